r"""Lists and verifies the checkpoints of a run, and deletes old ones.

  python -m experiments.checkpoints --workdir=runs/mine
  python -m experiments.checkpoints --workdir=runs/mine --verify
  python -m experiments.checkpoints --workdir=runs/mine --prune=3
  python -m experiments.checkpoints --workdir=runs/mine --prune=3 --damaged

Prints one line per checkpoint: step, date, bytes and state. `--verify` compares every array with
its digest, and renames and deletes nothing. `--prune=N` verifies from the newest checkpoint on,
keeps the newest N good ones and deletes older ones; if fewer are good, it deletes none. Damaged
checkpoints, including those that training renamed to `damaged-STEP` (see their `reason.txt`), are
kept unless `--damaged` is given and at least one checkpoint is good.

Exit status: 0; 1 if there is a damaged checkpoint; 2 for bad input. The command uses the CPU only
and may run during training.
"""

import datetime
import pathlib
import shutil
import sys
from typing import NamedTuple

import jax

from experiments import command
from relpos_jax.errors import InputError
from relpos_jax.training.checkpoint import Checkpoints
from relpos_jax.training.checkpoint_reader import examine
from relpos_jax.training.manifest import Damage
from relpos_jax.training.workdir import list_damaged, list_steps

FLAGS = dict(
  workdir=command.Flag(None, "the run's folder"),
  verify=command.Flag(False, "read every array and compare it with its digest"),
  prune=command.Flag(0, "keep so many of the newest good checkpoints, delete older ones"),
  damaged=command.Flag(False, "with --prune: delete damaged ones too"),
)


class Row(NamedTuple):
  """A checkpoint's folder and its state; `is_good` is None if it was not read."""

  path: pathlib.Path
  is_good: bool | None
  state: str


def main(workdir: str, verify: bool, prune: int, damaged: bool) -> None:
  """Lists checkpoints, and deletes old ones with --prune."""
  if prune < 0 or (damaged and not prune):
    raise InputError("--prune must be 1 or more: the number of good checkpoints to keep")
  folder = pathlib.Path(workdir, "checkpoints")
  if not list_steps(folder) and not list_damaged(folder):
    raise InputError(f"no checkpoints in {folder}: give the --workdir of a run")
  jax.config.update("jax_platforms", "cpu")  # The run may be using the accelerators.
  with Checkpoints(folder) as checkpoints:
    rows = _rows(checkpoints, prune or (verify and sys.maxsize))
  for path in _to_delete(rows, prune, damaged) if prune else ():
    rows = [row for row in rows if row.path != path]
    print(f"deleted {path} ({_delete(path):,} bytes)")
  _print(rows)
  if any(row.is_good is False for row in rows):
    sys.exit(1)


def _rows(checkpoints: Checkpoints, num_good: int) -> list[Row]:
  """Returns rows newest first, read until `num_good` are good; renamed ones come last."""
  rows = []
  for step in reversed(checkpoints.steps()):
    path = checkpoints.folder / str(step)
    is_enough = sum(row.is_good is True for row in rows) >= num_good
    rows.append(Row(path, None, "not read") if is_enough else _examined(path))
  damaged = list_damaged(checkpoints.folder).items()
  return rows + [Row(path, False, f"damaged: {reason}") for path, reason in damaged]


def _examined(path: pathlib.Path) -> Row:
  try:
    return Row(path, True, examine(path))
  except Damage as damage:
    return Row(path, False, f"damaged: {damage}")


def _to_delete(rows: list[Row], num: int, damaged: bool) -> list[pathlib.Path]:
  """Returns those not read if `num` are good, and with `damaged` the damaged if any is good."""
  num_good = sum(row.is_good is True for row in rows)
  if num_good < num:
    print(f"{num_good} good: fewer than {num}, none of them is deleted")
  old = [row.path for row in rows if row.is_good is None and num_good >= num]
  bad = [row.path for row in rows if row.is_good is False and damaged and num_good]
  return old + bad


def _num_bytes(path: pathlib.Path) -> int:
  return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _delete(path: pathlib.Path) -> int:
  try:
    size = _num_bytes(path)
    shutil.rmtree(path)
  except OSError as error:
    raise InputError(f"cannot delete {path} ({error.strerror}): see to its permissions") from error
  return size


def _print(rows: list[Row]) -> None:
  for row in rows:
    try:
      size, seconds = _num_bytes(row.path), row.path.stat().st_mtime
    except FileNotFoundError:  # The run deleted it meanwhile.
      continue
    date = datetime.datetime.fromtimestamp(seconds).isoformat(" ", "minutes")
    print(f"{row.path.name:>12}  {date}  {size:>15,} bytes  {row.state}")


if __name__ == "__main__":
  command.run(main, FLAGS)
