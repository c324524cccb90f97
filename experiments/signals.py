"""Handles the signals that end a command."""

import contextlib
import gc
import signal
import traceback
import types
from collections.abc import Callable, Iterator, Sequence

# SIGHUP: the terminal was closed.
STOPPING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@contextlib.contextmanager
def handle_signals(
  numbers: Sequence[signal.Signals], handler: Callable
) -> Iterator[None]:
  """Handles signals inside the block; ignored ones, as under nohup, stay ignored."""
  before = {}
  for number in numbers:
    if signal.getsignal(number) is not signal.SIG_IGN:
      before[number] = signal.signal(number, handler)
  try:
    yield
  finally:
    for number, handler_before in before.items():
      signal.signal(number, handler_before)


@contextlib.contextmanager
def raise_interrupts() -> Iterator[None]:
  """Makes Ctrl-C raise KeyboardInterrupt inside the block.

  During an import, Ctrl-C kills the process instead, because extension modules would
  drop the exception. Nothing changes unless SIGINT has its default action.
  """
  if signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
    yield
    return
  with handle_signals([signal.SIGINT], _interrupt):
    yield


def _interrupt(number: int, frame: types.FrameType | None) -> None:
  if drops_exceptions(frame):
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
  raise KeyboardInterrupt


def drops_exceptions(frame: types.FrameType | None) -> bool:
  """Checks whether an exception raised in this frame would be printed and dropped.

  Extension modules drop exceptions while they are imported. Python drops them in
  callbacks of the garbage collector, such as JAX's.
  """
  callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]
  for outer, _ in traceback.walk_stack(frame):
    is_import = outer.f_code.co_filename.startswith("<frozen importlib")
    if is_import or outer.f_code in callbacks:
      return True
  return False
