"""Law 13: a relation equals the other one that it computes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import normal, set_tiles
from comparing import assert_close, assert_same
from compiling import run_with_gradients

from relpos_jax import (
  DistanceBias,
  FunctionBias,
  KeyBias,
  LinearBias,
  RelativePositions,
  dot_product_attention,
)
from relpos_jax.attention.arrays import check_array
from relpos_jax.attention.by_distance import ByDistance
from relpos_jax.attention.relation import Relation, VectorRelation, distances

pytestmark = pytest.mark.usefixtures("float64")
QUERIES, KEYS, HEADS, WIDTH = 12, 9, 4, 3
TOKENS = normal(2, QUERIES, HEADS, WIDTH), *normal(2, 2, KEYS, 2, WIDTH)


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


def register(cls):
  """Registers a dataclass as a pytree."""
  return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@register
class TwiceTheQuery(ByDistance, VectorRelation):
  """Shaw's vectors, whose key term multiplies twice the query."""

  key: Any
  value: Any

  def content(self, queries, keys):
    return 2 * queries.vectors, self.key


@register
class ByKey(TwiceTheQuery):
  """Shaw's vectors, whose key term multiplies the key."""

  is_by_key = True

  def content(self, queries, keys):
    return KeyBias(self.key).content(queries, keys)


def function_around_table(table):
  return FunctionBias(lambda _, *pair: look_up_clipped(table, *pair))


REVERSED = {
  "query_positions": np.arange(QUERIES)[::-1],
  "key_positions": np.arange(KEYS)[::-1],
}


@pytest.mark.parametrize(
  "shape, relation, other",
  [
    ((5, HEADS), functools.partial(FunctionBias, look_up_clipped), DistanceBias),
    ((5, HEADS), function_around_table, DistanceBias),
    ((HEADS,), functools.partial(FunctionBias, linear), LinearBias),
    ((2, HEADS), TwoSidedDecay, functools.partial(FunctionBias, two_sided_decay)),
  ],
  ids=["a table", "a table around it", "slopes", "a class of one's own"],
)
def test_a_relation_by_distance_is_what_it_computes(
  shape, relation, other, monkeypatch
):
  """Compares the outputs, and the gradients of query, key, value and parameters."""
  set_tiles(monkeypatch, 5)
  params = normal(*shape)

  def run(make, name):
    def attend(query, key, value, params):
      own = {"relations": make(params), "implementation": name}
      return dot_product_attention(query, key, value, is_causal=True, **own, **REVERSED)

    return run_with_gradients(attend, *TOKENS, params)

  wanted = run(other, "reference")
  for name in ("projected", "chunked"):
    assert_close(run(relation, name), wanted, name)


# By the implementations: the rows of a table, and the positions.
OFFSET = {"query_offset": 3}
PLACES = [
  (("reference", "per_position", "projected", "chunked", "skew"), 5, OFFSET),
  (("projected", "chunked"), 2 * QUERIES + 9, OFFSET),
  (("projected", "chunked"), 5, REVERSED),
]


@pytest.mark.parametrize(
  "relation, others",
  [
    (TwiceTheQuery, lambda key, value: RelativePositions(2 * key, value)),
    (ByKey, lambda key, value: (KeyBias(key), RelativePositions(None, value))),
  ],
)
@pytest.mark.parametrize("names, num_rows, place", PLACES)
def test_vectors_of_ones_own_by_distance_are_what_content_says(
  relation, others, names, num_rows, place, monkeypatch
):
  set_tiles(monkeypatch, 5)
  tables = normal(2, num_rows, HEADS, WIDTH)

  def run(make, name):
    def attend(query, key, value, tables):
      own = {"relations": make(*tables), "implementation": name}
      return dot_product_attention(query, key, value, is_causal=True, **own, **place)

    return run_with_gradients(attend, *TOKENS, tables)

  wanted = run(others, "reference")
  for name in names:
    assert_close(run(relation, name), wanted, name)


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
