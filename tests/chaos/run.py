"""Watches the processes of a run, waits for moments in it, and reads its run directory."""

import contextlib
import hashlib
import pathlib
import subprocess
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.training.checkpoint_reader import (
  abstract,
  check_digests,
  list_steps,
  list_unfinished,
  read,
  read_kinds,
)
from experiments.training.metrics import read_metrics

_TIMES = ("time", "tokens_per_second", "seconds_per_step")  # metrics that differ between equal runs


class Run:
  """A command that runs in one process or several, with its output in two files."""

  def __init__(self, workdir: pathlib.Path, log: pathlib.Path, has_launcher: bool = False):
    self.workdir, self.log, self._has_launcher = workdir, log, has_launcher
    self.processes: list[subprocess.Popen] = []
    self.since = time.time()  # of the start or the last kill

  def pids(self) -> list[int]:
    """Returns the live processes of the training, in the order of their start."""
    pids = [process.pid for process in self.processes if process.poll() is None]
    if self._has_launcher:
      pids = [pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in pids]
      pids = [int(pid) for children in pids for pid in children]
    return [pid for pid in pids if is_alive(pid)]

  def out(self) -> str:
    return self.log.with_suffix(".out").read_text("utf-8")

  def err(self) -> str:
    return self.log.with_suffix(".err").read_text("utf-8")

  def until(self, condition: Callable[[], Any]) -> None:
    """Waits until the condition holds; fails if all processes ended before."""

    def holds():
      is_over = self._is_over()  # first, so that the last process's own writes count
      found = condition()
      assert found or not is_over, f"ended too soon:\n{self.out()}\n{self.err()}"
      return found

    wait_until(holds)

  def wait(self) -> int:
    """Waits for the end and returns the exit status of the first process, or the launcher."""
    wait_until(self._is_over)
    return self.processes[0].returncode

  def _is_over(self) -> bool:
    return all(process.poll() is not None for process in self.processes)

  def has_stepped(self) -> bool:
    return _is_newer(self.workdir / "metrics.jsonl", self.since)

  def is_saving(self) -> bool:
    """Returns whether a save that began since `since` is under way."""
    has_started = _is_newer(self.workdir / "environment.json", self.since)
    unfinished = list_unfinished(self.workdir / "checkpoints")
    return has_started and any(_is_newer(path, self.since) for path in unfinished)


def wait_until(condition: Callable[[], Any], seconds: float = 600) -> None:
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, f"not in {seconds:.0f} s"
    time.sleep(0.01)


def is_alive(pid: int) -> bool:
  with contextlib.suppress(OSError):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
  return False


def _is_newer(path: pathlib.Path, since: float) -> bool:
  with contextlib.suppress(FileNotFoundError):
    return path.stat().st_mtime > since
  return False


# The run directory --------------------------------------------------------------------------------


def metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the lines of metrics.jsonl without the values that depend on time."""
  return [{k: v for k, v in line.items() if k not in _TIMES} for line in read_metrics(workdir)]


def losses(workdir: pathlib.Path) -> dict[int, float | None]:
  return {line["step"]: line["loss"] for line in read_metrics(workdir) if "loss" in line}


def digests(workdir: pathlib.Path, step: int) -> dict[str, str]:
  """Returns the digest of every array of a checkpoint; raises Damage if a file differs."""
  path = workdir / "checkpoints" / str(step)
  check_digests(path)
  return {name: hashlib.sha256(np.asarray(x)).hexdigest() for name, x in read(path).items()}


def shapes(workdir: pathlib.Path, step: int) -> dict[str, Any]:
  kinds = read_kinds(workdir / "checkpoints" / str(step))
  return {name: abstract(kind) for name, kind in kinds.items()}


def state_digests(workdir: pathlib.Path, step: int) -> dict[str, str]:
  return {name: digest for name, digest in digests(workdir, step).items() if name != "step"}


def reached(workdir: pathlib.Path) -> int:
  return max(losses(workdir), default=0)


def kept(workdir: pathlib.Path) -> int:
  return max(list_steps(workdir / "checkpoints"), default=0)
