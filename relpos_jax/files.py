"""Reads local files, and writes files atomically."""

import contextlib
import gzip
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from relpos_jax.errors import InputError

_GZIP = b"\x1f\x8b"


@contextlib.contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
  """Opens a new file that replaces `path` at the end of the block.

  If the block raises or the process is killed, `path` keeps its content. A link at `path` is
  replaced, not followed.
  """
  path = pathlib.Path(path)
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
