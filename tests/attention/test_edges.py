"""Labelled and featured edges, as lists and as matrices of pairs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import normal
from comparing import assert_close
from compiling import (
  compile_fusing,
  compile_quickly,
  run_with_gradients,
  with_gradients,
)
from random_edges import (
  HEADS,
  NODES,
  NUM_EDGES,
  SENDERS,
  Edges,
  make_tables,
  make_tensors,
  split,
)

from relpos_jax import EdgeFeatures, EdgeLabels, dot_product_attention, edge_attention

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8])
def test_traced_labels_are_of_any_integer_type(dtype):
  query, key, value = make_tensors(6, 7, (2,))
  table = normal(300, 3)  # has rows that labels of 8 bits do not reach
  labels = 60 + jnp.arange(6 * 7).reshape(6, 7)

  @compile_quickly
  def attend(labels):
    relations = EdgeLabels(labels, table, None)
    return dot_product_attention(query, key, value, relations=relations)

  assert_close(attend(labels.astype(dtype)), attend(labels))


@pytest.mark.parametrize(
  "has_keys, has_values, batch, heads",
  [(True, True, (2,), (HEADS,)), (True, False, (), (HEADS,)), (False, True, (2,), ())],
  ids=["both", "keys, no batch", "values, shared"],
)
def test_a_list_of_edges_is_the_operator_on_the_matrix_of_pairs(
  has_keys, has_values, batch, heads
):
  """Sorts edges that are known before the program, and traced ones in it.

  The traced ones are in another order, which changes nothing.
  """
  edges = Edges.of_graphs(*batch)
  pairs, mask = edges.of_pairs()

  def chosen(key_table, value_table):
    return key_table if has_keys else None, value_table if has_values else None

  def by_list(edges, tensors, *tables):
    of_labels, of_features = split(chosen(*tables))
    labels = EdgeLabels(edges.labels, *of_labels)
    features = EdgeFeatures(edges.features, *of_features)
    return edge_attention(*tensors, *edges.ends, labels=labels, features=features)

  def by_matrix(tensors, *tables):
    options = {"mask": mask, "implementation": "reference"}
    relations = EdgeFeatures(pairs, *chosen(*tables))
    return dot_product_attention(*tensors, relations=relations, **options)

  arrays = make_tensors(NODES, SENDERS, batch), *make_tables(heads)
  wanted = run_with_gradients(by_matrix, *arrays)
  by_known = functools.partial(by_list, edges)
  assert_close(run_with_gradients(by_known, *arrays), wanted)

  @compile_quickly
  def run_traced(edges):
    return with_gradients(functools.partial(by_list, edges), *arrays)

  order = np.random.default_rng(3).permutation(NUM_EDGES)
  in_other_order = Edges(*(np.take(x, order, len(batch)) for x in edges))
  assert_close(run_traced(in_other_order), wanted)


@pytest.mark.parametrize("heads", [1, HEADS])
def test_numbers_of_edges_are_a_bias_of_their_pairs(heads):
  edges = Edges.of_graphs(2)
  _, mask = edges.of_pairs()

  def by_list(tensors, numbers):
    return edge_attention(*tensors, *edges.ends, bias=numbers)

  def by_pairs(tensors, numbers):
    bias = jnp.einsum("bmn,bmts->bnts", numbers, edges.matrix())
    options = {"mask": mask, "implementation": "reference"}
    return dot_product_attention(*tensors, bias, **options)

  arrays = make_tensors(NODES, SENDERS, (2,)), normal(2, NUM_EDGES, heads)
  wanted = run_with_gradients(by_pairs, *arrays)
  assert_close(run_with_gradients(by_list, *arrays), wanted)


def test_traced_nodes_out_of_range_are_padding():
  edges = np.array([(0, 1, 2), (2, 1, 0), (0, 1, 1), (3, 3, 1), (1, 0, 2)])
  out_of_range = np.array([(4, 0, 1), (0, 4, 1), (-2, 0, 1)])
  tensors, tables = make_tensors(4, 4), make_tables()

  @compile_quickly
  def run(senders, receivers, labels):
    def attend(*tensors):
      relation = EdgeLabels(labels, *tables)
      return edge_attention(*tensors, senders, receivers, labels=relation)

    return with_gradients(attend, *tensors)

  assert_close(run(*np.concatenate([edges, out_of_range]).T), run(*edges.T))


def test_dropout_keeps_the_mean_and_drops_a_pair_as_one():
  """Uses ones as values, so a pair adds 1 or 12 in total, or is dropped."""
  senders, receivers = np.array([0, 0, 1]), np.array([0, 0, 0])
  ones = jnp.ones((2, 1, 1))
  labels = EdgeLabels(np.array([0, 1, -1]), None, jnp.array([[1.0], [10.0]]))

  def attend(key):
    dropout = {"dropout_rate": 0.5, "dropout_key": key}
    edges = senders, receivers
    return edge_attention(ones, ones, ones, *edges, labels=labels, **dropout)[0, 0, 0]

  sums = compile_quickly(jax.vmap(attend))(jax.random.split(jax.random.key(0), 4000))
  np.testing.assert_allclose(np.unique(np.round(sums, 6)), [0, 1, 12, 13])
  assert abs(sums.mean() - 6.5) < 0.5


def test_bfloat16_sums_in_float32():
  """Averages thousands of numbers: a sum of ones in bfloat16 ends at 256."""
  number = 4096
  senders, receivers = np.arange(number), np.zeros(number, int)
  ones = jnp.ones((number, 1, 1), jnp.bfloat16)
  value = ones.at[: number // 2].set(0)
  output = compile_quickly(edge_attention)(ones, ones, value, senders, receivers)
  assert output.dtype == jnp.bfloat16
  assert output[0, 0, 0] == 0.5


def test_known_edges_are_sorted_before_anything_is_compiled():
  """Checks the program, because XLA takes minutes to fold a sort of constants."""
  senders, receivers = np.random.default_rng(0).integers(0, 9, (2, 1000))
  tokens, table = jnp.ones((9, 1, 1)), jnp.ones((9, 1))

  def attend(tokens, table, senders, receivers):
    labels = EdgeLabels(receivers, table, table)
    return edge_attention(tokens, tokens, tokens, senders, receivers, labels=labels)

  def attend_to_known(tokens, table):
    return attend(tokens, table, senders, receivers)

  known = jax.jit(attend_to_known).lower(tokens, table)
  assert "stablehlo.sort" not in known.as_text()
  traced = jax.jit(attend).lower(tokens, table, senders, receivers)
  assert "stablehlo.sort" in traced.as_text()


def temporary_bytes(num_edges, num_nodes):
  tokens = jax.ShapeDtypeStruct((num_nodes, 4, 8), jnp.float32)
  of_edges = jax.ShapeDtypeStruct((num_edges,), jnp.int32)
  table = jax.ShapeDtypeStruct((5, 8), jnp.float32)

  def loss(tokens, table, senders, receivers, labels):
    labels = EdgeLabels(labels, table, table)
    output = edge_attention(tokens, tokens, tokens, senders, receivers, labels=labels)
    return output.sum()

  gradient = compile_fusing(jax.grad(loss, argnums=(0, 1)))
  compiled = gradient.lower(tokens, table, of_edges, of_edges, of_edges).compile()
  of_pairs = rf"\[([^]]*,)?{num_nodes},([^]]*,)?{num_nodes}[],]"
  assert not re.search(of_pairs, compiled.as_text())
  return compiled.memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_edges_and_never_with_the_pairs():
  once, twice = temporary_bytes(20_000, 3_000), temporary_bytes(40_000, 3_000)
  assert 1.5 < twice / once < 2.1
  assert twice < 3_000**2 * 4 * 4  # the logits of all pairs


def test_no_edge_at_all_gives_zeros():
  tokens, none = np.ones((4, 2, 3)), np.zeros(0, int)
  assert (edge_attention(tokens, tokens, tokens, none, none) == 0).all()


@pytest.mark.parametrize("lowest", [-np.inf, -2e38])
def test_the_lowest_bias_masks_an_edge_as_it_masks_a_pair(lowest):
  """Node 0 has a masked and a free edge, node 1 only a masked one."""
  senders, receivers = np.array([1, 2, 1]), np.array([0, 0, 1])
  tensors = make_tensors(3, 3)
  numbers = np.array([lowest, 0.5, lowest])
  bias = np.full((1, 3, 3), lowest)
  bias[0, receivers, senders] = numbers

  def by_list(tensors):
    return edge_attention(*tensors, senders, receivers, bias=numbers[:, None])

  def by_pairs(tensors):
    options = {"bias": bias, "implementation": "reference"}
    return dot_product_attention(*tensors, **options)

  wanted = run_with_gradients(by_pairs, tensors)
  assert_close(run_with_gradients(by_list, tensors), wanted)
