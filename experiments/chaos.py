r"""Does faults to a real training: nothing may be lost by them, or go wrong in silence.

  python -m experiments.chaos                                # the short form: some minutes
  python -m experiments.chaos --scale=long --out=results     # all of it, and writes the table
  python -m experiments.chaos --only=kill --seed=7 --tries=3

The training is `experiments.train` on some pairs of the embedded corpus, a model of one layer, on
CPUs, started by `experiments.launch`. It is killed, told to end, robbed of its disk and of its
other process, moved to other devices, and given batches whose loss is not a number; its checkpoints
are damaged. What comes of it is compared, bit for bit, with a run that nothing was done to.

Which fault comes when is a function of --seed, but for the machine's own pace. Progress goes to
stderr, a Markdown table to stdout. With --out every try goes to OUT/faults.json, in the place of
those of its kind that are there, and the table of all kinds to OUT/faults.md.

Exit status: 0 if all held; 1 if not, and stderr names the fault and how to do it again.
"""

import pathlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax

from experiments import command
from experiments.faults import report
from experiments.faults.families import FAMILIES
from experiments.faults.subject import Subject
from experiments.faults.tries import Try
from relpos_jax.errors import InputError
from relpos_jax.training.manifest import Damage
from relpos_jax.training.workdir import environment

FLAGS = dict(
  seed=command.Flag(0, "of what is done when"),
  scale=command.Flag("short", "how many tries of each: short or long"),
  tries=command.Flag(0, "so many of each instead"),
  only=command.Flag(",".join(FAMILIES), "some of these faults"),
  parallel=command.Flag(1, "so many kinds of faults at a time"),
  workdir=command.Flag("", "a new folder for the runs, which stays; by default one that goes"),
  out=command.Flag("", "the folder to write to"),
)


def main(
  seed: int, scale: str, tries: int, only: str, parallel: int, workdir: str, out: str
) -> None:
  """Checks the flags, does the faults, prints the table, and writes it if told where."""
  if scale not in ("short", "long") or tries < 0 or parallel < 1:
    raise InputError("--scale is short or long, --tries at least 0, --parallel at least 1")
  wanted = {name: tries or getattr(FAMILIES[name], scale) for name in _names(only)}
  if out:
    report.read(command.make_folder(out, "out") / "faults.json")  # better now than after the work
  jax.config.update("jax_platforms", "cpu")
  where = environment()  # before anything of it can change
  with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
    folder = command.make_folder(workdir, "workdir") if workdir else pathlib.Path(temporary)
    if any(folder.iterdir()):
      raise InputError(f"{folder} is not empty: give --workdir a new folder")
    found = {}
    for name, each in do_faults(Subject(folder.absolute()), wanted, seed, parallel):
      found[name] = dict(environment=where, seed=seed, tries=each)
      if out:
        report.write(pathlib.Path(out), found)
  print(report.table(found))
  if bad := [name for name in found if report.row(name, found[name]).problems]:
    again = f"--only={','.join(bad)} --seed={seed} --scale={scale} --tries={tries}"
    sys.exit(f"did not hold: {', '.join(bad)}; to do it again: python -m experiments.chaos {again}")


def _names(only: str) -> list[str]:
  for name in only.split(","):
    if name not in FAMILIES:
      raise InputError(f"--only: unknown {name!r}; want some of {','.join(FAMILIES)}")
  return list(dict.fromkeys(only.split(",")))


def do_faults(
  subject: Subject, wanted: Mapping[str, int], seed: int, parallel: int
) -> Iterator[tuple[str, list[Try]]]:
  """Does so many faults of each kind; gives a kind, and what came of its tries, once it is done."""
  progress = _Progress(wanted)

  def do(name: str) -> tuple[str, list[Try]]:
    found = []
    for each in _do(name, subject, random.Random(f"{seed} {name}"), wanted[name]):
      progress.tell(name, each)
      found.append(each)
    progress.done(name)
    return name, found

  with ThreadPoolExecutor(parallel) as pool:
    for future in as_completed([pool.submit(do, name) for name in wanted]):
      yield future.result()


def _do(name: str, subject: Subject, rng: random.Random, tries: int) -> Iterator[Try]:
  try:
    yield from FAMILIES[name].do(subject, rng, tries)
  except (RuntimeError, TimeoutError, Damage) as error:  # Others are bugs of this program.
    yield Try("all that were to follow", " ".join(str(error).split())[-2000:], number=0)


class _Progress:
  """A line a fault on stderr, with the time left."""

  def __init__(self, wanted: Mapping[str, int]):
    self._wanted = wanted
    self._counts = dict.fromkeys(wanted, 0)
    self._lock, self._start = threading.Lock(), time.monotonic()

  def tell(self, name: str, each: Try) -> None:
    with self._lock:
      self._counts[name] = min(self._counts[name] + each.number, self._wanted[name])
      held = f"DID NOT HOLD: {each.problem}" if each.problem else "held"
      held += "".join(f", {figure} {value:.3g}" for figure, value in each.figures.items())
      left = f"{self._minutes_left():.0f} min left"
      count = f"{self._counts[name]}/{self._wanted[name]}"
      print(f"{name} {count}: {each.what}: {held}; {left}", file=sys.stderr)

  def done(self, name: str) -> None:
    """There may be fewer than were wanted."""
    with self._lock:
      self._counts[name] = self._wanted[name]

  def _minutes_left(self) -> float:
    cost = lambda counts: sum(FAMILIES[name].seconds * count for name, count in counts.items())
    done = cost(self._counts)
    gone = time.monotonic() - self._start
    return gone * (cost(self._wanted) - done) / max(done, 1e-9) / 60


if __name__ == "__main__":
  command.run(main, FLAGS)
