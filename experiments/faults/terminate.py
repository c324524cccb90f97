"""SIGTERM, to one process or one of two, or their launcher: what was done is saved in time."""

import functools
import os
import pathlib
import random
import re
import signal
import time
from collections.abc import Iterator

from experiments.faults.outcome import damage, kept, reached
from experiments.faults.running import Running
from experiments.faults.subject import NUM_STEPS, Subject
from experiments.faults.tries import Try, each_start, joined, until_done

SECONDS = 10.0
_SAYS = r"(stopped by SIGTERM|pictures: ).*\n?\Z"  # or that all is done
_LONGEST = 3.0  # seconds from the first step on till the signal comes


def terminate(subject: Subject, rng: random.Random, tries: int) -> Iterator[Try]:
  """Half of the tries in one process, half in two."""
  for processes, number in ((1, tries - tries // 2), (2, tries // 2)):
    disturb = functools.partial(_disturb, subject, rng, processes)
    wanted = subject.undisturbed(processes) if number else None
    yield from until_done(subject, f"terminated-{processes}", number, wanted, disturb)


def _disturb(
  subject: Subject, rng: random.Random, processes: int, workdir: pathlib.Path, most: int
) -> Iterator[Try]:
  def strike(running: Running, _) -> Try | None:
    is_there = _wait_for_moment(running, rng, processes)
    return _terminate(running, rng, processes) if is_there else None

  return each_start(lambda: subject.launched(workdir, processes=processes), most, strike)


def _wait_for_moment(running: Running, rng: random.Random, processes: int) -> bool:
  """Whether it came: several processes are left alone once they evaluate, at the end."""
  is_there = running.wait_from(running.has_stepped, rng.uniform(0, _LONGEST))
  return is_there and (processes == 1 or reached(running.workdir) < NUM_STEPS)


def _terminate(running: Running, rng: random.Random, processes: int) -> Try:
  pids = running.pids()
  whom = rng.choice([running.started[0].pid, *pids])
  named = "the launcher" if whom not in pids else f"process {pids.index(whom)}"
  sent = time.monotonic()
  os.kill(whom, signal.SIGTERM)
  status = running.wait()
  seconds = time.monotonic() - sent
  last, safe = reached(running.workdir), kept(running.workdir)
  problems = {
    f"exit status {status}": status != 0,
    f"not in {SECONDS:.0f} s": seconds > SECONDS,
    f"step {last} was reached and {safe} is saved": last != safe,
    "it did not say so": not re.search(_SAYS, running.log()),
    damage(running.workdir, safe): True,
  }
  what = f"SIGTERM to {named} of {processes} at step {last}"
  return Try(what, joined(problems), {"seconds": seconds})
