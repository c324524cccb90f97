"""Locks of folders, which the kernel frees when their process ends, however it ends.

Over a network that of a machine that died is free when its server gives the machine up.
"""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator, Sequence

from relpos_jax.errors import InputError


@contextlib.contextmanager
def alone_in(folder: pathlib.Path, work: str = "sweep", flag: str = "out") -> Iterator[None]:
  """Keeps every other sweep, or other work of one kind, out of the folder that a flag names.

  The folder is made if it is not there, and gone again at the end if nothing was put in it. Where
  the file system has no locks, it says so and goes on.

  Raises:
    InputError: another is in it, or the file of its lock cannot be opened.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as name, alone_in(pathlib.Path(name)):
  ...   print(os.listdir(name))
  ['.lock']
  """
  made = [path for path in (folder, *folder.parents) if not path.exists()]
  try:  # A file of its own, for writing: no other can be locked over NFS.
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
  except OSError as error:
    raise InputError(
      f"cannot use {folder}/.lock ({error.strerror}): give another --{flag}"
    ) from error
  try:
    _claim(descriptor, folder, work, flag)
    try:
      yield
    finally:
      _remove(folder / ".lock", made)
  finally:
    os.close(descriptor)


def _claim(descriptor: int, folder: pathlib.Path, work: str, flag: str) -> None:
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.fstat(descriptor).st_nlink:  # Its holder has removed it since it was opened.
      raise BlockingIOError
  except BlockingIOError as error:
    raise InputError(
      f"another {work} is at work in {folder}: wait for it, or give another --{flag}"
    ) from error
  except OSError as error:
    print(f"{folder} cannot be locked ({error.strerror}): start no other {work} in it meanwhile")


def _remove(lock: pathlib.Path, made: Sequence[pathlib.Path]) -> None:
  with contextlib.suppress(OSError):  # as where folders are not empty
    lock.unlink(missing_ok=True)
    for path in made:
      path.rmdir()


@contextlib.contextmanager
def in_turn(folder: pathlib.Path) -> Iterator[None]:
  """One process after the other, each for a moment; leaves no file in the folder."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    with contextlib.suppress(OSError):  # Some file systems lock no folders, NFS among them.
      fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
  finally:
    os.close(descriptor)
