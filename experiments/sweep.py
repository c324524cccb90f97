r"""Trains every cell of a table with each of its seeds, and collects what they give.

  python -m experiments.sweep --config=configs/table2.py
  python -m experiments.sweep --config=configs/table2.py --dry_run
  python -m experiments.sweep --config=configs/table1.py:published --seeds=5
  python -m experiments.sweep --config=configs/table3.py --parallel=4 --seeds=1 \
      --config.training.num_steps=500 --config.name=table3-trial
  python -m experiments.sweep --config=configs/table2.py \
      --submit='sbatch --job-name={name} --wrap={command}'
  python -m experiments.sweep --config=configs/table2.py \
      --submit='xpk workload create --workload={name} --command={command}'

A sweep is a config file with a generator `sweep()` of (row, changes). A cell is a row with a seed,
and trains in OUT/SWEEP/CELL, its output beside it in CELL.log. The same command again goes on: what
is finished is skipped, here or in another sweep's results with the same config; what is not goes
on where it stopped. A failed cell leaves the end of its output in CELL.error.txt, and the others go
on.

The results, a line a cell, are RESULTS/SWEEP.jsonl. To train a cell again, delete its line and its
folder. With --submit each cell is a job, and the same command collects those that are finished; to
submit one again, delete its CELL.submitted.
"""

import collections
import contextlib
import math
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from experiments import command
from experiments.sweeps.cells import (
  Cell,
  Known,
  own_record,
  plan_cells,
  read_known,
  submission,
  sweep_name,
)
from experiments.sweeps.progress import Progress, State, read_state
from experiments.tasks import make_task
from relpos_jax.errors import InputError
from relpos_jax.evaluation.record import to_line
from relpos_jax.training.workdir import environment, write_whole

FLAGS = dict(
  config=command.SWEEP,
  seeds=command.Flag(3, "trainings of each row, from the config's seed on"),
  out=command.Flag("runs/sweeps", "the folder of the runs"),
  results=command.Flag("results/runs", "the folder of the results files"),
  parallel=command.Flag(1, "cells at once, each with its share of the cores"),
  submit=command.Flag("", "a cluster's command for one job, with {name} and {command} in it"),
  dry_run=command.Flag(False, "print the commands of what is to be done, and do nothing"),
)

_KEPT_LINES = 40  # of a failed cell's output
_POLL_SECONDS, _READ_SECONDS, _SECONDS_TO_STOP = 0.05, 2.0, 10.0


def main(
  config: command.ConfigFile,
  seeds: int,
  out: str,
  results: str,
  parallel: int,
  submit: str,
  dry_run: bool,
) -> None:
  """Runs or submits the cells that are not finished; exits with status 1 if one failed."""
  if parallel < 1:
    raise InputError(f"--parallel={parallel}: give at least 1")
  _leave_the_accelerator_to_the_cells(config.config.mesh)
  sweep, cells = sweep_name(config), plan_cells(config, seeds, pathlib.Path(out))
  jobs = {cell.name: submission(submit, sweep, cell) for cell in cells} if submit else {}
  book = _Book(pathlib.Path(results), sweep, cells)
  waiting = [cell for cell in cells if cell.name not in book.records and not _is_submitted(cell)]
  for note in book.notes:
    print(note)
  if dry_run:
    for cell in waiting:
      print(shlex.join(jobs.get(cell.name, cell.command)))
    return
  book.write()
  with Progress(cells, score=make_task(config.config).score) as progress:
    _show_what_is_done(cells, book, progress)
    if submit:
      _submit(waiting, jobs, progress)
    else:
      _run(waiting, parallel, book, progress)
  _tell(sweep, cells, progress, book)


def _is_submitted(cell: Cell) -> bool:
  return cell.beside(".submitted").exists()


def _leave_the_accelerator_to_the_cells(mesh: Mapping[str, int]) -> None:
  """Configs are traced on CPUs: this process must hold no GPU's memory and no TPU."""
  jax.config.update("jax_platforms", "cpu")
  num_devices = math.prod(size for size in mesh.values() if size > 0)
  if num_devices > 1:
    jax.config.update("jax_num_cpu_devices", num_devices)


