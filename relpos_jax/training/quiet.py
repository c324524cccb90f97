"""Keeps what Orbax says of itself from the user, who is told what matters in one line."""

import logging
import re
import sys
import traceback
import warnings

# How reads and writes complain that were left behind when another failed: nobody waits for them.
_LEFT_BEHIND = re.compile("Event loop is closed|coroutine .* was never awaited")
_ORBAX = re.compile("orbax|tensorstore|OCDBT")


def quieten() -> None:
  """Drops Orbax's log, of every phase of every save, and of errors that it raises as well."""
  logging.getLogger("absl").addFilter(_is_of_others)


def quieten_what_is_left_behind() -> None:
  """Drops the complaints of reads and writes that Orbax leaves behind when one of many fails.

  They come from other threads: those of writes before the error, hence from the first save on, and
  those of reads later, hence for good, once something damaged has been read.
  """
  logging.getLogger("asyncio").addFilter(_is_of_others)
  warnings.filterwarnings("ignore", _LEFT_BEHIND.pattern, RuntimeWarning)
  before = sys.unraisablehook
  if not hasattr(before, "knows_what_is_left_behind"):
    hook = lambda args: None if _is_left_behind(args) else before(args)
    hook.knows_what_is_left_behind = True
    sys.unraisablehook = hook


def _is_of_others(record: logging.LogRecord) -> bool:
  text = record.getMessage() if record.name == "asyncio" else record.pathname
  return not _ORBAX.search(text)


def _is_left_behind(args) -> bool:
  frames = traceback.extract_tb(args.exc_traceback)
  return bool(_LEFT_BEHIND.search(str(args.exc_value))) or any(
    _ORBAX.search(frame.filename) for frame in frames
  )
