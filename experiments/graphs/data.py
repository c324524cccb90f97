"""Graph data sets: kinship of CLUTRR, molecules, and users' own, in TU format or JSON."""

import ast
import codecs
import collections
import csv
import hashlib
import io
import json
import pathlib
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.data.upstream import Upstream
from experiments.errors import InputError
from experiments.files import read_content
from experiments.graphs.graph import Graph, GraphData, GraphNames
from relpos_jax.typing import Int

RELATIONS = (
  "aunt", "brother", "daughter", "father", "granddaughter", "grandfather", "grandmother",
  "grandson", "husband", "mother", "sister", "son", "uncle", "wife",
)  # fmt: skip
ANSWERS = (
  "aunt", "brother", "daughter", "daughter-in-law", "father", "father-in-law", "granddaughter",
  "grandfather", "grandmother", "grandson", "mother", "mother-in-law", "nephew", "niece", "sister",
  "son", "son-in-law", "uncle",
)  # fmt: skip
# Our splits by upstream's: a chain of test_k has k relations.
SPLITS = {"1.2,1.3,1.4_train": "train"} | {
  f"1.{k}_test": f"test_{k}" for k in range(2, 11)
}

_ZIP, _GRAPHS = "data_db9b8f04.zip", "data_db9b8f04.graphs.jsonl"
CLUTRR = Upstream(
  "clutrr",
  f"{_ZIP}, from data/clutrr-emnlp of github.com/uclnlp/ctp",
  "https://raw.githubusercontent.com/uclnlp/ctp/8cd7e639024f2aa28bdae4783e940cad784580ae/"
  "data/clutrr-emnlp/",
  {
    _ZIP: "52571c7feb2dc628d6cd56cc9e03f2572d343fdccbbc5c7301caa02f12f1b7bd",
    # The same graphs without the stories.
    _GRAPHS: "e202bfa46d4759e7bca17666e24b2a73c3b88208f9e0968a0022c95400649194",
  },
)


def load_clutrr(path: str = "", valid_share: float = 0.1) -> GraphData:
  """Loads chains of kinship (Sinha et al. 2019): splits train, valid, and test_2 to
  test_10.

  Nodes are persons with one common label. The label of an edge from a to b is the
  relation of b to a; the target is the relation of the last person of the chain to the
  first. Training chains have 2 to 4 relations (15,083 rows, 2,340 distinct graphs);
  test_k has k. Upstream has no valid split: it is a `valid_share` of the distinct
  training graphs, chosen by hash, and none of them remains in train. The graphs of
  test_2 occur in train; those of the other test splits do not.

  From the repository of Minervini et al. 2020 (3.1 MB), or from a file in the folder
  `path`, as in `Upstream`: the same archive, or data_db9b8f04.graphs.jsonl.gz, its
  graphs alone.

  Raises InputError for a missing or wrong file, or no network.
  """
  splits = _read_clutrr(path)
  is_valid = [(graph, _hash(graph) < valid_share) for graph in splits["train"]]
  train, valid = (
    [graph for graph, held in is_valid if held is part] for part in (False, True)
  )
  note = (
    f"CLUTRR: {len(valid):,} of {len(is_valid):,} training graphs are for validation"
  )
  names = GraphNames(("person",), RELATIONS, ANSWERS)
  return GraphData(splits | dict(train=train, valid=valid), names, (note,))


def _read_clutrr(path: str) -> dict[str, list[Graph]]:
  """Returns the graphs by split."""
  splits = {name: [] for name in SPLITS.values()}
  if path and (pathlib.Path(path).expanduser() / f"{_GRAPHS}.gz").exists():
    for row in map(json.loads, CLUTRR.read(_GRAPHS, path).decode().splitlines()):
      splits[SPLITS[row["split"]]].append(_graph(row))
    return splits
  columns = dict(story_edges="edges", edge_types="labels", query_edge="query")
  with zipfile.ZipFile(io.BytesIO(CLUTRR.read(_ZIP, path))) as archive:
    for name, split in SPLITS.items():
      for row in csv.DictReader(
        io.StringIO(archive.read(f"{name}.csv").decode(), newline="")
      ):
        values = {
          ours: ast.literal_eval(row[theirs]) for theirs, ours in columns.items()
        }
        splits[split].append(_graph(row | values))
  return splits


