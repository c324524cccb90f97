r"""Trains every row of a table with several seeds and collects the results.

  python -m experiments.sweep --config=configs/table2.py
  python -m experiments.sweep --config=configs/table2.py --dry_run
  python -m experiments.sweep --config=configs/table3.py --parallel=4 --seeds=1 \
      --config.training.num_steps=500 --config.name=table3-trial
  python -m experiments.sweep --config=configs/table2.py --only=k=16
  python -m experiments.sweep --config=configs/table2.py --dry_run | xargs -d '\n' -n1 sbatch --wrap

A sweep is a config file with a generator `sweep()` of (row, changes). A cell is a row with a seed;
it trains in OUT/SWEEP/CELL and logs to CELL.log. The same command resumes the sweep and skips cells
that are finished, here or in another sweep. If a cell fails, CELL.error.txt keeps the end of its
log, and the sweep continues. --dry_run prints the command of each cell that would train, a line
each, such as for the jobs of a cluster; once these are finished, the sweep collects their results.

RESULTS/runs/SWEEP.jsonl (or .jsonl.xz) has a line per cell; this repository has those of its own
results. To train a cell again, delete its line and run directory, or give other --out and
--results. `python -m experiments.report` with the same --results writes the tables.
"""

import collections
import contextlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments import command, signals
from experiments.config import flatten, own_values
from experiments.errors import InputError
from experiments.evaluation.records import (
  digest,
  read_records,
  record_files,
  runs_folder,
  write_records,
)
from experiments.files import write_whole
from experiments.launch import dying_with_this_process

FLAGS = dict(
  config=command.SWEEP,
  seeds=command.Flag(
    3, "number of seeds per row, counted up from the config's", least=1
  ),
  only=command.Flag("", "the one row to train, by its name"),
  out=command.Flag("runs/sweeps", "folder of the run directories", is_path=True),
  results=command.Flag(
    "results", "folder of the records, in its folder runs", is_path=True
  ),
  parallel=command.Flag(
    1, "number of cells at once, each with its share of the cores", least=1
  ),
  dry_run=command.Flag(False, "print the commands that would run, and exit"),
)
TRAIN = ("python", "-m", "experiments.train")
_POLL_SECONDS = 1.0
_SAVE_SECONDS = 60.0  # for a training to save and end

Key = tuple[str, int]  # row and seed


class Cell(NamedTuple):
  """One training of a sweep."""

  row: str
  seed: int
  digest: str  # of its config
  workdir: pathlib.Path
  command: tuple[str, ...]

  @property
  def key(self) -> Key:
    return self.row, self.seed

  def file(self, ending: str) -> pathlib.Path:
    """Returns the path of a file beside the run directory, such as CELL.log."""
    return self.workdir.with_name(self.workdir.name + ending)


def main(
  config: command.ConfigFile,
  seeds: int,
  only: str,
  out: pathlib.Path,
  results: pathlib.Path,
  parallel: int,
  dry_run: bool,
) -> None:
  """Runs the cells that are not finished; exits with status 1 if one failed."""
  import jax

  jax.config.update("jax_platforms", "cpu")  # leaves the accelerators to the trainings
  sweep = slug(config.config.name)
  cells = plan_cells(config, seeds, out)
  chosen = _choose(cells, only, config.name)
  path = _results_file(results, sweep)
  if dry_run:
    waiting = _find_waiting(chosen, find_records(path, cells))
    for cell in waiting:
      print(shlex.join(cell.command))
    num_finished = len(chosen) - len(waiting)
    print(f"{num_finished} of {len(chosen)} are finished: {path}", file=sys.stderr)
    return
  with command.lock_folder(out / sweep, "out"):
    waiting = _find_waiting(chosen, collect_records(path, cells))
    with signals.handling([signal.SIGTERM, signal.SIGHUP], _stop):
      _train(waiting, parallel, lambda: collect_records(path, cells))
  failures = []
  for cell in waiting:
    file = cell.file(".error.txt")
    if file.exists():
      failures.append(f"failed: {file}: {file.read_text().splitlines()[-1]}")
  num_finished = len(chosen) - len(failures)
  print(f"{sweep}: {num_finished} of {len(chosen)} are finished; {path}")
  if failures:
    sys.exit("\n".join(failures))


