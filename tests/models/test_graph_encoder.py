"""The graph encoder: which properties of edges each option reveals, and padding."""

import functools

import numpy as np
import pytest
from compiling import quickly, randomly
from flax import nnx

from experiments.graphs.graph import Graph, GraphBatch, GraphBatches
from relpos_jax.attention.edges import pair_features
from relpos_jax.models.graph_encoder import GraphEncoder, GraphEncoderConfig, complete

LABELS, CLASSES = 3, 5
BLIND = dict(relative_keys=False, relative_values=False)


@functools.cache
def make(**values):
  layers = dict(num_layers=1, width=8, num_heads=2, feed_forward=8) | values
  config = GraphEncoderConfig(
    num_node_labels=2, num_edge_labels=LABELS, num_classes=CLASSES, num_node_features=2,
    num_edge_features=1, **layers
  )  # fmt: skip
  model = randomly(lambda: GraphEncoder(config, rngs=nnx.Rngs(0)))
  return quickly(lambda graphs: model(graphs))


# Two edges of one pair, two against each other, and one from a node to itself.
EDGES = ((0, 1, 2), (1, 2, 0), (0, 2, 1), (0, 2, 0), (3, 3, 1), (2, 1, 1))


def graph(num_nodes=4, edges=EDGES, seed=0):
  random = np.random.default_rng(seed)
  return Graph.from_edges(
    random.integers(0, 2, num_nodes),
    edges,
    target=0,
    query=(0, num_nodes - 1),
    node_features=random.normal(size=(num_nodes, 2)),
    edge_features=random.normal(size=(len(edges), 1)),
  )


def rows(*graphs, longest=4) -> GraphBatch:
  options = dict(boundaries=(longest,), budget=longest * len(graphs), seed=None)
  return GraphBatches(graphs, **options)[0]


def assert_same(x, y):
  np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def differ(x, y) -> bool:
  return np.abs(x - y).max() > 1e-2


ONE = graph()
OTHER_LABEL = ONE._replace(labels=np.int32([0, *ONE.labels[1:]]))
OTHER_WAY = ONE._replace(
  senders=np.int32([1, *ONE.senders[1:]]), receivers=np.int32([0, *ONE.receivers[1:]])
)
OTHER_FEATURE = ONE._replace(
  edge_features=ONE.edge_features + np.eye(6, 1, dtype=np.float32)
)
NO_EDGE = Graph.from_edges(
  ONE.nodes,
  [],
  target=0,
  query=ONE.query,
  node_features=ONE.node_features,
  edge_features=np.empty((0, 1)),
)
SEVERAL = [
  ONE,
  graph(3, ((0, 1, 0), (2, 1, 1)), seed=1),
  graph(2, ((1, 0, 2), (1, 0, 1)), seed=2),
]

# The properties of edges that each system uses: labels, direction, features, and their
# existence.
SYSTEMS = {
  "keys and values": (dict(), "labels direction features edges"),
  "as a list": (dict(implementation="edge_list"), "labels direction features edges"),
  "values": (dict(relative_keys=False), "labels direction features edges"),
  "none": (BLIND, "edges"),
  "none, one way": (BLIND | dict(reverse_edges="none"), "direction edges"),
  "all see all": (dict(sees="all"), "labels direction features edges"),
  "no structure": (BLIND | dict(sees="all"), ""),
}


@functools.cache
def of_five_graphs(**values):
  """Returns the logits of each node of a graph, and of four graphs that differ from it."""
  batch = rows(ONE, OTHER_LABEL, OTHER_WAY, OTHER_FEATURE, NO_EDGE)
  return make(head="node", **values)(batch)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_knows_of_the_edges_what_its_switches_say(system):
  values, known = SYSTEMS[system]
  one, *others = of_five_graphs(**values)
  for what, other in zip(
    ("labels", "direction", "features", "edges"), others, strict=True
  ):
    assert differ(one, other) == (what in known.split()), what


WAYS = [dict(reverse_edges=way) for way in ("own_label", "none")]


