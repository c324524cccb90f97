"""The fused kernels, interpreted, and "chunked", on tiles so small that every kind occurs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quickly, with_gradients
from kernel_calls import (
  CASES,
  CAUSAL,
  DROPOUT,
  LOW,
  MORE_CASES,
  arrays_of,
  assert_exact,
  exact_case,
  normal,
  run,
  shapes_of,
)

from relpos_jax import DistanceBias, dot_product_attention
from relpos_jax.attention import band, chunked, pallas_gpu
from relpos_jax.attention.inputs import gather_inputs

pytestmark = pytest.mark.usefixtures("float64")

kernel = functools.partial(pallas_gpu.attention, block=(8, 4))


@pytest.mark.parametrize("case", CASES)
def test_exact(case):
  assert_exact(kernel, *exact_case(case))


# By name: the first and last hidden row of 7, and the options of a call.
HIDDEN = {
  "left end": (0, 2, {}),
  "left end, causal": (0, 0, dict(is_causal=True)),
  "right end, lengths": (5, 6, dict(key_value_seq_lengths=np.array([20, 18]))),
  "within": (2, 4, {}),
}


@pytest.mark.parametrize("where", HIDDEN)
def test_low_rows_of_tables_hide(where):
  """Checks float32 with tables whose rows hide keys: each head has another number there."""
  first, last, options = HIDDEN[where]
  table = normal(7, len(LOW))
  table[first : last + 1] = LOW
  arrays = arrays_of(
    heads=len(LOW), key_heads=1, more=(DistanceBias(table),), dtype=np.float32
  )
  assert_exact(kernel, arrays, options, tolerance=2e-6)


def test_queries_that_see_only_low_rows():
  """Checks that such queries have finite gradients, and make no others infinite."""
  arrays = arrays_of(
    more=(DistanceBias(jnp.array([-1e30, 0.0, 0.0])),), dtype=np.float32
  )
  arrays["query"] *= 100
  options = dict(
    query_seq_lengths=np.array([9, 20]), key_value_seq_lengths=np.array([9, 2])
  )
  assert all(
    np.isfinite(x).all() for x in jax.tree.leaves(run(kernel, arrays, options))
  )


# In blocks: "chunked".
def seen(*shape):
  return np.random.default_rng(1).random(shape) < 0.7


# What the kernels do not do, or not in these steps. By name: sizes of arrays, and
# options.
OWN_CASES = {
  "a bias by head and pair, causal": (dict(rows=7, bias="NTS", per_head="kv"), CAUSAL),
  "a bias of every query, a mask of pairs": (
    dict(queries=1, heads=4, rows=7, bias="BNTS"),
    dict(mask=seen(4, 1, 20)),
  ),
  "a bias by head, more queries than keys": (dict(keys=9, bias="N"), CAUSAL),
  "queries that see no key": (
    dict(bias="BNTS"),
    dict(is_causal=True, mask=seen(2, 1, 20, 1)) | DROPOUT,
  ),
  "three queries a key head": (
    dict(keys=12, heads=6, per_head="v", bias="BN"),
    dict(mask=seen(6, 20, 12)) | DROPOUT,
  ),
  "a soft cap": (dict(keys=30, bias="TS"), dict(is_causal=True, logits_soft_cap=1.0)),
  "stretches around the keys": (
    dict(queries=70, rows=7),
    CAUSAL | dict(query_offset=-45),
  ),
  "a stretch shorter than a block": (dict(queries=25, keys=25), CAUSAL),
}
SHARED = CASES | MORE_CASES
NAMES = [*SHARED, *OWN_CASES]


@pytest.mark.parametrize("name", NAMES)
def test_many_blocks_equal_the_reference(name, monkeypatch):
  """Varies the sizes of blocks and tiles; on one device also the heads at a time."""
  number = NAMES.index(name)
  sizes, options = (SHARED | OWN_CASES)[name]
  block, tile = (8, 5, 3)[number % 3], (7, 32, 4)[number // 3 % 3]
  at_most = 2 ** (number // 2 % 3)

  def sizes_of_call(inputs):
    heads = math.gcd(at_most, inputs.query.shape[2])
    return block, tile, heads if number % 2 else None

  monkeypatch.setattr(band, "_choose_sizes", sizes_of_call)
  call = exact_case(name) if name in SHARED else (arrays_of(**sizes), options)
  assert_exact(chunked.attention, *call)


@pytest.mark.parametrize("is_causal", [True, False])
def test_blocks_of_one_query_that_have_no_near_key(is_causal, monkeypatch):
  monkeypatch.setattr(band, "_choose_sizes", lambda *_: (1, 2, None))
  arrays = arrays_of(queries=2, keys=9, rows=1)
  assert_exact(chunked.attention, arrays, dict(is_causal=is_causal))


@pytest.mark.parametrize("is_causal", [True, False])
def test_memory_is_linear_in_length(is_causal):
  def loss(query, key, value, relations):
    inputs = gather_inputs(query, key, value, relations=relations, is_causal=is_causal)
    return chunked.attention(inputs).sum()

  def bytes_per_token(length):
    arrays = shapes_of(length, 16, 9, dtype=np.float32)
    compiled = quickly(jax.grad(loss, (0, 1, 2, 3))).lower(*arrays).compile()
    return compiled.memory_analysis().temp_size_in_bytes / length

  assert bytes_per_token(65536) < 1.1 * bytes_per_token(4096)


@pytest.mark.parametrize("is_one", [True, False])
def test_a_bias_belongs_to_sequences_that_follow_one_another(is_one, monkeypatch):
  monkeypatch.setattr(band, "is_one_device", lambda: is_one)
  generator = np.random.default_rng(0)
  query = jnp.asarray(generator.standard_normal((3, 2, 20, 4, 8)))
  bias = jnp.asarray(generator.standard_normal((3, 1, 4, 20, 20)))

  def attend(name, query, bias):
    return dot_product_attention(query, query, query, bias, implementation=name)

  results = []
  for name in ("chunked", "reference"):
    call = quickly(functools.partial(with_gradients, functools.partial(attend, name)))
    results.append(call(query, bias))
  close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-10)
  jax.tree.map(close, *results)
