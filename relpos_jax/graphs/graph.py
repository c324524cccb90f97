"""Labelled directed graphs, checked, and split into folds; knows nothing of models."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from relpos_jax.errors import InputError
from relpos_jax.typing import Float, Int


class Graph(NamedTuple):
  """A directed graph of n nodes and m edges, and what is asked about it.

  Edges are a set of (sender, receiver, label, features): one given twice says nothing new, and
  `Graph.of` leaves it out. Several labels of a pair are several edges, and so are several features,
  of which attention takes the mean in each direction. An edge may go from a node to itself.

  Attributes:
    nodes: the label of each node.
    senders, receivers: the node that each edge goes from, and to.
    labels: of the edges; -1 is an edge without label.
    node_features, edge_features: floating numbers, of width 0 where there are none.
    target: the class of the graph, or of its query, []; or of each node, [n].
    query: the two nodes that are asked about; -1 where it is the graph.
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
    """From rows of (sender, receiver, label), and of features; edges equal in both become one.

    Raises InputError: a number is no integer of 32 bits, or edges have not a row of features each.

    >>> graph = Graph.of([0, 0, 1], [(0, 1, 4), (1, 2, 4), (0, 1, 4), (0, 1, 5)], target=1)
    >>> graph.senders, graph.receivers, graph.labels
    (array([0, 1, 0], dtype=int32), array([1, 2, 1], dtype=int32), array([4, 4, 5], dtype=int32))
    """
    nodes = _int32("nodes", nodes).reshape(-1)
    edges = _int32("edges", edges).reshape(-1, 3)
    floats = lambda x, number: np.asarray(np.empty((number, 0)) if x is None else x, np.float32)
    edge_features = floats(edge_features, len(edges))
    _check_rows("features of edges", edge_features, len(edges))
    places: dict[tuple[float, ...], int] = {}
    for place, edge in enumerate(map(tuple, np.column_stack([edges, edge_features]).tolist())):
      places.setdefault(edge, place)
    first = [*places.values()]
    return cls(
      nodes,
      *edges[first].T,
      node_features=floats(node_features, len(nodes)),
      edge_features=edge_features[first],
      target=_int32("target", target),
      query=_int32("query", query),
    )


def _int32(what: str, x) -> Int[np.ndarray, "..."]:
  """x, where no number is lost thereby."""
  found, limits = np.asarray(x), np.iinfo(np.int32)
  if found.size and found.dtype.kind not in "iuO":  # objects: Python's integers beyond 64 bits
    raise InputError(f"{what} are of {found.dtype}; want integers of 32 bits")
  if found.size and not limits.min <= found.min() <= found.max() <= limits.max:
    raise InputError(f"{what} go from {found.min()} to {found.max()}; want integers of 32 bits")
  return found.astype(np.int32)


class GraphNames(NamedTuple):
  """What a model must know of graphs before it is made: a vocabulary.

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
  """Graphs by split, and what their numbers are called.

  Attributes:
    splits: graphs by name: train, valid, test, ...
    names: of their labels and classes.
    notes: for the log, a line each.

  Raises InputError, when made, for a graph that `check` refuses.
  """

  splits: Mapping[str, Sequence[Graph]]
  names: GraphNames
  notes: tuple[str, ...] = ()

  def __post_init__(self):
    for split, graphs in self.splits.items():
      for number, graph in enumerate(graphs, start=1):
        self.check(graph, f"{split}: graph {number}")

  def check(self, graph: Graph, where: str) -> None:
    """Raises InputError, one line that starts with `where`, for a graph that is none.

    That is one without nodes, with an edge or a query to a node that it does not have, with a label
    or class that has no name, or with features of another width or not of all nodes and edges.
    """
    number = len(graph.nodes)
    if not number:
      raise InputError(f"{where} has no node: leave it out")
    _check(where, "label of node", graph.nodes, 0, len(self.names.node_labels))
    _check(where, "sender of edge", graph.senders, 0, number)
    _check(where, "receiver of edge", graph.receivers, 0, number)
    _check(where, "label of edge", graph.labels, -1, len(self.names.edge_labels))
    _check(where, "node of query", graph.query, -1, number)
    _check(where, "class", graph.target.reshape(-1), -1, len(self.names.classes))
    for what, rows in (("node", number), ("edge", len(graph.senders))):
      features = getattr(graph, f"{what}_features")
      _check_rows(f"{where}: features of {what}s", features, rows)
      found, wanted = features.shape[1], getattr(self.names, f"num_{what}_features")
      if found != wanted:
        raise InputError(f"{where} has {found} features of {what}s; want {wanted}")
    if graph.target.ndim and len(graph.target) != number:
      raise InputError(f"{where} has {number} nodes and {len(graph.target)} classes: give as many")


def _check(where: str, what: str, x: Int[np.ndarray, "x"], least: int, number: int) -> None:
  if x.size and not least <= x.min() <= x.max() < number:
    wrong = np.flatnonzero((x < least) | (x >= number))[0]
    raise InputError(f"{where}: {what} {wrong + 1} is {x[wrong]}; want {least} to {number - 1}")


def _check_rows(what: str, features: np.ndarray, rows: int) -> None:
  if features.ndim != 2 or len(features) != rows:
    raise InputError(f"{what} have shape {features.shape}; want ({rows}, ...), a row each")


def stratified_folds(
  classes: Sequence[int] | Int[np.ndarray, "examples"], number: int, seed: int
) -> list[Int[np.ndarray, "fold"]]:
  """Disjoint sets of examples, each with its share of every class.

  The sizes of two folds, and what they have of one class, differ by at most one. A function of
  classes, number and seed alone.

  Raises InputError where a fold would be empty.

  >>> [fold.tolist() for fold in stratified_folds([0, 1, 0, 1, 0, 1], 3, seed=0)]
  [[0, 5], [1, 2], [3, 4]]
  """
  classes = np.asarray(classes)
  if not 2 <= number <= len(classes):
    raise InputError(f"{number} folds of {len(classes)} graphs: give 2 to {len(classes)} folds")
  generator = np.random.Generator(np.random.Philox(key=seed % 2**64))
  shuffled = generator.permutation(len(classes))
  # Dealt out like cards, class after class.
  dealt = shuffled[np.argsort(classes[shuffled], kind="stable")]
  return [np.sort(dealt[fold::number]) for fold in range(number)]
