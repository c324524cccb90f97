"""Graphs are batched completely once per epoch in few shapes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.graphs.graph import Graph, GraphBatches

BOUNDARIES = (2, 5, 8)


def graph(number: int, seed: int) -> Graph:
  """Returns a graph of `number` nodes that differs from those of other seeds."""
  random = np.random.default_rng(seed)
  edges = random.integers(0, number, (random.integers(0, 2 * number), 3))
  return Graph.from_edges(
    random.integers(0, 4, number),
    edges,
    target=seed,
    query=random.integers(0, number, 2),
    node_features=random.normal(size=(number, 2)),
    edge_features=random.normal(size=(len(edges), 1)),
  )


def as_lists(graph: Graph):
  return [np.atleast_1d(array).tolist() for array in graph]


def unbatched(batch) -> list:
  """Recovers the graphs of a batch from its rows."""
  graphs = []
  for row, labels in enumerate(batch.nodes):
    nodes, edges = labels >= 0, batch.senders[row] >= 0
    if not nodes.any():
      assert (batch.query[row] == -1).all()
      assert batch.target[row] == -1
      continue
    values = batch._asdict()
    cut = {name: values[name][row, nodes] for name in ("nodes", "node_features")}
    for name in ("senders", "receivers", "labels", "edge_features"):
      cut[name] = values[name][row, edges]
    cut |= dict(target=batch.target[row], query=batch.query[row])
    graphs.append(as_lists(Graph(**cut)))
  return graphs


sizes_of_graphs = st.lists(st.integers(1, 9), min_size=1, max_size=30)
some_sizes = sizes_of_graphs.filter(lambda sizes: min(sizes) <= 8)


@settings(max_examples=30)
@given(some_sizes, st.one_of(st.none(), st.integers(-1, 2**64)))
def test_every_graph_occurs_once_per_epoch_in_few_shapes(sizes, seed):
  graphs = [graph(size, number) for number, size in enumerate(sizes)]
  options = dict(boundaries=BOUNDARIES, budget=16, multiple_of=2, seed=seed)
  batches = GraphBatches(graphs, **options)
  small = [as_lists(graph) for graph in graphs if len(graph.nodes) <= 8]
  num = batches.num_per_epoch
  for steps in (range(num), range(num, 2 * num)):
    found, shapes = [], set()
    for step in steps:
      batch = batches[step]
      shapes.add((*batch.nodes.shape, batch.senders.shape[1]))
      in_batch = unbatched(batch)
      assert in_batch == [as_lists(graphs[number]) for number in batches.order(step)]
      found += in_batch
    assert sorted(found) == sorted(small)
    assert shapes == {*batches.shapes}
  assert all(rows % 2 == 0 for rows, *_ in batches.shapes)
  assert batches.dropped == len(graphs) - len(small)


def test_an_edge_given_twice_is_one_and_another_label_or_feature_is_another_edge():
  edges = [(0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 1, 0), (1, 1, 2)]
  features = [[1, 5], [3, 5], [1, 5], [1, 5], [1, 5]]
  graph = Graph.from_edges([0, 0], edges, target=0, edge_features=features)
  assert graph.labels.tolist() == [2, 2, 0, 2]
  assert graph.senders.tolist() == [0, 0, 0, 1]
  assert graph.receivers.tolist() == [1, 1, 1, 1]
  assert graph.edge_features.tolist() == [[1, 5], [3, 5], [1, 5], [1, 5]]
