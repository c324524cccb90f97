"""The training loop."""

import collections
from collections.abc import Callable, Iterator

import jax
import numpy as np

from relpos_jax.training.step import TrainState


class NonFiniteError(RuntimeError):
  """The loss or its gradient is not a number: training stopped, and nothing of it was saved."""


def train(
  state: TrainState,
  train_step: Callable,
  batches: Iterator,
  *,
  num_steps: int,
  report: Callable[[int, dict], None],
  evaluate: Callable[[TrainState], None],
  save: Callable[[TrainState], None],
  eval_every: int,
  save_every: int,
) -> TrainState:
  """Trains from `state.step` to `num_steps`.

  Args:
    train_step: `(state, batch) -> (state, metrics)`.
    batches: those of steps `state.step`, `state.step + 1`, ...
    report: called with each step, counted from 1, and its metrics.
    save, evaluate: called every `save_every` and `eval_every` steps, and after the last; save goes
      first, so that nothing is lost if evaluating fails.

  Raises:
    NonFiniteError: names the step and its batch; only finite parameters are ever saved.
  """
  in_flight = collections.deque()
  for step in range(int(state.step) + 1, num_steps + 1):
    batch = next(batches)
    state, metrics = train_step(state, batch)
    in_flight.append((step, batch, metrics))
    last = step == num_steps
    evaluate_now, save_now = (last or step % every == 0 for every in (eval_every, save_every))
    # One step stays in flight, so that the device need not wait for the host to read its metrics.
    num_to_keep = 0 if evaluate_now or save_now else 1
    while len(in_flight) > num_to_keep:
      _settle(*in_flight.popleft(), report)
    if save_now:
      save(state)
    if evaluate_now:
      evaluate(state)
  return state


def _settle(step: int, batch, metrics, report) -> None:
  metrics = {name: value.item() for name, value in jax.device_get(metrics).items()}
  if not np.isfinite([metrics["loss"], metrics["grad_norm"]]).all():
    raise NonFiniteError(
      f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']} on batch "
      f"{step - 1} of shape {'x'.join(map(str, batch.target.shape))}: "
      "lower the learning rate or look at this batch"
    )
  report(step, metrics)
