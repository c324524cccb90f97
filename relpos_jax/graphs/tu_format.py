"""The text files of a graph data set in TU format, read and checked line by line.

Morris et al. 2020, arXiv:2007.08663: NAME_A.txt and its neighbours.
"""

import functools
import pathlib
import zipfile

import numpy as np

from relpos_jax.errors import InputError
from relpos_jax.graphs.graph import Graph, GraphData, GraphNames
from relpos_jax.typing import Float, Int, Shaped

Folder = pathlib.Path | zipfile.Path

_NEEDED = ("A", "graph_indicator", "graph_labels")


def read_folder(folder: Folder, name: str = "") -> GraphData:
  """The graphs of a folder with NAME_A.txt, NAME_graph_indicator.txt and NAME_graph_labels.txt.

  In one split, "all". Read where they exist: NAME_node_labels.txt and NAME_edge_labels.txt, one
  integer a line, NAME_node_attributes.txt and NAME_edge_attributes.txt, numbers separated by
  commas. Labels and classes are numbered in the order of the integers that name them. Each line of
  A is an edge from its first node to its second: data sets of undirected graphs have two lines an
  edge. Without a name the folder must hold one data set.

  Raises InputError, naming file and line: it is no such folder; a line is none of its file, has a
  number that is not finite in float32, or an edge to a node that is not there or between two
  graphs; files do not have as many lines; a graph has no node; there are fewer than two classes.
  """
  name = name or _only_name(folder)
  read = lambda kind, *columns: _read(folder / f"{name}_{kind}.txt", *columns)
  _check_files(folder, name)
  classes, class_names = _numbered(read("graph_labels", int, 1))
  _check_classes(folder / f"{name}_graph_labels.txt", class_names)
  graph_of = read("graph_indicator", int, 1)[:, 0] - 1
  edges = read("A", int, 2) - 1
  _check_indicator(folder / f"{name}_graph_indicator.txt", graph_of, len(classes))
  _check_edges(folder / f"{name}_A.txt", edges, graph_of)
  of_nodes = functools.partial(_beside, folder, name, "graph_indicator", len(graph_of))
  of_edges = functools.partial(_beside, folder, name, "A", len(edges))
  node_labels, node_names = _numbered(of_nodes("node_labels", int, 1))
  edge_labels, edge_names = _numbered(of_edges("edge_labels", int, 1))
  if not node_names:
    node_labels, node_names = np.zeros(len(graph_of), int), ("node",)
  node_features = of_nodes("node_attributes", float, None)
  edge_features = of_edges("edge_attributes", float, None)
  labelled = np.column_stack([edges, edge_labels])
  graphs = _graphs(graph_of, node_labels, labelled, classes, node_features, edge_features)
  widths = node_features.shape[1], edge_features.shape[1]
  return GraphData(dict(all=graphs), GraphNames(node_names, edge_names, class_names, *widths))


def _only_name(folder: Folder) -> str:
  try:
    names = sorted(file.name for file in folder.iterdir())
  except OSError as error:
    raise _not_tu(folder, str(error.strerror)) from None
  found = [name.removesuffix("_A.txt") for name in names if name.endswith("_A.txt")]
  if not found:
    raise _not_tu(folder, "no file NAME_A.txt")
  if len(found) > 1:
    raise InputError(f"{folder} has {len(found)} data sets: give the name, {' or '.join(found)}")
  return found[0]


def _check_files(folder: Folder, name: str) -> None:
  for file in (f"{name}_{kind}.txt" for kind in _NEEDED):
    try:
      is_there = (folder / file).exists()
    except OSError as error:  # it may not be looked for
      raise _not_tu(folder, str(error.strerror)) from None
    if not is_there:
      raise _not_tu(folder, f"no {file}")


def _not_tu(folder: Folder, reason: str) -> InputError:
  wanted = ", ".join(f"NAME_{kind}.txt" for kind in _NEEDED)
  return InputError(f"{folder} is no folder in TU format ({reason}): want {wanted} in it")


def _read(file: Folder, kind: type, columns: int | None) -> Shaped[np.ndarray, "lines columns"]:
  """The numbers of a file, `columns` in every line, or as many as in the first."""
  try:
    lines = file.read_text(encoding="ascii").rstrip().splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise InputError(f"cannot read {file}: {error}; want numbers in ASCII text") from None
  columns = (lines[0].count(",") + 1 if lines else 1) if columns is None else columns
  rows = [line.split(",") for line in lines]
  found = _numbers(rows, kind, columns)
  if found is not None:
    return found
  number = next(i for i, row in enumerate(rows, 1) if _numbers([row], kind, columns) is None)
  what, limit = ("integer", "of 64 bits") if kind is int else ("number", "finite in float32")
  want = f"{columns} {what}s separated by commas" if columns > 1 else f"one {what}"
  raise InputError(f"{file}, line {number}: {lines[number - 1]!r}; want {want}, {limit}")


