"""Law 18: a list of edges equals its dense labels, while all pairs attend."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from calls import ANY_RELATION, normal, set_tiles
from comparing import assert_close
from compiling import run_with_gradients
from random_edges import (
  HEADS,
  NODES,
  NUM_LABELS,
  SENDERS,
  Edges,
  make_tables,
  make_tensors,
  split,
)

from relpos_jax import (
  EdgeFeatures,
  EdgeLabels,
  LabelBias,
  dot_product_attention,
  edge_attention,
)

pytestmark = pytest.mark.usefixtures("float64")

EDGES = Edges.of_graphs(2)
TENSORS = make_tensors(NODES, SENDERS, (2,))


def attend(*tensors, relations, implementation="reference", **options):
  options |= {"relations": relations, "implementation": implementation}
  return dot_product_attention(*tensors, **options)


@pytest.mark.parametrize("implementation", ANY_RELATION)
def test_a_list_of_edges_equals_all_pairs_and_so_do_its_gradients(
  implementation, monkeypatch
):
  set_tiles(monkeypatch, 2)
  pairs, _ = EDGES.of_pairs()

  def by_list(tensors, *tables):
    of_labels, of_features = split(tables)
    labels = EdgeLabels.from_edges(*EDGES.ends, EDGES.labels, *of_labels)
    features = EdgeFeatures.from_edges(*EDGES.ends, EDGES.features, *of_features)
    relations = labels, features
    return attend(*tensors, relations=relations, implementation=implementation)

  def by_pairs(tensors, *tables):
    return attend(*tensors, relations=EdgeFeatures(pairs, *tables))

  arrays = TENSORS, *make_tables((HEADS,))
  wanted = run_with_gradients(by_pairs, *arrays)
  assert_close(run_with_gradients(by_list, *arrays), wanted)


@pytest.mark.parametrize("heads", [(), (HEADS,)], ids=["shared", "per head"])
def test_numbers_of_edges_equal_a_bias(heads):
  table, (pairs, _) = normal(NUM_LABELS, *heads), EDGES.of_pairs()
  per_head = table.reshape(NUM_LABELS, -1)
  bias = np.einsum("btse,en->bnts", pairs[..., :NUM_LABELS], per_head)
  relations = LabelBias.from_edges(*EDGES.ends, EDGES.labels, table)
  wanted = attend(*TENSORS, relations=None, bias=bias)
  assert_close(attend(*TENSORS, relations=relations, implementation=None), wanted)


def test_edges_out_of_range_are_named():
  edges = np.full((3, 2, 1), SENDERS)
  relations = EdgeLabels.from_edges(*edges, normal(SENDERS + 1, 3), None)
  with pytest.raises(ValueError, match=r"senders go from 6 to 6; want 0 to 5"):
    attend(*TENSORS, relations=relations)


def test_minus_infinity_in_a_table_masks_pairs_as_dense_labels_do():
  """Two edges have the same label, and one has no label."""
  senders, receivers, labels = np.array([[0, 1, 1, 2], [0, 0, 0, 1], [2, 1, 1, -1]])
  pairs = np.full((NODES, SENDERS), -1)
  pairs[receivers, senders] = labels
  table = normal(3)
  table[:2] = -np.inf

  def by_list(*tensors):
    batch = [np.stack([x, x]) for x in (senders, receivers, labels)]
    return attend(*tensors, relations=LabelBias.from_edges(*batch, table))

  def by_pairs(*tensors):
    return attend(*tensors, relations=LabelBias(pairs, table))

  wanted = run_with_gradients(by_pairs, *TENSORS)
  assert_close(run_with_gradients(by_list, *TENSORS), wanted)


@pytest.mark.parametrize("kind", ["labels", "features"])
def test_an_explicit_mesh_may_shard_the_batch(kind):
  mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Explicit,))
  of_labels, of_features = split(make_tables((HEADS,)))
  make, values, tables = {
    "labels": (EdgeLabels, EDGES.labels, of_labels),
    "features": (EdgeFeatures, EDGES.features, of_features),
  }[kind]

  def by_list(tensors, *edges):
    return attend(*tensors, relations=make.from_edges(*edges, *tables))

  arrays = TENSORS, *EDGES.ends, values
  wanted = by_list(*arrays)
  with jax.set_mesh(mesh):
    sharded = jax.device_put(arrays, jax.NamedSharding(mesh, jax.P("data")))
    assert_close(by_list(*sharded), wanted)


def test_symbolic_shapes_are_exported(monkeypatch):
  batch, nodes, edges = jax.export.symbolic_shape("b, n, m")
  x = jax.ShapeDtypeStruct((batch, nodes, HEADS, 3), jnp.float32)
  ends = jax.ShapeDtypeStruct((batch, edges), jnp.int32)
  table = np.float32(normal(NUM_LABELS, 3))

  def by_list(x, senders, receivers, labels):
    relations = EdgeLabels.from_edges(senders, receivers, labels, table, table)
    along_edges = edge_attention(
      x, x, x, senders, receivers, labels=EdgeLabels(labels, table, table)
    )
    return along_edges + dot_product_attention(x, x, x, relations=relations)

  # To the checks of annotations a symbolic dimension is no int.
  monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
  exported = jax.export.export(jax.jit(by_list))(x, ends, ends, ends)
  x = np.float32(normal(2, NODES, HEADS, 3))
  senders, receivers = np.minimum(EDGES.ends, NODES - 1)
  arrays = x, *map(np.int32, (senders, receivers, EDGES.labels))
  assert_close(exported.call(*arrays), by_list(*arrays), rtol=1e-5, atol=1e-5)
