"""Starts several processes on this machine; has scripts for clusters."""

import shutil


def end_with_parent() -> list[str]:
  """Returns a prefix for a command that is killed once this process ends.

  The prefix is empty where Linux has no setpriv.
  """
  return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
