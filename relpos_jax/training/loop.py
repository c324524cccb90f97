"""The training loop."""

import collections
from collections.abc import Callable, Iterator

import jax

from relpos_jax.training.signals import Stop, Stopped
from relpos_jax.training.step import TrainState


class NonFiniteError(RuntimeError):
  """Too many steps in a row were skipped: their losses or gradients were not finite."""


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
  max_skipped: int = 10,
  stop: Stop | None = None,
) -> TrainState:
  """Trains from `state.step` to `num_steps`.

  Args:
    train_step: `(state, batch) -> (state, metrics)`.
    batches: those of steps `state.step`, `state.step + 1`, ...
    report: called with each step, counted from 1, and its metrics.
    save, evaluate: called every `save_every` and `eval_every` steps, and after the last; save goes
      first, so that nothing is lost if evaluating fails.
    stop: looked at after each step; what `evaluate` does may look at it too, and return early.
    max_skipped: so many steps skipped in a row end the training.

  Raises:
    NonFiniteError: names the step and its batch; the parameters are those before the steps skipped.
    Stopped: `stop` was reached, and the step reached is saved.
  """
  stop = stop or Stop()
  num_skipped = 0  # in a row
  in_flight = collections.deque()
  for step in range(int(state.step) + 1, num_steps + 1):
    batch = next(batches)
    state, metrics = train_step(state, batch)
    in_flight.append((step, batch, metrics, stop.ask(metrics)))
    last = step == num_steps
    evaluate_now, save_now = (last or step % every == 0 for every in (eval_every, save_every))
    # One step stays in flight, so that the device need not wait for the host to read its metrics.
    num_to_keep = 0 if evaluate_now or save_now else 1
    while len(in_flight) > (0 if stop.reached else num_to_keep):
      *done, answer = in_flight.popleft()
      num_skipped = _settle(*done, report, num_skipped, max_skipped)
      stop.hear(answer)
    if save_now:
      save(state)
    if evaluate_now and not stop.hear(stop.ask()):
      with stop.cutting_short():
        evaluate(state)
    if evaluate_now or save_now:  # which may have taken long
      stop.hear(stop.ask())
    if stop.reached:
      if not save_now:
        save(state)
      raise Stopped(f"at step {step}")
  return state


def _settle(step: int, batch, metrics, report, num_skipped: int, max_skipped: int) -> int:
  """Reports a step; returns how many in a row were skipped, up to this one."""
  metrics = {name: value.item() for name, value in jax.device_get(metrics).items()}
  report(step, metrics)
  num_skipped = num_skipped + 1 if metrics["skipped"] else 0
  if num_skipped >= max_skipped:
    shape = jax.tree.leaves(batch)[-1].shape  # of pairs: the targets
    raise NonFiniteError(
      f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']} on batch "
      f"{step - 1} of shape {'x'.join(map(str, shape))}, number {num_skipped} "
      "skipped in a row: lower the learning rate or look at these batches"
    )
  return num_skipped
