"""CLUTRR has upstream's graphs; TU folders are read or refused by line, and folded."""

import gzip
import json
import pathlib
import shutil
import zipfile

import pytest
from faults import refusal
from hypothesis import given
from hypothesis import strategies as st

from experiments.graphs import data as data_module
from experiments.graphs.data import (
  ANSWERS,
  RELATIONS,
  load_clutrr,
  load_tu,
  split_folds,
)
from experiments.graphs.graph import Graph, GraphData, GraphNames

HEADER = "id,story,target,task_name,story_edges,edge_types,query_edge"


def row(number: int) -> dict:
  """Returns a chain of two relations; every third equals the one before."""
  kind = number - (number % 3 == 2)
  labels = [RELATIONS[kind % 14], RELATIONS[kind // 14 % 14]]
  return dict(edges=[[0, 1], [1, 2]], labels=labels, query=[0, 2], target="aunt")


def csv_line(row: dict) -> str:
  edges = [tuple(edge) for edge in row["edges"]]
  cells = ",".join(f'"{cell}"' for cell in (edges, row["labels"], tuple(row["query"])))
  return f'1,"a ""story"", in\ntwo lines",{row["target"]},task_1.2,{cells}'


ZIP, GRAPHS = data_module.CLUTRR.files
SPLITS = {
  name: [row(number) for number in range(300 if split == "train" else 1)]
  for name, split in data_module.SPLITS.items()
}


@pytest.fixture(params=["archive", "graphs"])
def folder(request, tmp_path, publish) -> pathlib.Path:
  """Writes small files in place of the published ones: the archive, or its graphs."""
  if request.param == "archive":
    with zipfile.ZipFile(tmp_path / ZIP, "w") as file:
      for name, rows in SPLITS.items():
        lines = [HEADER, *map(csv_line, rows)]
        file.writestr(f"{name}.csv", "\n".join(lines) + "\n")
    publish(data_module, "CLUTRR", tmp_path)
    return tmp_path
  lines = []
  for name, rows in SPLITS.items():
    lines += [json.dumps(row | {"split": name}) for row in rows]
  file = tmp_path / GRAPHS
  file.write_text("\n".join(lines))
  publish(data_module, "CLUTRR", tmp_path)
  (tmp_path / f"{GRAPHS}.gz").write_bytes(gzip.compress(file.read_bytes()))
  file.unlink()
  return tmp_path


def as_lists(graphs):
  return [[x.tolist() for x in graph] for graph in graphs]


def test_the_archive_and_its_graphs_are_read(folder):
  data = load_clutrr(str(folder), valid_share=0.0)
  assert (len(data.splits["train"]), data.splits["valid"]) == (300, [])
  for name, split in data_module.SPLITS.items():
    for graph, wanted in zip(data.splits[split], SPLITS[name], strict=True):
      assert [RELATIONS[label] for label in graph.labels] == wanted["labels"]
      assert edges(graph) == [(0, 1, graph.labels[0]), (1, 2, graph.labels[1])]
      assert graph.query.tolist() == wanted["query"]
      assert ANSWERS[graph.target] == "aunt"


@pytest.mark.parametrize("folder", ["graphs"], indirect=True)
def test_a_share_of_the_chains_is_for_validation_and_equal_ones_stay_together(folder):
  splits = load_clutrr(str(folder)).splits
  assert splits.keys() == {"train", "valid", *(f"test_{k}" for k in range(2, 11))}
  train, valid = as_lists(splits["train"]), as_lists(splits["valid"])
  assert len(train) + len(valid) == 300
  assert 0.04 < len(valid) / 300 < 0.2
  assert not any(graph in train for graph in valid)


# A directed triangle with a loop and an edge given twice, and a pair of nodes.
FILES = {
  "graph_indicator": "1\n1\n2\n1\n2\n",
  "graph_labels": "-1\n1\n",
  "A": "1, 2\n2,4\n 4, 1\n5, 3\n4, 4\n1, 2\n3, 5\n",
  "node_labels": "0, 7\n0, 7\n1, 0\n0, 8\n0, 7\n",
  "edge_labels": "0\n0\n2\n0\n2\n0\n2\n",
  "node_attributes": "0.5, 1\n0, 2\n0, 3\n0, 4\n1e-3, 5\n",
  "edge_attributes": "1\n2\n3\n4\n5\n1\n6\n",
}


def write(folder: pathlib.Path, name="TOY", **changes) -> pathlib.Path:
  """Writes a folder in TU format; None omits a file."""
  folder.mkdir(exist_ok=True)
  for kind, text in (FILES | changes).items():
    if text is not None:
      (folder / f"{name}_{kind}.txt").write_text(text)
  return folder


def edges(graph):
  return [*zip(graph.senders, graph.receivers, graph.labels, strict=True)]


@pytest.mark.parametrize("name", ["", "TOY"])
def test_a_users_folder_is_read(tmp_path, name):
  data = load_tu(name, path=str(write(tmp_path / "toy")))
  labels = ("0,7", "0,8", "1,0"), ("0", "2"), ("-1", "1")
  assert data.names == GraphNames(*labels, num_node_features=2, num_edge_features=1)
  first, second = data.splits["all"]
  assert [*map(int, first.nodes), *map(int, second.nodes)] == [0, 0, 1, 2, 0]
  assert edges(first) == [(0, 1, 0), (1, 2, 0), (2, 0, 1), (2, 2, 1)]
  assert edges(second) == [(1, 0, 0), (0, 1, 1)]
  assert first.node_features.tolist() == [[0.5, 1], [0, 2], [0, 4]]
  assert second.edge_features.tolist() == [[4], [6]]
  assert (first.target, second.target) == (0, 1)


EDGES = '[[0, 1, "x"], [1, 2, 0], [2, 2], [0, 1, "x"]]'
OBJECTS = (
  '{"class": "b", "nodes": ["7", 7, 9], "edges": ' + EDGES + "}",
  '{"class": "a", "nodes": ["9"], "edges": []}',
)


@pytest.fixture
def load_text(tmp_path):
  """Loads the graphs in a text, of toy.jsonl."""
  file = tmp_path / "toy.jsonl"

  def load(text: str) -> GraphData:
    file.write_text(text, encoding="utf-8")
    return load_tu("", path=str(file))

  return load


def test_a_file_of_objects_is_read(load_text):
  data = load_text("\n".join(OBJECTS))
  assert data.names == GraphNames(("7", "9"), ("0", "x"), ("a", "b"))
  first, second = data.splits["all"]
  assert first.nodes.tolist() == [0, 0, 1]
  assert second.nodes.tolist() == [1]
  assert edges(first) == [(0, 1, 1), (1, 2, 0), (2, 2, -1)]
  assert edges(second) == []
  assert (first.target, second.target) == (1, 0)


@pytest.mark.parametrize("text", ["[{},\n{}]", "\ufeff[\n{},\n{}\n]\n", "{}\n\n{}\n\n"])
def test_an_array_of_objects_and_blank_lines_are_read(load_text, text):
  data, lines = load_text(text.format(*OBJECTS)), load_text("\n".join(OBJECTS))
  assert data.names == lines.names
  assert as_lists(data.splits["all"]) == as_lists(lines.splits["all"])


NO_LABEL = "is no label: give a word or an integer; want {"


@pytest.mark.parametrize(
  "line, words",
  [
    ('{"class": "a", "nodes": [1]', "line 3 is no JSON: Expecting"),
    ("class,nodes,edges", "line 3 is no JSON: Expecting"),
    ("a\t1", "line 3 is no JSON: Expecting"),
    ('{"class": "a", "nodes": [1]}', 'line 3: no "edges";'),
    ('{"nodes": [1], "edges": []}', 'line 3: no "class";'),
    ('{"class": "a", "nodes": [], "edges": []}', "line 3: 0 nodes"),
    ('{"class": "a", "nodes": [1], "edges": [[-1, 0]]}', "line 3: 1 nodes do not fit"),
    ('{"class": null, "nodes": [1], "edges": []}', f"line 3: null {NO_LABEL}"),
    ('{"class": "a", "nodes": [0.37], "edges": []}', f"line 3: 0.37 {NO_LABEL}"),
    ('{"class": "a", "nodes": [1], "edges": [[0, 0, [1]]]}', f"line 3: [1] {NO_LABEL}"),
  ],
)
def test_a_wrong_object_is_named(load_text, line, words):
  message = refusal(load_text, "\n".join([*OBJECTS, line]))
  assert words in message
  assert "want {" in message


def test_optional_files_may_be_missing(tmp_path):
  kinds = "node_labels", "edge_labels", "node_attributes", "edge_attributes"
  data = load_tu("", path=str(write(tmp_path / "toy", **dict.fromkeys(kinds))))
  graph = data.splits["all"][0]
  assert (data.names.node_labels, data.names.edge_labels) == (("node",), ())
  assert graph.nodes.tolist() == [0, 0, 0]
  assert graph.labels.tolist() == [-1, -1, -1, -1]
  assert graph.node_features.size == graph.edge_features.size == 0


BAD_EDGE = "want two nodes of one graph, from 1 to 5"
NO_FOLDER = "{folder} has 0 data sets in TU format: want a folder with NAME_A.txt"
BAD_GRAPHS = "{graph_indicator}: want graphs from 1 to 2, each"
NO_NUMBER = "cannot read {A}: could not convert string 'x' to float64 at row 1"
THREE_NUMBERS = "{A} has 2 lines of 3 numbers; want 2 lines of 2 numbers"
NAN = "0, 1\n0, 2\n0, nan\n0, 4\n0, 5\n"


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(A="1, 2\n2,x\n"), NO_NUMBER),
    (dict(A="1, 2\n2, 1\n2, 6\n"), "{A}, line 3: " + BAD_EDGE),
    (dict(A="1, 2\n1, 3\n"), "{A}, line 2: " + BAD_EDGE),
    (dict(A="1, 2, 3\n1, 2, 3\n"), THREE_NUMBERS),
    (dict(graph_indicator="1\n1\n2\n1\n3\n"), BAD_GRAPHS),
    (dict(node_labels="1\n2\n3\nnan\n5\n"), "{node_labels}, line 4: nan is no integer"),
    (dict(node_attributes=NAN), "{node_attributes}, line 3: nan"),
    (dict(graph_labels="5\n5\n"), "{folder}: want graphs of two classes or more"),
    (dict(graph_labels=None), "cannot read {graph_labels}: [Errno 2] No such file"),
    (dict.fromkeys(FILES, ""), "{graph_labels} has no graphs; want"),
    (dict(A=None), NO_FOLDER),
  ],
)
def test_a_wrong_folder_is_refused_by_file_and_line(tmp_path, changes, message):
  folder = write(tmp_path / "toy", **changes)
  files = {kind: folder / f"TOY_{kind}.txt" for kind in FILES}
  refused = refusal(load_tu, "", str(folder))
  assert refused.startswith(message.format(folder=folder, **files))


