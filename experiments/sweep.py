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
import datetime
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
  folder = runs_folder(results)
  sweep = slug(config.config.name)
  cells = plan_cells(config, seeds, out)
  rows = dict.fromkeys(cell.row for cell in cells)
  if only and only not in rows:
    raise InputError(f"--only={only}: give a row of {config.name}: {'; '.join(rows)}")
  chosen = [cell for cell in cells if only in ("", cell.row)]
  misplaced = record_files(results).get(sweep)
  if misplaced:
    raise InputError(f"records are in {folder}: move {misplaced} into {folder}")
  path = record_files(folder).get(sweep, folder / f"{sweep}.jsonl")
  with contextlib.nullcontext() if dry_run else command.lock_folder(out / sweep, "out"):
    records = find_records(path, cells) if dry_run else collect_records(path, cells)
    waiting = [cell for cell in chosen if cell.key not in records]
    if not waiting:
      flags = "--results=FOLDER" + " --out=FOLDER" * any(
        cell.workdir.exists() for cell in chosen
      )
      print(f"every cell has a record: give {flags} to train anew", file=sys.stderr)
    if dry_run:
      for cell in waiting:
        print(shlex.join(cell.command))
      print(
        f"{len(chosen) - len(waiting)} of {len(chosen)} are finished: {path}",
        file=sys.stderr,
      )
      return
    with signals.handling([signal.SIGTERM, signal.SIGHUP], _stop):
      _train(waiting, parallel, lambda: collect_records(path, cells))
  errors = [
    cell.file(".error.txt") for cell in waiting if cell.file(".error.txt").exists()
  ]
  print(f"{sweep}: {len(chosen) - len(errors)} of {len(chosen)} are finished; {path}")
  if errors:
    sys.exit(
      "\n".join(
        f"failed: {file}: {file.read_text().splitlines()[-1]}" for file in errors
      )
    )


def plan_cells(
  file: command.ConfigFile, num_seeds: int, out: pathlib.Path
) -> list[Cell]:
  """Returns the cells in the order they run: every row with the config's seed, then
  with the next.

  Raises InputError: there is no `sweep()`, or a cell's config is not valid, or all rows
  override a value of the command line.
  """
  if not hasattr(file.module, "sweep"):
    raise InputError(
      f"{file.name} has no sweep(), a generator of (row, changes): see configs/table1.py"
    )
  rows, first = [*file.module.sweep()], file.config.seed
  for key in file.given:
    if all(key in changes for _, changes in rows):
      raise InputError(
        f"--config.{key} has no effect: every row of {file.name} sets it"
      )
  folder, seeds = out / slug(file.config.name), range(first, first + num_seeds)
  cells = [
    _make_cell(file, folder, row, changes, seed)
    for seed in seeds
    for row, changes in rows
  ]
  if len({x.workdir for x in cells}) < len(cells) or len(
    {x.digest for x in cells}
  ) < len(cells):
    raise InputError(
      f"two rows of {file.name} have the same name or config: make them differ"
    )
  return cells


def slug(text: str) -> str:
  """Returns a text as lower-case letters, digits and single hyphens, for names of folders."""
  return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _make_cell(
  file: command.ConfigFile,
  folder: pathlib.Path,
  row: str,
  changes: Mapping[str, Any],
  seed: int,
) -> Cell:
  from experiments.systems import parse_config

  workdir, values = folder / f"{slug(row)}-seed{seed}", flatten(file.config)
  values = {key: values[key] for key in file.given} | changes | dict(seed=seed)
  arguments = [
    f"--config={file.name}",
    *(f"--config.{key}={x}" for key, x in values.items()),
  ]
  try:
    config = command.parse(dict(config=command.CONFIG), arguments)["config"]
    parse_config(config, num_devices=0)  # the cell may run elsewhere
  except InputError as error:
    raise InputError(f"row {row!r}: {error}") from error
  words = (*TRAIN, *arguments, f"--workdir={workdir}")
  return Cell(row, seed, digest(own_values(config)), workdir, words)


def collect_records(
  path: pathlib.Path, cells: Sequence[Cell]
) -> dict[Key, dict[str, Any]]:
  """Writes the records of a sweep to its results file and returns them; see `find_records`."""
  command.make_folder(path.parent, "results")
  if records := find_records(path, cells):
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
  lines, found = read_records(path), {}
  own = {(record["row"], record["seed"]): record for record in lines}
  if len(own) < len(lines):
    raise InputError(f"{path} has two lines of one row and seed: delete one of them")
  files = record_files(path.parent)
  own_name = path.name.partition(".jsonl")[0]
  files.pop(own_name, None)
  others = {
    x["digest"]: (file, x)
    for _, file in sorted(files.items())
    for x in read_records(file)
  }
  for cell in cells:
    if own.get(cell.key, {}).get("digest", cell.digest) != cell.digest:
      raise InputError(
        f"{path} has {cell.row!r}, seed {cell.seed}, with another config, or by "
        "older code: delete that line, or give another --results or --config.name"
      )
    here = [
      x
      for x in read_records(cell.workdir / "record.json")
      if x["digest"] == cell.digest
    ]
    record = [own.pop(cell.key, None), *here][-1]
    if not record and cell.digest in others:
      file, record = others[cell.digest]
      note = f"{cell.workdir.name} is {record['row']!r}, seed {record['seed']}, of {file.name}"
      print(note, file=sys.stderr)  # on stdout --dry_run has commands
    if record:
      found[cell.key] = {**record, "sweep": own_name, "row": cell.row}
  return found | own


def _train(
  waiting: Sequence[Cell], parallel: int, collect: Callable[[], Mapping]
) -> None:
  """Trains cells on this machine; collects the records whenever a training ends."""
  queue, running, start = collections.deque(waiting), {}, time.monotonic()

  def report(cell: Cell, state: str, note: str = "") -> None:
    counts = f"{len(running)} running, {len(queue)} waiting"
    print(f"{cell.workdir.name}: {state} ({counts}{note})", file=sys.stderr, flush=True)

  try:
    while queue or running:
      for share in range(parallel):
        if queue and share not in running:
          cell = queue.popleft()
          running[share] = cell, _start(cell, share, parallel)
          report(cell, "running")
      time.sleep(_POLL_SECONDS)
      for share, (cell, process) in [*running.items()]:
        if process.poll() is None:
          continue
        del running[share]
        unfinished = len(queue) + len(running)
        seconds = (time.monotonic() - start) / (len(waiting) - unfinished) * unfinished
        if cell.key in collect():
          report(
            cell, "finished", f", {datetime.timedelta(seconds=round(seconds))} left"
          )
        else:
          log = (
            cell.file(".log").read_text(encoding="utf-8", errors="replace").splitlines()
          )
          lines = [f"exit status {process.returncode}", *log[-40:]]
          write_whole(cell.file(".error.txt"), "".join(f"{line}\n" for line in lines))
          report(cell, "failed")
  finally:
    for _, process in running.values():
      process.terminate()
    for _, process in running.values():
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_SAVE_SECONDS)
      process.kill()  # one that hangs
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
      words += [
        "taskset",
        "--cpu-list",
        ",".join(map(str, cores[share::parallel] or cores)),
      ]
  words += [sys.executable, *cell.command[1:]]
  with open(cell.file(".log"), "wb") as log:
    return subprocess.Popen(
      words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
    )


if __name__ == "__main__":
  command.run(main, FLAGS)
