"""Attention by blocks: exact over many blocks and tiles, and its own backward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from relpos_jax import RelativePositions
from relpos_jax.attention import chunked, reference
from relpos_jax.attention.inputs import gather_inputs

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def arrays_of(num_queries, num_keys, k, per_head=False, keys=True, values=True, seed=0):
  """Two key heads, each of two query heads."""
  random = lambda *shape: jnp.asarray(np.random.default_rng(seed + len(shape)).normal(size=shape))
  table = (2 * k + 1, *([4] if per_head else []), 3)
  return dict(
    query=random(2, num_queries, 4, 3),
    key=random(2, num_keys, 2, 3),
    value=random(2, num_keys, 2, 3) + 1,
    key_table=random(*table) if keys else None,
    value_table=random(*table) * 2 if values else None,
  )


def attend(arrays, attention, beyond="clip", **options):
  tables = arrays["key_table"], arrays["value_table"]
  relations = (
    RelativePositions(*tables, beyond=beyond) if any(x is not None for x in tables) else None
  )
  inputs = gather_inputs(
    *(arrays[name] for name in ("query", "key", "value")),
    arrays.get("bias"),
    relations=relations,
    **options,
  )
  return attention(inputs)


def results(arrays, attention, **options):
  """The output, and the gradients for a random cotangent."""

  @functools.partial(jax.jit, compiler_options=QUICK)
  def run(arrays):
    output, pull_back = jax.vjp(lambda arrays: attend(arrays, attention, **options), arrays)
    cotangent = jnp.asarray(np.random.default_rng(7).normal(size=output.shape))
    return dict(output=output, **pull_back(cotangent)[0])

  return run(arrays)


MASK = np.random.default_rng(1).random((2, 1, 1, 90)) < 0.7
SEGMENTS = np.random.default_rng(2).integers(0, 2, (2, 90))
CASES = {
  "many blocks and tiles": (dict(num_queries=70, num_keys=90, k=3), {}),
  "causal": (dict(num_queries=70, num_keys=70, k=3, per_head=True), dict(is_causal=True)),
  "a table longer than a block": (
    dict(num_queries=70, num_keys=90, k=40),
    dict(is_causal=True, beyond="zero", dropout_rate=0.1),
  ),
  "k = 0, more queries than keys": (dict(num_queries=70, num_keys=10, k=0), {}),
  "more keys than queries, one table": (
    dict(num_queries=10, num_keys=70, k=4, values=False),
    dict(beyond="zero", local_window_size=(30, 2)),
  ),
  "a window, the other table": (
    dict(num_queries=70, num_keys=70, k=4, keys=False),
    dict(is_causal=True, local_window_size=9),
  ),
  "no relations": (
    dict(num_queries=70, num_keys=70, k=1, keys=False, values=False),
    dict(is_causal=True, dropout_rate=0.2),
  ),
  "masks, segments and lengths": (
    dict(num_queries=70, num_keys=90, k=3),
    dict(
      mask=MASK,
      query_segment_ids=SEGMENTS[:, :70],
      key_segment_ids=SEGMENTS,
      query_seq_lengths=np.array([70, 41]),
      key_value_seq_lengths=np.array([0, 55]),
    ),
  ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("biased", [False, True])
def test_many_blocks_equal_the_reference(name, biased):
  sizes, options = CASES[name]
  arrays = arrays_of(**sizes)
  if biased:
    shape = (2, 1, sizes["num_queries"], sizes["num_keys"])
    arrays["bias"] = jnp.asarray(np.random.default_rng(3).normal(size=shape))
  if "dropout_rate" in options:
    options = options | dict(dropout_key=jax.random.key(0))
  blocked = functools.partial(chunked.attention, block=8)
  actual, wanted = (results(arrays, f, **options) for f in (blocked, reference.attention))
  for array in wanted:
    if wanted[array] is not None:
      np.testing.assert_allclose(actual[array], wanted[array], atol=1e-10, err_msg=array)


def test_the_backward_pass_is_the_derivative():
  arrays = arrays_of(num_queries=9, num_keys=11, k=2)
  blocked = functools.partial(chunked.attention, block=4)
  run = jax.jit(lambda arrays: attend(arrays, blocked))
  check_grads(run, (arrays,), order=1, modes=["rev"])


def test_memory_is_linear_in_length():
  def temporary_bytes(length):
    array = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
    table = jax.ShapeDtypeStruct((9, 16), jnp.float32)
    arrays = dict(query=array, key=array, value=array, key_table=table, value_table=table)
    loss = lambda arrays: attend(arrays, chunked.attention).sum()
    return jax.jit(jax.grad(loss)).lower(arrays).compile().memory_analysis().temp_size_in_bytes

  assert temporary_bytes(8192) < 2.2 * temporary_bytes(4096)
