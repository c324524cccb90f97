"""Graph data sets in TU format: molecules with bond labels, and users' own folders."""

import io
import pathlib
import zipfile

import numpy as np

from experiments.data.upstream import Upstream
from experiments.errors import InputError
from experiments.graphs.graph import Graph, GraphData, GraphNames
from relpos_jax.typing import Bool, Int, Shaped

MOLECULES = Upstream(
  "tu",
  "datasets of github.com/nd7141/graph_datasets",
  "https://raw.githubusercontent.com/nd7141/graph_datasets/"
  "97da5acfd1f8137f7776783533717182d3e5a6fc/datasets/",
  {
    "MUTAG.zip": "ea3576783c61cd2b3a942e9e3bab821cd4b359f5409fd53b31192c721207f6fa",
    "Mutagenicity.zip": "387ce29718d08c9788521fb3a8842b67bc16751907414ac69dd3c6c113b95e40",
  },
)


def load(name: str = "MUTAG", path: str = "") -> GraphData:
  """Loads graphs and their classes in one split, "all".

  "MUTAG" (135 molecules) and "Mutagenicity" (3,335) are from the archives of Ivanov et al. 2019,
  which may be in the folder `path`: see `Upstream`. Isomorphic copies are removed there, so
  published figures for the 188 graphs of MUTAG do not apply. Any other name, or "" for the only
  one, is a data set in TU format in the folder `path`: see `read_folder`.

  Raises InputError for an unknown name, a missing or wrong file or folder, or no network.

  >>> load("MUTAG", path="graph_datasets/datasets").names.edge_labels  # doctest: +SKIP
  ('0', '1', '2', '3')
  """
  if (archive := f"{name}.zip") in MOLECULES.files:
    folder = zipfile.Path(io.BytesIO(MOLECULES.read(archive, path)), f"{name}/")
    return read_folder(folder, name)
  if path:
    return read_folder(pathlib.Path(path).expanduser(), name)
  known = " or ".join(name.removesuffix(".zip") for name in MOLECULES.files)
  raise InputError(f"unknown data set {name!r}: give the path of its folder, or {known}")


def split_folds(data: GraphData, fold: int, num_folds: int) -> GraphData:
  """Splits "all" into stratified folds: one to test, the next to validate, the others to train.

  The folds are disjoint and the same for every call with the same data. The sizes of two folds
  differ by at most one, and so do their numbers of graphs of one class.
  """
  graphs = data.splits["all"]
  if len(graphs) < num_folds:
    raise InputError(f"{num_folds} folds of {len(graphs)} graphs: lower config.data.tu.num_folds")
  classes = np.array([graph.target for graph in graphs])
  shuffled = np.random.Generator(np.random.Philox(key=0)).permutation(len(graphs))
  by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
  folds = [np.sort(by_class[number::num_folds]) for number in range(num_folds)]
  parts = dict(test=folds.pop(fold), valid=folds.pop(fold % len(folds)))
  parts["train"] = np.concatenate(folds)
  splits = {name: [graphs[i] for i in parts[name]] for name in ("train", "valid", "test")}
  note = f"of {num_folds} folds, {fold} is for testing, {(fold + 1) % num_folds} for validation"
  return data._replace(splits=splits, notes=(note,))


_LARGEST = 2.0**63  # fits into int64 and float32
_WANTED = "want a folder with NAME_A.txt, NAME_graph_indicator.txt and NAME_graph_labels.txt"