def _graph(row: Mapping[str, Any]) -> Graph:
  labels = map(RELATIONS.index, row["labels"])
  edges = [(*edge, label) for edge, label in zip(row["edges"], labels, strict=True)]
  number = int(np.array(edges)[:, :2].max()) + 1
  target = ANSWERS.index(row["target"])
  return Graph.of([0] * number, edges, target=target, query=row["query"])


def _hash(graph: Graph) -> float:
  """Hashes a graph to a number below 1; copies of a graph have the same."""
  parts = graph.senders, graph.receivers, graph.labels, graph.query
  text = json.dumps([part.tolist() for part in parts])
  return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


# TU format
# ---------------------------------------------------------------------------------------

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


def load_tu(name: str = "MUTAG", path: str = "") -> GraphData:
  """Loads graphs and their classes in one split, "all".

  "MUTAG" (135 molecules) and "Mutagenicity" (3,335) are from the archives of Ivanov et
  al. 2019, which may be in the folder `path`: see `Upstream`. Isomorphic copies are
  removed there, so published figures for the 188 graphs of MUTAG do not apply. Any
  other name, or "" for the only one, is a data set in TU format in the folder or zip
  archive `path`, or in JSON in the file `path`: see `read_folder` and `read_lines`. The
  notes say how many graphs each class has.

  Raises InputError for an unknown name, a missing or wrong file or folder, or no
  network.
  """
  place = pathlib.Path(path).expanduser()
  if (archive := f"{name}.zip") in MOLECULES.files:
    if place.is_file():
      remedy = (
        f"give the folder of {archive}, or --config.data.tu.name= for your own graphs"
      )
      raise InputError(f"config.data.tu.path is the file {path}: {remedy}")
    folder = zipfile.Path(io.BytesIO(MOLECULES.read(archive, path)), f"{name}/")
    return read_folder(folder, name)
  if zipfile.is_zipfile(place):
    return read_folder(_open_archive(place, name), name)
  if path:
    return read_folder(place, name) if place.is_dir() else read_lines(place)
  known = " or ".join(name.removesuffix(".zip") for name in MOLECULES.files)
  raise InputError(
    f"unknown data set {name!r}: give the path of its folder, or {known}"
  )


def split_folds(data: GraphData, fold: int, num_folds: int) -> GraphData:
  """Splits "all" into stratified folds: one to test, the next to validate, the others
  to train.

  The folds are disjoint and the same for every call with the same data. The sizes of
  two folds differ by at most one, and so do their numbers of graphs of one class.
  """
  graphs = data.splits["all"]
  if len(graphs) < num_folds:
    raise InputError(
      f"{num_folds} folds of {len(graphs)} graphs: lower config.data.tu.num_folds"
    )
  classes = np.array([graph.target for graph in graphs])
  shuffled = np.random.Generator(np.random.Philox(key=0)).permutation(len(graphs))
  by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
  folds = [np.sort(by_class[number::num_folds]) for number in range(num_folds)]
  parts = dict(test=folds.pop(fold), valid=folds.pop(fold % len(folds)))
  parts["train"] = np.concatenate(folds)
  splits = {
    name: [graphs[i] for i in parts[name]] for name in ("train", "valid", "test")
  }
  note = f"of {num_folds} folds, {fold} is for testing, {(fold + 1) % num_folds} for validation"
  return data._replace(splits=splits, notes=(*data.notes, note))


_NAMED_CLASSES = 10
_WANTED = (
  "want a folder with NAME_A.txt, NAME_graph_indicator.txt and NAME_graph_labels.txt"
)


