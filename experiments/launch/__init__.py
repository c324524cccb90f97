"""Starts runs in several processes on this machine; recipes for clusters."""

import contextlib
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence


def dying_with_this_process() -> list[str]:
  """Returns a command prefix that kills the child when its parent ends, where Linux has setpriv."""
  return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


@contextlib.contextmanager
def handling_signals(numbers: Sequence[signal.Signals], handler: Callable) -> Iterator[None]:
  """Handles signals inside the block; those that are ignored, as nohup does, stay ignored."""
  before = {}
  for number in numbers:
    if signal.getsignal(number) is not signal.SIG_IGN:
      before[number] = signal.signal(number, handler)
  try:
    yield
  finally:
    for number, handler_before in before.items():
      signal.signal(number, handler_before)