def test_an_unknown_name_is_refused():
  unknown = "unknown data set 'PROTEINS': give the path of its folder, or MUTAG"
  assert refusal(load_tu, "PROTEINS").startswith(unknown)


def test_a_published_archive_is_read_as_its_folder_is(tmp_path, publish):
  folder = write(tmp_path / "MUTAG", name="MUTAG")
  shutil.make_archive(str(folder), "zip", tmp_path, folder.name)
  publish(data_module, "MOLECULES", tmp_path)
  wanted, data = load_tu("", path=str(folder)), load_tu("MUTAG", path=str(tmp_path))
  assert as_lists(data.splits["all"]) == as_lists(wanted.splits["all"])


@pytest.mark.parametrize("inside", ["", "raw/TOY/"])
def test_a_users_archive_is_read(tmp_path, inside):
  folder, file = write(tmp_path / "toy"), tmp_path / "TOY.zip"
  with zipfile.ZipFile(file, "w") as archive:
    for path in folder.iterdir():
      archive.write(path, f"{inside}{path.name}")
      archive.writestr(f"__MACOSX/{inside}._{path.name}", "x")
  wanted, found = (load_tu("", path=str(path)) for path in (folder, file))
  assert as_lists(found.splits["all"]) == as_lists(wanted.splits["all"])
  with zipfile.ZipFile(file, "a") as archive:
    archive.writestr("A/TOY_A.txt", "x")
  assert f"{file} has data sets in " in refusal(load_tu, "", str(file))


