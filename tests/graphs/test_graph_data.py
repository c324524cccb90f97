"""CLUTRR has upstream's graphs; TU folders are read or refused by line, and split into folds."""

import gzip
import itertools
import json
import pathlib
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
  relations = RELATIONS
  kind = number - (number % 3 == 2)
  labels = [relations[kind % 14], relations[kind // 14 % 14]]
  return dict(edges=[[0, 1], [1, 2]], labels=labels, query=[0, 2], target="aunt")


def csv_line(row: dict) -> str:
  cells = [tuple(edge) for edge in row["edges"]], row["labels"], tuple(row["query"])
  quoted = ",".join(f'"{cell}"' for cell in cells)
  return f'1,"a ""story"", in\ntwo lines",{row["target"]},task_1.2,{quoted}'


SPLITS = {
  name: [row(number) for number in range(300 if split == "train" else 1)]
  for name, split in data_module.SPLITS.items()
}


@pytest.fixture
def folder(tmp_path, publish) -> pathlib.Path:
  """Writes a small archive and its graphs in place of the published ones."""
  for name in ("archive", "graphs"):
    (tmp_path / name).mkdir()
  with zipfile.ZipFile(tmp_path / "archive" / data_module._ZIP, "w") as archive:
    for name, rows in SPLITS.items():
      archive.writestr(f"{name}.csv", "\n".join([HEADER, *map(csv_line, rows)]) + "\n")
  lines = [
    json.dumps(row | dict(split=name)) for name, rows in SPLITS.items() for row in rows
  ]
  graphs = "\n".join(lines).encode()
  (tmp_path / "graphs" / data_module._GRAPHS).write_bytes(graphs)
  for name in ("archive", "graphs"):
    publish(data_module, "CLUTRR", tmp_path / name)
  (tmp_path / "graphs" / data_module._GRAPHS).unlink()
  (tmp_path / "graphs" / f"{data_module._GRAPHS}.gz").write_bytes(gzip.compress(graphs))
  return tmp_path


def as_lists(graphs):
  return [[x.tolist() for x in graph] for graph in graphs]


@pytest.mark.parametrize("kind", ["archive", "graphs"])
def test_archive_and_graphs_are_read(folder, kind):
  found = load_clutrr(str(folder / kind))
  again = load_clutrr(str(folder / kind), valid_share=0.0)
  assert {*found.splits} == {"train", "valid", *(f"test_{k}" for k in range(2, 11))}
  assert again.splits["valid"] == [] and len(again.splits["train"]) == 300
  for name, split in data_module.SPLITS.items():
    for graph, wanted in zip(again.splits[split], SPLITS[name], strict=True):
      relations = [RELATIONS[label] for label in graph.labels]
      assert (relations, graph.query.tolist()) == (wanted["labels"], wanted["query"])
      assert graph.senders.tolist() == [0, 1] and graph.receivers.tolist() == [1, 2]
      assert ANSWERS[graph.target] == "aunt" and graph.nodes.tolist() == [0, 0, 0]
  train, valid = (as_lists(found.splits[split]) for split in ("train", "valid"))
  assert len(train) + len(valid) == 300 and 0.04 < len(valid) / 300 < 0.2
  assert not any(graph in train for graph in valid)


# Two graphs: a directed triangle with a loop and an edge given twice, and a pair of
# nodes.
FILES = {
  "graph_indicator": "1\n1\n2\n1\n2\n",
  "graph_labels": "-1\n1\n",
  "A": "1, 2\n2,4\n 4, 1\n5, 3\n4, 4\n1, 2\n3, 5\n",
  "node_labels": "7\n7\n9\n8\n7\n",
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
  return [
    *zip(
      *(x.tolist() for x in (graph.senders, graph.receivers, graph.labels)), strict=True
    )
  ]


@pytest.mark.parametrize("name", ["", "TOY"])
def test_a_users_folder_is_read(tmp_path, name):
  data = load_tu(name, path=str(write(tmp_path / "toy")))
  assert (data.names.node_labels, data.names.edge_labels, data.names.classes) == (
    ("7", "8", "9"), ("0", "2"), ("-1", "1")
  )  # fmt: skip
  first, second = data.splits["all"]
  assert first.nodes.tolist() == [0, 0, 1] and second.nodes.tolist() == [2, 0]
  assert edges(first) == [(0, 1, 0), (1, 2, 0), (2, 0, 1), (2, 2, 1)]
  assert edges(second) == [(1, 0, 0), (0, 1, 1)]
  assert first.node_features.tolist() == [[0.5, 1], [0, 2], [0, 4]]
  assert second.edge_features.tolist() == [[4], [6]]
  assert (first.target, second.target) == (0, 1)


OBJECTS = (
  '{"class": "b", "nodes": ["7", 7, 9], "edges": [[0, 1, "x"], [1, 2, 0], [2, 2], [0, 1, "x"]]}',
  '{"class": "a", "nodes": ["9"], "edges": []}',
)


def test_a_file_of_objects_is_read(tmp_path):
  (file := tmp_path / "toy.jsonl").write_text("\n".join(OBJECTS))
  data = load_tu("", path=str(file))
  assert data.names == GraphNames(("7", "9"), ("0", "x"), ("a", "b"))
  first, second = data.splits["all"]
  assert first.nodes.tolist() == [0, 0, 1] and second.nodes.tolist() == [1]
  assert edges(first) == [(0, 1, 1), (1, 2, 0), (2, 2, -1)] and edges(second) == []
  assert (first.target, second.target) == (1, 0)
  refused = refusal(load_tu, "MUTAG", str(file))
  assert "MUTAG.zip, or --config.data.tu.name= for your own graphs" in refused
  file.write_text(OBJECTS[0])
  assert "two classes" in refusal(load_tu, "", str(file))


@pytest.mark.parametrize("text", ["[{}]", "\ufeff[\n{}\n]\n", "{}\n\n"])
def test_an_array_of_objects_and_blank_lines_are_read(tmp_path, text):
  between = "\n\n" if "[" not in text else ",\n"
  file = tmp_path / "toy.json"
  file.write_text(text.format(between.join(OBJECTS)), encoding="utf-8")
  (wanted := tmp_path / "toy.jsonl").write_text("\n".join(OBJECTS))
  data, lines = load_tu("", path=str(file)), load_tu("", path=str(wanted))
  assert data.names == lines.names
  assert as_lists(data.splits["all"]) == as_lists(lines.splits["all"])
  file.write_text(f"[{OBJECTS[0]}, 7]")
  assert refusal(load_tu, "", str(file)).startswith(f"{file}, graph 2: ")
  file.write_text(f"[{OBJECTS[0]},")
  assert refusal(load_tu, "", str(file)).startswith(
    f"{file} is no JSON: Expecting value"
  )


def write_classes(file: pathlib.Path, classes) -> str:
  lines = [json.dumps({"class": x, "nodes": ["C"], "edges": []}) for x in classes]
  file.write_text("\n".join(lines))
  return str(file)


def test_classes_are_counted_and_whole_numbers_are_integers(tmp_path):
  file = tmp_path / "toy.jsonl"
  data = load_tu("", path=write_classes(file, [0, 0.0, 1, True, "0", 1.0, 0]))
  assert data.names.classes == ("0", "1", "True")
  assert data.notes == ("3 classes of 7 graphs: 0 (4), 1 (2), True (1)",)
  assert split_folds(data, 0, 3).notes[0] == data.notes[0]
  several = [number % 13 for number in range(30)]
  (note,) = load_tu("", path=write_classes(file, several)).notes
  assert note.startswith("13 classes of 30 graphs: 0 (3), 1 (3), 2 (3), 3 (3), 4 (2), ")
  assert note.endswith(", and 3 more")
  (note,) = load_tu("", path=write_classes(file, [*range(734)] + 166 * [0])).notes
  assert note.startswith(
    "734 classes of 900 graphs: is this a regression? 0 (167), 1 (1), "
  )


@pytest.mark.parametrize("label", [None, 0.37, float("nan"), [1], {"a": 1}])
def test_what_is_no_label_is_refused(tmp_path, label):
  (file := tmp_path / "toy.jsonl").write_text("")
  objects = [
    {"class": label, "nodes": ["C"], "edges": []},
    {"class": "a", "nodes": ["C", label], "edges": []},
    {"class": "a", "nodes": ["C"], "edges": [[0, 0, label]]},
  ]
  for wrong in objects:
    file.write_text("\n".join([*OBJECTS, json.dumps(wrong)]))
    refused = refusal(load_tu, "", str(file))
    wanted = f"{file}, line 3: {json.dumps(label)} is no label: give a word or an integer; want {{"
    assert refused.startswith(wanted)


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
  ],
)
def test_a_wrong_object_is_named(tmp_path, line, words):
  (file := tmp_path / "toy.jsonl").write_text("\n".join([*OBJECTS, line]))
  message = refusal(load_tu, "", str(file))
  assert words in message and "want {" in message


def test_optional_files_may_be_missing(tmp_path):
  kinds = "node_labels", "edge_labels", "node_attributes", "edge_attributes"
  data = load_tu("", path=str(write(tmp_path / "toy", **dict.fromkeys(kinds))))
  graph = data.splits["all"][0]
  assert data.names.node_labels == ("node",) and data.names.edge_labels == ()
  assert graph.nodes.tolist() == [0] * 3 and graph.labels.tolist() == [-1] * 4
  assert graph.node_features.shape == (3, 0) and graph.edge_features.shape == (4, 0)


WRONG = {
  "cannot read {A}: could not convert string 'x' to float64 at row 1": dict(
    A="1, 2\n2,x\n"
  ),
  "{A}, line 3: want two nodes of one graph, from 1 to 5": dict(A="1, 2\n2, 1\n2, 6\n"),
  "{A}, line 2: want two nodes of one graph, from 1 to 5": dict(A="1, 2\n1, 3\n"),
  "{A} has 2 lines of 3 numbers; want 2 lines of 2 numbers": dict(
    A="1, 2, 3\n1, 2, 3\n"
  ),
  "{graph_indicator}: want graphs from 1 to 2, each": dict(
    graph_indicator="1\n1\n2\n1\n3\n"
  ),
  "{node_labels} has 2 lines of 1 numbers; want 5 lines": dict(node_labels="1\n2\n"),
  "cannot read {node_attributes}: the number of columns": dict(
    node_attributes="1, 2\n1\n"
  ),
  "{folder}: want graphs of two classes or more": dict(graph_labels="5\n5\n"),
  "cannot read {graph_labels}: [Errno 2] No such file": dict(graph_labels=None),
  "{folder} has 0 data sets in TU format: want a folder with NAME_A.txt": dict(A=None),
}


WRONG |= {
  "{graph_labels} has no graphs": dict.fromkeys(FILES, "")
  | dict(graph_indicator="1\n1\n"),
  "{graph_labels} has no graphs; want": dict.fromkeys(FILES, ""),
  "{A}, line 2: want two nodes": dict(graph_indicator="1\n2\n", A="1, 1\n1, 2\n"),
  "{node_attributes}, line 3: nan": dict(
    node_attributes="0, 1\n0, 2\n0, nan\n0, 4\n0, 5\n"
  ),
  "{edge_attributes}, line 2: inf": dict(edge_attributes="1\ninf\n3\n4\n5\n1\n6\n"),
  "{edge_attributes}, line 7: -1e+39": dict(
    edge_attributes="1\n2\n3\n4\n5\n1\n-1e39\n"
  ),
  "{graph_labels}, line 2: 0.5 is no integer": dict(graph_labels="1\n0.5\n"),
  "{node_labels}, line 4: nan is no integer": dict(node_labels="1\n2\n3\nnan\n5\n"),
}


def test_labels_may_be_written_as_floats(tmp_path):
  changes = dict(graph_labels="-1.0\n1e0\n", node_labels="7.0\n7.0\n9.0\n8.0\n7.0\n")
  wanted = load_tu("", path=str(write(tmp_path / "a")))
  data = load_tu("", path=str(write(tmp_path / "b", **changes)))
  assert data.names == wanted.names
  assert as_lists(data.splits["all"]) == as_lists(wanted.splits["all"])


def test_several_columns_of_labels_are_one_label(tmp_path):
  node_labels, edge_labels = (
    "0, 7\n0, 7\n1, 0\n0, 8\n0, 7\n",
    "0,1\n0,1\n2,0\n" * 2 + "2,0\n",
  )
  folder = write(tmp_path / "toy", node_labels=node_labels, edge_labels=edge_labels)
  data = load_tu("", path=str(folder))
  assert data.names.node_labels == ("0,7", "0,8", "1,0")
  assert data.names.edge_labels == ("0,1", "2,0")
  first, second = data.splits["all"]
  assert first.nodes.tolist() == [0, 0, 1] and second.nodes.tolist() == [2, 0]


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_folder_is_refused_by_file_and_line(tmp_path, message):
  folder = write(tmp_path / "toy", **WRONG[message])
  files = {kind: folder / f"TOY_{kind}.txt" for kind in FILES}
  assert refusal(load_tu, "", str(folder)).startswith(
    message.format(folder=folder, **files)
  )


def test_a_folder_of_several_data_sets_needs_a_name_that_it_has(tmp_path):
  folder = write(tmp_path / "toy")
  assert refusal(load_tu, "OTHER", str(folder)).startswith(
    f"cannot read {folder}/OTHER_A.txt: "
  )
  write(folder, name="TWO")
  assert refusal(load_tu, "", str(folder)).endswith("(TOY, TWO): give the name of one")
  for name in ("", "OTHER"):
    gone = str(tmp_path / "gone.jsonl")
    assert refusal(load_tu, name, gone) == f"no file {gone}: check the name"
  unknown = "unknown data set 'PROTEINS': give the path of its folder, or MUTAG"
  assert refusal(load_tu, "PROTEINS").startswith(unknown)


def test_folder_and_archive_are_equal(tmp_path, publish):
  plain = dict(node_attributes=None, edge_attributes=None)
  folder = write(tmp_path / "MUTAG", name="MUTAG", **plain)
  with zipfile.ZipFile(tmp_path / "MUTAG.zip", "w") as archive:
    for file in folder.iterdir():
      archive.write(file, f"MUTAG/{file.name}")
  publish(data_module, "MOLECULES", tmp_path)
  wanted, data = load_tu("", path=str(folder)), load_tu("MUTAG", path=str(tmp_path))
  assert data.names == wanted.names
  assert as_lists(data.splits["all"]) == as_lists(wanted.splits["all"])


@pytest.mark.parametrize("inside", ["", "TOY/", "raw/TOY/"])
def test_a_users_archive_is_read(tmp_path, inside):
  folder, file = write(tmp_path / "toy"), tmp_path / "TOY.zip"
  with zipfile.ZipFile(file, "w") as archive:
    for path in folder.iterdir():
      archive.write(path, f"{inside}{path.name}")
      archive.writestr(f"__MACOSX/{inside}._{path.name}", "x")
  wanted = load_tu("", path=str(folder))
  for name in ("", "TOY"):
    data = load_tu(name, path=str(file))
    assert as_lists(data.splits["all"]) == as_lists(wanted.splits["all"])
  with zipfile.ZipFile(file, "a") as archive:
    archive.writestr("A/TOY_A.txt", "x")
  assert f"{file} has data sets in " in refusal(load_tu, "", str(file))
  with zipfile.ZipFile(file, "w") as archive:
    archive.writestr("readme.txt", "x")
  assert f"{file}/ has 0 data sets in TU format: want" in refusal(
    load_tu, "", str(file)
  )


def make_data(classes) -> GraphData:
  graphs = [
    Graph.from_edges([0] * (1 + i % 5), [], target=label)
    for i, label in enumerate(classes)
  ]
  return GraphData(dict(all=graphs), GraphNames(("x",), (), ("a", "b", "c", "d")))


@given(st.lists(st.integers(0, 3), min_size=10, max_size=80), st.integers(3, 10))
def test_folds_cover_every_graph_once_with_their_share_of_every_class(classes, number):
  data = make_data(classes)
  splits = [split_folds(data, fold, number).splits for fold in range(number)]

  def ids(fold, *names):
    return [id(graph) for name in names for graph in splits[fold][name]]

  everything = sorted(map(id, data.splits["all"]))
  assert (
    sorted(itertools.chain(*(ids(fold, "test") for fold in range(number))))
    == everything
  )
  for fold in range(number):
    assert sorted(ids(fold, "train", "valid", "test")) == everything
    assert ids(fold, "valid") == ids((fold + 1) % number, "test")
  for wanted in (None, *classes):
    shares = [sum(wanted in (None, g.target) for g in of["test"]) for of in splits]
    assert max(shares) - min(shares) <= 1


def test_fewer_graphs_than_folds_are_refused():
  refused = refusal(split_folds, make_data([0, 1]), 0, 10)
  assert "10 folds of 2 graphs: lower config.data.tu.num_folds" in refused
