"""The kinds of faults: what is done, how often, and what has to hold."""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from experiments.faults import damage, devices, disk, kill, nan, subject, terminate, workers
from experiments.faults.subject import Subject
from experiments.faults.tries import Try


class Family(NamedTuple):
  """A kind of fault."""

  title: str
  demand: str  # what has to hold
  do: Callable[[Subject, random.Random, int], Iterator[Try]]  # so many tries
  short: int
  long: int
  seconds: float  # a try, roughly: for the time left


FAMILIES = {
  "kill": Family(
    "SIGKILL while it starts, trains or saves",
    "started again by itself, it ends with the very bits, losses included, of the undisturbed run; "
    f"at most one save interval, {subject.SAVE_EVERY} steps, is lost, and what was trained beside "
    "a save that was cut short",
    *(kill.kill, 4, 50, 12),
  ),
  "term": Family(
    "SIGTERM in one process and in two",
    f"the step reached is saved and good, exit status 0 in {terminate.SECONDS:.0f} s; the same "
    "command ends with the very bits of the undisturbed run",
    *(terminate.terminate, 2, 20, 20),
  ),
  "bits": Family(
    "one bit of a checkpoint flipped",
    "the right values come back, or the step before and one line that says why",
    *(damage.bits, 20, 100, 0.5),
  ),
  "files": Family(
    "a file of the newest checkpoint cut short, or removed",
    "the right values come back, or the step before and one line that says why",
    *(damage.files, 99, 99, 0.5),
  ),
  "disk": Family(
    "disk full during a save",
    "one line, a non-zero exit status, the older steps good; with room again the same command ends "
    "with the very bits of the undisturbed run",
    *(disk.disk, 1, 5, 15),
  ),
  "workers": Family(
    "one of two processes killed, coordinator or not",
    f"no process is left after {workers.SECONDS:.0f} s; started again, they end with the very bits "
    "of the undisturbed run",
    *(workers.workers, 2, 10, 35),
  ),
  "devices": Family(
    "restored on 8, 4, 2, 8 devices and in 2, 1, 2 processes",
    "parameters and optimiser are the same bits, and the pairs of each batch the same",
    *(devices.devices, 1, 5, 25),
  ),
  "nan": Family(
    "a batch whose loss is not a number, and a run of them",
    f"skipped, counted, and nothing changed; {nan.MOST} in a row end the run with exit status 1, "
    "step and batch named, and finite parameters saved",
    *(nan.nan, 2, 4, 14),
  ),
}
