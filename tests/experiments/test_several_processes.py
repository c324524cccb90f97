"""Tests the command train in several processes; run by `pytest -m slow -k several_processes`."""

import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from experiments import command
from experiments.training.metrics import read_metrics

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]


def launch(processes, workdir, data, *changes, devices=1, first=":"):
  """Trains the tiny config after another command; each process expands variables in both."""
  launcher = [
    sys.executable,
    "-m",
    "experiments.launch",
    f"--processes={processes}",
    "--",
  ]
  python = f"exec {sys.executable} -m"
  train = (
    f"{first}; {python} experiments.train --config={data}/tiny.py --workdir={workdir}"
  )
  return subprocess.run(
    [*launcher, "bash", "-c", " ".join((train, *changes))],
    env=dict(
      os.environ,
      PYTHONPATH=str(ROOT),
      JAX_PLATFORMS="cpu",
      JAX_NUM_CPU_DEVICES=str(devices),
    ),
    cwd=ROOT,
    capture_output=True,
    text=True,
  )


def losses(workdir):
  lines = read_metrics(workdir)
  of = lambda name: [(line["step"], line[name]) for line in lines if name in line]
  return np.array([*of("loss"), *of("valid_loss")])


def test_processes_with_other_configs_code_or_data_are_refused_by_all(data, tmp_path):
  run, everywhere, own = (
    tmp_path / "run",
    "--config.mesh.data=-1",
    tmp_path / "$JAX_PROCESS_ID",
  )
  for process in ("0", "1"):
    shutil.copytree(data, tmp_path / process)
    shutil.copytree(ROOT / "relpos_jax", tmp_path / f"code{process}" / "relpos_jax")
  shutil.copy(data / "train.en", tmp_path / "0" / "own.en")
  with open(tmp_path / "code1" / "relpos_jax" / "errors.py", "a") as file:
    file.write("# another version")
  splits = dict(train="training", valid="validation", test="test")
  for split in splits:
    first, second, *others = (
      (data / f"{split}.en").read_text().splitlines(keepends=True)
    )
    (tmp_path / "1" / f"{split}.en").write_text("".join((second, first, *others)))
  pair = lambda split: f"--config.data.pairs.{split}={split}.en,{data}/{split}.de"
  answers = {
    "config.training.learning_rate is 0.01 in process 0 and 0.02 in process 1: start all": launch(
      2,
      run,
      data,
      everywhere,
      "--config.training.learning_rate=0.0$((JAX_PROCESS_ID+1))",
    ),
    "the digest of relpos_jax is ": launch(
      2, run, data, everywhere, first=f"cd {tmp_path}/code$JAX_PROCESS_ID"
    ),
    "no file own.en": launch(
      2,
      run,
      data,
      everywhere,
      f"--config.data.pairs.train=own.en,{data}/train.de",
      first=f"cd {own}",
    ),
  } | {
    f"the digest of the {name} data": launch(
      2, run, data, everywhere, pair(split), first=f"cd {own}"
    )
    for split, name in splits.items()
  }
  for message, answer in answers.items():
    assert answer.returncode == 2 and answer.stderr.count(message) == 2, answer.stderr
    assert "Traceback" not in answer.stderr and "compiling" not in answer.stderr
  assert not run.exists()


def test_wrong_folders_and_meshes_are_refused_by_all(data, tmp_path):
  run, own, everywhere = (
    tmp_path / "run",
    tmp_path / "$JAX_PROCESS_ID",
    "--config.mesh.data=-1",
  )
  answers = [launch(2, run, data), launch(2, own, data, everywhere)]
  assert not [*tmp_path.rglob("checkpoints/*")]
  shutil.rmtree(tmp_path / "0")
  assert not launch(1, tmp_path / "0", data, "--config.training.num_steps=6").returncode
  answers.append(launch(2, own, data, everywhere))
  with command.lock_folder(run, "workdir"):
    answers.append(launch(2, run, data, everywhere))
  messages = (
    "a mesh of 1 devices leaves some of 2 processes without any",
    "is not one folder for all processes",
    "the list of checkpoints in --workdir is [3, 6] in process 0 and [] in process 1",
    f"another command is using {run}",
  )
  for answer, message in zip(answers, messages, strict=True):
    assert answer.returncode == 2 and message in answer.stderr, answer.stderr
  assert not run.exists()


def test_parameters_sharded_over_processes_are_evaluated_as_replicated_ones(
  workdir, data, tmp_path
):
  answer = launch(2, tmp_path, data, "--config.mesh.data=1", "--config.mesh.fsdp=2")
  assert answer.returncode == 0, answer.stderr
  assert (
    answer.stdout.count("training: shapes ") == answer.stdout.count("pictures:") == 1
  )
  np.testing.assert_allclose(losses(tmp_path), losses(workdir), atol=1e-4)
  translations = [
    (folder / "test.translations.txt").read_text("utf-8")
    for folder in (tmp_path, workdir)
  ]
  assert translations[0] == translations[1]
