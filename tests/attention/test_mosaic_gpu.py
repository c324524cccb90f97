"""The Mosaic kernels: interpreted with checks for races, and lowered for a GPU.

No device is there. Sequences are so long that every kind of tile occurs.

  pytest -m mosaic tests/attention/test_mosaic_gpu.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_devices import check_kernels
from attention_cases import CAUSAL, DROPOUT, case
from calls import LOW, attend, make_arrays, normal, output_and_gradients
from comparing import assert_same, relative_errors
from compiling import compile_quickly

from relpos_jax import DistanceBias, dot_product_attention
from relpos_jax.attention import mosaic_gpu, reference


def test_an_older_jax_is_refused(monkeypatch):
  monkeypatch.setattr(jax, "__version__", "0.11.2")
  monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
  query = jnp.ones((3, 2, 4), jnp.bfloat16)
  attend = functools.partial(dot_product_attention, implementation="mosaic_gpu")
  message = "cannot do this call: jax is 0.11.2; it needs 0.12 or newer"
  with pytest.raises(NotImplementedError, match=message):
    jax.eval_shape(attend, query, query, query)


WIDTH = 64
IDS = np.arange(192, dtype=np.int32) // 80
SEGMENTS = {"query_segment_ids": IDS, "key_segment_ids": IDS}
KEY_MASK = np.random.default_rng(0).random((2, 1, 1, 192)) < 0.6
LENGTHS = {"query_seq_lengths": np.array([5, 100])}
LENGTHS["key_value_seq_lengths"] = np.array([150, 0])
BY_HEAD = (DistanceBias(normal(9, 2)),)
SIZES = {"queries": 192, "keys": 192, "width": WIDTH, "heads": 1, "key_heads": 1}
CASES = {
  "keys, causal": case(rows=33, tables="k", **CAUSAL),
  "values, causal": case(rows=33, tables="v", **CAUSAL),
  "neither table": case(queries=64, tables=""),
  "more keys, grouped heads, zero": case(
    queries=150, keys=250, heads=2, per_head="kv", rows=33, beyond="zero"
  ),
  "257 rows, causal": case(queries=256, keys=256, rows=257, **CAUSAL),
  "k = 0, lengths": case(queries=100, keys=150, rows=1, **LENGTHS),
  "segments, mask": case(rows=7, mask=KEY_MASK, **SEGMENTS),
  "dropout, causal": case(rows=7, **DROPOUT, **CAUSAL),
  "a bias": case(keys=130, tables="", heads=2, key_heads=2, more=BY_HEAD),
  "a sum, scale": case(
    rows=5, tables="kv", more=(DistanceBias(normal(21)),), scale=-0.3
  ),
}


def run(attention, arrays, options):
  call = functools.partial(attend, attention=attention, **options)
  return compile_quickly(functools.partial(output_and_gradients, call))(arrays)


def check(arrays, options):
  """Allows a root-mean-square error of one unit of the dtype's precision."""
  actual = run(mosaic_gpu.attention, arrays, options)
  with jax.enable_x64(True):
    exact_arrays = jax.tree.map(lambda x: np.asarray(x, np.float64), arrays)
    exact = run(reference.attention, exact_arrays, options)
  allowed = float(jnp.finfo(arrays["query"].dtype).eps)
  for name, error in relative_errors(actual, exact, least=0.3).items():
    assert error <= allowed, name  # at least 0.3, since gradients may cancel


@pytest.mark.mosaic
@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_reference(name):
  sizes, options = CASES[name]
  dtype = jnp.float16 if "causal" in name else jnp.bfloat16
  check(make_arrays(**SIZES | sizes, dtype=dtype), options)


@pytest.mark.mosaic
def test_values_of_another_width():
  arrays = make_arrays(**SIZES | {"queries": 64, "rows": 5}, dtype=jnp.bfloat16)
  for name in ("value", "v"):
    arrays[name] = jnp.tile(arrays[name], 2)[..., :100]
  check(arrays, {})


@pytest.mark.mosaic
@pytest.mark.parametrize(
  "first, last, queries, keys, options",
  [(0, 2, 192, 192, CAUSAL), (2, 4, 64, 64, {}), (5, 6, 64, 192, {})],
  ids=["left end", "within", "right end"],
)
def test_low_rows_of_tables_mask(first, last, queries, keys, options):
  """Checks rows that mask keys: each head has another number."""
  table = normal(7, len(LOW))
  table[first : last + 1] = LOW
  sizes = {"queries": queries, "keys": keys, "heads": len(LOW), "key_heads": 1}
  more = (DistanceBias(table),)
  arrays = make_arrays(**SIZES | sizes, tables="v", more=more, dtype=jnp.bfloat16)
  for name in ("query", "key", "value"):
    arrays[name] = arrays[name][:1]  # one sequence is quicker
  check(arrays, options)


@pytest.mark.mosaic
def test_it_repeats_every_bit():
  sizes = SIZES | {"queries": 128, "keys": 128, "rows": 5}
  arrays = make_arrays(**sizes, dtype=jnp.bfloat16)
  call = functools.partial(attend, attention=mosaic_gpu.attention, **CAUSAL)
  compiled = compile_quickly(functools.partial(output_and_gradients, call))
  assert_same(compiled(arrays), compiled(arrays))


LONG_IDS = jnp.zeros(200, jnp.int32)


@pytest.mark.mosaic
@pytest.mark.parametrize(
  "sizes, options",
  [
    ({}, {}),
    ({"length": 500, "rows": 257, "dtype": jnp.float16, "width": 48}, CAUSAL | DROPOUT),
    (
      {"length": 200, "width": 128},
      {"query_segment_ids": LONG_IDS, "key_segment_ids": LONG_IDS},
    ),
    ({"rows": 0, "t5": 257}, CAUSAL),
  ],
  ids=["plain", "dropout", "segments", "a bias"],
)
def test_it_lowers_for_an_h100(sizes, options):
  check_kernels(mosaic_gpu.attention, "@mosaic_gpu", sizes, options)
