"""Locks a folder in a bucket with an object that its holder renews."""

import contextlib
import datetime
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator

from experiments.errors import InputError
from experiments.files import Path, checking_bucket, read_version, write_version

_RENEW_SECONDS = 10.0
_STALE_SECONDS = 120.0  # without a change of the object, after which its holder must be dead


@contextlib.contextmanager
def lock_in_bucket(folder: Path, flag: str) -> Iterator[None]:
  """Locks the folder in a bucket that a flag names.

  The lock is an object that is created if there is none, and renewed in a thread. One that does not
  change for two minutes was left by a process that was killed: it is replaced if it is still the
  same then. No clocks are compared. A process whose lock was replaced, since it did not run or
  reach the bucket for so long, ends with status 2.

  Raises InputError: another process holds the lock, or the bucket cannot be used.
  """
  lock, released = _Lock(folder), threading.Event()
  with checking_bucket(folder):
    _acquire(lock, flag)
  thread = threading.Thread(target=_renew, args=(lock, released), daemon=True)
  thread.start()
  try:
    yield
  finally:
    released.set()
    thread.join()
    with contextlib.suppress(Exception):  # what is left of it becomes stale
      if lock.write(lock.version):  # nobody replaces it now
        lock.path.unlink()


def _acquire(lock: "_Lock", flag: str) -> None:
  seen, since, is_told = None, 0.0, False
  while True:
    version, content = lock.read()
    waited = time.monotonic() - since
    if version is None or (version == seen and waited > _STALE_SECONDS):
      if lock.write(version):
        return
    elif seen is None:
      seen, since = version, time.monotonic()
    elif version != seen:
      raise InputError(
        f"another command is using {lock.folder} ({content.get('holder')}): wait for it, or give "
        f"another --{flag}"
      )
    elif waited > 2 * _RENEW_SECONDS and not is_told:
      is_told = True
      print(
        f"{lock.folder} is locked by {content.get('holder')}, last at {content.get('time')}: it is "
        f"taken over unless that shows within {_STALE_SECONDS:.0f} seconds",
        file=sys.stderr,
      )
    time.sleep(_RENEW_SECONDS / 10)


def _renew(lock: "_Lock", released: threading.Event) -> None:
  while not released.wait(_RENEW_SECONDS):
    try:
      if lock.write(lock.version) or lock.version is None:
        continue
      _, content = lock.read()
    except Exception:  # the bucket is out of reach; the lock may still be held
      continue
    print(
      f"error: {content.get('holder')} has taken over {lock.folder}, since this process did not "
      "renew its lock: wait for it",
      file=sys.stderr,
      flush=True,
    )
    os._exit(2)  # before anything else is written there


class _Lock:
  """The object `.lock` in a folder of a bucket."""

  def __init__(self, folder: Path):
    self.folder, self.path = folder, folder / ".lock"
    self.version: str | None = None  # the one that was written last
    self._holder = f"{socket.gethostname()}, process {os.getpid()}"
    self._token = secrets.token_hex(8)

  def read(self) -> tuple[str | None, dict]:
    """Returns the version and content of the object; (None, {}) if there is none."""
    version, content = read_version(self.path)
    return version, json.loads(content or b"{}")

  def write(self, version: str | None) -> bool:
    """Writes the object if it has this version, None if there is none; returns whether it did."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    content = json.dumps(dict(holder=self._holder, time=date, token=self._token))
    try:
      self.version = write_version(self.path, content.encode(), version)
      return True
    except Exception:
      # The errors differ by store. A request that was sent again fails after it had succeeded.
      now, found = self.read()
      if now == version:
        raise
      if (is_own := found.get("token") == self._token) or now is None:
        self.version = now
      return is_own
