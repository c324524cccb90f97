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
  found = []
  for row, labels in enumerate(batch.nodes):
    nodes, edges = labels >= 0, batch.senders[row] >= 0
    if not nodes.any():
      assert (batch.query[row] == -1).all() and batch.target[row] == -1
      continue
    found.append(
      Graph(
        *(
          batch.nodes[row, nodes],
          batch.senders[row, edges],
          batch.receivers[row, edges],
        ),
        *(batch.labels[row, edges], batch.node_features[row, nodes]),
        *(batch.edge_features[row, edges], batch.target[row], batch.query[row]),
      )
    )
  return [as_lists(graph) for graph in found]


some_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=30).filter(
  lambda x: min(x) <= 8
)


@settings(max_examples=30)
@given(some_sizes, st.one_of(st.none(), st.integers(-1, 2**64)))
def test_every_graph_occurs_once_per_epoch_in_few_shapes(sizes, seed):
  graphs = [graph(size, number) for number, size in enumerate(sizes)]
  batches = GraphBatches(
    graphs, boundaries=BOUNDARIES, budget=16, multiple_of=2, seed=seed
  )
  small = [as_lists(graph) for graph in graphs if len(graph.nodes) <= 8]
  for epoch in range(2):
    steps = range(epoch * batches.num_per_epoch, (epoch + 1) * batches.num_per_epoch)
    epochs = [batches[step] for step in steps]
    assert sorted(x for batch in epochs for x in unbatched(batch)) == sorted(small)
    shapes = {(*x.nodes.shape, x.senders.shape[1]) for x in epochs}
    assert shapes == {*batches.shapes}
    assert all(rows % 2 == 0 for rows, *_ in batches.shapes)
    for step, batch in zip(steps, epochs, strict=True):
      wanted = [as_lists(graphs[number]) for number in batches.order(step)]
      assert unbatched(batch) == wanted
  assert batches.dropped == len(graphs) - len(small)


@pytest.mark.parametrize(
  "wrong", [dict(target=[1]), dict(node_features=[[1.0]]), dict(nodes=[])]
)
def test_rows_that_do_not_fit_the_nodes_are_refused(wrong):
  with pytest.raises(ValueError, match=r"nodes with node_features .* and target"):
    Graph.from_edges(**dict(nodes=[0, 0, 0], edges=[], target=1) | wrong)


def test_an_edge_given_twice_is_one_and_another_label_or_feature_is_another_edge():
  given = [(0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 1, 0), (1, 1, 2)]
  twice = Graph.from_edges(
    [0, 0], given, target=0, edge_features=[[1, 5], [3, 5], [1, 5], [1, 5], [1, 5]]
  )
  assert twice.labels.tolist() == [2, 2, 0, 2]
  assert twice.senders.tolist() == [0, 0, 0, 1] and twice.receivers.tolist() == [
    1,
    1,
    1,
    1,
  ]
  assert twice.edge_features.tolist() == [[1, 5], [3, 5], [1, 5], [1, 5]]
