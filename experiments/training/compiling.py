"""Compiles the steps of a training ahead, and tells which attention they run."""

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from experiments.training.step import TrainState
from relpos_jax.attention import choice


@contextlib.contextmanager
def open_compiler() -> Iterator[Callable]:
  """Yields `start(work, *args)`, which runs its calls in turn in a background thread.

  Compiles programs before their first call: JAX keeps them, so that a call with arrays
  of the same shapes finds them. Processes of one run do not compile ahead.
  """
  on_mesh = dict(initializer=jax.set_mesh, initargs=(jax.sharding.get_mesh(),))
  threads = concurrent.futures.ThreadPoolExecutor(1, **on_mesh)
  try:
    yield threads.submit if jax.process_count() == 1 else lambda *_: None
  finally:
    threads.shutdown(wait=False, cancel_futures=True)


def compile_ahead(step: Callable, *args: Any) -> None:
  """Compiles a step for arguments of these shapes."""
  step.lower(*args).compile()


def announce_attention(
  step: Callable, start: Callable, state: TrainState, batches: Iterable[Any]
) -> Callable:
  """Returns a step that prints the attention that it runs.

  Compiles the step ahead for a `state` and `batches`, of which only the shapes count.
  One line has the implementations of the first batch, and another follows when a batch
  of another shape runs a new one.
  """
  printed, seen = set(), set()  # names of implementations; shapes of batches

  def prepare(state: TrainState, batch: Any) -> dict[str, str]:
    # The call below neither traces nor compiles again.
    with _reasons_for_attention() as reasons:
      traced = step.trace(state, batch)
    traced.lower().compile()
    return reasons

  started = {_shapes(batch): start(prepare, state, batch) for batch in batches}

  def named(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
    if (shapes := _shapes(batch)) not in seen:
      ahead = started.pop(shapes, None)
      reasons = ahead.result() if ahead else prepare(state, batch)
      new = [name for name in reasons if name not in printed]
      if new:
        chosen = "; ".join(f"{name}, because {reasons[name]}" for name in new)
        chosen = chosen.replace("implementation=", "config.model.implementation")
        print(f"attention, batches of {'x'.join(map(str, shapes[-1]))}: {chosen}")
        printed.update(new)
      seen.add(shapes)
    return step(state, batch)

  return named


class _ReasonsForAttention(logging.Handler):
  """Collects the implementations that one thread chooses as it traces."""

  def __init__(self):
    super().__init__()
    self.thread = threading.get_ident()
    self.reasons = {}  # by the name of the implementation

  def emit(self, record: logging.LogRecord) -> None:
    if record.thread == self.thread:
      implementation, reason = record.args
      self.reasons[implementation] = reason


@contextlib.contextmanager
def _reasons_for_attention() -> Iterator[dict[str, str]]:
  """Yields the reasons for implementations, by name, as this thread chooses them."""
  handler = _ReasonsForAttention()
  choice.logger.setLevel(logging.DEBUG)
  choice.logger.addHandler(handler)
  try:
    yield handler.reasons
  finally:
    choice.logger.removeHandler(handler)


def _shapes(batch: Any) -> tuple:
  return tuple(x.shape for x in jax.tree.leaves(batch))
