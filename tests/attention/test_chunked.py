"""Attention by blocks: exact over many blocks and tiles, and its own backward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quickly
from jax.test_util import check_grads

from relpos_jax import RelativePositions
from relpos_jax.attention import chunked, reference
from relpos_jax.attention.inputs import gather_inputs

pytestmark = pytest.mark.usefixtures("float64")

def arrays_of(
  num_queries,
  num_keys,
  k=0,
  rows=None,
  per_head=False,
  keys=True,
  values=True,
  bias=None,
):
  """Two key heads, each of two query heads; the bias has those axes of BNTS that are named."""
  random = lambda seed, shape: jnp.asarray(np.random.default_rng(seed).normal(size=shape))
  table = (2 * k + 1 if rows is None else rows, *([4] if per_head else []), 3)
  return dict(
    query=random(0, (2, num_queries, 4, 3)),
    key=random(1, (2, num_keys, 2, 3)),
    value=random(2, (2, num_keys, 2, 3)) + 1,
    key_table=random(3, table) if keys else None,
    value_table=random(4, table) * 2 if values else None,
    bias=None if bias is None else random(5, like_logits(bias, num_queries, num_keys)),
  )


def like_logits(axes, num_queries, num_keys):
  sizes = dict(B=2, N=4, T=num_queries, S=num_keys)
  return tuple(size if axis in axes else 1 for axis, size in sizes.items())


def attend(arrays, attention, beyond="clip", left=None, **options):
  tables = arrays["key_table"], arrays["value_table"]
  relations = None
  if any(table is not None for table in tables):
    relations = RelativePositions(*tables, beyond=beyond, left=left)
  inputs = gather_inputs(
    *(arrays[name] for name in ("query", "key", "value")),
    arrays.get("bias"),
    relations=relations,
    **options,
  )
  return attention(inputs)


def results(arrays, attention, **options):
  """The output, and the gradients for a random cotangent."""

  @quickly
  def run(arrays):
    output, pull_back = jax.vjp(lambda arrays: attend(arrays, attention, **options), arrays)
    cotangent = jnp.asarray(np.random.default_rng(7).normal(size=output.shape))
    return dict(output=output, **pull_back(cotangent)[0])

  return run(arrays)


SEGMENTS = np.random.default_rng(2).integers(0, 2, (2, 90))
# By name: the arguments of `arrays_of`, and those of `attend`; of a mask its axes.
CASES = {
  "many blocks and tiles": (dict(num_queries=70, num_keys=90, k=3), {}),
  "causal": (
    dict(num_queries=70, num_keys=70, k=3, per_head=True, bias="NTS"),
    dict(is_causal=True),
  ),
  "a stretch shorter than a block": (
    dict(num_queries=25, num_keys=25, k=3),
    dict(is_causal=True, mask="TS"),
  ),
  "a table longer than a block": (
    dict(num_queries=70, num_keys=90, k=40),
    dict(is_causal=True, beyond="zero", dropout_rate=0.1),
  ),
  "dropped on both sides": (dict(num_queries=20, num_keys=30, k=2), dict(dropout_rate=0.3)),
  "k = 0, more queries than keys": (dict(num_queries=70, num_keys=10, k=0, bias="BNT"), {}),
  "fewer keys than near ones": (dict(num_queries=20, num_keys=6, k=3), dict(mask="BNTS")),
  "causal, more queries than keys": (
    dict(num_queries=20, num_keys=9, k=2, bias="N"),
    dict(is_causal=True),
  ),
  "causal, more keys than queries": (
    dict(num_queries=12, num_keys=30, k=2),
    dict(is_causal=True, beyond="zero", mask="N"),
  ),
  "one query": (dict(num_queries=1, num_keys=20, k=3, bias="BNTS"), dict(mask="NTS")),
  "one key": (dict(num_queries=20, num_keys=1, k=3, bias="BNTS"), dict(mask="NTS")),
  "a window, more keys than queries, one table": (
    dict(num_queries=10, num_keys=70, k=4, values=False),
    dict(beyond="zero", local_window_size=(30, 2)),
  ),
  "a window, more queries than keys": (
    dict(num_queries=30, num_keys=9, k=2, bias="TS"),
    dict(local_window_size=(4, 2)),
  ),
  "a causal window, the other table": (
    dict(num_queries=70, num_keys=70, k=4, keys=False, bias="S"),
    dict(is_causal=True, local_window_size=9),
  ),
  "a causal window, more queries than keys": (
    dict(num_queries=30, num_keys=9, k=3),
    dict(is_causal=True, local_window_size=(2, 5), dropout_rate=0.2),
  ),
  "a table of the right": (dict(num_queries=20, num_keys=23, rows=4), dict(left=0)),
  "a table of the right, causal": (
    dict(num_queries=16, num_keys=16, rows=4),
    dict(left=0, is_causal=True, beyond="zero"),
  ),
  "a table of the left": (dict(num_queries=20, num_keys=23, rows=4), dict(left=3)),
  "a table of the left, causal": (
    dict(num_queries=16, num_keys=12, rows=4),
    dict(left=3, is_causal=True),
  ),
  "a table of the left, beyond all keys": (
    dict(num_queries=20, num_keys=20, rows=30),
    dict(left=29, beyond="zero"),
  ),
  "more of the right than of the left": (
    dict(num_queries=20, num_keys=30, rows=9, per_head=True, bias=""),
    dict(left=2, mask="BTS"),
  ),
  "no relations": (dict(num_queries=20, num_keys=30, keys=False, values=False), dict(mask="B")),
  "no relations, causal": (
    dict(num_queries=70, num_keys=70, keys=False, values=False),
    dict(is_causal=True, dropout_rate=0.2),
  ),
  "no relations, a window": (
    dict(num_queries=20, num_keys=30, keys=False, values=False),
    dict(local_window_size=(3, 2)),
  ),
  "queries that see no key": (
    dict(num_queries=20, num_keys=20, k=2, bias="BNTS"),
    dict(mask="BT", is_causal=True, dropout_rate=0.2),
  ),
  "masks, segments and lengths": (
    dict(num_queries=70, num_keys=90, k=3, bias="BTS"),
    dict(
      mask="BS",
      query_segment_ids=SEGMENTS[:, :70],
      key_segment_ids=SEGMENTS,
      query_seq_lengths=np.array([70, 41]),
      key_value_seq_lengths=np.array([0, 55]),
    ),
  ),
}


ALL = [(name, 2 ** (number % 3)) for number, name in enumerate(CASES)]  # 1, 2 or 4 heads at a time


@pytest.mark.parametrize("name, num_heads", [*ALL, ("causal", 1), ("causal", 4)])
def test_many_blocks_equal_the_reference(name, num_heads, monkeypatch):
  sizes, options = CASES[name]
  monkeypatch.setattr(chunked, "_PAIRS", num_heads * 8 * sizes["num_keys"])
  arrays, options = arrays_of(**sizes), dict(options)
  if "mask" in options:
    shape = like_logits(options["mask"], sizes["num_queries"], sizes["num_keys"])
    options["mask"] = np.random.default_rng(1).random(shape) < 0.7
  if "dropout_rate" in options:
    options["dropout_key"] = jax.random.key(0)
  blocked = functools.partial(chunked.attention, block=8)
  actual, wanted = (results(arrays, f, **options) for f in (blocked, reference.attention))
  for array in wanted:
    if wanted[array] is not None:
      np.testing.assert_allclose(actual[array], wanted[array], rtol=0, atol=1e-10, err_msg=array)


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