@pytest.mark.parametrize("values", [*WAYS, BLIND], ids=str)
def test_edges_as_a_list_and_as_a_matrix_are_one_model(values):
  assert_same(
    of_five_graphs(implementation="edge_list", **values), of_five_graphs(**values)
  )


@pytest.mark.parametrize(
  "reverse_edges, wanted",
  [
    (
      "own_label",
      {(1, 0): [1, 5], (0, 1): [5, 1], (2, 1): [3, 0], (1, 2): [0, 3], (3, 3): [6, 6]},
    ),
    ("none", {(1, 0): [1], (0, 1): [5], (2, 1): [3], (3, 3): [6]}),
  ],
)
def test_a_pairs_features_are_the_mean_of_its_edges_in_each_direction(
  reverse_edges, wanted
):
  """Compares features by receiver and sender; the edge from a node to itself changes nothing."""
  config = GraphEncoderConfig(
    num_node_labels=1, num_edge_labels=3, num_classes=2, num_edge_features=1, width=8, num_heads=2,
    reverse_edges=reverse_edges
  )  # fmt: skip
  # Two edges in opposite directions, two on one pair, and one from a node to itself.
  ends = ((0, 1, 0), (1, 0, 0), (1, 2, 0), (1, 2, 1), (3, 3, 2))
  features = [[1.0], [5.0], [2.0], [4.0], [6.0]]
  batch = rows(Graph.from_edges([0] * 4, ends, target=0, edge_features=features))
  num_rows = config.num_table_rows
  (found,), _ = pair_features(
    *complete(batch, config), num_labels=num_rows, num_nodes=4
  )
  expected = np.zeros((4, 4, config.num_directions))
  for pair, features in wanted.items():
    expected[pair] = features
  assert_same(found[..., num_rows:], expected)


def renumbered(graph: Graph, new) -> Graph:
  """Renames node i to new[i] and reverses the order of the edges."""
  old, edges = np.argsort(new), np.arange(len(graph.senders))[::-1]
  return Graph(
    graph.nodes[old],
    *(
      np.int32(np.asarray(new)[ends[edges]])
      for ends in (graph.senders, graph.receivers)
    ),
    labels=graph.labels[edges],
    node_features=graph.node_features[old],
    edge_features=graph.edge_features[edges],
    target=graph.target,
    query=np.int32(np.asarray(new)[graph.query]),
  )


KINDS = {
  "mean of nodes": dict(head="graph"),
  "sum of nodes": dict(head="graph", readout="sum", sees="all", num_layers=2),
  "nodes": dict(
    head="node", norm="post", tables_per_layer=False, tables_per_head=False
  ),
  "pairs, as a list": dict(head="pair", implementation="edge_list"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_renumbered_and_padded_graphs_give_the_same(kind):
  """Compares graphs with the same ones in longer rows, the first of them renumbered."""
  model, new = make(**KINDS[kind]), [2, 0, 3, 1]
  found = np.array(model(rows(*SEVERAL)))
  others = np.array(model(rows(renumbered(ONE, new), *SEVERAL[1:], longest=6)))
  if KINDS[kind]["head"] == "node":
    others[0, :4] = others[0, new]
    found, others = (
      [x[i, : len(y.nodes)] for i, y in enumerate(SEVERAL)] for x in (found, others)
    )
    found, others = np.concatenate(found), np.concatenate(others)
  assert_same(found, others)
  assert differ(found[0], found[1])


def test_a_query_is_shown_to_all_and_its_order_matters():
  asked = [ONE._replace(query=np.int32(query)) for query in ((0, 3), (3, 0))]
  alike = NO_EDGE._replace(nodes=0 * ONE.nodes, node_features=0 * ONE.node_features)
  alike = [alike._replace(query=np.int32(query)) for query in ((0, 1), (0, 0), (2, 3))]
  found = make(head="pair")(rows(*asked, *alike))
  assert differ(found[0], found[1]) and differ(found[2], found[3])
  assert_same(found[2], found[4])