class _Book:
  """The records of a sweep, and its results file."""

  def __init__(self, results: pathlib.Path, sweep: str, cells: Sequence[Cell]):
    """Finds what is finished: in the cells' folders, in the sweep's results, in those of others."""
    self.path = results / f"{sweep}.jsonl"
    self._sweep, self._cells = sweep, cells
    known = read_known(results, sweep, cells)
    self._others = known.others
    self.records: dict[str, dict[str, Any]] = {}  # by the cell's name
    self.notes: list[str] = []
    for cell in cells:
      self._look_for(cell, known)
    self._note_commits()

  def _look_for(self, cell: Cell, known: Known) -> None:
    if record := own_record(cell) or known.here.get(cell.digest):
      self.add(cell, record)
    elif cell.digest in known.elsewhere:
      name, record = known.elsewhere[cell.digest]
      self.notes.append(f"{cell.name} is {record['row']!r}, seed {record['seed']}, of {name}")
      self.add(cell, record)

  def _note_commits(self) -> None:
    now = environment()["git_commit"]
    commits = collections.Counter(record["commit"] for record in self.records.values())
    for commit, number in commits.items():
      if commit != now:
        self.notes.append(
          f"{number} of {len(self._cells)} cells were finished at commit {commit}, now {now}: to "
          f"train them again, delete their lines in {self.path} and their folders"
        )

  def add(self, cell: Cell, record: Mapping[str, Any]) -> None:
    """Enters a finished cell."""
    self.records[cell.name] = {**record, "sweep": self._sweep, "row": cell.row}

  def write(self) -> None:
    """Writes the results file whole, if there is anything to write."""
    found = [self.records[cell.name] for cell in self._cells if cell.name in self.records]
    text = "".join(map(to_line, [*found, *self._others]))
    try:
      self.path.parent.mkdir(parents=True, exist_ok=True)
      if text:
        write_whole(self.path, text)
    except OSError as error:
      raise InputError(f"cannot write {self.path} ({error.strerror}): give --results") from error


def _show_what_is_done(cells: Sequence[Cell], book: _Book, progress: Progress) -> None:
  for cell in cells:
    if cell.name in book.records:
      progress.update(cell.name, _finished(cell, book.records[cell.name]))
    elif _is_submitted(cell):
      progress.update(cell.name, read_state(cell.workdir, "submitted"))


def _finished(cell: Cell, record: Mapping[str, Any]) -> State:
  loss = read_state(cell.workdir, "finished").loss  # none where the folder is not here
  test_score = next(iter(record["scores"].get("test", {}).values()), None)
  return State("finished", cell.num_steps, loss, record["curve"][-1][2], test_score)


# Trainings on this machine ------------------------------------------------------------------------


class _Running(NamedTuple):
  cell: Cell
  process: subprocess.Popen
  place: int  # of so many at once


def _run(cells: Sequence[Cell], parallel: int, book: _Book, progress: Progress) -> None:
  """Runs the cells in order, so many at once, and enters each that finishes."""
  waiting, running, last_read = collections.deque(cells), [], 0.0
  cores = core_shares(parallel)
  before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
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
  cell.workdir.parent.mkdir(parents=True, exist_ok=True)
  cell.beside(".error.txt").unlink(missing_ok=True)
  variables = dict(os.environ)
  if parallel > 1:  # Each would take three quarters of a GPU's memory.
    variables.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / parallel:.3f}")
  words = [sys.executable, *cell.command[1:]]
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


def _settle(cell: Cell, status: int, book: _Book, progress: Progress) -> None:
  """Enters a cell that has ended, or keeps what it said."""
  if record := own_record(cell):  # the last thing that a training writes
    book.add(cell, record)
    book.write()
    progress.update(cell.name, _finished(cell, record))
    return
  said = cell.beside(".log").read_text(encoding="utf-8", errors="replace").splitlines()
  reason = f"exit status {status}" if status else "no record.json of this config in its folder"
  _fail(cell, [*said[-_KEPT_LINES:], reason], progress)


def _fail(cell: Cell, lines: Sequence[str], progress: Progress) -> None:
  cell.beside(".error.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
  progress.update(cell.name, read_state(cell.workdir, "failed"))


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


# Jobs on a cluster --------------------------------------------------------------------------------


def _submit(cells: Sequence[Cell], jobs: Mapping[str, list[str]], progress: Progress) -> None:
  """Hands each cell over; what the cluster said is kept in CELL.submitted."""
  for cell in cells:
    cell.workdir.parent.mkdir(parents=True, exist_ok=True)
    try:
      answer = subprocess.run(jobs[cell.name], capture_output=True, text=True)
    except OSError as error:
      raise InputError(f"--submit: cannot run {jobs[cell.name][0]} ({error.strerror})") from error
    said = answer.stdout + answer.stderr
    if answer.returncode:
      _fail(cell, [*said.splitlines(), f"exit status {answer.returncode}"], progress)
    else:
      write_whole(cell.beside(".submitted"), said)
      progress.update(cell.name, read_state(cell.workdir, "submitted"))


def _tell(sweep: str, cells: Sequence[Cell], progress: Progress, book: _Book) -> None:
  """What the sweep came to."""
  print(f"{sweep}: {progress.summary()}; {book.path}")
  failed = [cell for cell in cells if progress.states[cell.name].word == "failed"]
  if failed:
    files = " ".join(str(cell.beside(".error.txt")) for cell in failed)
    sys.exit(f"failed: {files}")


if __name__ == "__main__":
  command.run(main, FLAGS)
