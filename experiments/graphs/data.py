"""Loads graph data sets: CLUTRR, molecules, and your own in TU format or JSON."""

import ast
import codecs
import collections
import csv
import fnmatch
import glob
import hashlib
import io
import json
import pathlib
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments.data.upstream import Upstream
from experiments.errors import InputError
from experiments.files import read_content
from experiments.graphs.graph import Graph, GraphData, GraphNames
from relpos_jax.typing import Float, Int

RELATIONS = (
  "aunt", "brother", "daughter", "father", "granddaughter", "grandfather",
  "grandmother", "grandson", "husband", "mother", "sister", "son", "uncle", "wife",
)  # fmt: skip
ANSWERS = (
  "aunt", "brother", "daughter", "daughter-in-law", "father", "father-in-law",
  "granddaughter", "grandfather", "grandmother", "grandson", "mother", "mother-in-law",
  "nephew", "niece", "sister", "son", "son-in-law", "uncle",
)  # fmt: skip
# Our name of each upstream split; chains in test_k have k relations.
SPLITS = {"1.2,1.3,1.4_train": "train"}
SPLITS |= {f"1.{k}_test": f"test_{k}" for k in range(2, 11)}

_ZIP, _GRAPHS = "data_db9b8f04.zip", "data_db9b8f04.graphs.jsonl"
CLUTRR = Upstream(
  "clutrr",
  f"{_ZIP}, from data/clutrr-emnlp of github.com/uclnlp/ctp",
  "https://raw.githubusercontent.com/uclnlp/ctp/"
  "8cd7e639024f2aa28bdae4783e940cad784580ae/data/clutrr-emnlp/",
  {
    _ZIP: "52571c7feb2dc628d6cd56cc9e03f2572d343fdccbbc5c7301caa02f12f1b7bd",
    # The same graphs without the stories; a smaller file.
    _GRAPHS: "e202bfa46d4759e7bca17666e24b2a73c3b88208f9e0968a0022c95400649194",
  },
)


def load_clutrr(path: str = "", valid_share: float = 0.1) -> GraphData:
  """Loads CLUTRR's chains of kinship (Sinha et al. 2019).

  Nodes are persons, all with the same label. The label of an edge from a to b says what
  b is to a. The target says what the last person of the chain is to the first. Training
  chains have 2 to 4 relations (15,083 rows, 2,340 distinct graphs). The test splits are
  test_2 to test_10; chains in test_k have k relations. The graphs of test_2 also occur
  in train; graphs of the other test splits do not.

  Upstream has no validation split. `valid` takes a `valid_share` of the distinct
  training graphs, chosen by hash, and none of them remains in train.

  The data are downloaded from the repository of Minervini et al. 2020 (3.1 MB), unless
  the folder `path` holds the same archive, or its graphs alone in
  data_db9b8f04.graphs.jsonl.gz.

  Raises InputError if a file is missing or wrong, or if there is no network.
  """
  splits = {split: [] for split in SPLITS.values()}
  for name, graph in _read_clutrr(path):
    splits[SPLITS[name]].append(graph)
  chains = splits["train"]
  splits["train"], splits["valid"] = [], []
  for graph in chains:
    split = "valid" if _hash_graph(graph) < valid_share else "train"
    splits[split].append(graph)
  counts = f"{len(splits['valid']):,} of {len(chains):,}"
  note = f"CLUTRR: {counts} training graphs are for validation"
  names = GraphNames(("person",), RELATIONS, ANSWERS)
  return GraphData(splits, names, (note,))


def _read_clutrr(path: str) -> Iterator[tuple[str, Graph]]:
  """Yields pairs: the name of an upstream split, and a graph of that split."""
  if path and (pathlib.Path(path).expanduser() / f"{_GRAPHS}.gz").exists():
    for line in CLUTRR.read(_GRAPHS, path).decode().splitlines():
      row = json.loads(line)
      graph = _make_chain(row["edges"], row["labels"], row["query"], row["target"])
      yield row["split"], graph
    return
  with zipfile.ZipFile(io.BytesIO(CLUTRR.read(_ZIP, path))) as archive:
    for split in SPLITS:
      text = archive.read(f"{split}.csv").decode()
      for row in csv.DictReader(io.StringIO(text, newline="")):
        cells = row["story_edges"], row["edge_types"], row["query_edge"]
        edges, labels, query = map(ast.literal_eval, cells)
        yield split, _make_chain(edges, labels, query, row["target"])


