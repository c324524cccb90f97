"""The command train in several processes: `pytest -m slow -k several_processes` for all of it."""

import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from experiments.locks import lock_folder
from relpos_jax.training.metrics import read_metrics

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]


def launch(processes, workdir, data, *changes, devices=1):
  """Trains the tiny config in so many processes of so many devices each; returns what they said.

  What the folder's name has of the environment is put in by each process.
  """
  launcher = [sys.executable, "-m", "experiments.launch", f"--processes={processes}", "--"]
  train = f"exec python -m experiments.train --config={data}/tiny.py --workdir={workdir}"
  return subprocess.run(
    [*launcher, "bash", "-c", " ".join((train, *changes))],
    env=dict(os.environ, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(devices)),
    cwd=ROOT,
    capture_output=True,
    text=True,
  )


def losses(workdir):
  lines = read_metrics(workdir)
  of = lambda name: [(line["step"], line[name]) for line in lines if name in line]
  return np.array([*of("loss"), *of("valid_loss")])


def test_two_processes_and_then_four_train_as_one_does_and_the_first_alone_speaks(
  workdir, data, tmp_path
):
  """The four go on from what the two have saved."""
  run, everywhere = tmp_path / "run", "--config.mesh.data=-1"
  answers = [
    launch(2, run, data, everywhere, "--config.training.num_steps=6"),
    launch(4, run, data, everywhere),
  ]
  for answer in answers:
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("training: 1 shape:") == answer.stdout.count("pictures:") == 1
  assert f"{run} is trained to step 6\n" in answers[1].stdout
  np.testing.assert_allclose(losses(run), losses(workdir), rtol=0, atol=1e-5)
  assert {path.name for path in run.iterdir()} == {path.name for path in workdir.iterdir()}


@pytest.mark.parametrize("mesh", [("data=-1",), ("data=2", "fsdp=2")])
def test_two_processes_of_two_devices_train_and_go_on_as_one_device_does(mesh, data, tmp_path):
  """Arrays are of a size that is digested on devices, whole and cut."""
  wide = "--config.model.feed_forward=4200"  # times the width of 16: more than 2**16
  assert not launch(1, tmp_path / "one", data, wide).returncode
  mesh = [f"--config.mesh.{sizes}" for sizes in mesh]
  for steps in (6, 12):
    changes = wide, *mesh, f"--config.training.num_steps={steps}"
    answer = launch(2, tmp_path / "run", data, *changes, devices=2)
    assert answer.returncode == 0, answer.stderr
  np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "one"), rtol=0, atol=1e-4)


def test_fewer_devices_than_processes_are_refused_by_all(data, tmp_path):
  answer = launch(2, tmp_path / "run", data)
  assert answer.returncode == 2 and not (tmp_path / "run").exists()
  assert "a mesh of 1 devices leaves 1 of 2 processes without" in answer.stderr


def test_a_folder_of_each_process_is_refused_by_all(data, tmp_path):
  """Nothing is trained; and what one has beside the others is not gone on from."""
  own, everywhere = tmp_path / "$JAX_PROCESS_ID", "--config.mesh.data=-1"
  answer = launch(2, own, data, everywhere)
  assert answer.returncode == 2 and "is not one folder for all processes" in answer.stderr
  assert not [*tmp_path.rglob("checkpoints/*")]

  shutil.rmtree(tmp_path / "0")
  assert not launch(1, tmp_path / "0", data, "--config.training.num_steps=6").returncode
  answer = launch(2, own, data, everywhere)
  assert answer.returncode == 2 and "checkpoints is not the same in all" in answer.stderr


def test_a_folder_that_another_training_is_at_work_in_is_refused_by_all(data, tmp_path):
  with lock_folder(tmp_path / "run", "training", "workdir"):
    answer = launch(2, tmp_path / "run", data, "--config.mesh.data=-1")
  assert answer.returncode == 2 and not (tmp_path / "run").exists()
  assert f"another training is at work in {tmp_path}/run" in answer.stderr


def test_parameters_cut_over_processes_are_evaluated_as_whole_ones(data, tmp_path):
  """The report and the beam search of every process see all of them."""
  cut = launch(2, tmp_path / "cut", data, "--config.mesh.data=1", "--config.mesh.fsdp=2")
  assert cut.returncode == 0, cut.stderr
  whole = launch(1, tmp_path / "whole", data)
  assert whole.returncode == 0, whole.stderr
  np.testing.assert_allclose(losses(tmp_path / "cut"), losses(tmp_path / "whole"), atol=1e-4)
  translations = [
    (tmp_path / name / "test.translations.txt").read_text("utf-8") for name in ("cut", "whole")
  ]
  assert translations[0] == translations[1]
