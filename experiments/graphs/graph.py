"""Defines labelled directed graphs, and makes batches of them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from experiments.data.batching import Schedule
from relpos_jax.models.graph_encoder import GraphBatch
from relpos_jax.typing import Float, Int

PAD = -1


class Graph(NamedTuple):
  """Holds a directed graph with n nodes and m edges, and the class to predict.

  Edges are a set of (sender, receiver, label, features). Two nodes may have several
  edges with different labels or features; attention averages the features for each
  direction. An edge may connect a node to itself.

  Attributes:
    nodes: the label of each node.
    senders, receivers: the node that each edge comes from, and the one it goes to.
    labels: edge labels; -1 for an edge without a label.
    node_features, edge_features: real-valued features; width 0 if there are none.
    target: the class of the graph, or of the pair of nodes in its query.
    query: the pair of nodes to classify; -1, -1 to classify the graph.
  """

  nodes: Int[np.ndarray, " n"]
  senders: Int[np.ndarray, " m"]
  receivers: Int[np.ndarray, " m"]
  labels: Int[np.ndarray, " m"]
  node_features: Float[np.ndarray, "n features"]
  edge_features: Float[np.ndarray, "m F"]
  target: Int[np.ndarray, ""]
  query: Int[np.ndarray, "2"]

  @classmethod
  def from_edges(
    cls, nodes, edges, *, target, query=(-1, -1), node_features=None, edge_features=None
  ) -> "Graph":
    """Builds a graph from a list of edges (sender, receiver, label), and features.

    Equal edges with equal features become one edge. Raises ValueError if there are no
    nodes, if `node_features` has another number of rows than there are nodes, or if
    `target` is not a single number.
    """
    nodes, target = np.asarray(nodes, np.int32), np.asarray(target, np.int32)
    edges = np.asarray(edges, np.int32).reshape(-1, 3)
    node_features = _to_features(node_features, len(nodes))
    edge_features = _to_features(edge_features, len(edges))
    if not len(nodes) or len(node_features) != len(nodes) or target.shape:
      shapes = f"node_features {node_features.shape} and target {target.shape}"
      wanted = "want a node or more, a row for each, and one target"
      raise ValueError(f"{len(nodes)} nodes with {shapes}; {wanted}")
    rows = np.column_stack([edges, edge_features])
    _, first = np.unique(rows, axis=0, return_index=True)
    first.sort()
    senders, receivers, labels = edges[first].T
    return cls(
      nodes,
      senders,
      receivers,
      labels,
      node_features,
      edge_features[first],
      target,
      np.asarray(query, np.int32),
    )


def _to_features(values, number: int) -> Float[np.ndarray, "number features"]:
  """Converts features to an array; None becomes `number` rows without features."""
  if values is None:
    values = np.empty((number, 0))
  return np.asarray(values, np.float32)


class GraphNames(NamedTuple):
  """Holds the names of labels and classes, in the order of their numbers.

  It is the vocabulary of a graph data set: it fixes the sizes of a model.
  """

  node_labels: tuple[str, ...]
  edge_labels: tuple[str, ...]
  classes: tuple[str, ...]
  num_node_features: int = 0
  num_edge_features: int = 0


class GraphData(NamedTuple):
  """Holds graphs by split, the names of their labels, and notes for the log."""

  splits: Mapping[str, Sequence[Graph]]
  names: GraphNames
  notes: tuple[str, ...] = ()


class GraphBatches(Schedule):
  """Makes an endless sequence of batches: `batches[step]` for any step >= 0.

  A row holds one graph. `Schedule` chooses graphs with similar numbers of nodes, and
  describes options and errors. Rows of padding fill the last batch of a bucket, and
  round up the rows of every batch.

  Attributes:
    examples: the graphs before batching.
    shapes: all shapes (rows, nodes, edges) of batches; a step is compiled for each.

  >>> edges = [(0, 1, 0), (1, 2, 0), (2, 0, 1)]
  >>> triangle = Graph.from_edges([0, 0, 0], edges, target=1)
  >>> single = Graph.from_edges([0], [], target=0)
  >>> batches = GraphBatches([triangle, single], boundaries=(2, 4), budget=4, seed=0)
  >>> print(batches)
  shapes 2x2 1x4, batches per epoch: 2, dropped (above 4): 0, padding: 50%
  """

  def __init__(self, graphs: Sequence[Graph], **options: Any):
    self.examples = graphs
    super().__init__(num_nodes(graphs), **options)
    shapes = []
    for (rows, nodes), bucket in zip(self.shapes, self.buckets, strict=True):
      num_edges = max(len(graphs[index].senders) for index in bucket)
      shapes.append((rows, nodes, max(1, num_edges)))  # arrays need a size above zero
    self.shapes = tuple(shapes)

  def __getitem__(self, step: SupportsIndex) -> GraphBatch:
    chosen, bucket = self.choose(step)
    first = self.examples[chosen[0]]
    widths = first.node_features.shape[1], first.edge_features.shape[1]
    batch = empty_batch(self.shapes[bucket], widths)
    for row, index in enumerate(chosen):
      for name, values in self.examples[index]._asdict().items():
        place = (row, *map(slice, values.shape))
        getattr(batch, name)[place] = values
    return batch


def num_nodes(graphs: Sequence[Graph]) -> Int[np.ndarray, "graphs"]:
  """Returns the number of nodes of each graph."""
  return np.array([len(graph.nodes) for graph in graphs], int)


def empty_batch(shape: tuple[int, ...], widths: tuple[int, int] = (0, 0)) -> GraphBatch:
  """Returns a batch of padding with shape (rows, nodes, edges).

  Each row has room for one graph. If the shape is (rows, nodes), there is room for as
  many edges as nodes. `widths` holds two numbers: the features of a node, and the
  features of an edge.
  """
  rows, nodes, *others = shape
  edges = others[0] if others else nodes
  node_width, edge_width = widths
  senders, receivers, labels = np.full((3, rows, edges), PAD, np.int32)
  return GraphBatch(
    nodes=np.full((rows, nodes), PAD, np.int32),
    node_features=np.zeros((rows, nodes, node_width), np.float32),
    senders=senders,
    receivers=receivers,
    labels=labels,
    edge_features=np.zeros((rows, edges, edge_width), np.float32),
    query=np.full((rows, 2), PAD, np.int32),
    target=np.full(rows, PAD, np.int32),
  )
