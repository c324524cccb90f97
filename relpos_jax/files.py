"""Writes files so that a reader sees the old content or the new, and never half of it."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
  """Opens a new file that replaces `path` at the end of the block.

  If the block raises or the process is killed, `path` is as it was before. A link at `path` is
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
