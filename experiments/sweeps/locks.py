"""Locks of folders, which the kernel frees when their process ends, however it ends."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from relpos_jax.errors import InputError


@contextlib.contextmanager
def alone_in(folder: pathlib.Path) -> Iterator[None]:
  """Keeps every other sweep out of a sweep's folder.

  Where the file system has no locks, it says so and goes on.

  Raises:
    InputError: another sweep is in it, or the file of its lock cannot be opened.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as name, alone_in(pathlib.Path(name)):
  ...   print(os.listdir(name))
  ['.lock']
  """
  try:  # A file of its own, for writing: no other can be locked over NFS.
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
  except OSError as error:
    raise InputError(f"cannot use {folder}/.lock ({error.strerror}): give another --out") from error
  try:
    _claim(descriptor, folder)
    yield
  finally:
    os.close(descriptor)


def _claim(descriptor: int, folder: pathlib.Path) -> None:
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise InputError(
      f"another sweep is at work in {folder}: wait for it, or give another --out"
    ) from error
  except OSError as error:
    print(f"{folder} cannot be locked ({error.strerror}): start no other sweep in it meanwhile")


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