def read_folder(folder: pathlib.Path | zipfile.Path, name: str = "") -> GraphData:
  """Reads the graphs of a folder in TU format (Morris et al. 2020, arXiv:2007.08663).

  The files are NAME_A.txt, NAME_graph_indicator.txt and NAME_graph_labels.txt, and
  optionally NAME_node_labels.txt and NAME_edge_labels.txt with an integer per line, or
  several as one label, and NAME_node_attributes.txt and NAME_edge_attributes.txt with
  numbers separated by commas. Labels and classes are numbered in the order of their
  integers. Each line of A is an edge from its first node to its second: data sets of
  undirected graphs have two lines per edge. All graphs are in one split, "all". Without
  a name, the folder must hold one data set.

  Raises InputError, which names the file, for lines of another form or number, numbers
  that are not finite, an edge to an unknown node or between two graphs, a graph without
  nodes, or fewer than two classes.
  """
  name = name or _find_name(folder)

  def read(kind: str, **options: Any) -> np.ndarray:
    return _read_numbers(folder / f"{name}_{kind}.txt", **options)

  edges = read("A", columns=2) - 1
  graph_of = read("graph_indicator", columns=1)[:, 0] - 1
  classes = read("graph_labels", columns=1)[:, 0]
  _check_members(edges, graph_of, len(classes), folder / name)
  node_labels = _as_labels(read("node_labels", number=len(graph_of)))
  edge_labels = _as_labels(read("edge_labels", number=len(edges)))
  node_features = read("node_attributes", number=len(graph_of), dtype=float)
  edge_features = read("edge_attributes", number=len(edges), dtype=float)

  rows = []
  nodes_of = _members(graph_of, len(classes))
  edges_of = _members(graph_of[edges[:, 0]], len(classes))
  for nodes, its_edges, target in zip(
    nodes_of, edges_of, classes.tolist(), strict=True
  ):
    labels = [node_labels[node] if node_labels else "node" for node in nodes]
    labelled = np.searchsorted(nodes, edges[its_edges]).tolist()
    if edge_labels:
      labelled = [
        (*ends, edge_labels[i]) for ends, i in zip(labelled, its_edges, strict=True)
      ]
    rows.append(
      _Row(labels, labelled, target, node_features[nodes], edge_features[its_edges])
    )
  return _numbered(rows, folder)


def _find_name(folder: pathlib.Path | zipfile.Path) -> str:
  """Returns the name of the only data set in a folder."""
  files = [file.name for file in folder.iterdir()] if folder.is_dir() else []
  found = sorted(file.removesuffix("_A.txt") for file in files if _is_edges(file))
  if len(found) != 1:
    which = f" ({', '.join(found)}): give the name of one" if found else f": {_WANTED}"
    raise InputError(f"{folder} has {len(found)} data sets in TU format{which}")
  return found[0]


def _check_members(
  edges: Int[np.ndarray, "edges 2"],
  graph_of: Int[np.ndarray, "nodes"],
  number: int,
  start: Any,
) -> None:
  """Raises InputError unless each of a number of graphs has nodes, and each edge two of
  one graph.

  `start` begins the files' names.
  """
  if not number:
    raise InputError(f"{start}_graph_labels.txt has no graphs; {_WANTED}")
  if not np.array_equal(np.unique(graph_of), np.arange(number)):
    problem = f"want graphs from 1 to {number}, each with a node or more"
    raise InputError(f"{start}_graph_indicator.txt: {problem}")
  is_node = ((edges >= 0) & (edges < len(graph_of))).all(1)
  is_edge = is_node & np.equal(*graph_of[edges * is_node[:, None]].T)
  if not is_edge.all():
    problem = f"want two nodes of one graph, from 1 to {len(graph_of)}"
    raise InputError(f"{start}_A.txt, line {np.argmin(is_edge) + 1}: {problem}")


def _is_edges(file: str) -> bool:
  """Returns whether a file is the NAME_A.txt of a data set, not macOS's attributes of one."""
  return file.endswith("_A.txt") and not file.startswith("._")


