"""Keeps what Orbax says of itself from the user, who is told what matters in one line."""

import logging
import re
import sys
import traceback
import types
import warnings

# How reads and writes complain that were left behind when another failed: nobody waits for them.
_LEFT_BEHIND = re.compile("Event loop is closed|coroutine .* was never awaited")
_ORBAX = re.compile("orbax|tensorstore|ocdbt", re.IGNORECASE)


def silence_orbax() -> None:
  """Drops Orbax's log, of every phase of every save, and of errors that it raises as well."""
  logging.getLogger("absl").addFilter(_is_of_others)


def silence_abandoned_requests() -> None:
  """Drops the complaints of reads and writes that Orbax leaves behind when one of many fails.

  They come from other threads, before the error or after it: hence from the first save or read on,
  and for good.
  """
  logging.getLogger("asyncio").addFilter(_is_of_others)
  warnings.filterwarnings("ignore", _LEFT_BEHIND.pattern, RuntimeWarning)
  before = sys.unraisablehook
  if not hasattr(before, "knows_what_is_left_behind"):
    hook = lambda args: None if _is_left_behind(args) else before(args)
    hook.knows_what_is_left_behind = True
    sys.unraisablehook = hook


def _is_of_others(record: logging.LogRecord) -> bool:
  if record.name != "asyncio":
    return not _ORBAX.search(record.pathname)
  *_, trace = record.exc_info or (None,)
  return not (_ORBAX.search(record.getMessage()) or _is_through_orbax(trace))


def _is_left_behind(args) -> bool:
  is_known = _LEFT_BEHIND.search(str(args.exc_value))
  return bool(is_known) or _is_through_orbax(args.exc_traceback)


def _is_through_orbax(trace: types.TracebackType | None) -> bool:
  return any(_ORBAX.search(frame.filename) for frame in traceback.extract_tb(trace))
