"""Locks a folder for one command at a time."""

import contextlib
import pathlib
from collections.abc import Iterator

import filelock

from relpos_jax.errors import InputError


@contextlib.contextmanager
def lock_folder(folder: pathlib.Path, work: str, flag: str) -> Iterator[None]:
  """Holds the lock of a folder, which is created if missing and removed again if left empty.

  The lock is released when its process ends, even if it is killed.

  Args:
    folder: the folder that the flag names.
    work: "sweep" or "training", for the error.
    flag: the name of the flag.

  Raises:
    InputError: another process holds the lock, or the folder cannot be written.
  """
  path, is_new = folder / ".lock", not folder.exists()
  lock = filelock.FileLock(path, timeout=0)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    lock.acquire()
  except filelock.Timeout as error:
    raise InputError(
      f"another {work} is at work in {folder}: wait for it, or give another --{flag}"
    ) from error
  except OSError as error:
    raise InputError(f"cannot use {folder} ({error.strerror}): give another --{flag}") from error
  try:
    yield
  finally:
    path.unlink(missing_ok=True)
    lock.release()
    if is_new:
      with contextlib.suppress(OSError):  # it is not empty
        folder.rmdir()
