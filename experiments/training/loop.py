"""The loop over the steps of a training."""

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator

import jax

from experiments.training.step import TrainState


class NonFiniteError(RuntimeError):
  """Too many steps in a row were skipped because their loss or gradients were not finite."""


def train(
  state: TrainState,
  train_step: Callable,
  batches: Iterator,
  *,
  num_steps: int,
  report: Callable[[int, dict], None],
  evaluate: Callable[[TrainState], None],
  save: Callable[[TrainState], None],
  should_stop: Callable[[], bool] = lambda: False,
  eval_every: int,
  save_every: int,
  max_skipped: int = 10,
) -> TrainState:
  """Trains from `state.step` to `num_steps` and returns the last state.

  Args:
    train_step: `(state, batch) -> (state, metrics)`.
    batches: the batches of steps `state.step`, `state.step + 1`, ...
    report: receives each step, counted from 1, and its metrics.
    evaluate, save: called every `eval_every` and `save_every` steps and after the last
      step. A step is saved before it is evaluated, so that a failing evaluation loses
      nothing.
    should_stop: called after each step, save and evaluation. Once it returns True, the
      state is saved and returned.
    max_skipped: this many skipped steps in a row end the training.

  Raises NonFiniteError: names the step and its batch.
  """
  num_skipped = 0  # in a row
  in_flight = collections.deque()

  def report_all_but(num_left: int) -> None:
    nonlocal num_skipped
    while len(in_flight) > num_left:
      step, batch, metrics = in_flight.popleft()
      metrics = {name: value.item() for name, value in jax.device_get(metrics).items()}
      report(step, metrics)
      num_skipped = num_skipped + 1 if metrics["skipped"] else 0
      if num_skipped >= max_skipped:
        shape = jax.tree.leaves(batch)[-1].shape  # the targets of a pair
        raise NonFiniteError(
          f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']} on batch "
          f"{step - 1} of shape {'x'.join(map(str, shape))}, number {num_skipped} "
          "skipped in a row: lower the learning rate or look at these batches"
        )

  first = int(state.step) + 1
  for step in range(first, num_steps + 1):
    batch = next(batches)
    state, metrics = train_step(state, batch)
    in_flight.append((step, batch, metrics))
    is_last = step == num_steps
    evaluate_now, save_now = (
      is_last or step % every == 0 for every in (eval_every, save_every)
    )
    # One step stays in flight, so that the device does not wait for the host to read
    # its metrics. The first is told at once: the next may have to be compiled.
    report_all_but(0 if step == first or evaluate_now or save_now else 1)
    if save_now:
      save(state)
    if evaluate_now and not should_stop():
      evaluate(state)
    if should_stop():
      report_all_but(0)
      if not save_now:
        save(state)
      break
  return state


def profiled(batches: Iterator, start: int, asked: str, folder: str) -> Iterator:
  """Yields the batches of the steps after `start`, and profiles those `asked`, such as 10:20."""
  first, last = map(int, asked.split(":"))
  yield from itertools.islice(batches, max(first - start - 1, 0))
  steps = range(max(first, start + 1), last + 2)
  with jax.profiler.trace(folder) if len(steps) > 1 else contextlib.nullcontext():
    # One more: while it is dispatched, the device may still compute the last one.
    for step, batch in zip(steps, batches, strict=False):
      with jax.profiler.StepTraceAnnotation("train", step_num=step):
        yield batch
  yield from batches
