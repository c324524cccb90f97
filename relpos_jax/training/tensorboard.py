"""A file of events for TensorBoard."""

import pathlib
import socket
import time
from collections.abc import Mapping

from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter

_SECONDS = 10  # after which what was written is on the disk


class EventFile:
  """Numbers and texts by step, in a new file of a folder.

  Not tensorboardX's `SummaryWriter`: once its thread has met a full disk, it waits for it for ever.
  Here an OSError comes to the caller.
  """

  def __init__(self, folder: pathlib.Path, step: int):
    """Makes the folder where there is none.

    Args:
      folder: with the files of the run so far, if any.
      step: the first to come: of it and later ones TensorBoard hides what older files have.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # By the second alone a quick restart would overwrite one.
    name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{step}"
    self._file = RecordWriter(str(folder / name))
    self._flushed = time.monotonic()
    self._write(step, file_version="brain.Event:2")
    self._write(step, session_log=SessionLog(status=SessionLog.START))

  def scalars(self, step: int, values: Mapping[str, float | int]) -> None:
    """Numbers by name."""
    for name, value in values.items():
      self._write(step, summary=summary.scalar(name, value))

  def text(self, step: int, tag: str, text: str) -> None:
    """A text, in Markdown."""
    self._write(step, summary=summary.text(tag, text))

  def close(self) -> None:
    """Nothing may be written after it."""
    self._file.close()

  def _write(self, step: int, **content) -> None:
    self._file.write(Event(step=step, wall_time=time.time(), **content).SerializeToString())
    now = time.monotonic()
    if now - self._flushed > _SECONDS:
      self._file.flush()
      self._flushed = now
