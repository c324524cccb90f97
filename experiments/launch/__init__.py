"""Starts runs in several processes on this machine; recipes for clusters."""

import shutil


def dying_with_this_process() -> list[str]:
  """Returns a command prefix that kills the child when its parent ends, where Linux has setpriv."""
  return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
