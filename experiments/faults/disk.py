"""A disk that is full when a save is under way: a limit on the size of files, set while it runs."""

import itertools
import pathlib
import random
import resource
from collections.abc import Iterator

from experiments.faults.subject import Running, Subject, Try, damage, joined, kept, until_done
from relpos_jax.training import shelf

_ROOM = 2**16  # bytes a file: less than the parameters need, more than the metrics do
_LONGEST = 2.0  # seconds from a first save on, or from the start


def disk(subject: Subject, rng: random.Random, tries: int) -> Iterator[Try]:
  """The same command goes on once there is room again."""

  def disturb(workdir: pathlib.Path, most: int) -> Iterator[Try]:
    for count in itertools.count():
      with subject.launched(workdir) as running:
        if count < most and _wait_for_moment(running, rng):
          yield _fill(running)
          continue
        if status := running.wait():
          yield Try("the end", f"exit status {status}", number=0)
        return

  yield from until_done(subject, "full-disk", tries, subject.undisturbed(), disturb)


def _wait_for_moment(running: Running, rng: random.Random) -> bool:
  seconds = rng.uniform(0, _LONGEST)
  running.wait_for(lambda: running.is_training() and kept(running.workdir))
  return running.wait_seconds(seconds)


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
