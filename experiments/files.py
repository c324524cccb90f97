"""Reads local files, and writes files atomically, also in buckets."""

import contextlib
import fcntl
import gzip
import importlib.util
import io
import lzma
import os
import pathlib
import re
import shutil
import tempfile
import textwrap
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import fsspec
from etils import epath

from experiments.errors import InputError

_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ"
_COPIES = "relpos_jax-copies-"  # the names of temporary folders begin so

Path = pathlib.Path | epath.Path  # local, or in a bucket


def to_path(name: str | os.PathLike) -> Path:
  """Returns a local path, or one in a bucket, as in gs://bucket/runs/mine or s3://bucket/mine.

  Raises:
    InputError: the name has another scheme, or the package that serves it is not installed.
  """
  if not (scheme := re.match("([a-z0-9]+):/", os.fspath(name))):
    return pathlib.Path(name)
  package = dict(gs="gcsfs", s3="s3fs").get(scheme[1])
  if not package or not os.fspath(name).startswith(f"{scheme[1]}://"):
    raise InputError(f"cannot use {name}: give a local path, gs://BUCKET/RUN or s3://BUCKET/RUN")
  if not importlib.util.find_spec(package):
    raise InputError(f"cannot use {name}: pip install {package}")
  # Others write into the same folders, which makes a listing that is kept wrong.
  fsspec.config.conf.setdefault(scheme[1], {})["use_listings_cache"] = False
  os.environ.setdefault("EPATH_USE_TF", "false")  # the same code with and without TensorFlow
  return epath.Path(name)


def in_bucket(path: Path) -> bool:
  """Returns whether a path is in a bucket, where files appear whole and do not grow."""
  return isinstance(path, epath.Path)


@contextlib.contextmanager
def checking_bucket(path: Path) -> Iterator[None]:
  """Raises InputError for every error of a bucket, since each service has errors of its own."""
  try:
    yield
  except Exception as error:
    if not in_bucket(path) or isinstance(error, InputError):
      raise
    reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
    raise InputError(f"cannot use {path} ({reason}): see to the bucket and credentials") from error


def needs_copy(folder: Path) -> bool:
  """Returns whether Orbax, which knows gs:// but not s3://, works on a local copy of a folder."""
  return str(folder).startswith("s3://")


@contextlib.contextmanager
def local_folder() -> Iterator[pathlib.Path]:
  """Makes a folder for copies of a bucket's files, and deletes those that killed processes left."""
  for old in pathlib.Path(tempfile.gettempdir()).glob(f"{_COPIES}*"):
    with contextlib.suppress(OSError), _held(old):
      shutil.rmtree(old)
  with tempfile.TemporaryDirectory(prefix=_COPIES) as name, _held(name):
    yield pathlib.Path(name)


@contextlib.contextmanager
def _held(folder: str | os.PathLike) -> Iterator[None]:
  """Locks a folder until the process ends, at the latest; raises OSError if it is locked."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    yield
  finally:
    os.close(descriptor)


@contextlib.contextmanager
def reading(folder: Path, name: str) -> Iterator[Path]:
  """Yields a folder that Orbax can read; for s3://, a local one with a copy of one sub-folder."""
  if not needs_copy(folder):
    yield folder if in_bucket(folder) else folder.absolute()
    return
  with local_folder() as local:
    # The run may delete the checkpoint meanwhile.
    with checking_bucket(folder), contextlib.suppress(FileNotFoundError):
      fs, source = fsspec.url_to_fs(str(folder / name))
      fs.get(f"{source}/", f"{local}/{name}/", recursive=True)
    yield local


def check_readable(folder: Path) -> None:
  """Raises InputError unless the files in a folder of a bucket can be read."""
  with checking_bucket(folder):
    fs, name = fsspec.url_to_fs(str(folder))
    for file in (file for file, info in fs.find(name, detail=True).items() if info["size"]):
      with contextlib.suppress(FileNotFoundError):  # the run deleted it meanwhile
        fs.cat_file(file, end=1)


def read_version(path: Path) -> tuple[str | None, bytes]:
  """Returns the version of an object in a bucket and its content; (None, b"") if there is none."""
  fs, name = fsspec.url_to_fs(str(path))
  try:
    info = fs.info(name)
    return info.get("generation") or info["ETag"], fs.cat_file(name)
  except FileNotFoundError:
    return None, b""


def write_version(path: Path, content: bytes, version: str | None) -> str:
  """Writes an object in a bucket if it has this version, None if there is none.

  Returns the new version. The store checks and writes at once; its errors are raised as they are.
  """
  fs, name = fsspec.url_to_fs(str(path))
  bucket, _, key = name.partition("/")
  if str(path).startswith("gs://"):  # gcsfs itself has no condition but that there is no object
    url = fs.base.replace("/storage/", "/upload/storage/") + "b/{}/o"
    options = dict(uploadType="media", name=key, ifGenerationMatch=version or 0)
    return fs.call("POST", url, bucket, **options, data=content, json_out=True)["generation"]
  condition = dict(IfMatch=version) if version else dict(IfNoneMatch="*")
  return fs.call_s3("put_object", Bucket=bucket, Key=key, Body=content, **condition)["ETag"]


def upload(folder: pathlib.Path, target: Path) -> None:
  """Copies the files of a local folder and its sub-folders into a folder of a bucket."""
  with checking_bucket(target):
    fs, name = fsspec.url_to_fs(str(target))
    fs.put(f"{folder}/", f"{name}/", recursive=True)


def rename(folder: Path, new: Path) -> None:
  """Renames a folder; in a bucket, copies its files and then deletes them."""
  if not in_bucket(folder):
    folder.rename(new)
    return
  with checking_bucket(folder):
    fs, name = fsspec.url_to_fs(str(folder))
    files = fs.find(name)
    fs.copy(files, [f"{new}{file.removeprefix(name)}" for file in files])
    fs.rm(name, recursive=True)


@contextlib.contextmanager
def growing(folder: Path) -> Iterator[pathlib.Path]:
  """Yields a folder whose files can grow; for a bucket, a local one that is copied at the end."""
  if not in_bucket(folder):
    yield folder
    return
  with local_folder() as local:
    try:
      yield local
    finally:
      upload(local, folder)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
  """Opens a new file that replaces `path` at the end of the block.

  If the block raises or the process is killed, `path` keeps its content. A link at `path` is
  replaced, not followed.
  """
  path = to_path(path)
  if in_bucket(path):
    content = io.BytesIO()
    yield content
    with checking_bucket(path):
      path.write_bytes(content.getvalue())
    return
  new = path.with_name(f".{path.name}.new")
  new.unlink(missing_ok=True)  # left by a killed process
  try:
    with open(new, "xb") as file:
      yield file
    os.replace(new, path)
  finally:
    new.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike, text: str) -> None:
  """Writes a text file as UTF-8; see `whole_file`."""
  with whole_file(path) as file:
    file.write(text.encode())


def read_content(path: pathlib.Path) -> bytes:
  """Reads a file, plain, gzip or xz; raises InputError if it is missing, unreadable or damaged."""
  try:
    content = path.read_bytes()
    if content.startswith(_XZ):
      return lzma.decompress(content)
    return gzip.decompress(content) if content.startswith(_GZIP) else content
  except FileNotFoundError:
    raise InputError(f"no file {path}: check the name") from None
  except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError):
    raise InputError(f"damaged compressed file {path}: copy it again") from None
  except OSError as error:
    raise InputError(f"cannot read {path}: {error.strerror}") from None