def _open_archive(file: pathlib.Path, name: str) -> zipfile.Path:
  """Returns the folder of a zip archive that holds a data set; its top if none does."""
  archive, folders = zipfile.ZipFile(file), set()
  for member in archive.namelist():
    folder, slash, member = member.rpartition("/")
    is_wanted = member == f"{name}_A.txt" if name else _is_edges(member)
    if is_wanted:
      folders.add(folder + slash)
  if len(folders) > 1:
    found = ", ".join(sorted(folders))
    raise InputError(
      f"{file} has data sets in {found}: unpack it and give the folder of one"
    )
  return zipfile.Path(archive, folders.pop() if folders else "")


def _read_numbers(
  file: pathlib.Path | zipfile.Path,
  *,
  columns: int | None = None,
  number: int | None = None,
  dtype: type = int,
) -> np.ndarray:
  """Reads the numbers [lines, columns] of a file; one with a known number may be missing."""
  if number is not None and not file.exists():
    return np.empty((number, 0), dtype)
  try:
    lines = file.read_text(encoding="ascii").splitlines()
    numbers = np.empty((0, columns or 1))
    if any(lines):
      numbers = np.loadtxt(lines, float, comments=None, delimiter=",", ndmin=2)
  except (OSError, ValueError, zlib.error, zipfile.BadZipFile) as error:
    raise InputError(f"cannot read {file}: {error}; {_WANTED}") from None
  wanted = len(numbers) if number is None else number, columns or numbers.shape[1]
  if numbers.shape != wanted:
    has, want = (
      f"{lines} lines of {of} numbers" for lines, of in (numbers.shape, wanted)
    )
    raise InputError(f"{file} has {has}; want {want}")
  _check_numbers(numbers, dtype, file)
  return numbers.astype(dtype)


def _check_numbers(numbers: np.ndarray, dtype: type, file: Any) -> None:
  """Raises InputError for the first number that does not fit integers, or floats of 32 bits."""
  is_right = np.abs(numbers) <= np.finfo(np.float32).max  # False for NaN
  problem = "not finite in float32: replace it by a number"
  if dtype is int:
    is_right &= numbers == np.trunc(numbers)
    problem = "no integer, which labels, classes and indices are"
  if not is_right.all():
    line, column = np.argwhere(~is_right)[0]
    raise InputError(f"{file}, line {line + 1}: {numbers[line, column]:g} is {problem}")


def _as_labels(numbers: np.ndarray) -> list:
  """Returns a label for each line: its integer, or the tuple of several; none without columns."""
  if numbers.shape[1] == 1:
    return numbers[:, 0].tolist()
  return [tuple(line) for line in numbers.tolist() if line]


_WANTED_OBJECT = (
  'want {"class": C, "nodes": [LABEL, ...], "edges": [[FROM, TO, LABEL], ...]}'
)


def read_lines(file: pathlib.Path) -> GraphData:
  """Reads the graphs of a file in JSON, an object on each line or an array of them.

  As {"class": "alcohol", "nodes": ["C", "O"], "edges": [[0, 1, "single"], [1, 0,
  "single"]]}: the labels of nodes; and edges from one node to another, counted from 0,
  with a label or without. Labels and classes are words or integers, and are numbered in
  alphabetical order. All graphs are in one split, "all". The file may be packed.

  Raises InputError, which names the line, for one of another form, and for fewer than
  two classes.
  """
  rows = []
  for place, row in _read_objects(file):
    try:
      nodes = [_to_label(label) for label in row["nodes"]]
      edges = [
        (start, end, *map(_to_label, labels)) for start, end, *labels in row["edges"]
      ]
      places = range(len(nodes))
      if not nodes or not all(
        x[0] in places and x[1] in places and len(x) < 4 for x in edges
      ):
        raise ValueError(f"{len(nodes)} nodes do not fit the edges")
      rows.append(_Row(nodes, edges, _to_label(row["class"])))
    except KeyError as error:
      raise InputError(f'{place}: no "{error.args[0]}"; {_WANTED_OBJECT}') from None
    except (TypeError, ValueError) as error:
      raise InputError(f"{place}: {error}; {_WANTED_OBJECT}") from None
  return _numbered(rows, file)


