"""The cells of a sweep: its rows times its seeds, each a training with its own command."""

import functools
import hashlib
import math
import pathlib
import re
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments import command
from experiments.validation import validate
from experiments.values import flatten, own_values
from relpos_jax.errors import InputError
from relpos_jax.evaluation.record import digest, from_line

TRAIN = ("python", "-m", "experiments.train")
_LONGEST_JOB_NAME = 40  # of xpk; Kubernetes itself and SLURM take longer ones


class Cell(NamedTuple):
  """One training of a sweep."""

  name: str  # the row's and the seed, fit for files and jobs
  row: str
  seed: int
  digest: str  # of its config
  num_steps: int
  workdir: pathlib.Path
  command: tuple[str, ...]

  def beside(self, ending: str) -> pathlib.Path:
    """A file of the cell's next to its folder, which is the run's alone."""
    return self.workdir.with_name(self.name + ending)


def plan_cells(file: command.ConfigFile, num_seeds: int, out: pathlib.Path) -> list[Cell]:
  """The cells in the order they run: every row with the first seed, then with the next.

  The first seed is the config's. A cell's folder is OUT/SWEEP/CELL, where SWEEP is the name of the
  config.

  Raises:
    InputError: the file has no rows, or all of them override a change of the user's; a cell's
      config is not valid, or two cells have one name or one config. Names the cells.
  """
  if num_seeds < 1:
    raise InputError(f"--seeds={num_seeds}: give at least 1")
  rows = _rows(file)
  _check_changes(file, rows)
  first = file.config.seed
  make = functools.partial(_cell, file, _changes_by_user(file), out / sweep_name(file))
  cells = [make(*row, seed) for seed in range(first, first + num_seeds) for row in rows]
  _check_distinct(cells[: len(rows)])
  for cell in [*cells[: len(rows)], cells[-1]]:  # the last seed may be too large
    _check_valid(cell)
  return cells


def sweep_name(file: command.ConfigFile) -> str:
  """What its results file, folder and jobs are called.

  Raises:
    InputError: nothing is left of the config's name.
  """
  if name := slug(file.config.name):
    return name
  raise InputError(
    f"config.name is {file.config.name!r}: give a --config.name with a letter or digit in it"
  )


def slug(text: str) -> str:
  """Lower-case letters, digits and single hyphens, as SLURM's and Kubernetes' names have them.

  >>> slug("relative, k=16")
  'relative-k-16'
  """
  return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _rows(file: command.ConfigFile) -> list[tuple[str, dict[str, Any]]]:
  path = file.name.partition(":")[0]
  if not hasattr(file.module, "sweep"):
    raise InputError(f"{path} has no sweep(), a generator of (row, changes): see configs/table1.py")
  try:
    rows = [*file.module.sweep()]
  except Exception as error:
    raise command.mistake_in(path, error) from error
  if not rows:
    raise InputError(f"{path}: sweep() has no rows")
  for row in rows:
    match row:
      case (str(name), dict()) if slug(name):
        continue
    raise InputError(
      f"{path}: sweep() yields {row!r}: give a row's name, with a letter or digit in it, and its "
      'changes, as in ("k=4", {"model.max_distance": 4})'
    )
  return rows


def _check_changes(file: command.ConfigFile, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
  """No change may be lost: rows override what the user gives, and the sweep the seeds of rows."""
  path = file.name.partition(":")[0]
  for row, changed in rows:
    if "seed" in changed:
      raise InputError(
        f"{path}: row {row!r} has a seed, which is the sweep's: give --config.seed and --seeds"
      )
  for key in file.given:
    if all(key in changed for _, changed in rows):
      raise InputError(
        f"--config.{key} reaches no cell: every row of {path} has a value of its own: leave it "
        "out, or change sweep() there"
      )


def _changes_by_user(file: command.ConfigFile) -> dict[str, Any]:
  """What --config.KEY=VALUE gave."""
  values = flatten(file.config)
  return {key: values[key] for key in file.given}


def _cell(
  file: command.ConfigFile,
  changes_of_all: dict[str, Any],
  folder: pathlib.Path,
  row: str,
  changes_of_row: dict[str, Any],
  seed: int,
) -> Cell:
  name = f"{slug(row)}-seed{seed}"
  values = changes_of_all | changes_of_row | dict(seed=seed)
  arguments = [f"--config={file.name}", *(f"--config.{key}={x}" for key, x in values.items())]
  config = _parse(name, arguments)
  return Cell(
    name,
    row,
    seed,
    digest(own_values(config)),
    config.training.num_steps,
    folder / name,
    (*TRAIN, *arguments, f"--workdir={folder / name}"),
  )


def _parse(name: str, arguments: Sequence[str]):
  """The config as the training will have it."""
  try:
    return command.parse(dict(config=command.CONFIG), arguments)["config"]
  except InputError as error:
    raise InputError(f"cell {name}: {error}") from error


def _check_distinct(cells: Sequence[Cell]) -> None:
  for i, cell in enumerate(cells):
    for other in cells[:i]:
      if cell.name == other.name:
        raise InputError(f"two cells are called {cell.name}: rows {other.row!r} and {cell.row!r}")
      if cell.digest == other.digest:
        raise InputError(f"rows {other.row!r} and {cell.row!r} have the same config: keep one")


def _check_valid(cell: Cell) -> None:
  """On as many devices as its mesh names: those here are not the training's."""
  config = _parse(cell.name, cell.command[len(TRAIN) : -1])
  try:
    validate(config, math.prod(size for size in config.mesh.values() if size > 0))
  except InputError as error:
    raise InputError(f"cell {cell.name}: {error}") from error


def submission(template: str, sweep: str, cell: Cell) -> list[str]:
  """The words of the command that hands a cell to a cluster.

  Raises:
    InputError: the template has no {command}, other braces, or quotes that do not end.

  >>> cell = Cell("k-4-seed0", "k=4", 0, "", 1, pathlib.Path("runs/a"), ("python", "train.py"))
  >>> submission("sbatch --job-name={name} --wrap={command}", "table2", cell)
  ['sbatch', '--job-name=table2-k-4-seed0', '--wrap=python train.py']
  """
  values = dict(name=_job_name(sweep, cell), command=shlex.join(cell.command))
  try:
    words = [word.format_map(values) for word in shlex.split(template)]
    if "{command}" not in template:
      raise ValueError("no {command}")
  except (LookupError, ValueError, AttributeError) as error:
    raise InputError(
      f"--submit={template} ({error}): give a command with {{command}} and {{name}} in it, "
      "as in 'sbatch --job-name={name} --wrap={command}'"
    ) from error
  return words


def _job_name(sweep: str, cell: Cell) -> str:
  """As it is, or shortened to what xpk takes, with some letters of a digest and the seed."""
  name = f"{sweep}-{cell.name}"
  if len(name) <= _LONGEST_JOB_NAME:
    return name
  end = f"-{hashlib.sha256(name.encode()).hexdigest()[:6]}-seed{cell.seed}"
  return name[: _LONGEST_JOB_NAME - len(end)].rstrip("-") + end


def own_record(cell: Cell) -> dict[str, Any] | None:
  """The record in a cell's folder, if its training is finished; not one of another config."""
  try:
    record = from_line(cell.workdir.joinpath("record.json").read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return None
  return record if record["digest"] == cell.digest else None
