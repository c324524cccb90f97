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
on. One sweep at a time is at work in OUT/SWEEP.

The results, a line a cell, are RESULTS/SWEEP.jsonl. To train a cell again, delete its line and its
folder. With --submit each cell is a job, and the same command collects those that are finished; to
submit one again, delete its CELL.submitted.
"""

import pathlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import jax

from experiments import command
from experiments.locks import alone_in
from experiments.sweeps.book import Book
from experiments.sweeps.cells import Cell, plan_cells, submission, sweep_name
from experiments.sweeps.local import run_cells
from experiments.sweeps.progress import Progress, fail, finished_state, read_state
from experiments.tasks import make_task
from relpos_jax.errors import InputError
from relpos_jax.training.stopping import Stopped
from relpos_jax.training.workdir import write_whole

FLAGS = dict(
  config=command.SWEEP,
  seeds=command.Flag(3, "trainings of each row, from the config's seed on"),
  out=command.Flag("runs/sweeps", "the folder of the runs"),
  results=command.Flag("results/runs", "the folder of the results files"),
  parallel=command.Flag(1, "cells at once, each with its share of the cores"),
  submit=command.Flag("", "a cluster's command for one job, with {name} and {command} in it"),
  dry_run=command.Flag(False, "print the commands of what is to be done, and do nothing"),
)


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
  # Configs are traced on CPUs: this process must hold no GPU's memory and no TPU.
  jax.config.update("jax_platforms", "cpu")
  sweep, cells = sweep_name(config), plan_cells(config, seeds, pathlib.Path(out))
  jobs = {cell.name: submission(submit, sweep, cell) for cell in cells} if submit else {}
  if dry_run:
    _, waiting = _what_is_left(pathlib.Path(results), sweep, cells)
    for cell in waiting:
      print(shlex.join(jobs.get(cell.name, cell.command)))
    return
  with alone_in(command.make_folder(cells[0].workdir.parent, "out")):
    book, waiting = _what_is_left(pathlib.Path(results), sweep, cells)
    book.write()
    with Progress(cells, score=make_task(config.config).score) as progress:
      _show_what_is_done(cells, book, progress)
      if submit:
        _submit(waiting, jobs, progress)
      else:
        _run(waiting, parallel, book, progress)
  _tell(sweep, cells, progress, book)


def _what_is_left(
  results: pathlib.Path, sweep: str, cells: Sequence[Cell]
) -> tuple[Book, list[Cell]]:
  """The records that are there, told where they are another's, and the cells still to be done."""
  book = Book(results, sweep, cells)
  for note in book.notes:
    print(note)
  done = lambda cell: cell.name in book.records or _is_submitted(cell)
  return book, [cell for cell in cells if not done(cell)]


def _is_submitted(cell: Cell) -> bool:
  return cell.beside(".submitted").exists()


def _show_what_is_done(cells: Sequence[Cell], book: Book, progress: Progress) -> None:
  for cell in cells:
    if cell.name in book.records:
      progress.update(cell.name, finished_state(cell, book.records[cell.name]))
    elif _is_submitted(cell):
      progress.update(cell.name, read_state(cell.workdir, "submitted"))


def _run(cells: Sequence[Cell], parallel: int, book: Book, progress: Progress) -> None:
  """Trains each cell here; SIGTERM ends all, and the process with its status."""
  try:
    run_cells(cells, parallel, book, progress)
  except Stopped:
    print("stopped by SIGTERM: the same command goes on", file=sys.stderr)
    sys.exit(128 + signal.SIGTERM)


def _submit(cells: Sequence[Cell], jobs: Mapping[str, list[str]], progress: Progress) -> None:
  """Hands each cell over; what the cluster said is kept in CELL.submitted."""
  for cell in cells:
    try:
      answer = subprocess.run(jobs[cell.name], capture_output=True, text=True)
    except OSError as error:
      raise InputError(f"--submit: cannot run {jobs[cell.name][0]} ({error.strerror})") from error
    said = answer.stdout + answer.stderr
    if answer.returncode:
      fail(cell, [*said.splitlines(), f"exit status {answer.returncode}"], progress)
    else:
      write_whole(cell.beside(".submitted"), said)
      progress.update(cell.name, read_state(cell.workdir, "submitted"))


def _tell(sweep: str, cells: Sequence[Cell], progress: Progress, book: Book) -> None:
  """What the sweep came to."""
  print("; ".join([f"{sweep}: {progress.summary()}", *[str(book.path)] * book.path.exists()]))
  errors = [
    cell.beside(".error.txt") for cell in cells if progress.states[cell.name].word == "failed"
  ]
  if errors:
    sys.exit("\n".join(f"failed: {path}: {_reason(path)}" for path in errors))


def _reason(error: pathlib.Path) -> str:
  """The last line but that of the exit status."""
  *lines, status = error.read_text("utf-8").splitlines()
  return lines[-1].removeprefix("error: ") if lines else status


if __name__ == "__main__":
  command.run(main, FLAGS)
