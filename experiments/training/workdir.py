"""The run directory: its config and its folder of checkpoints."""

import contextlib
import errno
import itertools
import json
import os
import pathlib
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.config import flatten
from experiments.errors import InputError
from experiments.files import Path, checking_bucket, in_bucket, rename, write_whole
from experiments.training import processes
from experiments.training.environment import environment

# Keys, or groups of keys, that may change when a run is resumed, since no step depends on them.
MAY_CHANGE = ("mesh", "data.pairs.test", "decoding", "evaluation")
MAY_CHANGE += ("training.num_steps", "training.eval_every", "training.save_every")
MAY_CHANGE += ("training.keep_checkpoints", "training.num_samples", "training.max_skipped")

COMPLETE = "commit_success.txt"  # the last file of a step in a bucket, written by Orbax into gs://
_SHARED_SECONDS = 10  # until a file appears on a network file system


def claim_workdir(
  workdir: Path, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> bool:
  """Returns whether a folder holds a run with this config, to be resumed; writes nothing.

  Only the keys of `MAY_CHANGE` may differ from the config of the run. Keys added since the run was
  started are compared with their `defaults`. Hidden files are ignored.

  Raises:
    InputError: the folder holds a run with another config or other files, cannot be made or
      written, or has a path under which Orbax cannot keep checkpoints.
  """
  check_path(workdir)
  try:
    paths = (workdir, *workdir.absolute().parents)
    nearest = workdir if in_bucket(workdir) else next(path for path in paths if path.exists())
    files = [path.name for path in list_folder(nearest) if not path.name.startswith(".")]
  except OSError as error:
    raise InputError(f"cannot use {workdir} ({error.strerror}): give another --workdir") from error
  check_writable(nearest)
  if nearest != workdir:
    return False
  if "config.json" not in files:
    if files:
      raise InputError(
        f"{workdir} holds {files[0]!r} but no run: give --workdir a new or empty folder"
      )
    return False
  old = flatten(defaults or {}) | flatten(read_json(workdir / "config.json"))
  new = flatten(config)
  for name in new | old:
    before, now = (json.dumps(c[name]) if name in c else "absent" for c in (old, new))
    if before != now and not any(f"{name}.".startswith(f"{key}.") for key in MAY_CHANGE):
      raise InputError(
        f"{workdir} holds the run of another config: {name} is {before} there and {now} here: "
        "give another --workdir, or delete that folder"
      )
  return True


def check_shared(workdir: Path) -> None:
  """Raises InputError unless each process sees what the first has written; all must call this."""
  processes.wait_for_all("written")
  until = time.monotonic() + _SHARED_SECONDS

  # Listing a folder asks the file server; looking up a file may use a stale cache.
  def found():
    return workdir / "config.json" in list_folder(workdir)

  while not (is_seen := found()) and time.monotonic() < until:
    time.sleep(0.1)
  if processes.any_process(not is_seen):
    raise InputError(
      f"{workdir} is not one folder for all processes: give a --workdir that they share"
    )


def check_writable(folder: Path, remedy: str = "give a --workdir that you may write to") -> None:
  """Raises InputError unless the folder is writable; in a bucket, by writing a file."""
  if in_bucket(folder):
    with checking_bucket(folder):
      (new := folder / f".{time.time_ns()}").write_bytes(b"")
      new.unlink(missing_ok=True)
  elif not os.access(folder, os.W_OK):
    raise InputError(f"cannot write into {folder}: {remedy}")


def list_folder(folder: Path) -> list[Path]:
  """Lists a folder, which may be missing; raises InputError if a bucket cannot be listed."""
  with checking_bucket(folder), contextlib.suppress(FileNotFoundError):
    return sorted(path for path in folder.iterdir() if path != folder)  # a bucket's empty folder
  return []


def read_json(path: Path) -> dict[str, Any]:
  """Reads a JSON file of a run directory; raises InputError if it cannot be read."""
  try:
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
      raise ValueError("not a JSON object")
    return content
  except (OSError, ValueError) as error:
    raise InputError(
      f"cannot read {path} ({error}): restore it, or name another run's folder"
    ) from error


def write_run_files(workdir: Path, config: Mapping[str, Any]) -> None:
  """Writes config.json and environment.json at each start of a run; makes the folder if needed."""
  workdir.mkdir(parents=True, exist_ok=True)
  for name, content in (("config", config), ("environment", environment())):
    text = json.dumps(content, indent=2, ensure_ascii=False)
    write_whole(workdir / f"{name}.json", text + "\n")


# The folder of checkpoints ------------------------------------------------------------------------


def check_path(folder: Path) -> None:
  """Raises InputError for a path with one of `[*?\\`, where Orbax cannot read what it saves."""
  if found := re.search(r"[*?\\\[]", str(folder if in_bucket(folder) else folder.absolute())):
    raise InputError(
      f"cannot keep checkpoints in {folder}: its path holds {found[0]!r}: give another --workdir"
    )


def list_steps(folder: Path) -> list[int]:
  """Returns the steps that have a complete folder, in order; links to folders do not count."""
  names = (path.name for path in _folders(folder))
  return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def check_not_lost(workdir: Path, lines: Sequence[Mapping[str, Any]]) -> None:
  """Raises InputError where checkpoints are lost, for example because a disk is not mounted.

  A step after the first save, or an evaluation at it, is in the `lines` of metrics.jsonl only once
  that save is complete.
  """
  folder = workdir / "checkpoints"
  if not lines or any(found(folder) for found in (list_steps, list_damaged, list_unfinished)):
    return
  first = read_json(workdir / "config.json")["training"]["save_every"]
  is_past = any(line["step"] >= first + ("valid_loss" not in line) for line in lines)
  if is_past or not (in_bucket(folder) or folder.is_dir()):
    raise InputError(
      f"the checkpoints in {folder} are gone, and the run has reached step {lines[-1]['step']}: "
      f"bring that folder back, or delete {workdir} to start again"
    )


def list_damaged(folder: Path) -> dict[Path, str]:
  """Returns the folders that were renamed as damaged, each with its reason."""
  paths = [path for path in _folders(folder) if re.match(r"damaged-\d", path.name)]

  def read(file):
    return file.read_bytes() if file.exists() else b"unknown"

  return {path: read(path / "reason.txt").decode(errors="replace").strip() for path in paths}


def list_unfinished(folder: Path) -> list[Path]:
  """Returns the folders of saves that are in progress or were interrupted."""
  return sorted(folder.glob("*.orbax-checkpoint-tmp*"))


def _folders(folder: Path) -> list[Path]:
  def is_complete(path):
    return path / COMPLETE in list_folder(path)

  def is_folder(path):
    return path.is_dir() and not path.is_symlink()

  return list(filter(is_complete if in_bucket(folder) else is_folder, list_folder(folder)))


def mark_damaged(path: Path, reason: str) -> Path:
  """Renames the folder of a step to `damaged-STEP`, adds the reason and returns the new path."""
  suffixes = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
  paths = (path.with_name(f"damaged-{path.name}{suffix}") for suffix in suffixes)
  rename(path, new := next(path for path in paths if not path.exists()))
  write_whole(new / "reason.txt", f"{reason}\n")
  return new


def check_room(folder: pathlib.Path, needed: int) -> None:
  """Raises InputError unless the file system has `needed` bytes left for the folder."""
  existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
  if (free := shutil.disk_usage(existing).free) < needed:
    raise InputError(
      f"no room for a checkpoint in {folder}: it needs {needed:,} bytes, {free:,} are free: "
      "free disk space and run the same command again"
    )


def write_refusal(error: BaseException, what: object) -> InputError | None:
  """Returns the error of a write to a disk that is full or read-only; None for another error."""
  remedies = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free disk space")
  for code, remedy in (remedies | {errno.EROFS: "make the disk writable"}).items():
    if getattr(error, "errno", None) == code or os.strerror(code) in str(error):  # as Orbax says it
      reason = f"cannot write {what} ({os.strerror(code)})"
      return InputError(f"{reason}: {remedy} and run the same command again")
  return None
