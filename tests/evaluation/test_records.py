"""Records of runs: digests, contents, and damaged lines."""

import json

import pytest

from experiments.errors import InputError
from experiments.evaluation.records import (
  digest,
  make_record,
  read_records,
  record_files,
  to_line,
  write_records,
)
from experiments.graphs import data as tu

CONFIG = dict(
  name="mine",
  seed=1,
  data=dict(source="multi30k", multi30k=dict(path=""), wmt14=dict()),
  batches=dict(tokens=1024),
  model=dict(rate=0.0, layers=(1, 2), keys=True),
)
ENVIRONMENT = dict(
  date="2026-11-21T02:47:45+00:00",
  git_commit="8ffa67b",
  python="3.11.7",
  packages=dict(jax="0.10.2"),
  cpu="AMD EPYC",
  cpu_cores=4,
  devices="1 x cpu",
)
METRICS = [
  dict(step=1, time=100.0, loss=9.0),
  dict(step=5, time=160.0, loss=5.0, tokens_per_second=900.0),
  dict(step=5, time=190.0, valid_loss=4.0, valid_bleu=1.5, valid_exact=1.0),
  dict(step=10, time=250.0, loss=3.0, tokens_per_second=1100.0),
  dict(step=10, time=280.0, valid_loss=3.0, valid_bleu=2.5, valid_exact=2.0, test_exact=0.5),
]
SCORES = dict(
  test=dict(sacrebleu=3.0, paper_bleu=3.5, signatures=dict(sacrebleu="a", paper_bleu="b"))
)

CHANGES = {
  "name": "mine",
  "seed": 1,
  "data.multi30k.path": "/my/data",
  "model.rate": 0.0,
  "model.layers": [1, 2],
  "model.keys": False,
}
MOLECULES = {"task": "graphs", "data.source": "tu", "data.tu.path": "/my/data"}


def record(changes=CHANGES):
  sentences = dict(test=[[7, 4, 4, 3, 2, 1, 0]])
  return make_record(CONFIG, changes, ENVIRONMENT, METRICS, SCORES, sentences, [5, 10])


@pytest.mark.parametrize(
  "same",
  [
    CHANGES | {"name": "other", "data.multi30k.path": "/your/data"},
    CHANGES | {"model.rate": 0},
    json.loads(json.dumps(CHANGES)),
  ],
)
def test_the_digest_ignores_names_folders_and_order(same):
  assert digest(same) == digest(CHANGES)


@pytest.mark.parametrize(
  "other",
  [
    CHANGES | {"seed": 2},
    CHANGES | {"model.keys": 1},
    CHANGES | {"model.name": "x"},
    CHANGES | {"data.wmt14.path": ""},
    {key: value for key, value in CHANGES.items() if key != "model.rate"},
  ],
)
def test_every_other_value_changes_the_digest(other):
  assert digest(other) != digest(CHANGES)


@pytest.mark.parametrize(
  "name", [None, *(file.removesuffix(".zip") for file in tu.MOLECULES.files)]
)
def test_a_record_omits_the_folder_of_known_archives(name):
  named = MOLECULES | ({"data.tu.name": name} if name else {})
  assert digest(named) == digest({k: v for k, v in named.items() if k != "data.tu.path"})
  assert "data.tu.path" not in record(named)["config"]


@pytest.mark.parametrize("name", ["", "PROTEINS", "mutag"])
def test_the_digest_of_a_users_folder_depends_on_its_path(name):
  named = MOLECULES | {"data.tu.name": name}
  assert digest(named) != digest(named | {"data.tu.path": "/your/data"})


def test_a_record_describes_the_run_and_the_machine():
  made = record()
  assert set(made["config"]) == {*CHANGES} - {"name", "data.multi30k.path"}
  assert (made["row"], made["seed"], made["checkpoints"]) == ("mine", 1, [5, 10])
  assert made["digest"] == digest(CHANGES) == digest(made["config"])
  assert made["hardware"] == "1 x cpu, 4 cores of AMD EPYC"
  assert made["packages"] == dict(python="3.11.7", jax="0.10.2")
  assert made["budget"] == dict(
    updates=10, tokens_per_update=1024, minutes=3.0, tokens_per_second=1000.0
  )
  assert made["curve"] == [[5, 4.0, 1.5], [10, 3.0, 2.5]]
  assert made["exact"] == dict(valid=[[5, 1.0], [10, 2.0]], test=[[10, 0.5]])


@pytest.mark.parametrize("name", ["table1.jsonl", "table1.jsonl.xz"])
def test_records_round_trip(tmp_path, name):
  file, records = tmp_path / name, [record(), record() | dict(seed=2)]
  assert read_records(file) == []
  write_records(file, records)
  assert read_records(file) == records and record_files(tmp_path) == dict(table1=file)


@pytest.mark.parametrize("damage", [b'{"row":"rel', b"\xff", b'{"row":1}'])
def test_a_damaged_line_is_refused(tmp_path, damage):
  file = tmp_path / "table1.jsonl"
  file.write_bytes(to_line(record()).encode() + damage + b"\n")
  with pytest.raises(InputError, match=rf"{file}, line 2: half-written .*delete that line"):
    read_records(file)
