"""Faults that are done to runs, each until the run has reached its end in spite of them."""

import pathlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

from experiments.faults.outcome import Outcome, difference
from experiments.faults.running import Running
from experiments.faults.subject import Subject
from relpos_jax.training import shelf

ENDLESS = 999  # so often may a launcher start a run again


class Try(NamedTuple):
  """A fault that was done, and what came of it."""

  what: str  # was done
  problem: str = ""  # that should not be; empty: all held
  figures: Mapping[str, float] = {}  # what was measured, by name; the larger the worse
  number: int = 1  # of faults; 0: only what those before have led to was looked at


def until_done(
  subject: Subject,
  name: str,
  tries: int,
  wanted: Outcome,
  disturb: Callable[[pathlib.Path, int], Iterator[Try]],
) -> Iterator[Try]:
  """Disturbs runs, each until it has reached its end in spite of it, and compares the ends.

  `disturb(workdir, most)`: a run to its end, with at most so many faults.
  """
  done = 0
  for number in range(tries):
    workdir = subject.folder / f"{name}-{number}"
    for each in disturb(workdir, tries - done):
      done += each.number
      yield each
    aside = ", ".join(path.name for path in shelf.aside(workdir / "checkpoints"))
    problems = {difference(workdir, wanted): True, f"set aside: {aside}": bool(aside)}
    yield Try(f"the end of {workdir.name}", joined(problems), number=0)
    if done == tries:
      return
  raise RuntimeError(f"{tries} runs of {name} were over before {tries} faults could be done")


Start = Callable[[], AbstractContextManager[Running]]
Strike = Callable[[Running, int], Try | None]  # does fault number 0, 1, ...; None: it came too late


def each_start(start: Start, most: int, strike: Strike) -> Iterator[Try]:
  """Does a fault to every start of a run, at most so many, and then leaves it alone to its end."""
  for count in range(most + 1):
    with start() as running:
      if count < most and (found := strike(running, count)):
        yield found
        continue
      yield from _end(running)
      return


def one_start(start: Start, most: int, strike: Strike) -> Iterator[Try]:
  """Does faults to one start, whose launcher starts it again by itself, `ENDLESS` times."""
  with start() as running:
    for count in range(most):
      if not (found := strike(running, count)):
        break
      yield found
    yield from _end(running)


def _end(running: Running) -> Iterator[Try]:
  if status := running.wait():
    yield Try("the end", f"exit status {status}", number=0)


def joined(problems: Mapping[str, bool]) -> str:
  """Those that are there.

  >>> joined({"late": False, "status 3": True, "no checkpoint": True})
  'status 3; no checkpoint'
  """
  return "; ".join(text for text, is_there in problems.items() if text and is_there)
