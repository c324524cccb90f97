"""Graphs are batched completely once per epoch in few shapes."""

import numpy as np
import pytest
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
  for row in np.flatnonzero(batch.target >= 0):
    values = {name: array[row] for name, array in batch._asdict().items()}
    is_node, is_edge = values["nodes"] >= 0, values["senders"] >= 0
    for name in ("nodes", "node_features"):
      values[name] = values[name][is_node]
    for name in ("senders", "receivers", "labels", "edge_features"):
      values[name] = values[name][is_edge]
    graphs.append(as_lists(Graph(**values)))
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
  num, found, shapes = batches.num_per_epoch, [], set()
  for step in range(num, 2 * num):
    batch = batches[step]
    shapes.add((*batch.nodes.shape, batch.senders.shape[1]))
    in_batch = unbatched(batch)
    assert in_batch == [as_lists(graphs[number]) for number in batches.order(step)]
    found += in_batch
  assert sorted(found) == sorted(small)
  assert shapes == {*batches.shapes}
  assert all(rows % 2 == 0 for rows, *_ in shapes)


def test_an_edge_given_twice_is_one_and_another_label_or_feature_is_another_edge():
  edges = [(0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 1, 0), (1, 1, 2)]
  features = [[1, 5], [3, 5], [1, 5], [1, 5], [1, 5]]
  graph = Graph.from_edges([0, 0], edges, target=0, edge_features=features)
  found = np.column_stack([graph.senders, graph.receivers, graph.labels])
  assert found.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 0], [1, 1, 2]]
  assert graph.edge_features.tolist() == [[1, 5], [3, 5], [1, 5], [1, 5]]


@pytest.mark.parametrize(
  "changes", [{"nodes": []}, {"node_features": [[0.5]]}, {"target": [1]}]
)
def test_arrays_of_wrong_shapes_are_refused(changes):
  arguments = {"nodes": [0, 0], "edges": [], "target": 1} | changes
  with pytest.raises(ValueError, match="want a node or more"):
    Graph.from_edges(**arguments)
