"""Starts several processes on this machine; has scripts for clusters."""

import shutil


def end_with_parent() -> list[str]:
  """Returns words to put before a command, so that it is killed once this process ends.

  There are no words if Linux has no setpriv.
  """
  return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
