"""A mistake is one line and exit status 2: nothing is compiled, lost or overwritten."""

import os
import shutil

import pytest

from experiments import translate


@pytest.fixture
def refused(call, contents):
  """Runs a command that must refuse with these words and leave a folder as it was."""

  def refused(folder, words: str, name: str, *arguments: str, stdin: bytes = b""):
    before = contents(folder)
    answer = call(name, *arguments, stdin=stdin)
    answer.assert_refused(f"error: {words}")
    assert contents(folder) == before
    assert name != "translate" or not answer.out

  return refused


@pytest.fixture
def train_refused(refused, data, tmp_path):
  """Runs train with changes of the tiny config; its folder is tmp_path/run."""
  flags = f"--config={data}/tiny.py", f"--workdir={tmp_path}/run"

  def train_refused(words: str, *changes: str):
    refused(tmp_path, words, "train", *flags, *changes)

  return train_refused


SOURCES = "embedded, multi30k, pairs, scan, wmt14"
POSITIONS = "relative, sinusoidal, both, none"
ROWS = "batches.tokens is 127 7 rows 8 shards config.mesh.data"
HEADS = "config.mesh.tensor is 4 divisor config.model.num_heads, 2"
STEPS = "config.training.num_steps is 15 num_epochs 3: give one of 0 for"
MARK = "config.evaluation.subword_mark '@@' no training target's"
PREPARED = "data.source=multi30k data.multi30k.prepared"
NO_FOLDER = "data.source=multi30k data.multi30k.path=/no"


@pytest.mark.parametrize(
  "changes, words",
  [
    ("data.source=wmt15", f"config.data.source 'wmt15' {SOURCES}"),
    ("vocabulary.size=100", "vocabulary size 100 at least 260"),
    ("model.positions=rotory", f"config.model.positions 'rotory' {POSITIONS}"),
    ("model.norm=middle", "config.model.norm 'middle' pre, post"),
    ("model.num_heads=3", "config.model width is 16 multiple num_heads, 3"),
    ("model.dropout_rate=nan", "config.model.dropout_rate is nan from 0"),
    ("training.num_epochs=3", STEPS),
    ("decoding.average_checkpoints=4", "checkpoints is 4 3 training.keep_checkpoints"),
    ("mesh.data=9", "mesh of data=9 8 devices config.mesh"),
    ("mesh.data=8 batches.tokens=127", ROWS),
    ("mesh.data=-1 mesh.fsdp=-1", "at most one -1"),
    ("mesh.tensor=4", HEADS),
    ("evaluation.subword_mark=@@", MARK),
    (PREPARED, "config.evaluation.subword_mark=@@"),
    ("data.moses=True", "config.evaluation.tokenize is '13a' give none"),
    (NO_FOLDER, "/no/train.en.gz multi30k/dataset"),
    ("data.source=embedded data.pairs.train=a", "'embedded' data.source=pairs"),
    ("data.pairs.valid=", "no validation pairs --config.data.pairs.valid="),
  ],
)
def test_keys_and_values_of_the_config(train_refused, changes, words):
  train_refused(words, *(f"--config.{change}" for change in changes.split()))


def test_a_folder_that_may_only_be_read(train_refused, refused, run_copy, monkeypatch):
  # Root may write anywhere.
  monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
  train_refused("cannot write into run --workdir")
  refused(run_copy, "cannot write into run", "evaluate", f"--workdir={run_copy}")


@pytest.mark.parametrize("is_link", [False, True])
def test_checkpoints_that_are_gone(train_refused, run_copy, is_link):
  shutil.rmtree(run_copy / "checkpoints")
  if is_link:
    (run_copy / "checkpoints").symlink_to("nowhere")
  train_refused("run/checkpoints 15 bring back delete run to start again")


@pytest.mark.parametrize("name", ["evaluate", "translate"])
def test_an_incomplete_or_damaged_run(refused, run_copy, name):
  folder = f"--workdir={run_copy}"
  refused(run_copy, "missing --workdir folder", name)
  refused(run_copy, "no training run 'nowhere' --workdir", name, "--workdir=nowhere")
  shutil.rmtree(run_copy / "checkpoints")
  refused(run_copy, "no checkpoint run/checkpoints train first", name, folder)
  (run_copy / "tokenizer.json").unlink()
  refused(run_copy, "no tokenizer", name, folder)
  config = (run_copy / "config.json").read_text()
  (run_copy / "config.json").write_text(config.replace('"width": 16', '"width": "16"'))
  refused(run_copy, "config width 16 int", name, folder)
  (run_copy / "config.json").write_text('{"model": ')
  refused(run_copy, "cannot read config.json", name, folder)


def test_invalid_utf8_on_stdin(call, workdir, monkeypatch):
  monkeypatch.setattr(translate, "_LINES_AT_ONCE", 2)
  text = b"\n\n\na caf\xe9\n"
  answer = call("translate", f"--workdir={workdir}", stdin=text)
  assert (answer.status, answer.out) == (2, "\n\n")
  last = "error: invalid UTF-8 in line 4 of stdin: convert it to UTF-8\n"
  assert answer.err.endswith(last)
