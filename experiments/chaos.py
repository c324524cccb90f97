r"""Does faults to a real training: nothing may be lost by them, or go wrong in silence.

  python -m experiments.chaos                                # the short form: some minutes
  python -m experiments.chaos --scale=long --out=results     # all of it, and writes the table
  python -m experiments.chaos --only=kill --seed=7 --tries=3

The training is `experiments.train` on some pairs of the embedded corpus, a model of one layer, on
CPUs, started by `experiments.launch`. It is killed, told to end, robbed of its disk and of its
other process, moved to other devices, and given batches whose loss is not a number; its checkpoints
are damaged. What comes of it is compared, bit for bit, with a run that nothing was done to.

Which fault comes when is a function of --seed, but for the machine's own pace. Progress goes to
stderr, a Markdown table to stdout; with --out also to OUT/faults.md, every try to OUT/faults.json.

Exit status: 0 if all held; 1 if not, and stderr names the fault and how to do it again.
"""

import json
import pathlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import jax

from experiments import command
from experiments.faults import report
from experiments.faults.families import FAMILIES
from experiments.faults.subject import Subject, Try
from relpos_jax.errors import InputError
from relpos_jax.training.workdir import check_writable, environment, write_whole

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
    _folder(out, "out")
  jax.config.update("jax_platforms", "cpu")
  start = time.monotonic()
  with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
    folder = _folder(workdir, "workdir") if workdir else pathlib.Path(temporary)
    if any(folder.iterdir()):
      raise InputError(f"{folder} is not empty: give --workdir a new folder")
    found = do_faults(Subject(folder.absolute()), wanted, seed, parallel)
  rows = report.rows(found)
  print(report.table(rows))
  if out:
    minutes = (time.monotonic() - start) / 60
    settings = dict(seed=seed, scale=scale, tries=wanted, parallel=parallel, minutes=minutes)
    _write(pathlib.Path(out), settings, found)
  if bad := [name for name, each in found.items() if any(one.problem for one in each)]:
    again = f"--only={','.join(bad)} --seed={seed} --scale={scale} --tries={tries}"
    sys.exit(f"did not hold: {', '.join(bad)}; to do it again: python -m experiments.chaos {again}")


def _names(only: str) -> list[str]:
  for name in only.split(","):
    if name not in FAMILIES:
      raise InputError(f"--only: unknown {name!r}; want some of {','.join(FAMILIES)}")
  return list(dict.fromkeys(only.split(",")))


def _folder(name: str, flag: str) -> pathlib.Path:
  folder = pathlib.Path(name)
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise InputError(f"cannot use {folder} ({error.strerror}): give another --{flag}") from error
  check_writable(folder)
  return folder


def do_faults(
  subject: Subject, wanted: Mapping[str, int], seed: int, parallel: int
) -> dict[str, list[Try]]:
  """Does so many faults of each kind; what came of them, by kind."""
  progress = _Progress(wanted)

  def do(name: str) -> list[Try]:
    found = []
    for each in FAMILIES[name].do(subject, random.Random(f"{seed} {name}"), wanted[name]):
      progress.tell(name, each)
      found.append(each)
    progress.done(name)
    return found

  with ThreadPoolExecutor(parallel) as pool:
    return dict(zip(wanted, pool.map(do, wanted), strict=True))


class _Progress:
  """A line a fault on stderr, with the time left."""

  def __init__(self, wanted: Mapping[str, int]):
    self._wanted = wanted
    self._counts = dict.fromkeys(wanted, 0)
    self._lock, self._start = threading.Lock(), time.monotonic()

  def tell(self, name: str, each: Try) -> None:
    with self._lock:
      self._counts[name] = min(self._counts[name] + each.number, self._wanted[name])
      outcome = f"DID NOT HOLD: {each.problem}" if each.problem else "held"
      minutes = self._minutes_left()
      count = f"{self._counts[name]}/{self._wanted[name]}"
      print(f"{name} {count}: {each.what}: {outcome}; {minutes:.0f} min left", file=sys.stderr)

  def done(self, name: str) -> None:
    """There may be fewer than were wanted."""
    with self._lock:
      self._counts[name] = self._wanted[name]

  def _minutes_left(self) -> float:
    cost = lambda counts: sum(FAMILIES[name].seconds * count for name, count in counts.items())
    done = cost(self._counts)
    gone = time.monotonic() - self._start
    return gone * (cost(self._wanted) - done) / max(done, 1e-9) / 60


def _write(out: pathlib.Path, settings: Mapping, found: Mapping[str, list[Try]]) -> None:
  tries = {name: [each._asdict() for each in those] for name, those in found.items()}
  results = dict(environment=environment(), settings=settings, tries=tries)
  write_whole(out / "faults.json", json.dumps(results, indent=1) + "\n")
  write_whole(out / "faults.md", report.page(results, found))


if __name__ == "__main__":
  command.run(main, FLAGS)