def _choose(cells: Sequence[Cell], only: str, name: str) -> Sequence[Cell]:
  """Returns the cells of one row, or all; raises InputError if there is no such row."""
  if not only:
    return cells
  chosen = [cell for cell in cells if cell.row == only]
  if not chosen:
    rows = dict.fromkeys(cell.row for cell in cells)
    raise InputError(f"--only={only}: give a row of {name}: {'; '.join(rows)}")
  return chosen


def _results_file(results: pathlib.Path, sweep: str) -> pathlib.Path:
  """Returns the results file of a sweep; raises InputError if it is in another folder."""
  folder = runs_folder(results)
  misplaced = record_files(results).get(sweep)
  if misplaced:
    raise InputError(f"records are in {folder}: move {misplaced} into {folder}")
  return record_files(folder).get(sweep, folder / f"{sweep}.jsonl")


def _find_waiting(chosen: Sequence[Cell], records: Mapping[Key, Any]) -> list[Cell]:
  """Returns the cells without a record, or tells how to train all anew."""
  waiting = [cell for cell in chosen if cell.key not in records]
  if not waiting:
    flags = "--results=FOLDER"
    if any(cell.workdir.exists() for cell in chosen):
      flags += " --out=FOLDER"
    print(f"every cell has a record: give {flags} to train anew", file=sys.stderr)
  return waiting


def plan_cells(
  file: command.ConfigFile, num_seeds: int, out: pathlib.Path
) -> list[Cell]:
  """Returns the cells in the order they run: every row with a seed, then with the next.

  The first seed is the config's. Raises InputError: there is no `sweep()`, or a cell's
  config is not valid, or all rows override a value of the command line.
  """
  if not hasattr(file.module, "sweep"):
    what = "a generator of (row, changes): see configs/table1.py"
    raise InputError(f"{file.name} has no sweep(), {what}")
  rows = [*file.module.sweep()]
  for key in file.given:
    if all(key in changes for _, changes in rows):
      problem = f"--config.{key} has no effect"
      raise InputError(f"{problem}: every row of {file.name} sets it")
  first = file.config.seed
  cells = []
  for seed in range(first, first + num_seeds):
    cells += [_make_cell(file, out, row, changes, seed) for row, changes in rows]
  workdirs = {cell.workdir for cell in cells}
  digests = {cell.digest for cell in cells}
  if min(len(workdirs), len(digests)) < len(cells):
    problem = f"two rows of {file.name} have the same name or config"
    raise InputError(f"{problem}: make them differ")
  return cells


def slug(text: str) -> str:
  """Returns a text as lower-case letters, digits and single hyphens, for names of folders."""
  return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _make_cell(
  file: command.ConfigFile,
  out: pathlib.Path,
  row: str,
  changes: Mapping[str, Any],
  seed: int,
) -> Cell:
  from experiments.systems import parse_config

  values = flatten(file.config)
  values = {key: values[key] for key in file.given} | changes | {"seed": seed}
  arguments = [f"--config={file.name}"]
  arguments += [f"--config.{key}={value}" for key, value in values.items()]
  try:
    config = command.parse(dict(config=command.CONFIG), arguments)["config"]
    parse_config(config, num_devices=0)  # the cell may run elsewhere
  except InputError as error:
    raise InputError(f"row {row!r}: {error}") from error
  workdir = out / slug(file.config.name) / f"{slug(row)}-seed{seed}"
  words = (*TRAIN, *arguments, f"--workdir={workdir}")
  return Cell(row, seed, digest(own_values(config)), workdir, words)


def collect_records(
  path: pathlib.Path, cells: Sequence[Cell]
) -> dict[Key, dict[str, Any]]:
  """Writes the records of a sweep to its results file and returns them; see `find_records`."""
  command.make_folder(path.parent, "results")
  records = find_records(path, cells)
  if records:
    write_records(path, records.values())
  return records


