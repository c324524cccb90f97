"""Plans the cells of a sweep, one training for each row and seed, and collects their records."""

import hashlib
import itertools
import math
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import filelock

from experiments import command
from experiments.config import own_values, validate
from relpos_jax.config import flatten
from relpos_jax.errors import InputError
from relpos_jax.evaluation.records import digest, from_line, read_records, to_line
from relpos_jax.training.workdir import write_whole

TRAIN = ("python", "-m", "experiments.train")
_LONGEST_JOB_NAME = 40  # xpk's limit; Kubernetes and SLURM allow more

Record, Key = dict[str, Any], tuple[str, int]  # a record's key: row and seed


class Cell(NamedTuple):
  """One training of a sweep."""

  name: str  # the row's slug and the seed; names the run directory and the job
  row: str
  seed: int
  digest: str  # of its config
  num_steps: int
  workdir: pathlib.Path
  command: tuple[str, ...]

  @property
  def key(self) -> Key:
    """Returns the row and the seed."""
    return self.row, self.seed

  def file(self, ending: str) -> pathlib.Path:
    """Returns the path of a file beside the run directory, such as CELL.log."""
    return self.workdir.with_name(self.name + ending)

  def record(self) -> Record | None:
    """Returns the record of this config in the run directory, if it has one."""
    try:
      record = from_line(self.workdir.joinpath("record.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
      return None
    return record if record["digest"] == self.digest else None


def plan_cells(file: command.ConfigFile, num_seeds: int, out: pathlib.Path) -> list[Cell]:
  """Returns the cells in the order they run: every row with the config's seed, then with the next.

  Raises:
    InputError: `sweep()` yields no rows or wrong ones, every row overrides a value of the command
      line, or a cell's config is not valid or that of another row.
  """
  rows, first = _rows(file), file.config.seed
  folder = out / slug(file.config.name)
  seeds = range(first, first + num_seeds)
  cells = [_make_cell(file, folder, row, changes, seed) for seed in seeds for row, changes in rows]
  for one, other in itertools.combinations(cells[: len(rows)], 2):
    if one.name == other.name or one.digest == other.digest:
      raise InputError(f"rows {one.row!r} and {other.row!r} have the same name or config: keep one")
  return cells


def slug(text: str) -> str:
  """Returns a text as lower-case letters, digits and single hyphens, for names of jobs.

  >>> slug("relative, k=16")
  'relative-k-16'
  """
  return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _rows(file: command.ConfigFile) -> list[tuple[str, dict[str, Any]]]:
  path = file.name.partition(":")[0]
  if not hasattr(file.module, "sweep"):
    raise InputError(f"{path} has no sweep(), a generator of (row, changes): see configs/table1.py")
  rows = [*file.module.sweep()]
  if not rows:
    raise InputError(f"{path}: sweep() has no rows")
  for row in rows:
    match row:
      case (str(name), dict(changes)) if slug(name) and "seed" not in changes:
        continue
    raise InputError(
      f"{path}: sweep() yields {row!r}: give a row's name and its changes, as in "
      '("k=4", {"model.max_distance": 4}); --config.seed and --seeds set the seeds'
    )
  for key in file.given:
    if all(key in changes for _, changes in rows):
      raise InputError(f"--config.{key} has no effect: every row of sweep() in {path} sets it")
  return rows


def _make_cell(
  file: command.ConfigFile, folder: pathlib.Path, row: str, changes: Mapping[str, Any], seed: int
) -> Cell:
  name, values = f"{slug(row)}-seed{seed}", flatten(file.config)
  values = {key: values[key] for key in file.given} | changes | dict(seed=seed)
  arguments = [f"--config={file.name}", *(f"--config.{key}={x}" for key, x in values.items())]
  try:
    config = command.parse(dict(config=command.CONFIG), arguments)["config"]
    # The cell may run elsewhere: check with as many devices as its mesh has.
    validate(config, math.prod(size for size in config.mesh.values() if size > 0))
  except InputError as error:
    raise InputError(f"cell {name}: {error}") from error
  words = (*TRAIN, *arguments, f"--workdir={folder / name}")
  num_steps = config.training.num_steps
  return Cell(name, row, seed, digest(own_values(config)), num_steps, folder / name, words)


def submission(template: str, sweep: str, cell: Cell) -> list[str]:
  """Returns the words of the command that submits a cell to a cluster.

  Raises:
    InputError: the template lacks {command}, or has other braces or an open quote.

  >>> cell = Cell("k-4-seed0", "k=4", 0, "", 1, pathlib.Path("runs/a"), ("python", "train.py"))
  >>> submission("sbatch --job-name={name} --wrap={command}", "table2", cell)
  ['sbatch', '--job-name=table2-k-4-seed0', '--wrap=python train.py']
  """
  name = f"{sweep}-{cell.name}"
  if len(name) > _LONGEST_JOB_NAME:  # six digits of its hash keep it unique
    end = f"-{hashlib.sha256(name.encode()).hexdigest()[:6]}-seed{cell.seed}"
    name = name[: _LONGEST_JOB_NAME - len(end)].rstrip("-") + end
  values = dict(name=name, command=shlex.join(cell.command))
  try:
    words = [word.format_map(values) for word in shlex.split(template)]
    if "{command}" not in template:
      raise ValueError("no {command}")
  except (LookupError, ValueError) as error:
    raise InputError(
      f"--submit={template} ({error}): give a command with {{command}} and {{name}} in it, "
      "as in 'sbatch --job-name={name} --wrap={command}'"
    ) from error
  return words


def collect_records(path: pathlib.Path, cells: Sequence[Cell]) -> dict[Key, Record]:
  """Writes the records of a sweep to its results file and returns them; see `find_records`."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with filelock.FileLock(path.with_name(".lock")):  # other processes may write the same file
    if records := find_records(path, cells):
      write_whole(path, "".join(map(to_line, records.values())))
  return records


def find_records(path: pathlib.Path, cells: Sequence[Cell]) -> dict[Key, Record]:
  """Returns the records of a sweep from its run directories and its results file.

  Records of equal configs in other sweeps' results count too; their names are printed. Records of
  other rows and seeds in the results file come last.

  Raises:
    InputError: a results file is damaged, or the sweep's own has a record of another config.
  """
  own, found = _read_own(path, cells), {}
  files = [file for file in sorted(path.parent.glob("*.jsonl")) if file != path]
  others = {record["digest"]: (file, record) for file in files for record in read_records(file)}
  for cell in cells:
    here = own.pop(cell.key, None)
    record = cell.record() or here
    if not record and cell.digest in others:
      file, record = others[cell.digest]
      print(f"{cell.name} is {record['row']!r}, seed {record['seed']}, of {file.name}")
    if record:
      found[cell.key] = {**record, "sweep": path.stem, "row": cell.row}
  return found | own


def _read_own(path: pathlib.Path, cells: Sequence[Cell]) -> dict[Key, Record]:
  digests, records = {cell.key: cell.digest for cell in cells}, {}
  for record in read_records(path):
    key = record["row"], record["seed"]
    if key in records or record["digest"] != digests.get(key, record["digest"]):
      raise InputError(
        f"{path} has {key[0]!r}, seed {key[1]}, twice or with another config: delete that line, "
        "or give another --results or --config.name"
      )
    records[key] = record
  return records
