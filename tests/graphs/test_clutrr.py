"""CLUTRR has upstream's graphs, and valid graphs that are not in train."""

import gzip
import json
import pathlib
import zipfile

import pytest

from experiments.graphs import clutrr

HEADER = "id,story,target,task_name,story_edges,edge_types,query_edge"


def row(number: int) -> dict:
  """Returns a chain of two relations; every third equals the one before."""
  relations = clutrr.RELATIONS
  kind = number - (number % 3 == 2)
  labels = [relations[kind % 14], relations[kind // 14 % 14]]
  return dict(edges=[[0, 1], [1, 2]], labels=labels, query=[0, 2], target="aunt")


def csv_line(row: dict) -> str:
  cells = [tuple(edge) for edge in row["edges"]], row["labels"], tuple(row["query"])
  quoted = ",".join(f'"{cell}"' for cell in cells)
  return f'1,"a ""story"", in\ntwo lines",{row["target"]},task_1.2,{quoted}'


SPLITS = {
  name: [row(number) for number in range(300 if split == "train" else 1)]
  for name, split in clutrr.SPLITS.items()
}


@pytest.fixture
def folder(tmp_path, publish) -> pathlib.Path:
  """Writes a small archive and its graphs in place of the published ones."""
  for name in ("archive", "graphs"):
    (tmp_path / name).mkdir()
  with zipfile.ZipFile(tmp_path / "archive" / clutrr._ZIP, "w") as archive:
    for name, rows in SPLITS.items():
      archive.writestr(f"{name}.csv", "\n".join([HEADER, *map(csv_line, rows)]) + "\n")
  lines = [json.dumps(row | dict(split=name)) for name, rows in SPLITS.items() for row in rows]
  graphs = "\n".join(lines).encode()
  (tmp_path / "graphs" / clutrr._GRAPHS).write_bytes(graphs)
  for name in ("archive", "graphs"):
    publish(clutrr, "UPSTREAM", tmp_path / name)
  (tmp_path / "graphs" / clutrr._GRAPHS).unlink()
  (tmp_path / "graphs" / f"{clutrr._GRAPHS}.gz").write_bytes(gzip.compress(graphs))
  return tmp_path


def as_lists(graphs):
  return [[x.tolist() for x in graph] for graph in graphs]


@pytest.mark.parametrize("kind", ["archive", "graphs", "address"])
def test_archive_and_graphs_are_read(folder, kind, serve, publish):
  path = "" if kind == "address" else str(folder / kind)
  with serve(folder / "archive") as url:
    publish(clutrr, "UPSTREAM", folder / "archive", url)
    data = clutrr.load(path)
  again = clutrr.load(path, valid_share=0.0)  # what is kept needs no network
  assert {*data.splits} == {"train", "valid", *(f"test_{k}" for k in range(2, 11))}
  assert again.splits["valid"] == [] and len(again.splits["train"]) == 300
  for name, split in clutrr.SPLITS.items():
    for graph, wanted in zip(again.splits[split], SPLITS[name], strict=True):
      found = [clutrr.RELATIONS[label] for label in graph.labels]
      assert (found, graph.query.tolist()) == (wanted["labels"], wanted["query"])
      assert graph.senders.tolist() == [0, 1] and graph.receivers.tolist() == [1, 2]
      assert clutrr.ANSWERS[graph.target] == "aunt" and graph.nodes.tolist() == [0, 0, 0]
  train, valid = (as_lists(data.splits[split]) for split in ("train", "valid"))
  assert len(train) + len(valid) == 300 and 0.04 < len(valid) / 300 < 0.2
  assert not any(graph in train for graph in valid)


def test_recorded_graphs_are_upstreams(shared_data):
  splits = clutrr._read(str(shared_data / "clutrr"))
  assert {split: len(graphs) for split, graphs in splits.items()} == {
    "train": 15_083, "test_2": 38, "test_3": 107, "test_4": 77, "test_5": 185, "test_6": 105,
    "test_7": 155, "test_8": 135, "test_9": 124, "test_10": 122,
  }  # fmt: skip
  graphs = [graph for of_split in splits.values() for graph in of_split]
  assert {label for graph in graphs for label in graph.labels.tolist()} == {
    *range(len(clutrr.RELATIONS))
  }
  assert {int(graph.target) for graph in graphs} == {*range(len(clutrr.ANSWERS))}
