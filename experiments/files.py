"""Reads files, writes them whole, also in buckets, and locks folders of buckets."""

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
from collections.abc import Iterator
from typing import BinaryIO

import fsspec
from etils import epath

from experiments.errors import InputError

_GZIP, _XZ, _ZIP = b"\x1f\x8b", b"\xfd7zXZ", b"PK\x03\x04"
_BZIP2 = re.compile(rb"BZh[1-9]1AY&SY")
_PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}  # that serve the schemes of buckets
_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
_RENEW_SECONDS = 10.0  # of a lock in a bucket

Path = pathlib.Path | epath.Path  # local, or in a bucket


def to_path(name: str | os.PathLike) -> Path:
  """Returns a local path, or one in a bucket, as in gs://bucket/runs/mine or s3://bucket/mine.

  Expands ~, which shells leave as it is in --workdir=~/run.

  Raises InputError: the name has another scheme, or the package that serves it is not
  installed, or there is no such home.
  """
  start = re.match("([a-z0-9]+):/", os.fspath(name))
  if not start:
    try:
      return pathlib.Path(name).expanduser()
    except RuntimeError as error:
      raise InputError(f"cannot use {name}: {error}") from None
  scheme = start[1]
  package = _PACKAGES.get(scheme)
  if not package or not os.fspath(name).startswith(f"{scheme}://"):
    raise InputError(
      f"cannot use {name}: give a local path, gs://BUCKET/RUN or s3://BUCKET/RUN"
    )
  if not importlib.util.find_spec(package):
    raise InputError(f"cannot use {name}: pip install {package}")
  # Others write into the same folders, which makes a listing that is kept wrong.
  fsspec.config.conf.setdefault(scheme, {})["use_listings_cache"] = False
  # The same code with and without TensorFlow.
  os.environ.setdefault("EPATH_USE_TF", "false")
  return epath.Path(name)


def in_bucket(path: Path) -> bool:
  """Returns whether a path is in a bucket, where files appear whole and do not grow."""
  return isinstance(path, epath.Path)


@contextlib.contextmanager
def checking_bucket(path: Path) -> Iterator[None]:
  """Raises InputError for every error of a bucket: each service has its own."""
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
  """Lists a folder, which may be missing; raises InputError if a bucket fails."""
  with checking_bucket(folder), contextlib.suppress(FileNotFoundError):
    # A bucket's empty folder holds itself.
    return sorted(path for path in folder.iterdir() if path != folder)
  return []


def check_writable(
  folder: Path, remedy: str = "give a --workdir that you may write to"
) -> None:
  """Raises InputError unless the folder is writable; in a bucket, by writing a file."""
  if in_bucket(folder):
    new = folder / f".{time.time_ns()}"
    with checking_bucket(folder):
      new.write_bytes(b"")
      new.unlink(missing_ok=True)
  elif not os.access(folder, os.W_OK):
    raise InputError(f"cannot write into {folder}: {remedy}")


def write_refusal(error: BaseException, what: object) -> InputError | None:
  """Returns the error of a write to a full or read-only disk; None for another."""
  for code in (*_FULL, errno.EROFS):
    reason = os.strerror(code)
    # Orbax says it in a message.
    if getattr(error, "errno", None) == code or reason in str(error):
      remedy = "free disk space" if code in _FULL else "make the disk writable"
      return InputError(
        f"cannot write {what} ({reason}): {remedy} and run the same command again"
      )
  return None


def upload(folder: pathlib.Path, target: Path) -> None:
  """Copies a local folder, with its sub-folders, into a folder of a bucket."""
  with checking_bucket(target):
    fs, name = fsspec.url_to_fs(str(target))
    fs.put(f"{folder}/", f"{name}/", recursive=True)


def download(folder: Path, target: pathlib.Path) -> None:
  """Copies a folder of a bucket, with its sub-folders, if it is there, to a local one."""
  with checking_bucket(folder), contextlib.suppress(FileNotFoundError):
    fs, name = fsspec.url_to_fs(str(folder))
    fs.get(f"{name}/", f"{target}/", recursive=True)


def move(folder: Path, new: Path) -> None:
  """Moves a folder; in a bucket, copies its files and then deletes them."""
  if not in_bucket(folder):
    folder.rename(new)
    return
  with checking_bucket(folder):
    fs, name = fsspec.url_to_fs(str(folder))
    # With folders in its list, as epath has it, s3:// refuses to copy.
    files = fs.find(name)
    fs.copy(files, [f"{new}{file.removeprefix(name)}" for file in files])
    fs.rm(name, recursive=True)


@contextlib.contextmanager
def bucket_lock(folder: Path, flag: str) -> Iterator[None]:
  """Locks the folder in a bucket that a flag names.

  The lock is an object that a thread renews. One that does not change during three
  intervals was left by a process that was killed. Processes that start within a second
  may both get the lock.

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
def whole_file(path: Path) -> Iterator[BinaryIO]:
  """Opens a new file that replaces `path` at the end of the block.

  If the block raises or the process is killed, `path` keeps its content. A link at
  `path` is replaced, not followed. Several processes may write one file: the last one
  stays, whole. A killed process leaves a hidden file, which nothing reads.
  """
  if in_bucket(path):
    content = io.BytesIO()
    yield content
    with checking_bucket(path):
      path.write_bytes(content.getvalue())
    return
  # Not by `tempfile`, whose files only their owner may read.
  new = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
  try:
    with open(new, "xb") as file:
      yield file
    os.replace(new, path)
  finally:
    new.unlink(missing_ok=True)


def with_digest(content: bytes) -> bytes:
  """Returns the content and its SHA-256."""
  return content + hashlib.sha256(content).digest()


def without_digest(content: bytes) -> bytes:
  """Inverts `with_digest`; raises ValueError if the content is damaged."""
  size = hashlib.sha256().digest_size
  content, digest = content[:-size], content[-size:]
  if hashlib.sha256(content).digest() != digest:
    raise ValueError("the content is not that of its digest")
  return content


def write_whole(path: Path, text: str) -> None:
  """Writes a text file as UTF-8; see `whole_file`."""
  with whole_file(path) as file:
    file.write(text.encode())


def read_content(path: pathlib.Path) -> bytes:
  """Reads a file, plain or packed by gzip, bzip2 or xz.

  Raises InputError: the file is missing, unreadable, damaged or a zip archive.
  """
  try:
    content = path.read_bytes()
  except FileNotFoundError:
    raise InputError(f"no file {path}: check the name") from None
  except OSError as error:
    raise InputError(f"cannot read {path}: {error.strerror}") from None
  if content.startswith(_ZIP):
    raise InputError(f"{path} is a zip archive: unpack it and give the files inside")
  try:
    return _unpack(content)
  except (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError):
    raise InputError(f"damaged compressed file {path}: copy it again") from None


def _unpack(content: bytes) -> bytes:
  """Decompresses content that starts as gzip, bzip2 or xz do, and returns any other."""
  if content.startswith(_GZIP):
    return gzip.decompress(content)
  if content.startswith(_XZ):
    return lzma.decompress(content)
  if _BZIP2.match(content):
    return bz2.decompress(content)
  return content
