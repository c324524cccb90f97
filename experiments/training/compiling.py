"""Compiles steps ahead of time, and prints which attention they run."""

import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from relpos_jax.attention import choice


@contextlib.contextmanager
def open_compiler() -> Iterator[Callable]:
  """Yields `start(work, *args)`, which calls `work(*args)` in a background thread.

  The calls run one by one. They compile programs before their first use: JAX keeps a
  program for later calls with the same shapes. If a run has several processes, `start`
  does nothing.
  """
  on_mesh = dict(initializer=jax.set_mesh, initargs=(jax.sharding.get_mesh(),))
  threads = concurrent.futures.ThreadPoolExecutor(1, **on_mesh)
  try:
    yield threads.submit if jax.process_count() == 1 else lambda *_: None
  finally:
    threads.shutdown(wait=False, cancel_futures=True)


def compile_ahead(
  step: Callable, start: Callable, state: Any, batches: Iterable[Any]
) -> Callable:
  """Starts compiling a step for each of `batches`; returns a step to call instead.

  If the program for a batch is not ready, the returned step waits for it. Only the
  shapes of `state` and the batches matter. `start` is what `open_compiler` yields.
  """
  started = {
    _list_shapes(batch): start(_compile, step, state, batch) for batch in batches
  }

  def compiled_step(state: Any, batch: Any) -> Any:
    program = started.pop(_list_shapes(batch), None)
    if program:
      program.result()  # JAX keeps it, so the call below does not compile again
    return step(state, batch)

  return compiled_step


def _compile(step: Any, state: Any, batch: Any) -> None:
  step.lower(state, batch).compile()


def _list_shapes(batch: Any) -> tuple:
  return tuple(x.shape for x in jax.tree.leaves(batch))


@contextlib.contextmanager
def announce_attention() -> Iterator[None]:
  """Prints each implementation of attention that is chosen in the block, and why.

  Messages below the logger's own level are dropped after printing; otherwise handlers
  that other libraries install would log them, too.
  """
  logger = choice.logger
  printed = set()
  level, own_level = logger.getEffectiveLevel(), logger.level

  def announce(record: logging.LogRecord) -> bool:
    implementation, reason = record.args
    if implementation not in printed:
      printed.add(implementation)
      reason = reason.replace("implementation=", "config.model.implementation")
      print(f"attention: {implementation}, because {reason}")
    return record.levelno >= level

  logger.addFilter(announce)
  logger.setLevel(logging.DEBUG)
  try:
    yield
  finally:
    logger.setLevel(own_level)
    logger.removeFilter(announce)
