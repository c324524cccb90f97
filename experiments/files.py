"""Reads and atomically writes files, on disks and in buckets, and locks buckets."""

import bz2
import contextlib
import datetime
import errno
import gzip
import hashlib
import importlib.util
import io
import lzma
import os
import pathlib
import re
import secrets
import socket
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import fsspec
from etils import epath

from experiments.errors import InputError

_ZIP = b"PK\x03\x04"
# How content is decompressed, by a pattern of its start.
_DECOMPRESS = {
  rb"\x1f\x8b": gzip.decompress,
  rb"\xfd7zXZ": lzma.decompress,
  rb"BZh[1-9]1AY&SY": bz2.decompress,
}
_PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}  # fsspec's package for each scheme
_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
_RENEW_SECONDS = 10.0  # the interval at which a bucket's lock is renewed

Path = pathlib.Path | epath.Path  # local, or in a bucket


def to_path(name: str | os.PathLike) -> Path:
  """Converts a name to a path on this machine or in a bucket.

  Buckets have names such as gs://bucket/runs/mine or s3://bucket/mine. A leading ~ is
  expanded, because shells leave it as it is in --workdir=~/run.

  Raises InputError if the scheme is unknown, if its package is not installed, or if
  there is no home folder.
  """
  prefix = re.match("([a-z0-9]+):/", os.fspath(name))
  if not prefix:
    try:
      return pathlib.Path(name).expanduser()
    except RuntimeError as error:
      raise InputError(f"cannot use {name}: {error}") from None
  scheme = prefix[1]
  package = _PACKAGES.get(scheme)
  if not package or not os.fspath(name).startswith(f"{scheme}://"):
    raise InputError(
      f"cannot use {name}: give a local path, gs://BUCKET/RUN or s3://BUCKET/RUN"
    )
  if not importlib.util.find_spec(package):
    raise InputError(f"cannot use {name}: pip install {package}")
  # Other processes write into the same folders: a cached listing would be outdated.
  fsspec.config.conf.setdefault(scheme, {})["use_listings_cache"] = False
  # Otherwise epath uses TensorFlow's file system wherever TensorFlow is installed.
  os.environ.setdefault("EPATH_USE_TF", "false")
  return epath.Path(name)


def in_bucket(path: Path) -> bool:
  """Checks whether a path is in a bucket, where files cannot be appended to."""
  return isinstance(path, epath.Path)


@contextlib.contextmanager
def explain_bucket_errors(path: Path) -> Iterator[None]:
  """Turns every error of a bucket into an InputError.

  Each service has exceptions of its own, so all of them are caught.
  """
  try:
    yield
  except Exception as error:
    if not in_bucket(path) or isinstance(error, InputError):
      raise
    reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
    raise InputError(
      f"cannot use {path} ({reason}): check bucket and credentials"
    ) from error


def list_folder(folder: Path) -> list[Path]:
  """Lists a folder, or [] if it is missing; raises InputError if a bucket fails."""
  with explain_bucket_errors(folder), contextlib.suppress(FileNotFoundError):
    # The listing of an empty folder in a bucket contains the folder itself.
    return sorted(path for path in folder.iterdir() if path != folder)
  return []


def check_writable(
  folder: Path, remedy: str = "give a --workdir that you may write to"
) -> None:
  """Raises InputError unless the folder is writable.

  In a bucket, it writes a file and deletes it, since permissions cannot be queried.
  """
  if in_bucket(folder):
    new = folder / f".{time.time_ns()}"
    with explain_bucket_errors(folder):
      new.write_bytes(b"")
      new.unlink(missing_ok=True)
  elif not os.access(folder, os.W_OK):
    raise InputError(f"cannot write into {folder}: {remedy}")


def explain_write_error(error: BaseException, what: object) -> InputError | None:
  """Returns an InputError if `error` means a full or read-only disk; otherwise None.

  `what` names the thing that could not be written.
  """
  for code in (*_FULL, errno.EROFS):
    reason = os.strerror(code)
    # Orbax raises other errors, with the reason in their message.
    if getattr(error, "errno", None) == code or reason in str(error):
      remedy = "free disk space" if code in _FULL else "make the disk writable"
      return InputError(
        f"cannot write {what} ({reason}): {remedy} and run the same command again"
      )
  return None


def upload(folder: pathlib.Path, target: Path) -> None:
  """Copies a local folder and its sub-folders into a bucket."""
  with explain_bucket_errors(target):
    fs, name = fsspec.url_to_fs(str(target))
    fs.put(f"{folder}/", f"{name}/", recursive=True)