def _make_chain(edges: Any, labels: Sequence[str], query: Any, target: str) -> Graph:
  """Makes the graph of a chain of kinship."""
  relations = []
  for label in labels:
    relations.append(RELATIONS.index(label))
  nodes = [0] * (int(np.max(edges)) + 1)
  rows = np.column_stack([edges, relations])
  return Graph.from_edges(nodes, rows, target=ANSWERS.index(target), query=query)


def _hash_graph(graph: Graph) -> float:
  """Hashes a graph to a number in [0, 1); copies of a graph have the same hash."""
  parts = []
  for array in (graph.senders, graph.receivers, graph.labels, graph.query):
    parts.append(array.tolist())
  text = json.dumps(parts)
  digest = hashlib.sha256(text.encode()).digest()
  return int.from_bytes(digest[:8], "big") / 2**64


# TU format
# ----------------------------------------------------------------------------

MOLECULES = Upstream(
  "tu",
  "datasets of github.com/nd7141/graph_datasets",
  "https://raw.githubusercontent.com/nd7141/graph_datasets/"
  "97da5acfd1f8137f7776783533717182d3e5a6fc/datasets/",
  {
    "MUTAG.zip": "ea3576783c61cd2b3a942e9e3bab821cd4b359f5409fd53b31192c721207f6fa",
    "Mutagenicity.zip": (
      "387ce29718d08c9788521fb3a8842b67bc16751907414ac69dd3c6c113b95e40"
    ),
  },
)


def load_tu(name: str = "MUTAG", path: str = "") -> GraphData:
  """Loads graphs and their classes, in one split, "all".

  "MUTAG" (135 molecules) and "Mutagenicity" (3,335) are archives of Ivanov et al. 2019,
  who removed isomorphic copies. So published figures for the 188 graphs of MUTAG do not
  apply. The archives are downloaded, unless the folder `path` holds them.

  Any other name is a data set of your own at `path`: in TU format in a folder or zip
  archive (`read_folder`), or in JSON in a file (`read_lines`). The name "" stands for
  the only data set there. The notes say how many graphs each class has.

  Raises InputError if the name is unknown, if a file or folder is missing or wrong, or
  if there is no network.
  """
  place = pathlib.Path(path).expanduser()
  archive = f"{name}.zip"
  if archive in MOLECULES.files:
    if path and not any(place.glob(f"{archive}*")):  # it may end in .gz
      raise InputError(
        f"config.data.tu.path is {path}, which holds no {archive}: give the folder of "
        "that file, or --config.data.tu.name= for your own graphs"
      )
    content = io.BytesIO(MOLECULES.read(archive, path))
    return read_folder(zipfile.Path(content, f"{name}/"), name)
  if not path:
    known = " or ".join(name.removesuffix(".zip") for name in MOLECULES.files)
    raise InputError(
      f"unknown data set {name!r}: give the path of its folder, or {known}"
    )
  if zipfile.is_zipfile(place):
    return read_folder(_open_archive(place, name), name)
  if place.is_dir():
    return read_folder(place, name)
  return read_lines(place)


