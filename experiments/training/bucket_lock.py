"""Locks a folder in a bucket with an object that its holder writes again and again."""

import contextlib
import datetime
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

from experiments.errors import InputError
from experiments.files import Path, checking_bucket

_RENEW_SECONDS = 10.0


@contextlib.contextmanager
def lock_in_bucket(folder: Path, flag: str) -> Iterator[None]:
  """Locks the folder in a bucket that a flag names.

  The lock is an object that a thread renews. One that does not change during three intervals was
  left by a process that was killed. Processes that start within a second may both get the lock.

  Raises InputError: another process holds the lock, or the bucket cannot be used.
  """
  path, released = folder / ".lock", threading.Event()
  holder = f"{socket.gethostname()}, process {os.getpid()}"

  def renew() -> None:
    while not released.wait(_RENEW_SECONDS):
      with contextlib.suppress(Exception):  # the bucket may be out of reach for a while
        write()

  def write() -> None:
    path.write_text(f"{holder}, {datetime.datetime.now(datetime.UTC).isoformat()}")

  with checking_bucket(folder):
    if before := _read(path):
      seconds = 3 * _RENEW_SECONDS
      print(f"waits {seconds:.0f} s for the lock of {folder} ({before})", file=sys.stderr)
      time.sleep(seconds)
      if _read(path) not in (before, ""):
        raise InputError(
          f"another command is using {folder} ({before}): wait for it, or give another --{flag}"
        )
    write()
  thread = threading.Thread(target=renew, daemon=True)
  thread.start()
  try:
    yield
  finally:
    released.set()
    thread.join()
    with contextlib.suppress(Exception):
      path.unlink()


def _read(path: Path) -> str:
  with contextlib.suppress(FileNotFoundError):
    return path.read_text()
  return ""
