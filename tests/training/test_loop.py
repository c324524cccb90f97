"""What the loop does at which step, and when it stops."""

import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax.data.batching import Batch
from relpos_jax.training.loop import NonFiniteError, train
from relpos_jax.training.step import TrainState


def numbered_batches(start: int = 0):
  """Endless batches that name their step."""
  for step in itertools.count(start):
    yield Batch(np.full((2, 3), step), np.full((2, 4), step))


class Recorder:
  """A training step that learns nothing, and all that the loop asked for, in order."""

  def __init__(self, bad_step: int = 0, bad_metric: str = "loss", bad_value: float = np.nan):
    self.bad = {bad_metric: jnp.float32(bad_value)}
    self.bad_step = bad_step
    self.batches, self.events = [], []

  def train_step(self, state: TrainState, batch: Batch):
    self.batches.append(int(batch.source[0, 0]))
    step = int(state.step) + 1
    metrics = dict(
      loss=jnp.float32(1 / step), grad_norm=jnp.float32(step), num_tokens=jnp.int32(10 * step)
    )
    metrics |= self.bad if step == self.bad_step else {}
    return state._replace(step=jnp.int32(step)), metrics

  def train(self, *, start: int = 0, num_steps: int, eval_every: int = 100, save_every: int = 100):
    state = TrainState(jnp.int32(start), params={}, opt_state=())
    return train(
      state,
      self.train_step,
      numbered_batches(start),
      num_steps=num_steps,
      report=lambda step, metrics: self.events.append(("report", step, metrics["num_tokens"])),
      evaluate=lambda state: self.events.append(("evaluate", int(state.step))),
      save=lambda state: self.events.append(("save", int(state.step))),
      eval_every=eval_every,
      save_every=save_every,
    )

  def steps(self, kind: str) -> list[int]:
    return [event[1] for event in self.events if event[0] == kind]


def test_every_step_is_reported_once_in_order_with_its_metrics():
  recorder = Recorder()
  state = recorder.train(num_steps=7)
  assert [e for e in recorder.events if e[0] == "report"] == [
    ("report", step, step * 10) for step in range(1, 8)
  ]
  assert recorder.batches == [*range(7)]
  assert int(state.step) == 7


def test_it_evaluates_and_saves_when_it_should_and_after_the_last_step():
  recorder = Recorder()
  recorder.train(num_steps=7, eval_every=3, save_every=2)
  assert recorder.steps("evaluate") == [3, 6, 7]
  assert recorder.steps("save") == [2, 4, 6, 7]


def test_the_last_step_is_not_evaluated_or_saved_twice():
  recorder = Recorder()
  recorder.train(num_steps=6, eval_every=3, save_every=3)
  assert recorder.steps("evaluate") == recorder.steps("save") == [3, 6]


def test_a_state_is_saved_after_all_its_steps_are_reported_and_before_it_is_evaluated():
  recorder = Recorder()
  recorder.train(num_steps=5, eval_every=2, save_every=2)
  kinds = [(event[0], event[1]) for event in recorder.events]
  for step in (2, 4, 5):
    at = kinds.index(("save", step))
    assert kinds[at - 1] == ("report", step)
    assert kinds[at + 1] == ("evaluate", step)


def test_it_goes_on_from_the_middle():
  recorder = Recorder()
  recorder.train(start=4, num_steps=7, eval_every=3, save_every=5)
  assert recorder.batches == [4, 5, 6]
  assert recorder.steps("report") == [5, 6, 7]
  assert recorder.steps("evaluate") == [6, 7]
  assert recorder.steps("save") == [5, 7]


def test_a_run_that_ended_does_nothing_more():
  recorder = Recorder()
  assert int(recorder.train(start=7, num_steps=7).step) == 7
  assert not recorder.events and not recorder.batches


@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("save_every", [1, 3, 5, 100])
def test_a_number_that_is_none_stops_with_step_and_batch_and_saves_nothing_of_it(
  metric, value, save_every
):
  recorder = Recorder(bad_step=5, bad_metric=metric, bad_value=value)
  with pytest.raises(NonFiniteError) as raised:
    recorder.train(num_steps=9, save_every=save_every)
  message = str(raised.value)
  assert re.match(r"step 5: loss (nan|inf|0.2)\S*, gradient norm (nan|inf|5.0)", message)
  assert "batch 4 of shape 2x4" in message and "\n" not in message
  assert recorder.steps("report") == [1, 2, 3, 4]
  assert recorder.steps("save") == [step for step in (1, 2, 3, 4) if step % save_every == 0]


def test_a_last_step_that_is_not_finite_is_not_saved():
  recorder = Recorder(bad_step=3)
  with pytest.raises(NonFiniteError):
    recorder.train(num_steps=3)
  assert not recorder.steps("save")
