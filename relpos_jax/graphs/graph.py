"""Labelled directed graphs: the type, its checks, and stratified folds."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from relpos_jax.errors import InputError
from relpos_jax.typing import Float, Int


class Graph(NamedTuple):
  """A directed graph of n nodes and m edges, with the classes to predict.

  Edges are a set of (sender, receiver, label, features); `Graph.of` removes duplicates. A pair of
  nodes may have several edges with different labels or features: attention averages the features
  in each direction. An edge may connect a node to itself.

  Attributes:
    nodes: the label of each node.
    senders, receivers: the source and target node of each edge.
    labels: edge labels; -1 for an edge without a label.
    node_features, edge_features: real-valued features; width 0 if there are none.
    target: the class of the graph or of its query, []; or of each node, [n].
    query: the pair of nodes to classify; -1 if the graph itself is classified.
  """

  nodes: Int[np.ndarray, " n"]
  senders: Int[np.ndarray, " m"]
  receivers: Int[np.ndarray, " m"]
  labels: Int[np.ndarray, " m"]
  node_features: Float[np.ndarray, "n features"]
  edge_features: Float[np.ndarray, "m F"]
  target: Int[np.ndarray, "*n"]
  query: Int[np.ndarray, "2"]

  @classmethod
  def of(
    cls, nodes, edges, *, target, query=(-1, -1), node_features=None, edge_features=None
  ) -> "Graph":
    """Builds a graph from rows of (sender, receiver, label) and of features.

    Edges with equal rows and equal features become one edge.

    Raises InputError for numbers that are not 32-bit integers, and unless every edge has a row of
    features.

    >>> graph = Graph.of([0, 0, 1], [(0, 1, 4), (1, 2, 4), (0, 1, 4), (0, 1, 5)], target=1)
    >>> graph.senders, graph.receivers, graph.labels
    (array([0, 1, 0], dtype=int32), array([1, 2, 1], dtype=int32), array([4, 4, 5], dtype=int32))
    """
    nodes = _int32("nodes", nodes).reshape(-1)
    edges = _int32("edges", edges).reshape(-1, 3)
    floats = lambda x, rows: np.asarray(np.empty((rows, 0)) if x is None else x, np.float32)
    edge_features = floats(edge_features, len(edges))
    if edge_features.ndim != 2 or len(edge_features) != len(edges):
      raise InputError(f"edge_features have shape {edge_features.shape}; want ({len(edges)}, F)")
    first: dict[tuple[float, ...], int] = {}
    for index, edge in enumerate(map(tuple, np.column_stack([edges, edge_features]).tolist())):
      first.setdefault(edge, index)
    kept = [*first.values()]
    return cls(
      nodes,
      *edges[kept].T,
      node_features=floats(node_features, len(nodes)),
      edge_features=edge_features[kept],
      target=_int32("target", target),
      query=_int32("query", query),
    )


def _int32(name: str, x) -> Int[np.ndarray, "..."]:
  """Converts x to int32; raises InputError if a value would change."""
  found = np.asarray(x)
  converted = found.astype(np.int32)
  if (converted != found).any():
    raise InputError(f"{name} of {found.dtype} do not fit; want integers of 32 bits")
  return converted


class GraphNames(NamedTuple):
  """The vocabulary of a graph data set, which fixes the sizes of a model.

  Attributes:
    node_labels, edge_labels, classes: names, in the order of their numbers.
    num_node_features, num_edge_features: widths.
  """

  node_labels: tuple[str, ...]
  edge_labels: tuple[str, ...]
  classes: tuple[str, ...]
  num_node_features: int = 0
  num_edge_features: int = 0


@dataclasses.dataclass(frozen=True)
class GraphData:
  """Graphs by split, and the names of their labels and classes.

  Attributes:
    splits: graphs by name: train, valid, test, ...
    names: of labels and classes.
    notes: lines for the log.

  Raises InputError for a graph without nodes, an index or label out of range, or an array of the
  wrong shape.
  """

  splits: Mapping[str, Sequence[Graph]]
  names: GraphNames
  notes: tuple[str, ...] = ()

  def __post_init__(self):
    for split, graphs in self.splits.items():
      for number, graph in enumerate(graphs, start=1):
        _check(graph, self.names, f"{split}: graph {number}")


def _check(graph: Graph, names: GraphNames, where: str) -> None:
  num_nodes, num_edges = len(graph.nodes), len(graph.senders)
  if not num_nodes:
    raise InputError(f"{where} has no node: leave it out")
  for what, x, low, high in (
    ("label of node", graph.nodes, 0, len(names.node_labels)),
    ("sender of edge", graph.senders, 0, num_nodes),
    ("receiver of edge", graph.receivers, 0, num_nodes),
    ("label of edge", graph.labels, -1, len(names.edge_labels)),
    ("node of query", graph.query, -1, num_nodes),
    ("class", graph.target.reshape(-1), -1, len(names.classes)),
  ):
    wrong = np.flatnonzero((x < low) | (x >= high))
    if len(wrong):
      index = wrong[0]
      raise InputError(f"{where}: {what} {index + 1} is {x[index]}; want {low} to {high - 1}")
  for what, found, wanted in (
    ("node_features", graph.node_features.shape, (num_nodes, names.num_node_features)),
    ("edge_features", graph.edge_features.shape, (num_edges, names.num_edge_features)),
    ("target", graph.target.shape, (num_nodes,) if graph.target.ndim else ()),
  ):
    if found != wanted:
      raise InputError(f"{where}: {what} has shape {found}; want {wanted}")


def stratified_folds(
  classes: Sequence[int] | Int[np.ndarray, "examples"], num_folds: int, seed: int
) -> list[Int[np.ndarray, "fold"]]:
  """Splits examples into disjoint folds, each with its share of every class.

  The sizes of two folds differ by at most one, and so do their numbers of examples of one class.
  Depends on the arguments alone.

  >>> [fold.tolist() for fold in stratified_folds([0, 1, 0, 1, 0, 1], 3, seed=0)]
  [[0, 5], [1, 2], [3, 4]]
  """
  classes = np.asarray(classes)
  generator = np.random.Generator(np.random.Philox(key=seed % 2**64))
  shuffled = generator.permutation(len(classes))
  by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
  return [np.sort(by_class[fold::num_folds]) for fold in range(num_folds)]