def _numbers(
  rows: list[list[str]], kind: type, columns: int
) -> Shaped[np.ndarray, "lines columns"] | None:
  """The numbers of the rows; None if one of them is no row of so many."""
  if not {*map(len, rows)} <= {columns}:
    return None
  try:
    found = np.array(rows, kind).reshape(-1, columns)
  except (ValueError, OverflowError):
    return None
  # Features are kept in float32. No comparison is true of nan.
  is_kept = kind is int or (np.abs(found) <= np.finfo(np.float32).max).all()
  return found if is_kept else None


def _beside(folder: Folder, name: str, other: str, number: int, kind: str, *columns):
  """The numbers of a file with as many lines as another has; none where there is no file."""
  file = folder / f"{name}_{kind}.txt"
  if not file.exists():
    return np.empty((number, 0))
  found = _read(file, *columns)
  if len(found) != number:
    raise InputError(f"{file} has {len(found)} lines and {name}_{other}.txt {number}: want as many")
  return found


def _check_classes(file: Folder, names: tuple[str, ...]) -> None:
  """Two classes at least: with one there is nothing to tell."""
  if len(names) < 2:
    found = f"every class is {names[0]}" if names else "no line"
    raise InputError(f"{file}: {found}; want the class of every graph, two classes at least")


def _check_indicator(file: Folder, graph_of: Int[np.ndarray, "nodes"], number: int) -> None:
  """Every node in a graph, every graph with a node."""
  wrong = np.flatnonzero((graph_of < 0) | (graph_of >= number))
  if len(wrong):
    raise InputError(
      f"{file}, line {wrong[0] + 1}: graph {graph_of[wrong[0]] + 1}; want 1 to {number}, a line of "
      "the file of graph labels"
    )
  empty = np.setdiff1d(np.arange(number), graph_of)
  if len(empty):
    raise InputError(
      f"{file}: graph {empty[0] + 1} has no node, and line {empty[0] + 1} of the file of graph "
      "labels has its class: leave it out"
    )


def _check_edges(
  file: Folder, edges: Int[np.ndarray, "edges 2"], graph_of: Int[np.ndarray, "nodes"]
) -> None:
  """Every edge between nodes of one graph."""
  wrong = np.argwhere((edges < 0) | (edges >= len(graph_of)))
  if len(wrong):
    line, end = wrong[0]
    raise InputError(
      f"{file}, line {line + 1}: an edge of node {edges[line, end] + 1}; want 1 to {len(graph_of)},"
      " a line of the graph indicator"
    )
  ends = graph_of[edges]
  wrong = np.flatnonzero(ends[:, 0] != ends[:, 1])
  if len(wrong):
    of = " to one of graph ".join(str(graph + 1) for graph in ends[wrong[0]])
    raise InputError(f"{file}, line {wrong[0] + 1}: an edge from a node of graph {of}; want one")


def _numbered(
  labels: Shaped[np.ndarray, "lines columns"],
) -> tuple[Int[np.ndarray, "lines"], tuple[str, ...]]:
  """Labels as numbers from 0, in order, and their names; -1 and no names where there is none."""
  if not labels.shape[1]:
    return np.full(len(labels), -1), ()
  names, numbers = np.unique(labels[:, 0], return_inverse=True)
  return numbers, tuple(map(str, names))


def _graphs(
  graph_of: Int[np.ndarray, "nodes"],
  node_labels: Int[np.ndarray, "nodes"],
  edges: Int[np.ndarray, "edges 3"],
  classes: Int[np.ndarray, "graphs"],
  node_features: Float[np.ndarray, "nodes features"],
  edge_features: Float[np.ndarray, "edges F"],
) -> list[Graph]:
  """Nodes and edges, numbered through, sorted into graphs."""
  number = len(classes)
  nodes_of = _members(graph_of, number)
  edges_of = _members(graph_of[edges[:, 0]], number)
  place = np.empty(len(graph_of), int)  # of each node in its graph
  for nodes in nodes_of:
    place[nodes] = np.arange(len(nodes))
  edges = np.column_stack([place[edges[:, :2]], edges[:, 2]])
  return [
    Graph.of(
      node_labels[nodes],
      edges[its_edges],
      target=classes[graph],
      node_features=node_features[nodes],
      edge_features=edge_features[its_edges],
    )
    for graph, (nodes, its_edges) in enumerate(zip(nodes_of, edges_of, strict=True))
  ]


def _members(group_of: Int[np.ndarray, "x"], number: int) -> list[Int[np.ndarray, "members"]]:
  """The places of each group's members, in order."""
  order = np.argsort(group_of, kind="stable")
  return np.split(order, np.searchsorted(group_of[order], np.arange(1, number)))
