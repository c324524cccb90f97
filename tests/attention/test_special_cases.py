"""Laws 8 and 13: a relation equals the other one that it computes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import set_tiles
from comparing import assert_close, assert_same
from compiling import run_with_gradients

from relpos_jax import (
  DistanceBias,
  EdgeFeatures,
  EdgeLabels,
  FunctionBias,
  LinearBias,
  RelativePositions,
  dot_product_attention,
)
from relpos_jax.attention.arrays import check_array
from relpos_jax.attention.relation import Relation, distances

pytestmark = pytest.mark.usefixtures("float64")
QUERIES, KEYS, HEADS, WIDTH = 12, 9, 4, 3
RNG = np.random.default_rng(0)


def normal(*shape):
  return RNG.normal(size=shape)


TOKENS = normal(2, QUERIES, HEADS, WIDTH), *normal(2, 2, KEYS, 2, WIDTH)
TABLES, TABLES_PER_HEAD = normal(2, 5, WIDTH), normal(2, 5, HEADS, WIDTH)
DISTANCE = np.arange(KEYS) - np.arange(QUERIES)[:, None]
CLIPPED = np.clip(DISTANCE, -2, 2) + 2
OR_NONE = np.where(abs(DISTANCE) <= 2, CLIPPED, -1)  # -1 is no label
LABELS = RNG.integers(-1, 5, (2, QUERIES, KEYS))
ONE_HOT = np.eye(5)[LABELS] * (LABELS >= 0)[..., None]  # -1 is no feature at all


def look_up(table, i, j, *_):
  return table[j - i + QUERIES - 1]


def look_up_clipped(table, i, j, *_):
  return table[jnp.clip(j - i, -2, 2) + 2]


def linear(slopes, i, j, *_):
  return -slopes * abs(j - i)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TwoSidedDecay(Relation):
  """Weights that decay exponentially with the distance, at learned rates `[2, N]`."""

  rates: Any  # before the query and after it

  def checked(self, name, sizes):
    shape = 2, sizes.heads
    rates = check_array(f"{name}.rates", self.rates, jnp.floating, shape)
    return dataclasses.replace(self, rates=rates.astype(sizes.accumulation_dtype))

  def logits(self, queries, keys):
    distance_B1TS = distances(queries.positions, keys.positions)[:, None]
    before, after = self.rates[:, None, :, None, None]
    return -jnp.where(distance_B1TS < 0, before, after) * abs(distance_B1TS)


def two_sided_decay(rates, i, j, *_):
  before, after = rates
  return -jnp.where(j < i, before, after) * abs(j - i)


# By name: parameters, the relation of them, and the relation that it equals.
PAIRS = {}
PAIRS["labels of clipped distances"] = (
  TABLES_PER_HEAD,
  lambda tables: EdgeLabels(CLIPPED, *tables),
  lambda tables: RelativePositions(*tables),
)
PAIRS["labels of near distances"] = (
  TABLES,
  lambda tables: EdgeLabels(OR_NONE, *tables),
  lambda tables: RelativePositions(*tables, "zero"),
)
PAIRS["one-hot features"] = (
  TABLES_PER_HEAD,
  lambda tables: EdgeFeatures(ONE_HOT, *tables),
  lambda tables: EdgeLabels(LABELS, *tables),
)
PAIRS["a function with arrays of the code around it"] = (
  normal(QUERIES + KEYS - 1, HEADS),
  lambda table: FunctionBias(lambda _, *pair: look_up(table, *pair)),
  lambda table: FunctionBias(look_up, table),
)
BY_DISTANCE = {}
BY_DISTANCE["a function of a table"] = (
  normal(5, HEADS),
  lambda table: FunctionBias(look_up_clipped, table),
  DistanceBias,
)
BY_DISTANCE["a function of slopes"] = (
  normal(HEADS),
  lambda slopes: FunctionBias(linear, slopes),
  LinearBias,
)
BY_DISTANCE["a class of one's own"] = (
  normal(2, HEADS),
  TwoSidedDecay,
  lambda rates: FunctionBias(two_sided_decay, rates),
)
REVERSED = {
  "query_positions": np.arange(QUERIES)[::-1],
  "key_positions": np.arange(KEYS)[::-1],
}
PLACES = {"here": {}, "at an offset": {"query_offset": 3}, "reversed": REVERSED}
CALLS = [(name, "here") for name in PAIRS]
for name in BY_DISTANCE:
  CALLS += [(name, "at an offset"), (name, "reversed")]


def run(params, make, **options):
  """Returns the output, and the gradients of query, key, value and parameters."""

  def attend(query, key, value, params):
    return dot_product_attention(
      query, key, value, relations=make(params), **options, is_causal=True
    )

  return run_with_gradients(attend, *TOKENS, params)


@functools.cache
def wanted_results(name, place):
  """Returns the results of the other relation."""
  params, _, other = (PAIRS | BY_DISTANCE)[name]
  return run(params, other, **PLACES[place], implementation="reference")


@pytest.mark.parametrize("implementation", ["projected", "chunked"])
@pytest.mark.parametrize("name, place", CALLS)
def test_a_relation_is_what_it_computes(name, place, implementation, monkeypatch):
  set_tiles(monkeypatch, 5)
  params, relation, _ = (PAIRS | BY_DISTANCE)[name]
  actual = run(params, relation, **PLACES[place], implementation=implementation)
  assert_close(actual, wanted_results(name, place))


def test_a_class_of_ones_own_is_checked():
  relations = LinearBias.alibi(HEADS), TwoSidedDecay(normal(HEADS))
  with pytest.raises(ValueError, match=r"^relations\[1\].rates has shape \(4,\); want"):
    dot_product_attention(*TOKENS, relations=relations)


def test_gradients_are_the_same_bits_in_every_run(monkeypatch):
  set_tiles(monkeypatch, 5)

  def loss(table):
    relations = FunctionBias(look_up_clipped, table)
    options = {"relations": relations, "implementation": "chunked"}
    return dot_product_attention(*TOKENS, **options).sum()

  table = normal(5, HEADS)
  first, *others = [jax.jit(jax.grad(loss))(table) for _ in range(3)]
  for other in others:
    assert_same(other, first)
