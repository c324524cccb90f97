"""The command train in several processes: `pytest -m slow -k several_processes` for all of it."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from relpos_jax.training.reporting import read_metrics

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]


def launch(processes, workdir, data, *changes):
  """Trains the tiny config in so many processes of one device each; returns what they said."""
  launcher = ("python", "-m", "experiments.launch", f"--processes={processes}", "--")
  train = ("python", "-m", "experiments.train", f"--config={data}/tiny.py", f"--workdir={workdir}")
  return subprocess.run(
    [sys.executable, *launcher[1:], *train, *changes],
    env=dict(os.environ, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1"),
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
    assert answer.stdout.count("training: 1 shapes") == answer.stdout.count("pictures:") == 1
  assert f"{run} is trained to step 6\n" in answers[1].stdout
  np.testing.assert_allclose(losses(run), losses(workdir), rtol=0, atol=1e-5)
  assert {path.name for path in run.iterdir()} == {path.name for path in workdir.iterdir()}


def test_fewer_devices_than_processes_are_refused_by_all(data, tmp_path):
  answer = launch(2, tmp_path / "run", data)
  assert answer.returncode == 2 and not (tmp_path / "run").exists()
  assert "a mesh of 1 devices leaves 1 of 2 processes without" in answer.stderr