def read_folder(folder: pathlib.Path | zipfile.Path, name: str = "") -> GraphData:
  """Reads the graphs of a folder in TU format (Morris et al. 2020, arXiv:2007.08663).

  The files are NAME_A.txt, NAME_graph_indicator.txt and NAME_graph_labels.txt, and optionally
  NAME_node_labels.txt and NAME_edge_labels.txt with one integer per line, and
  NAME_node_attributes.txt and NAME_edge_attributes.txt with numbers separated by commas. Labels and
  classes are numbered in the order of their integers. Each line of A is an edge from its first node
  to its second: data sets of undirected graphs have two lines per edge. All graphs are in one
  split, "all". Without a name, the folder must hold one data set.

  Raises InputError, which names the file and line, for a line of another form, an edge to an
  unknown node or between two graphs, a graph without nodes, or fewer than two classes.
  """
  if not name:
    found = sorted(file.name.removesuffix("_A.txt") for file in folder.glob("*_A.txt"))
    if len(found) != 1:
      which = f" ({', '.join(found)}): give the name of one" if found else f": {_WANTED}"
      raise InputError(f"{folder} has {len(found)} data sets in TU format{which}")
    name = found[0]

  def file(kind):
    return folder / f"{name}_{kind}.txt"

  def read_optional(kind: str, number_type: type, columns: int | None, num_lines: int):
    if not file(kind).exists():
      return np.empty((num_lines, 0), number_type)
    rows = _read(file(kind), number_type, columns)
    if len(rows) != num_lines:
      raise InputError(f"{file(kind)} has {len(rows)} lines; want {num_lines}, one per {kind[:4]}")
    return rows

  def check(kind: str, is_right: Bool[np.ndarray, "lines"], wanted: str) -> None:
    if not is_right.all():
      raise InputError(f"{file(kind)}, line {np.argmin(is_right) + 1}: {wanted}")

  edges = _read(file("A"), int, 2) - 1
  graph_of = _read(file("graph_indicator"), int)[:, 0] - 1
  classes, class_names = _numbered(_read(file("graph_labels"), int))
  if len(class_names) < 2:
    raise InputError(f"{file('graph_labels')}: want one class per graph, two or more")
  is_graph = (graph_of >= 0) & (graph_of < len(classes))
  check("graph_indicator", is_graph, f"want a graph from 1 to {len(classes)}")
  sizes = np.bincount(graph_of, minlength=len(classes))
  check("graph_labels", sizes > 0, "the graph has no node: delete the line")
  is_node = ((edges >= 0) & (edges < len(graph_of))).all(1)
  check("A", is_node, f"want two nodes from 1 to {len(graph_of)}")
  check("A", np.equal(*graph_of[edges].T), "want two nodes of one graph")
  node_labels, node_names = _numbered(read_optional("node_labels", int, 1, len(graph_of)))
  edge_labels, edge_names = _numbered(read_optional("edge_labels", int, 1, len(edges)))
  if not node_names:
    node_labels, node_names = np.zeros(len(graph_of), int), ("node",)
  node_features = read_optional("node_attributes", float, None, len(graph_of))
  edge_features = read_optional("edge_attributes", float, None, len(edges))

  nodes_of = _members(graph_of, len(classes))
  edges_of = _members(graph_of[edges[:, 0]], len(classes))
  graphs = [
    Graph.of(
      node_labels[nodes],
      np.column_stack([np.searchsorted(nodes, edges[its_edges]), edge_labels[its_edges]]),
      target=target,
      node_features=node_features[nodes],
      edge_features=edge_features[its_edges],
    )
    for nodes, its_edges, target in zip(nodes_of, edges_of, classes, strict=True)
  ]
  widths = node_features.shape[1], edge_features.shape[1]
  return GraphData(dict(all=graphs), GraphNames(node_names, edge_names, class_names, *widths))


def _read(
  file: pathlib.Path | zipfile.Path, number_type: type, columns: int | None = 1
) -> Shaped[np.ndarray, "lines columns"]:
  """Reads the numbers of a file: `columns` in every line, or as many as in the first."""
  try:
    lines = file.read_text(encoding="ascii").rstrip().splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise InputError(f"cannot read {file}: {error}; {_WANTED}") from None
  rows = []
  for number, line in enumerate(lines, start=1):
    try:
      row = [number_type(x) for x in line.split(",")]
    except ValueError:
      row = []
    columns = columns or max(1, len(row))
    if len(row) != columns or not all(abs(x) < _LARGEST for x in row):  # false for NaN
      kind = "integers" if number_type is int else "finite numbers"
      raise InputError(f"{file}, line {number}: {line!r}; want {columns} {kind}, comma-separated")
    rows.append(row)
  return np.array(rows, number_type).reshape(-1, columns or 1)


def _numbered(
  labels: Shaped[np.ndarray, "lines columns"],
) -> tuple[Int[np.ndarray, "lines"], tuple[str, ...]]:
  """Returns labels numbered from 0 in order, and their names; -1 and no names without labels."""
  if not labels.shape[1]:
    return np.full(len(labels), -1), ()
  names, numbers = np.unique(labels[:, 0], return_inverse=True)
  return numbers, tuple(map(str, names))


def _members(group_of: Int[np.ndarray, "x"], num_groups: int) -> list[Int[np.ndarray, "members"]]:
  """Returns the indices of each group's members, in order."""
  order = np.argsort(group_of, kind="stable")
  return np.split(order, np.searchsorted(group_of[order], np.arange(1, num_groups)))
