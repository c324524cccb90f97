"""The graph encoder: which properties of edges each option reveals, and padding."""

import functools

import numpy as np
import pytest
from comparing import assert_close
from compiling import compile_quickly, make_random
from flax import nnx

from experiments.graphs.graph import Graph, GraphBatch, GraphBatches
from relpos_jax.attention.edges import pair_features
from relpos_jax.models.graph_encoder import GraphEncoder, GraphEncoderConfig, complete

NUM_NODES = 4
SIZES = {
  "num_node_labels": 2,
  "num_edge_labels": 3,
  "num_classes": 5,
  "num_node_features": 2,
  "num_edge_features": 1,
  "width": 8,
  "num_heads": 2,
  "feed_forward": 8,
}
assert_near = functools.partial(assert_close, rtol=1e-4, atol=1e-4)


@functools.cache
def make(num_layers=1, **values):
  config = GraphEncoderConfig(**SIZES, num_layers=num_layers, **values)
  model = make_random(lambda: GraphEncoder(config, rngs=nnx.Rngs(0)))
  return compile_quickly(lambda graphs: model(graphs))


# Senders, receivers and labels: two edges of one pair, two against each other, and one
# from a node to itself.
EDGES = ((0, 1, 2), (1, 2, 0), (0, 2, 1), (0, 2, 0), (3, 3, 1), (2, 1, 1))


def make_graph(num_nodes=NUM_NODES, edges=EDGES, seed=0):
  random = np.random.default_rng(seed)
  nodes = random.integers(0, 2, num_nodes)
  features = {
    "node_features": random.normal(size=(num_nodes, 2)),
    "edge_features": random.normal(size=(len(edges), 1)),
  }
  query = 0, num_nodes - 1
  return Graph.from_edges(nodes, edges, target=0, query=query, **features)


def make_batch(*graphs, longest=NUM_NODES) -> GraphBatch:
  budget = longest * len(graphs)
  return GraphBatches(graphs, boundaries=(longest,), budget=budget, seed=None)[0]


def differ(x, y) -> bool:
  return np.abs(x - y).max() > 1e-2


def change_first(numbers, first):
  return np.int32([first, *numbers[1:]])


ONE = make_graph()
OTHER_LABEL = ONE._replace(labels=change_first(ONE.labels, 0))
OTHER_WAY = ONE._replace(
  senders=change_first(ONE.senders, 1), receivers=change_first(ONE.receivers, 0)
)
FIRST_FEATURE = np.eye(6, 1, dtype=np.float32)
OTHER_FEATURE = ONE._replace(edge_features=ONE.edge_features + FIRST_FEATURE)
NO_EDGE = make_graph(edges=())
OF_THREE = make_graph(3, ((0, 1, 0), (2, 1, 1)), seed=1)
OF_TWO = make_graph(2, ((1, 0, 2), (1, 0, 1)), seed=2)
SEVERAL = [ONE, OF_THREE, OF_TWO]

# The graphs that differ from ONE by a property of their edges.
OTHERS = {
  "labels": OTHER_LABEL,
  "direction": OTHER_WAY,
  "features": OTHER_FEATURE,
  "edges": NO_EDGE,
}
ALL = list(OTHERS)
BLIND = {"relative_keys": False, "relative_values": False}


@functools.cache
def run_all(**values):
  """Returns the logits of the nodes of a graph, and of four that differ from it."""
  return make(head="node", **values)(make_batch(ONE, *OTHERS.values()))


@pytest.mark.parametrize(
  "values, properties",
  [
    ({}, ALL),
    ({"implementation": "edge_list"}, ALL),
    ({"relative_keys": False}, ALL),
    (BLIND, ["edges"]),
    (BLIND | {"reverse_edges": "none"}, ["direction", "edges"]),
    ({"sees": "all"}, ALL),
    (BLIND | {"sees": "all"}, []),
  ],
  ids=str,
)
def test_a_system_knows_of_the_edges_what_its_switches_say(values, properties):
  one, *others = run_all(**values)
  for name, other in zip(OTHERS, others, strict=True):
    assert differ(one, other) == (name in properties), name


