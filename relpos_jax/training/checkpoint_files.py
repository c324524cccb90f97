"""The files of a checkpoint folder: steps, damaged steps, access and free space."""

import errno
import json
import os
import pathlib
import re
import shutil

from relpos_jax.errors import InputError

# Messages of failed writes: disk full, quota exceeded, file size limit.
_NO_ROOM = re.compile("No space left on device|Disk quota exceeded|File too large")
_NO_ROOM_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_path(folder: pathlib.Path) -> None:
  """Raises InputError for a path with one of `[*?\\` or without UTF-8, which Orbax cannot read."""
  path = str(folder.absolute())
  shown = path.encode(errors="backslashreplace").decode()
  found = re.search(r"[*?\\\[]", path)
  if found or shown != path:
    reason = f"the path holds {found[0]!r}" if found else "the path is not UTF-8"
    raise InputError(f"cannot keep checkpoints in {shown}: {reason}: give another --workdir")


def list_steps(folder: pathlib.Path) -> list[int]:
  """Returns the steps that have a folder, in order; links to folders do not count.

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
  """Returns the folders of saves that are in progress or were interrupted.

  >>> list_unfinished(pathlib.Path("nowhere"))
  []
  """
  return sorted(folder.glob(f"{step}.orbax-checkpoint-tmp*"))


def mark_damaged(path: pathlib.Path, reason: str) -> pathlib.Path:
  """Renames the folder of a step to `damaged-STEP`, adds the reason and returns the new path.

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
  """Returns the folders that were renamed as damaged, each with its reason."""
  paths = [path for path in _folders(folder) if re.match(r"damaged-\d", path.name)]
  return {path: _reason(path / "reason.txt") for path in paths}


def _reason(file: pathlib.Path) -> str:
  try:
    return " ".join(file.read_text(encoding="utf-8").split())
  except (OSError, ValueError):
    return "no reason is on file"


def is_foreign(path: pathlib.Path) -> bool:
  """Returns whether another program saved a checkpoint, from the names that Orbax records."""
  try:
    metadata = json.loads((path / "_CHECKPOINT_METADATA").read_text(encoding="utf-8"))
    return "manifest" not in (metadata["item_handlers"] or {})
  except (OSError, ValueError, KeyError, TypeError):
    return False


def check_access(path: pathlib.Path) -> None:
  """Raises InputError for a file or folder of a checkpoint that exists and cannot be opened."""

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
  """Returns the error for a checkpoint, or a folder of them, that cannot be opened."""
  return InputError(
    f"cannot read {path} ({error.filename}: {error.strerror}): see to its permissions, or to its "
    "disk"
  )


def num_bytes(path: pathlib.Path) -> int:
  """Returns the total size of all files in a folder."""
  return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def check_room(folder: pathlib.Path, needed: int) -> None:
  """Raises InputError unless the file system has `needed` bytes left for the folder."""
  if _free(folder) < needed:
    raise no_room(folder, needed)


def no_room(folder: pathlib.Path, needed: int) -> InputError:
  """Returns the error for a checkpoint that does not fit on the disk."""
  return InputError(
    f"no room for a checkpoint in {folder}: it needs {needed:,} bytes, {_free(folder):,} are free: "
    "make room and go on with the same command; the checkpoints there are stay good"
  )


def _free(folder: pathlib.Path) -> int:
  """Returns the free bytes of the folder's file system; the folder need not exist."""
  existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
  return shutil.disk_usage(existing).free


def is_no_room(error: BaseException) -> bool:
  """Returns whether a write failed because the disk or the user's quota is full."""
  return getattr(error, "errno", None) in _NO_ROOM_CODES or bool(_NO_ROOM.search(str(error)))
