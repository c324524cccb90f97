"""Attention by tiles ("chunked"), so small that every kind of tile occurs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
  CASES,
  CAUSAL,
  CONTENTS,
  DROPOUT,
  KEY_MASK,
  MORE_CASES,
  SEGMENTS,
  case,
  exact_case,
)
from calls import (
  WIDTH,
  assert_exact,
  make_arrays,
  make_shapes,
  normal,
  set_tiles,
)
from compiling import compile_quickly, temporary_bytes

from relpos_jax import DistanceBias, KeyBias, dot_product_attention
from relpos_jax.attention import chunked
from relpos_jax.attention.inputs import gather_inputs

pytestmark = pytest.mark.usefixtures("float64")


def random_mask(*shape):
  return np.random.default_rng(1).random(shape) < 0.7


# What the kernels do not do, or not in these steps.
OWN_CASES = {}
OWN_CASES["a bias by head and pair, causal"] = case(
  rows=7, bias="NTS", per_head="kv", **CAUSAL
)
OWN_CASES["a bias of every query, a mask of pairs"] = case(
  queries=1, heads=4, rows=7, bias="BNTS", mask=random_mask(4, 1, 20)
)
OWN_CASES["a bias by head, more queries than keys"] = case(keys=9, bias="N", **CAUSAL)
OWN_CASES["fully masked queries"] = case(
  bias="BNTS", mask=random_mask(2, 1, 20, 1), **CAUSAL, **DROPOUT
)
THREE_A_KEY_HEAD = {"keys": 12, "heads": 6, "per_head": "v", "bias": "BN"}
OWN_CASES["three queries a key head"] = case(
  **THREE_A_KEY_HEAD, mask=random_mask(6, 20, 12), **DROPOUT
)
OWN_CASES["a soft cap"] = case(keys=30, bias="TS", logits_soft_cap=1.0, **CAUSAL)
OWN_CASES["tiles around the keys"] = case(
  queries=70, rows=7, query_offset=-45, **CAUSAL
)
OWN_CASES["a last block that is shorter"] = case(queries=25, keys=25, **CAUSAL)
SHARED = CASES | MORE_CASES
NAMES = [*SHARED, *OWN_CASES]


@pytest.mark.parametrize("name", NAMES)
def test_many_blocks_equal_the_reference(name, monkeypatch):
  """Varies the sizes of blocks and tiles; on one device also the heads at a time."""
  number = NAMES.index(name)
  sizes, options = (SHARED | OWN_CASES)[name]
  heads = None
  if number % 2:
    heads = math.gcd(2 ** (number // 2 % 3), sizes.get("heads", 2))
  block, tile = (8, 5, 3)[number % 3], (7, 32, 4)[number // 3 % 3]
  set_tiles(monkeypatch, block, tile, heads)
  if name in SHARED:
    assert_exact(chunked.attention, *exact_case(name))
  else:
    assert_exact(chunked.attention, make_arrays(**sizes), options)


# Each tile multiplies its own rows of these tables; some tiles lie beside the band.
SEVEN_LEFT = {"beyond": "zero", "left": 7}
BY_KEY = (KeyBias(normal(13, 2, WIDTH), beyond="zero"), KeyBias(normal(29, WIDTH)))
BY_KEY_OF_FOUR = (KeyBias(normal(21, 4, WIDTH)),)
ALL_FACTORS = (*CONTENTS, DistanceBias(normal(17)), *BY_KEY)
WIDE_CASES = {}
WIDE_CASES["all distances"] = case(rows=39, per_head="kv")
WIDE_CASES["causal, zero"] = case(rows=23, tables="k", **SEVEN_LEFT, **CAUSAL)
WIDE_CASES["grouped heads, traced offset"] = case(
  rows=15, keys=33, key_heads=1, query_offset=np.array(13), **DROPOUT
)
WIDE_CASES["by key, more keys"] = case(tables="v", keys=37, more=BY_KEY)
WIDE_CASES["a sum"] = case(rows=21, more=ALL_FACTORS, scale=-0.7, mask=KEY_MASK)
WIDE_CASES["a key head for two"] = case(
  rows=21, heads=4, tables="v", more=BY_KEY_OF_FOUR
)
MASKED_RIGHT = DistanceBias(np.where(np.arange(21) > 12, -np.inf, 0.5))
WIDE_CASES["masks of every kind"] = case(
  rows=19,
  more=(MASKED_RIGHT,),
  local_window_size=(9, 4),
  logits_soft_cap=1.0,
  **SEGMENTS,
)
WIDE_CASES["an offset of each sequence"] = case(rows=25, query_offset=np.array([3, -9]))


# The heads in a tile; None for all heads of all sequences.
WIDE_TILES = [("a sum", 1)]
for number, name in enumerate(WIDE_CASES):
  WIDE_TILES.append((name, (None, 2, None, 1)[number % 4]))


@pytest.mark.parametrize("name, heads", WIDE_TILES)
def test_wide_tables_equal_the_reference(name, heads, monkeypatch):
  sizes, options = WIDE_CASES[name]
  set_tiles(monkeypatch, 3, 4, heads)
  assert_exact(chunked.attention, make_arrays(**sizes), options)


@pytest.mark.parametrize("is_causal", [True, False])
def test_blocks_of_one_query_that_have_no_near_key(is_causal, monkeypatch):
  set_tiles(monkeypatch, 1, 2)
  arrays = make_arrays(queries=2, keys=9, rows=1)
  assert_exact(chunked.attention, arrays, {"is_causal": is_causal})


@pytest.mark.parametrize("is_causal", [True, False])
def test_memory_is_linear_in_length(is_causal):
  def loss(query, key, value, relations):
    inputs = gather_inputs(query, key, value, relations=relations, is_causal=is_causal)
    return chunked.attention(inputs).sum()

  def bytes_per_token(length):
    arrays = make_shapes(length, 16, 9, dtype=np.float32)
    gradient = compile_quickly(jax.grad(loss, (0, 1, 2, 3)))
    return temporary_bytes(gradient, *arrays) / length

  assert bytes_per_token(65536) < 1.1 * bytes_per_token(4096)


def test_the_program_is_no_longer_for_more_rows_of_a_table(monkeypatch):
  set_tiles(monkeypatch, 128, heads=1)

  def count_lines(num_rows):
    x = jax.ShapeDtypeStruct((1, 1024, 1, 8), jnp.float32)
    table = jax.ShapeDtypeStruct((num_rows, 1), jnp.float32)

    def attend(x, table):
      options = {"relations": DistanceBias(table), "implementation": "chunked"}
      return dot_product_attention(x, x, x, **options)

    return jax.jit(attend).lower(x, table).as_text().count("\n")

  assert count_lines(1025) < 1.1 * count_lines(9)
