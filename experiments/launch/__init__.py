"""Starts runs in several processes on this machine; recipes for clusters."""

import os
import sys

# PR_SET_PDEATHSIG: Linux kills the child with its parent. Exits if the parent has died already.
_CODE = (
  "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
  "os.getppid() == int(sys.argv[1]) or os._exit(137); os.execvp(sys.argv[2], sys.argv[2:])"
)


def dying_with_this_process() -> list[str]:
  """Returns a command prefix that, on Linux, kills the child when its parent ends."""
  is_linux = sys.platform == "linux"
  return [sys.executable, "-I", "-S", "-c", _CODE, str(os.getpid())] if is_linux else []
