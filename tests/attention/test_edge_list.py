"""Tests of law 18: a list of edges equals its dense labels, while all pairs attend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import (
  EdgeFeatures,
  EdgeLabels,
  LabelBias,
  dot_product_attention,
  edge_attention,
)
from relpos_jax.attention.edges import pair_features

BATCH, NODES, HEADS, WIDTH, LABELS, FEATURES, EDGES = 2, 11, 2, 4, 3, 2, 30
ANY_RELATION = ["reference", "per_position", "projected", "chunked"]
TOLERANCE = dict(rtol=1e-10, atol=1e-10)


@pytest.fixture(autouse=True)
def in_float64():
  with jax.enable_x64(True):
    yield


def random_edges(seed: int) -> dict[str, jax.Array]:
  """Returns edges of which several join a pair, and a few are padding."""
  random = np.random.default_rng(seed)
  shape = BATCH, EDGES
  senders = random.integers(0, 4, shape)
  receivers = random.integers(-1, 4, shape)
  labels = random.integers(-1, LABELS, shape)
  features = random.normal(size=(*shape, FEATURES))
  edges = dict(senders=senders, receivers=receivers, labels=labels, features=features)
  return {name: jnp.asarray(array) for name, array in edges.items()}


def random_arrays(seed: int) -> dict[str, jax.Array]:
  random = np.random.default_rng(seed)
  vectors = BATCH, NODES, HEADS, WIDTH
  shapes = dict(query=vectors, key=vectors, value=vectors)
  shapes |= dict(label_key=(LABELS, HEADS, WIDTH), label_value=(LABELS, WIDTH))
  shapes |= dict(kernel_key=(FEATURES, WIDTH), kernel_value=(FEATURES, HEADS, WIDTH))
  return {
    name: jnp.asarray(random.normal(size=shape)) for name, shape in shapes.items()
  }


def attend_by_list(arrays, edges, implementation):
  pairs = edges["senders"], edges["receivers"]
  labels = EdgeLabels.from_edges(
    *pairs, edges["labels"], arrays["label_key"], arrays["label_value"]
  )
  features = EdgeFeatures.from_edges(
    *pairs, edges["features"], arrays["kernel_key"], arrays["kernel_value"]
  )
  return dot_product_attention(
    arrays["query"],
    arrays["key"],
    arrays["value"],
    relations=(labels, features),
    implementation=implementation,
  )


def attend_to_all_pairs(arrays, edges):
  """Computes the same from the features of all pairs."""
  features, _ = pair_features(
    edges["senders"],
    edges["receivers"],
    edges["labels"],
    edges["features"],
    num_labels=LABELS,
    num_nodes=NODES,
  )

  def rows(name):
    table = arrays[f"label_{name}"]
    kernel = arrays[f"kernel_{name}"]
    shape = HEADS, WIDTH
    table = table if table.ndim == 3 else table[:, None]
    kernel = kernel if kernel.ndim == 3 else kernel[:, None]
    table = jnp.broadcast_to(table, (LABELS, *shape))
    kernel = jnp.broadcast_to(kernel, (FEATURES, *shape))
    return jnp.concatenate([table, kernel])

  return dot_product_attention(
    arrays["query"],
    arrays["key"],
    arrays["value"],
    relations=EdgeFeatures(features, rows("key"), rows("value")),
    implementation="reference",
  )


@pytest.mark.parametrize("implementation", ANY_RELATION)
def test_a_list_of_edges_equals_all_pairs_and_so_do_its_gradients(implementation):
  arrays, edges = random_arrays(0), random_edges(1)
  weight = jnp.asarray(np.random.default_rng(2).normal(size=arrays["value"].shape))

  def by_list(arrays):
    return jnp.sum(weight * attend_by_list(arrays, edges, implementation))

  def by_pairs(arrays):
    return jnp.sum(weight * attend_to_all_pairs(arrays, edges))

  found, found_gradients = jax.jit(jax.value_and_grad(by_list))(arrays)
  wanted, gradients = jax.jit(jax.value_and_grad(by_pairs))(arrays)
  np.testing.assert_allclose(found, wanted, **TOLERANCE)
  for name in arrays:
    np.testing.assert_allclose(found_gradients[name], gradients[name], **TOLERANCE)


def test_the_order_of_edges_and_repeated_labels_change_nothing():
  arrays, edges = random_arrays(0), random_edges(1)
  del edges["features"]
  order = np.random.default_rng(3).permutation(EDGES)
  twice = {name: jnp.concatenate([x, x[:, order]], 1) for name, x in edges.items()}

  def attend(edges):
    relation = EdgeLabels.from_edges(
      edges["senders"], edges["receivers"], edges["labels"], arrays["label_key"], None
    )
    tensors = arrays["query"], arrays["key"], arrays["value"]
    return dot_product_attention(*tensors, relations=relation)

  np.testing.assert_allclose(attend(twice), attend(edges), **TOLERANCE)


@pytest.mark.parametrize("table_shape", [(LABELS,), (LABELS, HEADS)])
def test_numbers_of_edges_equal_a_bias(table_shape):
  arrays, edges = random_arrays(0), random_edges(1)
  table = jnp.asarray(np.random.default_rng(4).normal(size=table_shape))
  features, _ = pair_features(
    edges["senders"],
    edges["receivers"],
    edges["labels"],
    jnp.zeros((BATCH, EDGES, 0)),
    num_labels=LABELS,
    num_nodes=NODES,
  )
  per_head = jnp.broadcast_to(table.reshape(LABELS, -1), (LABELS, HEADS))
  bias = jnp.einsum("btse,en->bnts", features, per_head)
  tensors = arrays["query"], arrays["key"], arrays["value"]
  relation = LabelBias.from_edges(
    edges["senders"], edges["receivers"], edges["labels"], table
  )
  found = dot_product_attention(*tensors, relations=relation)
  wanted = dot_product_attention(*tensors, bias=bias, implementation="reference")
  np.testing.assert_allclose(found, wanted, **TOLERANCE)


def test_blocks_of_queries_make_no_array_of_all_pairs():
  nodes, edges = 4096, 8192
  random = np.random.default_rng(0)
  senders, receivers = random.integers(0, nodes, (2, 1, edges))
  labels = random.integers(0, LABELS, (1, edges))
  x = jax.ShapeDtypeStruct((1, nodes, 1, WIDTH), jnp.float32)
  table = jax.ShapeDtypeStruct((LABELS, WIDTH), jnp.float32)

  def loss(x, table):
    relation = EdgeLabels.from_edges(senders, receivers, labels, table, table)
    options = dict(relations=relation, implementation="chunked")
    return jnp.sum(dot_product_attention(x, x, x, **options))

  compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, table).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < nodes * nodes * 4 / 4


def test_edges_out_of_range_are_named():
  arrays = random_arrays(0)
  edge = jnp.full((BATCH, 1), NODES)
  relation = EdgeLabels.from_edges(edge, edge, edge * 0, arrays["label_key"], None)
  with pytest.raises(ValueError, match=r"senders go from 11 to 11; want 0 to 10"):
    dot_product_attention(
      arrays["query"], arrays["key"], arrays["value"], relations=relation
    )


@pytest.mark.parametrize("heads", [1, HEADS])
def test_numbers_of_edges_are_a_bias_of_their_pairs(heads):
  arrays, edges = random_arrays(0), random_edges(1)
  numbers = np.random.default_rng(5).normal(size=(BATCH, EDGES, heads))
  tensors = arrays["query"], arrays["key"], arrays["value"]
  bias = np.zeros((BATCH, HEADS, NODES, NODES))
  mask = np.zeros((BATCH, 1, NODES, NODES), bool)
  for batch in range(BATCH):
    for edge in range(EDGES):
      receiver = edges["receivers"][batch, edge]
      sender = edges["senders"][batch, edge]
      if receiver >= 0:
        bias[batch, :, receiver, sender] += numbers[batch, edge]
        mask[batch, :, receiver, sender] = True
  weight = jnp.asarray(np.random.default_rng(6).normal(size=arrays["value"].shape))

  def by_list(tensors, numbers):
    pairs = edges["senders"], edges["receivers"]
    return jnp.sum(weight * edge_attention(*tensors, *pairs, bias=numbers))

  def by_pairs(tensors):
    options = dict(bias=bias, mask=mask, implementation="reference")
    return jnp.sum(weight * dot_product_attention(*tensors, **options))

  found, gradients = jax.jit(jax.value_and_grad(by_list))(tensors, numbers)
  wanted, wanted_gradients = jax.jit(jax.value_and_grad(by_pairs))(tensors)
  np.testing.assert_allclose(found, wanted, **TOLERANCE)
  for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
    np.testing.assert_allclose(gradient, wanted_gradient, **TOLERANCE)
