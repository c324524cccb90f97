"""A folder of checkpoints as files: its steps, what was set aside of them, and room for more."""

import errno
import json
import os
import pathlib
import re
import shutil

from relpos_jax.errors import InputError

# What a failed write says when there is no room: of the file system, of the user, for one file.
_NO_ROOM = re.compile("No space left on device|Disk quota exceeded|File too large")
_NO_ROOM_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_path(folder: pathlib.Path) -> None:
  """Refuses a path under which Orbax writes checkpoints that it cannot read.

  Orbax takes the absolute path for a pattern of file names, and TensorStore wants UTF-8.

  Raises:
    InputError: the path holds one of `[*?\\`, or is not UTF-8.
  """
  path = str(folder.absolute())
  shown = path.encode(errors="backslashreplace").decode()
  found = re.search(r"[*?\\\[]", path)
  if found or shown != path:
    reason = f"the path holds {found[0]!r}" if found else "the path is not UTF-8"
    raise InputError(f"cannot keep checkpoints in {shown}: {reason}: give another --workdir")


def list_steps(folder: pathlib.Path) -> list[int]:
  """Returns the steps that have a folder, whole or not, in order; a link to a folder is none.

  Raises:
    InputError: there is no access to the folder.

  >>> list_steps(pathlib.Path("nowhere"))
  []
  """
  names = (path.name for path in _folders(folder))
  return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def _folders(folder: pathlib.Path) -> list[pathlib.Path]:
  try:
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in paths if path.is_dir() and not path.is_symlink()]
  except OSError as error:
    raise no_access(folder, error) from error


def list_unfinished(folder: pathlib.Path, step: int | str = "*") -> list[pathlib.Path]:
  """The folders of saves that go on, or were cut short; of one step, if it is given.

  >>> unfinished(pathlib.Path("nowhere"))
  []
  """
  return sorted(folder.glob(f"{step}.orbax-checkpoint-tmp*"))


def mark_damaged(path: pathlib.Path, reason: str) -> pathlib.Path:
  """Renames the folder of a step to `damaged-STEP`, with the reason in a file; returns the new one.

  Raises:
    OSError: it cannot be renamed.
  """
  new = path.with_name(f"damaged-{path.name}")
  count = 1
  while new.exists():
    count += 1
    new = path.with_name(f"damaged-{path.name}-{count}")
  path.rename(new)
  new.joinpath("reason.txt").write_text(f"{reason}\n", encoding="utf-8")
  return new


def list_damaged(folder: pathlib.Path) -> dict[pathlib.Path, str]:
  """The folders that were set aside, each with its reason."""
  paths = [path for path in _folders(folder) if re.match(r"damaged-\d", path.name)]
  return {path: _reason(path / "reason.txt") for path in paths}


def _reason(file: pathlib.Path) -> str:
  try:
    return " ".join(file.read_text(encoding="utf-8").split())
  except (OSError, ValueError):
    return "no reason is on file"


def is_foreign(path: pathlib.Path) -> bool:
  """Whether another program saved a checkpoint: Orbax keeps the names of what was saved."""
  try:
    metadata = json.loads((path / "_CHECKPOINT_METADATA").read_text(encoding="utf-8"))
    return "manifest" not in (metadata["item_handlers"] or {})
  except (OSError, ValueError, KeyError, TypeError):
    return False


def check_access(path: pathlib.Path) -> None:
  """Opens every file of a checkpoint: where one cannot be opened, the checkpoint may be good.

  Raises:
    InputError: names the file or folder. One that is not there is another matter.
  """

  def refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
      raise no_access(path, error) from error

  for folder, _, names in os.walk(path, onerror=refuse):
    for name in names:
      try:
        open(os.path.join(folder, name), "rb").close()
      except OSError as error:
        refuse(error)


def no_access(path: pathlib.Path, error: OSError) -> InputError:
  """Returns the error of a checkpoint, or a folder of them, that cannot be looked into."""
  return InputError(
    f"cannot read {path} ({error.filename}: {error.strerror}): see to its permissions, or to its "
    "disk"
  )


def num_bytes(path: pathlib.Path) -> int:
  """Of all files in a folder."""
  return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def check_room(folder: pathlib.Path, needed: int) -> None:
  """Raises InputError unless the file system has `needed` bytes left for the folder."""
  if _free(folder) < needed:
    raise no_room(folder, needed)


def no_room(folder: pathlib.Path, needed: int) -> InputError:
  """The error of a checkpoint for which there is no room."""
  return InputError(
    f"no room for a checkpoint in {folder}: it needs {needed:,} bytes, {_free(folder):,} are free: "
    "make room and go on with the same command; the checkpoints there are stay good"
  )


def _free(folder: pathlib.Path) -> int:
  """Bytes, of the file system on which the folder is, or would be made."""
  there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
  return shutil.disk_usage(there).free


def is_no_room(error: BaseException) -> bool:
  """Whether a write failed because the disk, or the user's part of it, is full."""
  return getattr(error, "errno", None) in _NO_ROOM_CODES or bool(_NO_ROOM.search(str(error)))
