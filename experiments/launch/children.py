"""Processes that do not outlive the one that started them."""

import os
import sys

# Before it becomes the command, a child asks Linux to be killed with its parent, if that is there.
_ASK = (
  "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "  # PR_SET_PDEATHSIG, SIGKILL
  "os.getppid() == int(sys.argv[1]) or os._exit(137); os.execvp(sys.argv[2], sys.argv[2:])"
)


def dying_with_this_process() -> list[str]:
  """Words before a command with which it is killed when the thread that started it ends."""
  linux = sys.platform == "linux"
  return [sys.executable, "-I", "-S", "-c", _ASK, str(os.getpid())] if linux else []
