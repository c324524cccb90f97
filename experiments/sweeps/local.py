"""Trainings of a sweep on this machine, so many at once."""

import collections
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from experiments.launch.children import dying_with_this_process
from experiments.sweeps.book import Book
from experiments.sweeps.cells import Cell, own_record
from experiments.sweeps.progress import Progress, fail, finished_state, read_state
from relpos_jax.training.stopping import Stopped

_KEPT_LINES = 40  # of a failed cell's output
_POLL_SECONDS, _READ_SECONDS, _SECONDS_TO_STOP = 0.05, 2.0, 10.0


class _Running(NamedTuple):
  cell: Cell
  process: subprocess.Popen
  place: int  # of so many at once


def run_cells(cells: Sequence[Cell], parallel: int, book: Book, progress: Progress) -> None:
  """Runs the cells in order, so many at once, and enters each that finishes; SIGTERM: `Stopped`."""
  waiting, running, last_read = collections.deque(cells), [], 0.0
  cores = core_shares(parallel)
  before = signal.signal(signal.SIGTERM, _stop_all)
  try:
    while waiting or running:
      while waiting and len(running) < parallel:
        place = min({*range(parallel)} - {one.place for one in running})
        running.append(_start(waiting.popleft(), place, cores[place], parallel, progress))
      time.sleep(_POLL_SECONDS)
      for one in [one for one in running if one.process.poll() is not None]:
        running.remove(one)
        _settle(one.cell, one.process.returncode, book, progress)
      if time.monotonic() - last_read > _READ_SECONDS:
        last_read = time.monotonic()
        for one in running:
          progress.update(one.cell.name, read_state(one.cell.workdir, "running"))
  finally:
    _stop([one.process for one in running])
    signal.signal(signal.SIGTERM, before)


def _stop_all(*_) -> None:
  raise Stopped


def core_shares(number: int) -> list[set[int]]:
  """The cores of this process in equal parts; one and the same for several, if there are too few.

  >>> shares = core_shares(1)
  >>> shares == [os.sched_getaffinity(0)]
  True
  """
  cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
  size = max(1, len(cores) // number)
  return [{cores[(size * i + j) % len(cores)] for j in range(size) if cores} for i in range(number)]


def _start(cell: Cell, place: int, cores: set[int], parallel: int, progress: Progress) -> _Running:
  cell.beside(".error.txt").unlink(missing_ok=True)
  variables = dict(os.environ)
  if parallel > 1:  # Each would take three quarters of a GPU's memory.
    variables.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / parallel:.3f}")
  words = [*dying_with_this_process(), sys.executable, *cell.command[1:]]
  with open(cell.beside(".log"), "wb") as log, _on(cores):
    process = subprocess.Popen(
      words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=variables
    )
  progress.update(cell.name, read_state(cell.workdir, "running"))
  return _Running(cell, process, place)


@contextlib.contextmanager
def _on(cores: set[int]) -> Iterator[None]:
  """What is started meanwhile runs on these cores: before its first line, it counts its threads."""
  if not cores:
    yield
    return
  before = os.sched_getaffinity(0)
  os.sched_setaffinity(0, cores)
  try:
    yield
  finally:
    os.sched_setaffinity(0, before)


def _settle(cell: Cell, status: int, book: Book, progress: Progress) -> None:
  """Enters a cell that has ended, or keeps what it said."""
  if record := own_record(cell):  # the last thing that a training writes
    book.add(cell, record)
    book.write()
    progress.update(cell.name, finished_state(cell, record))
    return
  said = cell.beside(".log").read_text(encoding="utf-8", errors="replace").splitlines()
  reason = f"exit status {status}" if status else "no record.json of this config in its folder"
  fail(cell, [*said[-_KEPT_LINES:], reason], progress)


def _stop(processes: Sequence[subprocess.Popen]) -> None:
  """Ends what still runs; an interrupt meanwhile kills it."""
  for process in processes:
    process.terminate()  # an interrupt is not heard by what a shell has started in the background
  try:
    for process in processes:
      process.wait(_SECONDS_TO_STOP)
  except (KeyboardInterrupt, subprocess.TimeoutExpired):
    for process in processes:
      process.kill()
      process.wait()
