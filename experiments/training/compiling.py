"""Compiles training steps ahead of time, and prints which attention they run."""

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from experiments.training.step import TrainState
from relpos_jax.attention import choice

_CHANGING_LEVEL = threading.Lock()  # two threads would restore each other's level


@contextlib.contextmanager
def open_compiler() -> Iterator[Callable]:
  """Yields `start(work, *args)`, which runs calls one by one in a background thread.

  It serves to compile programs before their first call: JAX caches them by shapes. If a
  run has several processes, `start` does nothing.
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
  """Returns a step that also prints which implementations of attention it runs.

  `start` compiles the step ahead of time for `state` and each of `batches`; only their
  shapes matter. A line names the implementations of the first batch. Another follows
  when a batch with another shape runs a new one.
  """
  printed, known_shapes = set(), set()  # names of implementations; shapes of batches

  def prepare(state: TrainState, batch: Any) -> dict[str, str]:
    # The call below neither traces nor compiles again.
    with _collect_reasons() as reasons:
      traced = step.trace(state, batch)
    traced.lower().compile()
    return reasons

  started = {_list_shapes(batch): start(prepare, state, batch) for batch in batches}

  def announced_step(
    state: TrainState, batch: Any
  ) -> tuple[TrainState, dict[str, Any]]:
    if (shapes := _list_shapes(batch)) not in known_shapes:
      ahead = started.pop(shapes, None)
      reasons = ahead.result() if ahead else prepare(state, batch)
      new = [name for name in reasons if name not in printed]
      if new:
        chosen = "; ".join(f"{name}, because {reasons[name]}" for name in new)
        chosen = chosen.replace("implementation=", "config.model.implementation")
        print(f"attention, batches of {'x'.join(map(str, shapes[-1]))}: {chosen}")
        printed.update(new)
      known_shapes.add(shapes)
    return step(state, batch)

  return announced_step


class _ReasonsForAttention(logging.Filter):
  """Collects the implementations of attention that one thread chooses.

  It drops the messages that nobody asked for: handlers of the root logger, which some
  libraries install, would print them.
  """

  def __init__(self, level: int):
    super().__init__()
    self.level = level  # of the messages that somebody asked for
    self.thread = threading.get_ident()
    self.reasons = {}  # by the name of the implementation

  def filter(self, record: logging.LogRecord) -> bool:
    if record.thread == self.thread:
      implementation, reason = record.args
      self.reasons[implementation] = reason
    return record.levelno >= self.level


@contextlib.contextmanager
def _collect_reasons() -> Iterator[dict[str, str]]:
  """Collects why this thread chooses implementations; yields reasons by name."""
  logger = choice.logger
  with _CHANGING_LEVEL:
    own_level = logger.level
    collector = _ReasonsForAttention(logger.getEffectiveLevel())
    logger.addFilter(collector)
    logger.setLevel(logging.DEBUG)
    try:
      yield collector.reasons
    finally:
      logger.setLevel(own_level)
      logger.removeFilter(collector)


def _list_shapes(batch: Any) -> tuple:
  return tuple(x.shape for x in jax.tree.leaves(batch))
