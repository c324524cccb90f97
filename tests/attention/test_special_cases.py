"""Laws 8 and 13: labels, features, functions and a user's own class equal the relations
that they compute."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quickly, with_gradients

from relpos_jax import (
  DistanceBias,
  EdgeFeatures,
  EdgeLabels,
  FunctionBias,
  LabelBias,
  LinearBias,
  RelativePositions,
  dot_product_attention,
  edge_attention,
)
from relpos_jax.attention import blocks
from relpos_jax.attention.arrays import check_array
from relpos_jax.attention.edges import pair_features
from relpos_jax.attention.relation import Relation, distances

pytestmark = pytest.mark.usefixtures("float64")
EACH = ["reference", "per_position", "projected", "chunked"]
QUERIES, KEYS, HEADS, WIDTH = 12, 9, 4, 3
RNG = np.random.default_rng(0)


def normal(*shape):
  return np.asarray(RNG.normal(size=shape))


def hstu(params, i, j, time, key_time, _):
  """Adds a number by distance and one by logarithm of elapsed time: Zhai et al. 2024."""
  bucket = jnp.floor(jnp.log(jnp.maximum(1.0, abs(time - key_time))) / 0.301).astype(
    int
  )
  return (
    params["position"][j - i + QUERIES - 1] + params["time"][jnp.clip(bucket, 0, 7)]
  )


TIMES = np.sort(RNG.integers(0, 10_000, QUERIES))
OF_TIMES = functools.partial(FunctionBias, hstu, of_query=TIMES, of_key=TIMES[:KEYS])
HSTU = dict(position=normal(QUERIES + KEYS - 1), time=normal(8, HEADS))
CALL = [normal(2, *shape, WIDTH) for shape in ((QUERIES, HEADS), (KEYS, 2), (KEYS, 2))]
DISTANCE = np.arange(KEYS) - np.arange(QUERIES)[:, None]
ELAPSED = abs(TIMES[:, None] - TIMES[:KEYS])
BUCKET = np.clip(np.log(np.maximum(1, ELAPSED)) // 0.301, 0, 7).astype(int)
REVERSED = dict(
  query_positions=np.arange(QUERIES)[::-1], key_positions=np.arange(KEYS)[::-1]
)
CLIPPED = np.clip(DISTANCE, -2, 2) + 2
OR_NONE = np.where(abs(DISTANCE) <= 2, CLIPPED, -1)  # -1 is no label
LABELS = RNG.integers(-1, 5, (2, QUERIES, KEYS))
ONE_HOT = jax.nn.one_hot(LABELS, 5)  # -1 is no feature at all
TABLES, TABLES_PER_HEAD = normal(2, 5, WIDTH), normal(2, 5, HEADS, WIDTH)


def look_up(table, i, j, *_):
  return table[j - i + QUERIES - 1]


def as_bias(params):
  by_head = jnp.moveaxis(params["time"][BUCKET], -1, 0)
  return dict(bias=params["position"][DISTANCE + QUERIES - 1] + by_head)


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
  return -jnp.where(j < i, rates[0], rates[1]) * abs(j - i)


# By name: parameters, a relation of them, and the relation that it equals, or the
# options.
PAIRS = {
  "labels of clipped distances": (
    TABLES_PER_HEAD,
    lambda tables: EdgeLabels(CLIPPED, *tables),
    lambda tables: RelativePositions(*tables),
  ),
  "labels of near distances": (
    TABLES,
    lambda tables: EdgeLabels(OR_NONE, *tables),
    lambda tables: RelativePositions(*tables, "zero"),
  ),
  "one-hot features": (
    TABLES_PER_HEAD,
    lambda tables: EdgeFeatures(ONE_HOT, *tables),
    lambda tables: EdgeLabels(LABELS, *tables),
  ),
  "a function of a table": (
    normal(5, HEADS),
    lambda table: FunctionBias(
      lambda t, i, j, *_: t[jnp.clip(j - i, -2, 2) + 2], table
    ),
    lambda table: DistanceBias(table),
  ),
  "a function of slopes": (
    normal(HEADS),
    lambda slopes: FunctionBias(lambda s, i, j, *_: -s * abs(j - i), slopes),
    lambda slopes: LinearBias(slopes),
  ),
  "a class of one's own": (
    normal(2, HEADS),
    TwoSidedDecay,
    lambda rates: FunctionBias(two_sided_decay, rates),
  ),
  "a function of data of all sequences": (HSTU, OF_TIMES, as_bias),
  "a function of data of pairs": (
    normal(2, QUERIES, KEYS),
    lambda pairs: FunctionBias(lambda _, i, j, x, y, z: z, of_pair=pairs),
    lambda pairs: dict(bias=pairs[:, None]),
  ),
  "a function with arrays of the code around it": (
    normal(QUERIES + KEYS - 1, HEADS),
    lambda table: FunctionBias(lambda _, *pair: look_up(table, *pair)),
    lambda table: FunctionBias(look_up, table),
  ),
}


def results(params, relation, **options):
  """Returns the output, and the gradients of query, key, value and parameters."""

  def call(query, key, value, params):
    found = relation(params)
    same = found if isinstance(found, dict) else dict(relations=found)
    return dot_product_attention(query, key, value, **options, **same)

  return quickly(functools.partial(with_gradients, call))(*CALL, params)


@pytest.mark.parametrize("implementation", EACH)
@pytest.mark.parametrize("name", PAIRS)
def test_a_relation_is_what_it_computes(name, implementation, monkeypatch):
  monkeypatch.setattr(blocks, "default_block", lambda *_: 5)
  params, relation, same = PAIRS[name]
  by_distance = name in (
    "a function of a table",
    "a function of slopes",
    "a class of one's own",
  )
  for at in [dict(query_offset=3), REVERSED] if by_distance else [{}]:
    found = results(
      params, relation, **at, implementation=implementation, is_causal=True
    )
    wanted = results(params, same, **at, implementation="reference", is_causal=True)
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-10), found, wanted
    )


def test_a_class_of_ones_own_is_checked():
  wrong = TwoSidedDecay(normal(HEADS))
  with pytest.raises(ValueError, match=r"^relations\[1\].rates has shape \(4,\); want"):
    dot_product_attention(*CALL, relations=(LinearBias.alibi(HEADS), wrong))


def of_all(params, i, j, x, y, z):
  return params @ jnp.tanh(x + y * z)


@pytest.mark.parametrize("implementation", EACH)
@pytest.mark.parametrize("batch", [(3,), (3, 3), ()])
def test_shared_data_may_have_axes_of_size_1(batch, implementation, monkeypatch):
  """Gives data for which a leading axis of queries could be that of the sequences."""
  monkeypatch.setattr(blocks, "default_block", lambda *_: 2)
  tokens = normal(3, *batch, 3, HEADS, WIDTH)
  data = dict(of_query=normal(3, 3), of_key=normal(3, 3), of_pair=normal(3, 3, 3))
  options = dict(implementation=implementation, is_causal=True)

  def attend(params, data):
    relation = FunctionBias(of_all, params, **data)
    return dot_product_attention(*tokens, relations=relation, **options)

  def one_by_one(params, data):
    relation = FunctionBias(of_all, params, **data)
    each = functools.partial(dot_product_attention, relations=relation, **options)
    for _ in batch:
      each = jax.vmap(each)
    return each(*tokens)

  ones = (1,) * len(batch)
  shared = {name: x.reshape(*ones, *x.shape) for name, x in data.items()}
  params = normal(HEADS, 3)
  found = quickly(functools.partial(with_gradients, attend))(params, shared)
  wanted = quickly(functools.partial(with_gradients, one_by_one))(params, data)
  output, (of_params, of_data) = found
  of_data = jax.tree.map(lambda x, y: x.reshape(y.shape), of_data, data)
  found = output, (of_params, of_data)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-10), found, wanted)


LABELLED = {
  "vectors of keys": lambda labels, table: EdgeLabels(labels, table, None),
  "vectors of values": lambda labels, table: EdgeLabels(labels, None, table),
  "numbers": lambda labels, table: LabelBias(labels, table[:, 0]),
}


@pytest.mark.parametrize("implementation", EACH)
@pytest.mark.parametrize("name", LABELLED)
def test_traced_labels_beyond_the_table_are_nan_to_debug(
  name, implementation, monkeypatch
):
  monkeypatch.setattr(blocks, "default_block", lambda *_: 5)

  def attend(labels):
    options = dict(relations=LABELLED[name](labels, TABLES[0]))
    return dot_product_attention(*CALL, **options, implementation=implementation)

  check_nan(attend, LABELS, 5)


def check_nan(attend, labels, num_rows):
  """Asserts that labels beyond a table raise under `jax.debug_nans`, else are clamped."""
  for wrong in (num_rows, -2):
    beyond = np.array(labels)
    beyond.flat[3] = wrong
    clamped = np.clip(beyond, -1, num_rows - 1)
    np.testing.assert_array_equal(*map(quickly(attend), (beyond, clamped)))
    with jax.debug_nans(True):
      quickly(lambda x: attend(x))(clamped)
      # JAX calls the function once more, without tracing, to find the NaN.
      with pytest.raises((FloatingPointError, ValueError), match=r"nan|labels go from"):
        quickly(lambda x: attend(x))(beyond)


@pytest.mark.parametrize("place", ["key", "value", "pair_features"])
def test_traced_labels_of_edges_beyond_the_table_are_nan_to_debug(place):
  nodes = jnp.asarray(RNG.integers(0, KEYS, (2, 2, 20)))

  def attend(labels):
    if place == "pair_features":
      none = jnp.zeros((2, 20, 0))
      labels = jnp.asarray(labels)
      return pair_features(*nodes, labels, none, num_labels=5, num_nodes=KEYS)[0]
    tables = dict(key=None, value=None) | {place: TABLES[0]}
    return edge_attention(*CALL, *nodes, labels=EdgeLabels(labels, **tables))

  check_nan(attend, RNG.integers(-1, 5, (2, 20)), 5)


def test_gradients_are_the_same_bits_in_every_run(monkeypatch):
  monkeypatch.setattr(blocks, "default_block", lambda *_: 5)

  def loss(params):
    options = dict(relations=OF_TIMES(params), implementation="chunked")
    return dot_product_attention(*CALL, **options).sum()

  first, *others = (jax.jit(jax.grad(loss))(HSTU) for _ in range(3))
  for other in others:
    jax.tree.map(np.testing.assert_array_equal, first, other)


def test_data_of_one_query_that_fit_two_readings_are_refused():
  query, keys = normal(4, 1, HEADS, WIDTH), normal(4, 5, HEADS, WIDTH)

  def attend(data):
    relation = FunctionBias(lambda params, i, j, x, *_: j * x.sum(), of_query=data)
    return dot_product_attention(query, keys, keys, relations=relation)

  with pytest.raises(ValueError, match=r"may be shared or not; want \[1, 1, \.\.\.\]"):
    attend(np.ones((1, 1)))  # [1, T], or [T, P]
  np.testing.assert_allclose(
    attend(np.ones((1, 1, 1))), attend(np.full((1, 2), 0.5)), atol=1e-12
  )
