"""A disk that is full when a save is under way: a limit on the size of files, set while it runs."""

import pathlib
import random
import resource
from collections.abc import Iterator

from experiments.faults.outcome import damage, kept
from experiments.faults.running import Running
from experiments.faults.subject import Subject
from experiments.faults.tries import Try, each_start, joined, until_done
from relpos_jax.training import shelf

_ROOM = 2**16  # bytes a file: less than the parameters need, more than the metrics do
_LONGEST = 2.0  # seconds from a first save on, or from the start


def disk(subject: Subject, rng: random.Random, tries: int) -> Iterator[Try]:
  """The same command goes on once there is room again."""

  def strike(running: Running, _) -> Try | None:
    is_saved = lambda: running.is_training() and kept(running.workdir)
    is_there = running.wait_from(is_saved, rng.uniform(0, _LONGEST))
    return _fill(running) if is_there else None

  def disturb(workdir: pathlib.Path, most: int) -> Iterator[Try]:
    return each_start(lambda: subject.launched(workdir), most, strike)

  yield from until_done(subject, "full-disk", tries, subject.undisturbed(), disturb)


def _fill(running: Running) -> Try:
  for pid in running.pids():
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (_ROOM, most))
  before = len(running.log())
  status = running.wait()
  said = running.log()[before:].splitlines()
  steps = shelf.numbered(running.workdir / "checkpoints")
  problems = {
    "exit status 0": status == 0,
    "not told": not any("error: no room for a checkpoint in " in line for line in said),
    "it told with a traceback": any("Traceback" in line for line in said),
    "no step is left": not steps,
  }
  problems |= {damage(running.workdir, step): True for step in steps}
  return Try(f"full after step {max(steps, default=0)}: exit status {status}", joined(problems))
