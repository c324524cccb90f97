"""Trains in several processes; run by `pytest -m slow -k several_processes`."""

import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from experiments.training.metrics import read_metrics

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]


ENV = os.environ | {
  "PYTHONPATH": str(ROOT),
  "JAX_PLATFORMS": "cpu",
  "JAX_NUM_CPU_DEVICES": "1",
}
PYTHON = sys.executable


def launch(processes, workdir, data, *changes, first=":"):
  """Trains the tiny config after a command; processes expand variables in both."""
  flags = [f"--config={data}/tiny.py", f"--workdir={workdir}", *changes]
  script = f"{first}; exec {PYTHON} -m experiments.train {' '.join(flags)}"
  launcher = [PYTHON, "-m", "experiments.launch", f"--processes={processes}", "--"]
  words = [*launcher, "bash", "-c", script]
  return subprocess.run(words, env=ENV, cwd=ROOT, capture_output=True, text=True)


def assert_refused(answer, message: str):
  assert answer.returncode == 2, answer.stderr
  assert message in answer.stderr


def losses(workdir):
  lines = read_metrics(workdir)
  values = []
  for name in ("loss", "valid_loss"):
    values += [(line["step"], line[name]) for line in lines if name in line]
  return np.array(values)


EVERYWHERE = "--config.mesh.data=-1"
RATE = (
  "config.training.learning_rate is 0.01 in process 0 and 0.02 in process 1: start all"
)
TRAIN_IN_ONE = "--config.data.pairs.train=own.en,{data}/train.de"
PAIRS = "--config.data.pairs.{split}={split}.en,{data}/{split}.de"


@pytest.fixture
def folders(data, tmp_path):
  """Writes files of each process in a folder of its number, and other files in 1."""
  for process in ("0", "1"):
    shutil.copytree(data, tmp_path / process)
    shutil.copytree(ROOT / "relpos_jax", tmp_path / f"code{process}" / "relpos_jax")
  shutil.copy(data / "train.en", tmp_path / "0" / "own.en")
  (tmp_path / "code1" / "relpos_jax" / "errors.py").write_text("# another version")
  for split in ("train", "test"):
    lines = (data / f"{split}.en").read_text().splitlines(keepends=True)
    (tmp_path / "1" / f"{split}.en").write_text("".join(reversed(lines)))
  return tmp_path


OWN = "$JAX_PROCESS_ID"


@pytest.mark.parametrize(
  "folder, change, message",
  [
    ("", "--config.training.learning_rate=0.0$((JAX_PROCESS_ID+1))", RATE),
    (f"code{OWN}", "", "the digest of relpos_jax and experiments is "),
    (OWN, TRAIN_IN_ONE, "no file own.en"),
    (OWN, PAIRS.replace("{split}", "train"), "digest of the training data"),
    (OWN, PAIRS.replace("{split}", "test"), "the digest of the test data"),
  ],
)
def test_processes_with_other_configs_code_or_data_are_refused_by_all(
  data, folders, folder, change, message
):
  run = folders / "run"
  change = change.format(data=data)
  answer = launch(2, run, data, EVERYWHERE, change, first=f"cd {folders}/{folder}")
  assert answer.returncode == 2
  assert answer.stderr.count(message) == 2, answer.stderr
  assert not run.exists()


def test_folders_of_their_own_are_refused(data, tmp_path):
  answer = launch(2, tmp_path / "$JAX_PROCESS_ID", data, EVERYWHERE)
  assert_refused(answer, "is not one folder for all processes")
  assert not [*tmp_path.rglob("checkpoints/*")]


def test_folders_with_other_checkpoints_are_refused(data, tmp_path):
  six = "--config.training.num_steps=6"
  assert launch(1, tmp_path / "0", data, six).returncode == 0
  answer = launch(2, tmp_path / "$JAX_PROCESS_ID", data, EVERYWHERE)
  words = (
    "the list of checkpoints in --workdir is [3, 6] in process 0 and [] in process 1"
  )
  assert_refused(answer, words)


def test_parameters_sharded_over_processes_are_evaluated_as_replicated_ones(
  workdir, data, tmp_path
):
  answer = launch(2, tmp_path, data, "--config.mesh.data=1", "--config.mesh.fsdp=2")
  assert answer.returncode == 0, answer.stderr
  assert answer.stdout.count("training: shapes ") == 1
  assert answer.stdout.count("pictures:") == 1
  np.testing.assert_allclose(losses(tmp_path), losses(workdir), atol=1e-4)
  ours, theirs = (x / "test.translations.txt" for x in (tmp_path, workdir))
  assert ours.read_text("utf-8") == theirs.read_text("utf-8")
