"""One of two processes dies: the other ends soon, and both go on exactly when started again."""

import contextlib
import os
import pathlib
import random
import signal
import time
from collections.abc import Iterator

from experiments.faults.subject import (
  ENDLESS,
  Running,
  Subject,
  Try,
  is_alive,
  joined,
  kept,
  reached,
  until_done,
  wait_until,
)

SECONDS = 15.0
_LONGEST = 4.0  # seconds of training till the kill
_VICTIMS = ("the coordinator", "the other worker")


def workers(subject: Subject, rng: random.Random, tries: int) -> Iterator[Try]:
  """Half of them as on a cluster, where none but JAX tells; half under the launcher."""
  wanted = subject.undisturbed(2)

  def on_a_cluster(workdir: pathlib.Path, most: int) -> Iterator[Try]:
    for count in range(most + 1):
      with subject.alone(workdir, processes=2) as running:
        if count < most and _wait_for_moment(running, rng):
          yield _kill_one(running, count % 2, "as on a cluster")
          continue
        if status := running.wait():
          yield Try("the end", f"exit status {status}", number=0)
        return

  def launched(workdir: pathlib.Path, most: int) -> Iterator[Try]:
    with subject.launched(workdir, processes=2, retries=ENDLESS) as running:
      for count in range(most):
        if not _wait_for_moment(running, rng):
          break
        yield _kill_one(running, count % 2, "under the launcher")
      if status := running.wait():
        yield Try("the end", f"exit status {status}", number=0)

  halves = (("alone", tries - tries // 2, on_a_cluster), ("launched", tries // 2, launched))
  for name, number, disturb in halves:
    yield from until_done(subject, name, number, wanted, disturb)


def _wait_for_moment(running: Running, rng: random.Random) -> bool:
  seconds = rng.uniform(0, _LONGEST)
  running.wait_for(running.has_stepped)
  return running.wait_seconds(seconds)


def _kill_one(running: Running, victim: int, how: str) -> Try:
  pids = running.pids()
  if len(pids) < 2:
    return Try(how, "one has ended by itself")
  with contextlib.suppress(ProcessLookupError):
    os.kill(pids[victim], signal.SIGKILL)
  running.since, died = time.time(), time.monotonic()
  last, safe = reached(running.workdir), kept(running.workdir)
  gone = wait_until(lambda: not any(map(is_alive, pids)), 4 * SECONDS)
  seconds = time.monotonic() - died
  problems = {
    "the survivor is there still": not gone,
    f"survivors gone only after {seconds:.1f} s": gone and seconds > SECONDS,
  }
  what = f"{_VICTIMS[victim]} killed at step {last}, {how}"
  return Try(what, joined(problems), {f"seconds, {how}": seconds, "steps lost": last - safe})
