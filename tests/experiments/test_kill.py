"""Kills real trainings, which end as one left alone; run by `pytest -m chaos`."""

import contextlib
import functools
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from faults import read_step
from run_files import metrics, results
from test_launch import is_alive

from experiments.launch.__main__ import environments
from experiments.training.checkpoint_reader import (
  check_digests,
  list_damaged,
  list_steps,
)

pytestmark = pytest.mark.chaos

ROOT = pathlib.Path(__file__).parents[2]
NUM_STEPS, SAVE_EVERY = 100, 20
CHANGES = (
  f"--config.training.num_steps={NUM_STEPS}",
  f"--config.training.save_every={SAVE_EVERY}",
  f"--config.training.eval_every={NUM_STEPS}",
  "--config.mesh.data=-1",
)
ENV = os.environ | {
  "PYTHONPATH": str(ROOT),
  "JAX_PLATFORMS": "cpu",
  "JAX_NUM_CPU_DEVICES": "1",
}


@contextlib.contextmanager
def start(*words, workdir, env=ENV):
  """Runs a module, which logs beside its run directory; kills it at the end."""
  words = [sys.executable, "-m", *map(str, words)]
  with open(workdir.with_suffix(".log"), "a") as log:
    process = subprocess.Popen(words, env=env, cwd=ROOT, stdout=log, stderr=log)
  try:
    yield process
  finally:
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def train(data):
  """Returns the words of the command that trains in a folder."""
  words = "experiments.train", f"--config={data}/tiny.py", *CHANGES
  return lambda workdir: (*words, f"--workdir={workdir}")


@pytest.fixture(scope="module")
def launched(train):
  def launched(workdir, processes, retries=0):
    flags = f"--processes={processes}", f"--retries={retries}"
    words = "experiments.launch", *flags, "--", "python", "-m", *train(workdir)
    return start(*words, workdir=workdir)

  return launched


@pytest.fixture(scope="module")
def left_alone(launched, tmp_path_factory):
  """Returns the folder of a run of so many processes that was left alone."""

  @functools.cache
  def left_alone(processes):
    workdir = tmp_path_factory.mktemp("left-alone") / "run"
    with launched(workdir, processes) as launcher:
      assert launcher.wait() == 0, log(workdir)
    return workdir

  return left_alone


def assert_same_end(workdir, other):
  ours, theirs = (run / "checkpoints" for run in (workdir, other))
  assert list_steps(ours) == list_steps(theirs) == [60, 80, NUM_STEPS]
  assert not list_damaged(ours)
  assert metrics(workdir) == metrics(other)
  assert results(workdir) == results(other)
  arrays = [read_step(folder / str(NUM_STEPS)) for folder in (ours, theirs)]
  jax.tree.map(np.testing.assert_array_equal, *arrays)


def log(workdir) -> str:
  return workdir.with_suffix(".log").read_text("utf-8")


def children(process) -> list[int]:
  tasks = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}")
  pids = [int(pid) for pid in (tasks / "children").read_text().split()]
  return [pid for pid in pids if is_alive(pid)]


def reached(workdir) -> int:
  return max((line["step"] for line in metrics(workdir)), default=0)


def kept(workdir) -> int:
  return max(list_steps(workdir / "checkpoints"), default=0)


def until(condition, process, workdir) -> None:
  deadline = time.monotonic() + 300
  while not condition():
    is_over = process.poll() is not None and not condition()
    assert not is_over and time.monotonic() < deadline, log(workdir)
    time.sleep(0.01)


def is_newer(paths, since) -> bool:
  with contextlib.suppress(FileNotFoundError):
    return any(path.stat().st_mtime > since for path in paths)
  return False


def wait_for(moment, rng, since, process, workdir) -> None:
  """Waits for a moment of the training that was started after the time `since`."""

  def has_stepped():
    return is_newer([workdir / "metrics.jsonl"], since)

  def is_saving():
    return is_newer(workdir.glob("checkpoints/*.orbax-checkpoint-tmp*"), since)

  if moment == "start":
    time.sleep(rng.uniform(0, 6))
  elif moment == "save":
    until(is_saving, process, workdir)
    time.sleep(rng.uniform(0, 0.2))
  else:
    step = NUM_STEPS if moment == "end" else rng.randrange(70)
    until(lambda: has_stepped() and reached(workdir) >= step, process, workdir)


@pytest.mark.parametrize(
  "processes, moments",
  [(1, "start save"), (1, "save train"), (1, "train end"), (2, "train")],
)
def test_a_killed_process_is_started_again(
  processes, moments, launched, left_alone, tmp_path
):
  workdir, rng, since = tmp_path / "run", random.Random(f"{processes} {moments}"), 0.0
  with launched(workdir, processes, retries=2) as launcher:
    for moment in moments.split():
      wait_for(moment, rng, since, launcher, workdir)
      until(lambda: len(children(launcher)) == processes, launcher, workdir)
      pids = children(launcher)
      os.kill(rng.choice(pids), signal.SIGKILL)
      until(lambda pids=pids: not any(map(is_alive, pids)), launcher, workdir)
      # An interval, and the steps beside the save under way, for which the next waits.
      assert reached(workdir) - kept(workdir) <= 2 * SAVE_EVERY
      since = time.time()
    assert launcher.wait() == 0, log(workdir)
  for number, _ in enumerate(moments.split(), 1):
    assert f"exit status 137: retry {number} of 2" in log(workdir)
  assert_same_end(workdir, left_alone(processes))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_any_process_saves_and_the_same_command_goes_on(
  number, launched, left_alone, tmp_path
):
  workdir, rng = tmp_path / "run", random.Random(2)
  with launched(workdir, 2) as launcher:
    wait_for("train", rng, 0.0, launcher, workdir)
    sent = time.monotonic()
    pids = [launcher.pid, *children(launcher)]
    if number == signal.SIGTERM:
      pids = [rng.choice(pids)]
    for pid in pids:  # a terminal sends SIGINT to all
      os.kill(pid, number)
    assert launcher.wait() == 128 + number, log(workdir)
  assert time.monotonic() - sent < 10
  last = reached(workdir)
  assert last == kept(workdir)
  check_digests(workdir / "checkpoints" / str(last))
  words = f"stopped by {number.name} at step {last}: run the same command again"
  assert words in log(workdir)
  with launched(workdir, 2) as launcher:
    assert launcher.wait() == 0, log(workdir)
  assert_same_end(workdir, left_alone(2))


@pytest.mark.parametrize("victim", [0, 1])
def test_on_a_cluster_no_process_survives_another(
  victim, train, launched, left_alone, tmp_path
):
  workdir = tmp_path / "run"
  with contextlib.ExitStack() as stack:
    processes = [
      stack.enter_context(start(*train(workdir), workdir=workdir, env=env))
      for env in environments(2, ENV)
    ]
    wait_for("train", random.Random(victim), 0.0, processes[0], workdir)
    processes[victim].kill()
    assert processes[1 - victim].wait(15) != 0  # JAX reports the death of the other
  with launched(workdir, 2) as launcher:
    assert launcher.wait() == 0, log(workdir)
  assert_same_end(workdir, left_alone(2))