def split_folds(data: GraphData, fold: int, num_folds: int) -> GraphData:
  """Divides the graphs of "all" into train, valid and test, for cross-validation.

  There are `num_folds` folds, numbered from 0. Fold number `fold` is for testing. The
  next one is for validation; after the last fold comes the first. All others are for
  training. Each graph is in one fold, and the same data always give the same folds. Two
  folds differ by at most one graph in size, and by at most one graph of each class.

  Raises InputError if there are fewer graphs than folds.
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
  test = folds.pop(fold)
  valid = folds.pop(fold % len(folds))
  parts = dict(train=np.concatenate(folds), valid=valid, test=test)
  splits = {}
  for name, part in parts.items():
    splits[name] = [graphs[index] for index in part]
  note = (
    f"of {num_folds} folds, {fold} is for testing, "
    f"{(fold + 1) % num_folds} for validation"
  )
  return data._replace(splits=splits, notes=(*data.notes, note))


_NAMED_CLASSES = 10
_EDGES = "[!.]*_A.txt"  # not ._NAME_A.txt, where macOS keeps a file's attributes
_WANTED = (
  "want a folder with NAME_A.txt, NAME_graph_indicator.txt and NAME_graph_labels.txt"
)


def read_folder(folder: pathlib.Path | zipfile.Path, name: str = "") -> GraphData:
  """Reads the graphs of a folder in TU format (Morris et al. 2020, arXiv:2007.08663).

  NAME_A.txt, NAME_graph_indicator.txt and NAME_graph_labels.txt are required. Each line
  of A is an edge from its first node to its second; undirected graphs have two lines
  for each edge.

  Four files are optional. NAME_node_labels.txt and NAME_edge_labels.txt hold integers;
  several integers on a line are one label. NAME_node_attributes.txt and
  NAME_edge_attributes.txt hold numbers, separated by commas.

  Labels and classes are numbered in the order of their integers. All graphs are in one
  split, "all". Without a name, the folder must hold a single data set.

  Raises InputError, which names the file, if a line has a wrong form, if a file has too
  few or too many lines, if a number is not finite, if an edge leads to an unknown node
  or another graph, if a graph has no nodes, or if there are fewer than two classes.
  """
  name = name or _find_name(folder)

  def read(kind: str, **options: Any) -> np.ndarray:
    return _read_numbers(folder / f"{name}_{kind}.txt", **options)

  edges = read("A", columns=2) - 1
  graph_index = read("graph_indicator", columns=1)[:, 0] - 1
  classes = _make_labels(read("graph_labels", columns=1))
  _check_members(edges, graph_index, len(classes), folder / name)
  num_nodes, num_edges = len(graph_index), len(edges)
  return _make_data(
    folder,
    classes,
    graph_index,
    edges,
    _make_labels(read("node_labels", number=num_nodes), "node"),
    _make_labels(read("edge_labels", number=num_edges)),
    read("node_attributes", number=num_nodes, dtype=float),
    read("edge_attributes", number=num_edges, dtype=float),
  )


def _find_name(folder: pathlib.Path | zipfile.Path) -> str:
  """Finds the name of the only data set in a folder.

  Raises InputError if the folder has none or several.
  """
  names = []
  for file in folder.iterdir():
    if fnmatch.fnmatchcase(file.name, _EDGES):
      names.append(file.name.removesuffix("_A.txt"))
  if len(names) == 1:
    return names[0]
  problem, remedy = f"{folder} has {len(names)} data sets in TU format", _WANTED
  if names:
    problem += f" ({', '.join(sorted(names))})"
    remedy = "give the name of one"
  raise InputError(f"{problem}: {remedy}")


def _check_members(
  edges: Int[np.ndarray, "edges 2"],
  graph_index: Int[np.ndarray, "nodes"],
  number: int,
  start: Any,
) -> None:
  """Raises InputError unless every graph has nodes and every edge is within a graph.

  The graphs are numbered from 0 to `number` - 1. `graph_index` has the graph of each
  node, and `edges` the two nodes of each edge. Errors name files; `start` is what the
  names of all these files begin with.
  """
  if not number:
    raise InputError(f"{start}_graph_labels.txt has no graphs; {_WANTED}")
  if not np.array_equal(np.unique(graph_index), np.arange(number)):
    raise InputError(
      f"{start}_graph_indicator.txt: want graphs from 1 to {number}, "
      "each with a node or more"
    )
  ends = np.clip(edges, 0, len(graph_index) - 1)
  start_graphs, end_graphs = graph_index[ends].T
  is_edge = (ends == edges).all(1) & (start_graphs == end_graphs)
  if not is_edge.all():
    raise InputError(
      f"{start}_A.txt, line {np.argmin(is_edge) + 1}: "
      f"want two nodes of one graph, from 1 to {len(graph_index)}"
    )


def _open_archive(file: pathlib.Path, name: str) -> zipfile.Path:
  """Opens a zip archive at the folder inside it that holds a data set.

  A data set has a file NAME_A.txt; NAME must be `name`, unless that is empty. Without
  such a file, opens the top of the archive. Raises InputError if several folders hold
  data sets.
  """
  archive = zipfile.ZipFile(file)
  pattern = f"{glob.escape(name)}_A.txt" if name else _EDGES
  folders = set()
  for member in archive.namelist():
    folder, slash, member_name = member.rpartition("/")
    if fnmatch.fnmatchcase(member_name, pattern):
      folders.add(folder + slash)
  if len(folders) > 1:
    names = ", ".join(sorted(folders))
    raise InputError(
      f"{file} has data sets in {names}: unpack it and give the folder of one"
    )
  return zipfile.Path(archive, folders.pop() if folders else "")


def _read_numbers(
  file: pathlib.Path | zipfile.Path,
  *,
  columns: int | None = None,
  number: int | None = None,
  dtype: type = int,
) -> np.ndarray:
  """Reads numbers [lines, columns] from a file.

  `number` is the expected number of lines. If it is given, the file may be missing; the
  result then has that many lines and no columns.
  """
  if number is not None and not file.exists():
    return np.empty((number, 0), dtype)
  numbers = np.empty((0, columns or 1))
  try:
    lines = file.read_text(encoding="ascii").splitlines()
    if any(lines):
      numbers = np.loadtxt(lines, float, comments=None, delimiter=",", ndmin=2)
  except (OSError, ValueError, zlib.error, zipfile.BadZipFile) as error:
    raise InputError(f"cannot read {file}: {error}; {_WANTED}") from None
  num_lines, num_columns = numbers.shape
  shape = num_lines if number is None else number, columns or num_columns
  if numbers.shape != shape:
    raise InputError(
      f"{file} has {num_lines} lines of {num_columns} numbers; "
      f"want {shape[0]} lines of {shape[1]} numbers"
    )
  _check_numbers(numbers, dtype, file)
  return numbers.astype(dtype)


def _check_numbers(numbers: np.ndarray, dtype: type, file: Any) -> None:
  """Raises InputError for the first number that is not finite, or not an integer."""
  is_right = np.abs(numbers) <= np.finfo(np.float32).max  # False for NaN
  problem = "not finite in float32: replace it by a number"
  if dtype is int:
    is_right &= numbers == np.trunc(numbers)
    problem = "no integer, which labels, classes and indices are"
  if not is_right.all():
    line, column = np.argwhere(~is_right)[0]
    number = numbers[line, column]
    raise InputError(f"{file}, line {line + 1}: {number:g} is {problem}")


def _make_labels(numbers: np.ndarray, default: str | None = None) -> list:
  """Makes a label from each line: a tuple of the line's integers.

  The label is `default` if the lines have no integers, because their file is missing.
  """
  return [tuple(line) or default for line in numbers.tolist()]


_WANTED_OBJECT = (
  'want {"class": C, "nodes": [LABEL, ...], "edges": [[FROM, TO, LABEL], ...]}'
)


def read_lines(file: pathlib.Path) -> GraphData:
  """Reads the graphs of a file in JSON: an object on each line, or an array of objects.

  An object has a class, the labels of nodes, and edges: {"class": "alcohol", "nodes":
  ["C", "O"], "edges": [[0, 1, "single"], [1, 0, "single"]]}. An edge leads from one
  node to another, counted from 0, and may have a label. Labels and classes are words or
  integers, numbered in alphabetical order. All graphs are in one split, "all". The file
  may be compressed.

  Raises InputError if a line has a wrong form, or if there are fewer than two classes.
  """
  classes, graph_index, node_labels, edges, edge_labels = [], [], [], [], []
  for place, row in _read_objects(file):
    first = len(node_labels)
    try:
      node_labels += map(_to_label, row["nodes"])
      num_nodes = len(node_labels) - first
      for start, end, label in _parse_edges(row["edges"], num_nodes):
        edges.append((first + start, first + end))
        edge_labels.append(label)
      graph_index += [len(classes)] * num_nodes
      classes.append(_to_label(row["class"]))
    except KeyError as error:
      raise InputError(f'{place}: no "{error.args[0]}"; {_WANTED_OBJECT}') from None
    except (TypeError, ValueError) as error:
      raise InputError(f"{place}: {error}; {_WANTED_OBJECT}") from None
  members, ends = np.array(graph_index, int), np.array(edges, int).reshape(-1, 2)
  features = np.empty((len(members), 0)), np.empty((len(ends), 0))
  return _make_data(file, classes, members, ends, node_labels, edge_labels, *features)


def _parse_edges(
  edges: Sequence[Sequence[Any]], num_nodes: int
) -> Iterator[tuple[int, int, str | None]]:
  """Yields the first and second node of each edge, and its label or None.

  Raises ValueError if there are no nodes, or if an edge has a wrong form.
  """
  nodes = range(num_nodes)
  problem = ValueError(f"{num_nodes} nodes do not fit the edges")
  if not nodes:
    raise problem
  for start, end, *labels in edges:
    label = _to_label(labels[0]) if labels else None
    if len(labels) > 1 or start not in nodes or end not in nodes:
      raise problem
    yield start, end, label


def _read_objects(file: pathlib.Path) -> Iterator[tuple[str, Any]]:
  """Yields (place, object) for each object of a JSON file; `place` is for errors."""
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
  """Converts the label of a node, an edge or a class to text.

  A label is a word or an integer. An integer may be written as 1.0, which becomes "1".
  Raises ValueError if `value` is anything else.
  """
  if isinstance(value, float) and value.is_integer():
    value = int(value)
  if not isinstance(value, str | int):
    raise ValueError(f"{json.dumps(value)} is no label: give a word or an integer")
  return str(value)


def _make_data(
  place: Any,
  classes: Sequence[str | tuple],
  graph_index: Int[np.ndarray, "nodes"],
  edges: Int[np.ndarray, "edges 2"],
  node_labels: Sequence[str | tuple],
  edge_labels: Sequence[str | tuple | None],
  node_features: Float[np.ndarray, "nodes features"],
  edge_features: Float[np.ndarray, "edges F"],
) -> GraphData:
  """Divides nodes and edges into graphs, and numbers the labels in sorted order.

  `classes` has the class of each graph, `graph_index` the graph of each node, and
  `edges` the two nodes of each edge. Raises InputError, which names `place`, if there
  are fewer than two classes.
  """
  class_names, targets = _number_labels(classes)
  if len(class_names) < 2:
    raise InputError(f"{place}: want graphs of two classes or more")
  node_names, node_numbers = _number_labels(node_labels)
  edge_names, edge_numbers = _number_labels(edge_labels)
  graphs = []
  node_groups = _group_members(graph_index, len(classes))
  edge_groups = _group_members(graph_index[edges[:, 0]], len(classes))
  for nodes, own, target in zip(node_groups, edge_groups, targets, strict=True):
    ends = np.searchsorted(nodes, edges[own])
    graph = Graph.from_edges(
      node_numbers[nodes],
      np.column_stack([ends, edge_numbers[own]]),
      target=target,
      node_features=node_features[nodes],
      edge_features=edge_features[own],
    )
    graphs.append(graph)
  widths = node_features.shape[1], edge_features.shape[1]
  names = GraphNames(node_names, edge_names, class_names, *widths)
  return GraphData(dict(all=graphs), names, (_count_classes(classes),))


def _number_labels(
  labels: Sequence[str | tuple | None],
) -> tuple[tuple[str, ...], Int[np.ndarray, "labels"]]:
  """Numbers the distinct labels in sorted order, from 0.

  Returns their names in that order, and the number of each of `labels`. None, for a
  missing label, has no name and gets the number -1.
  """
  distinct = sorted({*labels} - {None})
  numbers: dict[Any, int] = {None: -1}
  for number, label in enumerate(distinct):
    numbers[label] = number
  names = tuple(map(_to_text, distinct))
  return names, np.array([numbers[label] for label in labels], np.int32)


def _to_text(label: str | tuple) -> str:
  """Formats a label; several integers are joined by commas."""
  return label if isinstance(label, str) else ",".join(map(str, label))


def _count_classes(classes: Sequence[str | tuple]) -> str:
  """Describes how many graphs each class has, the most frequent first."""
  counts = collections.Counter(classes)
  texts = []
  for label, number in counts.most_common(_NAMED_CLASSES):
    texts.append(f"{_to_text(label)} ({number:,})")
  if len(counts) > _NAMED_CLASSES:
    texts.append("...")
  return f"{len(counts):,} classes of {len(classes):,} graphs: {', '.join(texts)}"


def _group_members(
  group_index: Int[np.ndarray, "x"], num_groups: int
) -> list[Int[np.ndarray, "members"]]:
  """Returns the indices of the members of each group, in increasing order."""
  order = np.argsort(group_index, kind="stable")
  return np.split(order, np.searchsorted(group_index[order], np.arange(1, num_groups)))


# Sources of configs
# --------------------------------------------------------------------------------------

HEADS = dict(clutrr="pair", tu="graph")  # the encoder's head for each source's targets


def load_data(config: ConfigDict) -> GraphData:
  """Loads the graphs of `config.data`: train, valid, and one or more test splits."""
  if config.data.source == "clutrr":
    return load_clutrr(**config.data.clutrr)
  options = config.data.tu
  fold = options.fold
  if fold == -1:
    fold = config.seed % options.num_folds
  return split_folds(load_tu(options.name, options.path), fold, options.num_folds)
