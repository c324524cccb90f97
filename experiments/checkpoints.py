r"""Lists the checkpoints of a run, verifies that they are what was saved, and deletes old ones.

  python -m experiments.checkpoints --workdir=runs/mine
  python -m experiments.checkpoints --workdir=runs/mine --verify
  python -m experiments.checkpoints --workdir=runs/mine --prune=3
  python -m experiments.checkpoints --workdir=runs/mine --prune=3 --damaged

A line a checkpoint: its step, date, bytes and state. `--verify` reads every array and compares it
with the digest that was saved with it; it renames and deletes nothing. `--prune=N` verifies them
from the newest on, keeps the newest N good ones and deletes those that are older; where fewer are
good it deletes none. Damaged ones that are newer stay, and what training set aside
(`damaged-STEP`, with its `reason.txt`) too, unless `--damaged` is given and one is good.

Exit status: 0; 1 if a damaged checkpoint is there; 2 for bad input. It runs on the CPU and leaves
accelerators to others; it can be used while the run goes on.
"""

import datetime
import pathlib
import shutil
import sys
from typing import NamedTuple

import jax

from experiments import command
from relpos_jax.errors import InputError
from relpos_jax.training import checkpoint_files
from relpos_jax.training.checkpoint import Checkpoints
from relpos_jax.training.checkpoint_reader import Reader
from relpos_jax.training.manifest import Damage

FLAGS = dict(
  workdir=command.Flag(None, "the run's folder"),
  verify=command.Flag(False, "read every array and compare it with its digest"),
  prune=command.Flag(0, "keep so many of the newest good checkpoints, delete older ones"),
  damaged=command.Flag(False, "with --prune: delete damaged and set-aside ones too"),
)


class Row(NamedTuple):
  """A checkpoint's folder and what is known of it; `is_good` is None of one that was not read."""

  path: pathlib.Path
  is_good: bool | None
  state: str


def main(workdir: str, verify: bool, prune: int, damaged: bool) -> None:
  """Lists, and deletes where it is told to."""
  if prune < 0 or (damaged and not prune):
    raise InputError("--prune wants 1 or more: so many good checkpoints are kept")
  folder = pathlib.Path(workdir, "checkpoints")
  if not checkpoint_files.list_steps(folder) and not checkpoint_files.list_damaged(folder):
    raise InputError(f"no checkpoints in {folder}: give the --workdir of a run")
  jax.config.update("jax_platforms", "cpu")  # Accelerators may be busy with the run itself.
  with Checkpoints(folder) as checkpoints:
    rows = _rows(checkpoints, prune or (verify and sys.maxsize))
  for path in _to_delete(rows, prune, damaged) if prune else ():
    rows = [row for row in rows if row.path != path]
    print(f"deleted {path} ({_delete(path):,} bytes)")
  _print(rows)
  if any(row.is_good is False for row in rows):
    sys.exit(1)


def _rows(checkpoints: Checkpoints, num_good: int) -> list[Row]:
  """Newest first; read until `num_good` are found to be good. Those set aside come last."""
  rows = []
  for step in reversed(checkpoints.steps()):
    path = checkpoints.folder / str(step)
    is_enough = sum(row.is_good is True for row in rows) >= num_good
    rows.append(Row(path, None, "not read") if is_enough else _examined(path))
  aside = checkpoint_files.list_damaged(checkpoints.folder)
  return rows + [Row(path, False, f"set aside: {reason}") for path, reason in aside.items()]


def _examined(path: pathlib.Path) -> Row:
  try:
    return Row(path, True, Reader(path.parent).examine(int(path.name)))
  except Damage as damage:
    return Row(path, False, f"damaged: {damage}")


def _to_delete(rows: list[Row], num: int, damaged: bool) -> list[pathlib.Path]:
  """Those not read, where `num` are good; the damaged, where any is good and the user says so."""
  num_good = sum(row.is_good is True for row in rows)
  if num_good < num:
    print(f"{num_good} good: fewer than {num}, none of them is deleted")
  old = [row.path for row in rows if row.is_good is None and num_good >= num]
  bad = [row.path for row in rows if row.is_good is False and damaged and num_good]
  return old + bad


def _delete(path: pathlib.Path) -> int:
  try:
    size = checkpoint_files.num_bytes(path)
    shutil.rmtree(path)
  except OSError as error:
    raise InputError(f"cannot delete {path} ({error.strerror}): see to its permissions") from error
  return size


def _print(rows: list[Row]) -> None:
  for row in rows:
    try:
      size, seconds = checkpoint_files.num_bytes(row.path), row.path.stat().st_mtime
    except FileNotFoundError:  # The run has deleted it meanwhile.
      continue
    date = datetime.datetime.fromtimestamp(seconds).isoformat(" ", "minutes")
    print(f"{row.path.name:>12}  {date}  {size:>15,} bytes  {row.state}")


if __name__ == "__main__":
  command.run(main, FLAGS)