def download(folder: Path, target: pathlib.Path) -> None:
  """Copies a folder of a bucket to this machine; does nothing if it is missing."""
  with explain_bucket_errors(folder), contextlib.suppress(FileNotFoundError):
    fs, name = fsspec.url_to_fs(str(folder))
    fs.get(f"{name}/", f"{target}/", recursive=True)


def move(folder: Path, new: Path) -> None:
  """Moves a folder; in a bucket, copies its files and deletes the old ones."""
  if not in_bucket(folder):
    folder.rename(new)
    return
  with explain_bucket_errors(folder):
    fs, name = fsspec.url_to_fs(str(folder))
    # Not epath's copy: it also lists folders, which s3:// refuses to copy.
    files = fs.find(name)
    fs.copy(files, [f"{new}{file.removeprefix(name)}" for file in files])
    fs.rm(name, recursive=True)


@contextlib.contextmanager
def lock_in_bucket(folder: Path, flag: str) -> Iterator[None]:
  """Locks a folder in a bucket; error messages name the flag `flag` that gave it.

  The lock is an object that a thread renews. If it does not change for three intervals,
  its process was killed, and the lock is taken over. Two processes that start within a
  second of each other may both get the lock.

  Raises InputError if another process holds the lock, or the bucket cannot be used.
  """
  path, released = folder / ".lock", threading.Event()
  holder = f"{socket.gethostname()}, process {os.getpid()}"

  def renew() -> None:
    while not released.wait(_RENEW_SECONDS):
      with contextlib.suppress(Exception):  # the network may fail for a while
        write()

  def write() -> None:
    path.write_text(f"{holder}, {datetime.datetime.now(datetime.UTC).isoformat()}")

  with explain_bucket_errors(folder):
    before = _read_lock(path)
    if before:
      seconds = 3 * _RENEW_SECONDS
      print(
        f"waits {seconds:.0f} s for the lock of {folder} ({before})", file=sys.stderr
      )
      time.sleep(seconds)
      if _read_lock(path) not in (before, ""):
        raise InputError(
          f"another command is using {folder} ({before}): "
          f"wait for it, or give another --{flag}"
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


def _read_lock(path: Path) -> str:
  with contextlib.suppress(FileNotFoundError):
    return path.read_text()
  return ""


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
  """Opens a new file; at the end of the block, it replaces `path` atomically.

  If the block raises or the process is killed, `path` keeps its content. A link at
  `path` is replaced, not followed. If several processes write one file, the last one
  wins, and the file is complete. A killed process leaves a hidden file behind, which
  nothing reads.
  """
  if in_bucket(path):
    content = io.BytesIO()
    yield content
    with explain_bucket_errors(path):
      path.write_bytes(content.getvalue())
    return
  # Not `tempfile`: only the owner may read its files.
  new = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
  try:
    with open(new, "xb") as file:
      yield file
    os.replace(new, path)
  finally:
    new.unlink(missing_ok=True)


def append_digest(content: bytes) -> bytes:
  """Returns the content with its SHA-256 appended."""
  return content + hashlib.sha256(content).digest()


def remove_digest(content: bytes) -> bytes:
  """Removes and checks the SHA-256; raises ValueError if it does not match."""
  size = hashlib.sha256().digest_size
  content, digest = content[:-size], content[-size:]
  if hashlib.sha256(content).digest() != digest:
    raise ValueError("the content does not match its digest")
  return content


def write_whole(path: Path, text: str) -> None:
  """Writes a text file atomically, as UTF-8; see `replace_file`."""
  with replace_file(path) as file:
    file.write(text.encode())


def write_lines(path: Path, lines: Iterable[str]) -> None:
  """Writes the lines of a text file atomically; see `replace_file`."""
  write_whole(path, "".join(f"{line}\n" for line in lines))


def read_content(path: pathlib.Path) -> bytes:
  """Reads a file, plain or compressed by gzip, bzip2 or xz.

  Raises InputError if the file is missing, unreadable, damaged or a zip archive.
  """
  try:
    content = path.read_bytes()
  except FileNotFoundError:
    raise InputError(f"no file {path}: check the name") from None
  except OSError as error:
    raise InputError(f"cannot read {path}: {error.strerror}") from None
  if content.startswith(_ZIP):
    raise InputError(f"{path} is a zip archive: unpack it and give the files inside")
  for start, decompress in _DECOMPRESS.items():
    if re.match(start, content):
      try:
        return decompress(content)
      except (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError):
        raise InputError(f"damaged compressed file {path}: copy it again") from None
  return content
