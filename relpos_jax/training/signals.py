"""What a run does when it is asked to end: SIGTERM, as schedulers send it, or SIGINT: Ctrl-C."""

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from relpos_jax.typing import Array, Int, PyTree

_A_MOMENT = 0.1  # seconds
_AFTER_THE_LAST = {signal.SIGTERM: signal.SIG_IGN, signal.SIGINT: signal.SIG_DFL}


class Stopped(BaseException):
  """The run was asked to end, and has saved what there was to save.

  No `Exception`, for it may come anywhere, and libraries go on after those.
  """


class Stop:
  """Hears SIGTERM and SIGINT between `with` and its end; the same one again kills.

  One that is ignored stays so: shells let what a script starts in the background ignore SIGINT.

  At once a `Stopped` is raised, but where `waits` is true: there a step of training is not to be
  cut short. Those that train look at `reached` after each step, and one process's signal stops all
  at the same step: `ask` after a step, in every process, and `hear` the answer when the step's
  metrics are read.

  >>> with Stop() as stop:
  ...   stop.waits = True
  ...   signal.raise_signal(signal.SIGTERM)
  ...   print(stop.hear(stop.ask()))
  True
  """

  def __init__(self, is_last: bool = False):
    """`is_last`: the process ends after it, with a status of its own that SIGTERM leaves alone."""
    self._is_last = is_last
    self.waits = False
    self.reached = False  # and all processes know
    self.signal = signal.SIGTERM  # or what it was
    self._asked = False  # this process was
    self._before, self._hook = {}, None

  def __enter__(self) -> "Stop":
    if threading.current_thread() is threading.main_thread():  # as Python wants it
      heard = [n for n in _AFTER_THE_LAST if signal.getsignal(n) is not signal.SIG_IGN]
      self._before = {number: signal.signal(number, self._note) for number in heard}
      self._hook, sys.unraisablehook = sys.unraisablehook, self._once_more
    return self

  def __exit__(self, *_) -> None:
    for number, handler in self._before.items():
      signal.signal(number, _AFTER_THE_LAST[number] if self._is_last else handler)
    if self._hook:
      sys.unraisablehook = self._hook

  def ask(self, after: PyTree = ()) -> Int[Array, ""] | None:
    """The signal that any of several processes heard, or 0: an array that is not waited for.

    `after` are arrays of what was last computed.
    """
    if jax.process_count() == 1:
      return None
    one_by_one = jax.default_backend() == "cpu"  # where two reductions at once may block each other
    if one_by_one:
      jax.block_until_ready(after)
    place, greatest = _over_processes()
    heard = np.array([self.signal if self._asked else 0], np.int32)
    with jax.set_mesh(place.mesh):  # not all devices of the caller's mesh are of this one
      answer = greatest(
        jax.make_array_from_callback((jax.process_count(),), place, lambda _: heard)
      )
    return jax.block_until_ready(answer) if one_by_one else answer

  def hear(self, answer: Int[Array, ""] | None) -> bool:
    """Waits for the answer; returns `reached`. Then `signal` is the same in all processes."""
    if answer is None:
      self.reached |= self._asked
    elif number := int(answer):
      self.reached, self.signal = True, signal.Signals(number)
    return self.reached

  @contextlib.contextmanager
  def cutting_short(self) -> Iterator[None]:
    """What is done inside is ended at once, and so is this, if no other process takes part in it.

    Then `reached` is true. For what changes nothing and may take long, such as an evaluation.
    """
    before, self.waits = self.waits, self.waits and jax.process_count() > 1
    try:
      yield
      self.waits = before  # here, or a signal between this and the next line would go through
    except Stopped:
      self.reached = True
    finally:
      self.waits = before

  def _note(self, number: int, _) -> None:
    signal.signal(number, signal.SIG_DFL)
    if self._asked:  # by the other one: a launcher passes on what its terminal sends to all
      return
    self._asked, self.signal = True, signal.Signals(number)
    if not self.waits:
      raise Stopped

  def _once_more(self, unraisable) -> None:
    """Callbacks and an object's end let nothing through: the signal comes again, a moment later."""
    if unraisable.exc_type is not Stopped:
      return self._hook(unraisable)
    self._asked = False
    signal.signal(self.signal, self._note)
    threading.Timer(_A_MOMENT, os.kill, (os.getpid(), self.signal)).start()


@functools.cache
def _over_processes():
  """Where each process has a number of its own, and what tells all of them the greatest."""
  firsts = {device.process_index: device for device in reversed(jax.devices())}
  mesh = Mesh([firsts[i] for i in range(jax.process_count())], ("process",))
  place = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
  return place("process"), jax.jit(jnp.max, out_shardings=place())