def _read_objects(file: pathlib.Path) -> Iterator[tuple[str, Any]]:
  """Yields the objects of a file in JSON and their places: those of an array, or of its lines."""
  content = read_content(file).removeprefix(codecs.BOM_UTF8)
  if content.lstrip().startswith(b"["):
    for number, row in enumerate(_parse(content, str(file)), start=1):
      yield f"{file}, graph {number}", row
    return
  for number, line in enumerate(content.splitlines(), start=1):
    if line.strip():
      place = f"{file}, line {number}"
      yield place, _parse(line, place)


def _parse(content: bytes, place: str) -> Any:
  try:
    return json.loads(content)
  except ValueError as error:
    raise InputError(f"{place} is no JSON: {error}; {_WANTED_OBJECT}") from None


def _to_label(value: Any) -> str:
  """Returns a label as text, 1.0 as 1; raises ValueError for what is no word and no integer."""
  if isinstance(value, float) and value.is_integer():
    value = int(value)
  if not isinstance(value, str | int):
    raise ValueError(f"{json.dumps(value)} is no label: give a word or an integer")
  return str(value)


class _Row(NamedTuple):
  """The labels of a graph's nodes, its edges as (start, end) or (start, end, label), its class."""

  nodes: Sequence[Any]
  edges: Sequence[Sequence[Any]]
  target: Any
  node_features: np.ndarray | None = None
  edge_features: np.ndarray | None = None


def _numbered(rows: Sequence[_Row], place: Any) -> GraphData:
  """Numbers labels and classes, each in their order."""
  node_labels, edge_labels = set(), set()
  for row in rows:
    node_labels.update(row.nodes)
    edge_labels.update(edge[2] for edge in row.edges if len(edge) > 2)
  targets = [row.target for row in rows]
  node, edge, class_ = map(_number, (node_labels, edge_labels, targets))
  if len(class_) < 2:
    raise InputError(f"{place}: want graphs of two classes or more")
  graphs = []
  for row in rows:
    edges = [
      (start, end, edge[labels[0]] if labels else -1)
      for start, end, *labels in row.edges
    ]
    nodes = [node[label] for label in row.nodes]
    features = dict(node_features=row.node_features, edge_features=row.edge_features)
    graphs.append(Graph.of(nodes, edges, target=class_[row.target], **features))
  widths = graphs[0].node_features.shape[1], graphs[0].edge_features.shape[1]
  texts = (tuple(map(_to_text, labels)) for labels in (node, edge, class_))
  return GraphData(
    dict(all=graphs), GraphNames(*texts, *widths), (_count_classes(targets),)
  )


def _number(labels: Iterable[Any]) -> dict[Any, int]:
  """Returns the numbers of labels, each once and in their order."""
  return {label: number for number, label in enumerate(sorted(set(labels)))}


def _to_text(label: Any) -> str:
  """Returns the name of a label; that of several integers has commas."""
  return ",".join(map(str, label)) if isinstance(label, tuple) else str(label)


def _count_classes(targets: Sequence[Any]) -> str:
  """Says how many graphs each class has, the most frequent first."""
  counts = collections.Counter(targets)
  texts = [
    f"{name} ({number:,})" for name, number in counts.most_common(_NAMED_CLASSES)
  ]
  if len(counts) > _NAMED_CLASSES:
    texts.append(f"and {len(counts) - _NAMED_CLASSES:,} more")
  is_many = len(counts) > max(_NAMED_CLASSES, len(targets) / 2)
  question = " is this a regression?" if is_many else ""
  return (
    f"{len(counts):,} classes of {len(targets):,} graphs:{question} {', '.join(texts)}"
  )


def _members(
  group_of: Int[np.ndarray, "x"], num_groups: int
) -> list[Int[np.ndarray, "members"]]:
  """Returns the indices of each group's members, in order."""
  order = np.argsort(group_of, kind="stable")
  return np.split(order, np.searchsorted(group_of[order], np.arange(1, num_groups)))
