"""A command under way in processes of its own, and what is seen of it from outside."""

import contextlib
import pathlib
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments.launch.children import dying_with_this_process
from relpos_jax.training import shelf

_ROOT = pathlib.Path(__file__).parents[2]
_PATIENCE = 300.0  # seconds; what has not come by then does not come


class Running:
  """A command under way, in one process or several."""

  def __init__(
    self, workdir: pathlib.Path, started: Sequence[subprocess.Popen], has_launcher: bool
  ):
    """`started`: the launcher, or the processes themselves."""
    self.workdir, self.started, self._has_launcher = workdir, started, has_launcher
    self.since = time.time()

  def pids(self) -> list[int]:
    """Those of the training, in order of their start."""
    if self._has_launcher:
      return _children(self.started[0].pid)
    return [process.pid for process in self.started if process.poll() is None]

  def is_over(self) -> bool:
    """Whether all have ended."""
    return all(process.poll() is not None for process in self.started)

  def wait(self, seconds: float = _PATIENCE) -> int:
    """Waits for the end; the exit status of the first that was started."""
    if not wait_until(self.is_over, seconds):
      raise TimeoutError(f"{self.workdir} has not ended in {seconds:.0f} s:\n{self.log()}")
    return self.started[0].returncode

  def wait_for(self, condition: Callable[[], Any]) -> bool:
    """Waits until something is true, or this has ended; returns whether it is true."""
    wait_until(lambda: condition() or self.is_over(), _PATIENCE)
    return not self.is_over()

  def wait_seconds(self, seconds: float) -> bool:
    """Waits so long, or until this has ended; returns whether it is there still."""
    end = time.time() + seconds
    return self.wait_for(lambda: time.time() > end)

  def wait_from(self, condition: Callable[[], Any], seconds: float) -> bool:
    """Waits until something is true and so long after it; returns whether this is there still."""
    self.wait_for(condition)
    return self.wait_seconds(seconds)

  def is_training(self) -> bool:
    """Whether it is about to make its first step since `since`, or has."""
    return _is_since(self.workdir / "environment.json", self.since)

  def has_stepped(self) -> bool:
    """Whether it has made steps since `since`."""
    return _is_since(self.workdir / "metrics.jsonl", self.since)

  def is_saving(self) -> bool:
    """Whether a save that began since `since` goes on."""
    if not self.is_training():  # What a kill left behind is deleted before.
      return False
    unfinished = shelf.unfinished(self.workdir / "checkpoints")
    return any(_is_since(path, self.since) for path in unfinished)

  def log(self) -> str:
    """What it said, and those before it in this folder."""
    return _log_file(self.workdir).read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def started(
  words: Sequence[str], env: Mapping[str, str], workdir: pathlib.Path
) -> Iterator[subprocess.Popen]:
  """A process of these words, which speaks into the log beside its folder; killed at the end."""
  with open(_log_file(workdir), "a", encoding="utf-8") as log:
    process = subprocess.Popen(
      [*dying_with_this_process(), *words], env=env, cwd=_ROOT, stdout=log, stderr=subprocess.STDOUT
    )
  try:
    yield process
  finally:
    process.kill()
    process.wait()


def _log_file(workdir: pathlib.Path) -> pathlib.Path:
  return workdir.with_name(f"{workdir.name}.log")


def _is_since(path: pathlib.Path, since: float) -> bool:
  try:
    return path.stat().st_mtime > since
  except FileNotFoundError:
    return False


def _children(pid: int) -> list[int]:
  """The processes that a process has started and that live."""
  found = []
  for file in pathlib.Path("/proc").glob("[0-9]*/stat"):
    with contextlib.suppress(OSError):  # it has ended
      state, parent = file.read_text().rpartition(")")[2].split()[:2]
      if int(parent) == pid and state != "Z":
        found.append(int(file.parent.name))
  return sorted(found)


def is_alive(pid: int) -> bool:
  """Whether a process is there and has not ended."""
  try:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
  except OSError:
    return False


def wait_until(condition: Callable[[], Any], seconds: float) -> bool:
  """Looks a hundred times a second whether something is true; returns whether it came to be."""
  deadline = time.monotonic() + seconds
  while not condition():
    if time.monotonic() > deadline:
      return False
    time.sleep(0.01)
  return True