@pytest.mark.parametrize(
  "values", [{"reverse_edges": "own_label"}, {"reverse_edges": "none"}, BLIND], ids=str
)
def test_edges_as_a_list_and_as_a_matrix_are_one_model(values):
  assert_near(run_all(implementation="edge_list", **values), run_all(**values))


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
  """Compares features by receiver and sender.

  The edge from a node to itself changes nothing.
  """
  config = GraphEncoderConfig(**SIZES, reverse_edges=reverse_edges)
  # Two edges in opposite directions, two on one pair, and one from a node to itself.
  ends = ((0, 1, 0), (1, 0, 0), (1, 2, 0), (1, 2, 1), (3, 3, 2))
  features = np.float32([[1], [5], [2], [4], [6]])
  graph = make_graph(edges=ends)._replace(edge_features=features)
  edges = complete(make_batch(graph), config)
  num_rows = config.num_table_rows
  (pairs,), _ = pair_features(*edges, num_labels=num_rows, num_nodes=NUM_NODES)
  expected = np.zeros((NUM_NODES, NUM_NODES, config.num_directions))
  for pair, numbers in wanted.items():
    expected[pair] = numbers
  assert_near(pairs[..., num_rows:], expected)
  # Only reverse edges lead from node 2 to node 1; their labels come after the others.
  reverse = [3, 4] if reverse_edges == "own_label" else []
  assert np.flatnonzero(pairs[1, 2, :num_rows]).tolist() == reverse


def renumber(graph: Graph, new) -> Graph:
  """Renames node i to new[i] and reverses the order of the edges."""
  new, old = np.int32(new), np.argsort(new)
  senders, receivers = new[graph.senders], new[graph.receivers]
  graph = graph._replace(
    nodes=graph.nodes[old],
    node_features=graph.node_features[old],
    query=new[graph.query],
  )
  return graph._replace(
    senders=senders[::-1],
    receivers=receivers[::-1],
    labels=graph.labels[::-1],
    edge_features=graph.edge_features[::-1],
  )


@pytest.mark.parametrize(
  "values",
  [
    {"head": "graph"},
    {"head": "graph", "readout": "sum", "sees": "all", "num_layers": 2},
    {"head": "pair", "implementation": "edge_list"},
    {
      "head": "node",
      "norm": "post",
      "tables_per_layer": False,
      "tables_per_head": False,
    },
  ],
  ids=str,
)
def test_renumbered_and_padded_graphs_give_the_same(values):
  """Compares graphs with the same ones in longer rows, the first of them renumbered."""
  model, new = make(**values), [2, 0, 3, 1]
  logits = model(make_batch(*SEVERAL))
  others = model(make_batch(renumber(ONE, new), *SEVERAL[1:], longest=6))
  if values["head"] != "node":
    assert_near(logits, others)
    assert differ(logits[0], logits[1])
    return
  assert_near(logits[0], others[0, new])
  for row, graph in enumerate(SEVERAL[1:], start=1):
    is_node = np.arange(len(graph.nodes))
    assert_near(logits[row, is_node], others[row, is_node])
  assert differ(logits[0, 0], logits[0, 1])


def test_a_query_is_shown_to_all_and_its_order_matters():
  alike = NO_EDGE._replace(nodes=0 * ONE.nodes, node_features=0 * ONE.node_features)
  graphs = [ONE._replace(query=np.int32(query)) for query in ((0, 3), (3, 0))]
  for query in ((0, 1), (0, 0), (2, 3)):
    graphs.append(alike._replace(query=np.int32(query)))
  forth, back, two, same, other_two = make(head="pair")(make_batch(*graphs))
  assert differ(forth, back)
  assert differ(two, same)
  assert_near(two, other_two)
