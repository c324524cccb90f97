"""Records of runs: digests, contents, and damaged lines."""

import pytest

from experiments.errors import InputError
from experiments.evaluation.records import (
  digest,
  read_records,
  record_files,
  to_line,
  write_records,
)
from experiments.graphs import data as tu

CHANGES = {
  "name": "mine",
  "seed": 1,
  "data.multi30k.path": "/my/data",
  "model.rate": 0.0,
  "model.layers": [1, 2],
  "model.keys": False,
}
MOLECULES = {"task": "graphs", "data.source": "tu", "data.tu.path": "/my/data"}
PUBLISHED = [file.removesuffix(".zip") for file in tu.MOLECULES.files]
RECORDS = [
  dict(row="mine", seed=seed, digest=digest(CHANGES), config=CHANGES) for seed in (1, 2)
]


@pytest.mark.parametrize(
  "other, is_same",
  [
    ({"name": "other", "data.multi30k.path": "/your/data"}, True),
    ({"seed": 2}, False),
    ({"model.keys": 1}, False),
    ({"model.name": "x"}, False),
    ({"data.wmt14.path": ""}, False),
  ],
)
def test_the_digest_ignores_names_and_folders(other, is_same):
  assert (digest(CHANGES) == digest(CHANGES | other)) == is_same


@pytest.mark.parametrize("name", [None, "", "PROTEINS", "mutag", *PUBLISHED])
def test_the_digest_ignores_folders_of_known_graphs_alone(name):
  mine = MOLECULES if name is None else MOLECULES | {"data.tu.name": name}
  yours = mine | {"data.tu.path": "/your/data"}
  is_known = name is None or name in PUBLISHED
  assert (digest(mine) == digest(yours)) == is_known


def test_records_round_trip(tmp_path):
  file = tmp_path / "table1.jsonl.xz"
  assert read_records(file) == []
  write_records(file, RECORDS)
  assert read_records(file) == RECORDS
  assert record_files(tmp_path) == {"table1": file}


@pytest.mark.parametrize("damage", [b'{"row":"rel', b"\xff", b'{"row":1}'])
def test_a_damaged_line_is_refused(tmp_path, damage):
  file = tmp_path / "table1.jsonl"
  file.write_bytes(to_line(RECORDS[0]).encode() + damage + b"\n")
  words = rf"{file}, line 2: half-written .*delete that line"
  with pytest.raises(InputError, match=words):
    read_records(file)
