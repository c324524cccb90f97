"""Reads local files, and writes files atomically, also in buckets."""

import contextlib
import gzip
import importlib.util
import io
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import fsspec
from etils import epath

from relpos_jax.errors import InputError

_GZIP = b"\x1f\x8b"
_PACKAGES = dict(gs="gcsfs")  # by scheme

Path = pathlib.Path | epath.Path  # local, or in a bucket


def to_path(name: str | os.PathLike) -> Path:
  """Returns a local path, or one in a bucket, as in gs://bucket/runs/mine.

  Raises:
    InputError: the scheme is unknown, or the package that serves it is not installed.
  """
  scheme, is_url, _ = os.fspath(name).partition("://")
  if not is_url:
    return pathlib.Path(name)
  package = _PACKAGES.get(scheme)
  if not (package and importlib.util.find_spec(package)):
    remedy = f"pip install {package}" if package else "give a local path, or one in gs://"
    raise InputError(f"cannot use {name}: {remedy}")
  # TensorStore writes into the same folders, which makes a listing that is kept wrong.
  fsspec.config.conf.setdefault(scheme, {})["use_listings_cache"] = False
  os.environ.setdefault("EPATH_USE_TF", "false")  # the same code with and without TensorFlow
  return epath.Path(name)


def in_bucket(path: Path) -> bool:
  """Returns whether a path is in a bucket, where files appear whole and do not grow."""
  return isinstance(path, epath.Path)


def upload(folder: pathlib.Path, target: epath.Path) -> None:
  """Copies the files of a local folder and its sub-folders into a folder of a bucket."""
  fs, name = fsspec.url_to_fs(str(target))
  fs.put(f"{folder}/", f"{name}/", recursive=True)


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
  """Reads a file, plain or gzip; raises InputError if it is missing, unreadable or damaged."""
  try:
    content = path.read_bytes()
    return gzip.decompress(content) if content.startswith(_GZIP) else content
  except FileNotFoundError:
    raise InputError(f"no file {path}: check the name") from None
  except (EOFError, zlib.error, gzip.BadGzipFile):
    raise InputError(f"damaged gzip file {path}: copy it again") from None
  except OSError as error:
    raise InputError(f"cannot read {path}: {error.strerror}") from None
