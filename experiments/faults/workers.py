"""One of two processes dies: the other ends soon, and both go on exactly when started again."""

import contextlib
import functools
import os
import pathlib
import random
import signal
import time
from collections.abc import Iterator

from experiments.faults.outcome import kept, reached
from experiments.faults.running import Running, is_alive, wait_until
from experiments.faults.subject import Subject
from experiments.faults.tries import ENDLESS, Try, each_start, joined, one_start, until_done

SECONDS = 15.0
_LONGEST = 4.0  # seconds of training till the kill
_VICTIMS = ("the coordinator", "the other worker")


def workers(subject: Subject, rng: random.Random, tries: int) -> Iterator[Try]:
  """Half of them as on a cluster, where none but JAX tells; half under the launcher."""

  def on_a_cluster(workdir: pathlib.Path, most: int) -> Iterator[Try]:
    strike = functools.partial(_strike, rng, "as on a cluster")
    return each_start(lambda: subject.alone(workdir, processes=2), most, strike)

  def launched(workdir: pathlib.Path, most: int) -> Iterator[Try]:
    strike = functools.partial(_strike, rng, "under the launcher")
    start = lambda: subject.launched(workdir, processes=2, retries=ENDLESS)
    return one_start(start, most, strike)

  wanted = subject.undisturbed(2)
  halves = (("alone", tries - tries // 2, on_a_cluster), ("launched", tries // 2, launched))
  for name, number, disturb in halves:
    yield from until_done(subject, name, number, wanted, disturb)


def _strike(rng: random.Random, how: str, running: Running, count: int) -> Try | None:
  is_there = running.wait_from(running.has_stepped, rng.uniform(0, _LONGEST))
  return _kill_one(running, count % 2, how) if is_there else None


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
