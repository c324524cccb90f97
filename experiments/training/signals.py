"""Stops a run on SIGTERM, which schedulers send, and on SIGINT, which is Ctrl-C."""

import contextlib
import functools
import signal
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from relpos_jax.typing import PyTree

# Handlers while the process exits: a late SIGTERM must not change its exit status.
_AT_EXIT = {signal.SIGTERM: signal.SIG_IGN, signal.SIGINT: signal.SIG_DFL}


class Stopped(BaseException):
  """The run was stopped by a signal.

  Not an `Exception`, because libraries that catch those would swallow it.
  """


class StopOnSignal:
  """Handles SIGTERM and SIGINT inside a `with` block; a second SIGINT kills.

  A second SIGTERM is ignored: at a shutdown both a launcher and the system send one.

  A signal raises `Stopped` at once, unless `deferred` is true: then `should_stop` returns True
  from the next call on, at the same call in all processes. Signals that are ignored stay ignored,
  since shells let background jobs ignore SIGINT.

  >>> with StopOnSignal() as stop:
  ...   stop.deferred = True
  ...   signal.raise_signal(signal.SIGTERM)
  ...   print(stop.should_stop(), stop.signal.name)
  True SIGTERM
  """

  def __init__(self, at_exit: bool = False):
    """Handles late signals as well if `at_exit`: the process exits right after the block."""
    self._at_exit = at_exit
    self.deferred = False
    self.stopping = False  # known to all processes
    self.signal = signal.SIGTERM  # the signal received
    self._received = False  # by this process
    self._answer = None  # of the last question to all processes
    self._handlers = {}

  def __enter__(self) -> "StopOnSignal":
    if threading.current_thread() is threading.main_thread():  # others cannot set handlers
      handled = [n for n in _AT_EXIT if signal.getsignal(n) is not signal.SIG_IGN]
      self._handlers = {number: signal.signal(number, self._receive) for number in handled}
    return self

  def __exit__(self, *_) -> None:
    for number, handler in self._handlers.items():
      signal.signal(number, _AT_EXIT[number] if self._at_exit else handler)

  def should_stop(self, state: PyTree | None = None) -> bool:
    """Returns whether any process received a signal; all processes call this together.

    With a `state`, which the last step computed, the answer on accelerators is that of the call
    before, so that no step is waited for. Without one it is up to date.
    """
    if jax.process_count() == 1:
      self.stopping |= self._received
    elif not self.stopping:
      on_cpu = jax.default_backend() == "cpu"
      if on_cpu:  # where two reductions at once may block each other
        jax.block_until_ready(state)
      sharding, greatest = _reduction()
      own = np.array([self.signal if self._received else 0], np.int32)
      with jax.set_mesh(sharding.mesh):  # the caller's mesh may have other devices
        of_all = jax.make_array_from_callback((jax.process_count(),), sharding, lambda _: own)
        before, self._answer = self._answer, greatest(of_all)
      answer = self._answer if on_cpu or state is None else before
      if number := int(answer) if answer is not None else 0:
        self.stopping, self.signal = True, signal.Signals(number)
    return self.stopping

  @contextlib.contextmanager
  def interruptible(self) -> Iterator[None]:
    """Ends the block at once on a signal, with `stopping` true, if this is the only process.

    It is meant for work that changes nothing and may take long, such as an evaluation.
    """
    before, self.deferred = self.deferred, self.deferred and jax.process_count() > 1
    try:
      yield
      self.deferred = before  # here too: a signal before `finally` would pass through
    except Stopped:
      self.stopping = True
    finally:
      self.deferred = before

  def _receive(self, number: int, _) -> None:
    signal.signal(number, _AT_EXIT[number])
    if self._received:  # the other signal came before, as when a launcher passes Ctrl-C on
      return
    self._received, self.signal = True, signal.Signals(number)
    if not self.deferred:
      raise Stopped


@functools.cache
def _reduction():
  """Returns the sharding of one number per process, and the function of their maximum."""
  firsts = {device.process_index: device for device in reversed(jax.devices())}
  mesh = Mesh([firsts[i] for i in range(jax.process_count())], ("process",))
  replicated = NamedSharding(mesh, PartitionSpec())
  return NamedSharding(mesh, PartitionSpec("process")), jax.jit(jnp.max, out_shardings=replicated)