def make_data(classes) -> GraphData:
  graphs = []
  for number, label in enumerate(classes):
    graphs.append(Graph.from_edges([0] * (1 + number % 5), [], target=label))
  return GraphData(dict(all=graphs), GraphNames(("x",), (), ("a", "b", "c", "d")))


@given(st.lists(st.integers(0, 3), min_size=10, max_size=80), st.integers(3, 10))
def test_folds_cover_every_graph_once_with_their_share_of_every_class(classes, number):
  data = make_data(classes)
  everything = sorted(map(id, data.splits["all"]))
  folds = [split_folds(data, fold, number).splits for fold in range(number)]
  for splits, after in zip(folds, folds[1:] + folds[:1], strict=True):
    graphs = [*splits["train"], *splits["valid"], *splits["test"]]
    assert sorted(map(id, graphs)) == everything
    assert [*map(id, splits["valid"])] == [*map(id, after["test"])]

  targets = [[graph.target for graph in splits["test"]] for splits in folds]
  sizes = [*map(len, targets)]
  assert max(sizes) - min(sizes) <= 1
  for wanted in {*classes}:
    shares = [part.count(wanted) for part in targets]
    assert max(shares) - min(shares) <= 1


def test_fewer_graphs_than_folds_are_refused():
  refused = refusal(split_folds, make_data([0, 1]), 0, 10)
  assert "10 folds of 2 graphs: lower config.data.tu.num_folds" in refused