def find_records(
  path: pathlib.Path, cells: Sequence[Cell]
) -> dict[Key, dict[str, Any]]:
  """Returns the records of a sweep from its run directories and its results file.

  Records of equal configs in other sweeps' results count too; their names are printed.
  Records of other rows and seeds in the results file come last.

  Raises InputError: a file is damaged, or the results have a record of another config.
  """
  collected = _read_collected(path, cells)
  sweep = path.name.partition(".jsonl")[0]
  others = _read_others(path.parent, sweep)
  records = {}
  for cell in cells:
    record = collected.pop(cell.key, None)
    for new in read_records(cell.workdir / "record.json"):
      if new["digest"] == cell.digest:
        record = new
    if not record and cell.digest in others:
      file, record = others[cell.digest]
      source = f"{record['row']!r}, seed {record['seed']}, of {file.name}"
      # On stdout --dry_run has commands.
      print(f"{cell.workdir.name} is {source}", file=sys.stderr)
    if record:
      records[cell.key] = {**record, "sweep": sweep, "row": cell.row}
  return records | collected


def _read_collected(
  path: pathlib.Path, cells: Sequence[Cell]
) -> dict[Key, dict[str, Any]]:
  """Returns the records of a results file; raises InputError if they contradict the cells."""
  records = {}
  for record in read_records(path):
    key = record["row"], record["seed"]
    if key in records:
      problem = f"{path} has two lines of one row and seed"
      raise InputError(f"{problem}: delete one of them")
    records[key] = record
  for cell in cells:
    if cell.key in records and records[cell.key]["digest"] != cell.digest:
      raise InputError(
        f"{path} has {cell.row!r}, seed {cell.seed}, with another config, or by "
        "older code: delete that line, or give another --results or --config.name"
      )
  return records


def _read_others(
  folder: pathlib.Path, sweep: str
) -> dict[str, tuple[pathlib.Path, dict[str, Any]]]:
  """Returns the records of other sweeps, with their files, by digest."""
  records = {}
  for name, file in sorted(record_files(folder).items()):
    if name != sweep:
      for record in read_records(file):
        records[record["digest"]] = file, record
  return records


def _train(
  waiting: Sequence[Cell], parallel: int, collect: Callable[[], Mapping]
) -> None:
  """Trains cells on this machine; collects the records whenever a training ends."""
  queue = collections.deque(waiting)
  running: dict[int, tuple[Cell, subprocess.Popen]] = {}  # by share of the machine

  def report(cell: Cell, state: str) -> None:
    counts = f"{len(running)} running, {len(queue)} waiting"
    print(f"{cell.workdir.name}: {state} ({counts})", file=sys.stderr, flush=True)

  try:
    while queue or running:
      for share in range(parallel):
        if queue and share not in running:
          cell = queue.popleft()
          running[share] = cell, _start(cell, share, parallel)
          report(cell, "running")
      time.sleep(_POLL_SECONDS)
      for share, (cell, process) in [*running.items()]:
        if process.poll() is not None:
          del running[share]
          report(cell, _finish(cell, process.returncode, collect()))
  finally:
    _end([process for _, process in running.values()])


def _finish(cell: Cell, status: int, records: Mapping[Key, Any]) -> str:
  """Returns how a training ended, and keeps the end of its log if it failed."""
  if cell.key in records:
    return "finished"
  log = cell.file(".log").read_text(encoding="utf-8", errors="replace").splitlines()
  lines = [f"exit status {status}", *log[-40:], ""]
  write_whole(cell.file(".error.txt"), "\n".join(lines))
  return "failed"


def _end(processes: Sequence[subprocess.Popen]) -> None:
  """Has trainings save and end, and kills those that hang."""
  for process in processes:
    process.terminate()
  for process in processes:
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(_SAVE_SECONDS)
    process.kill()
    process.wait()


def _stop(number: int, _) -> None:
  """Ends a sweep, and ignores other signals while its trainings save."""
  for other in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(other, signal.SIG_IGN)
  sys.exit(128 + number)


def _start(cell: Cell, share: int, parallel: int) -> subprocess.Popen:
  """Starts a training with its share of the cores and of a GPU's memory."""
  cell.file(".error.txt").unlink(missing_ok=True)
  env, words = dict(os.environ), dying_with_this_process()
  if parallel > 1:
    env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / parallel:.3f}")
    if shutil.which("taskset"):
      cores = sorted(os.sched_getaffinity(0))
      own = cores[share::parallel] or cores
      words += ["taskset", "--cpu-list", ",".join(map(str, own))]
  words += [sys.executable, *cell.command[1:]]
  with open(cell.file(".log"), "wb") as log:
    return subprocess.Popen(
      words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
    )


if __name__ == "__main__":
  command.run(main, FLAGS)
