"""What the loop does at which step, and when it stops."""

import itertools
from collections.abc import Set

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.data.batching import Batch
from experiments.training.loop import NonFiniteError, take_steps
from experiments.training.step import TrainState


def numbered_batches():
  for step in itertools.count():
    yield Batch(np.full((2, 3), step), np.full((2, 4), step))


class Recorder:
  """A training step that learns nothing, and all that the loop asked for, in order."""

  def __init__(self, skipped: Set[int] = frozenset()):
    self.skipped = skipped
    self.batches, self.events = [], []

  def train_step(self, state: TrainState, batch: Batch):
    self.batches.append(int(batch.source[0, 0]))
    step = int(state.step) + 1
    loss, norm = 1 / step, float(step)
    if step in self.skipped:
      loss, norm = np.nan, np.inf
    metrics = dict(loss=jnp.float32(loss), grad_norm=jnp.float32(norm))
    metrics |= dict(num_tokens=jnp.int32(9), skipped=jnp.int32(step in self.skipped))
    return state._replace(step=jnp.int32(step)), metrics

  def train(self, stop_at=(), **options):
    return take_steps(
      TrainState(jnp.int32(0), params={}, opt_state=()),
      self.train_step,
      numbered_batches(),
      report=lambda step, _: self.events.append(("report", step)),
      evaluate=lambda state: self.events.append(("evaluate", int(state.step))),
      save=lambda state: self.events.append(("save", int(state.step))),
      should_stop=lambda: stop_at in self.events,
      **(dict(eval_every=100, save_every=100) | options),
    )

  def steps(self, kind: str) -> list[int]:
    return [step for name, step in self.events if name == kind]


def test_a_state_is_saved_after_all_its_steps_are_reported_and_before_it_is_evaluated():
  recorder = Recorder()
  recorder.train(num_steps=5, eval_every=2, save_every=2)
  for step in (2, 4, 5):
    at = recorder.events.index(("save", step))
    assert recorder.events[at - 1] == ("report", step)
    assert recorder.events[at + 1] == ("evaluate", step)


def test_so_many_steps_skipped_in_a_row_stop_with_step_and_batch():
  recorder = Recorder(skipped={2, 3, 5, 6, 7})
  words = "step 7: loss nan, gradient norm inf on batch 6 of shape 2x4, number 3"
  with pytest.raises(NonFiniteError, match=words):
    recorder.train(num_steps=9, max_skipped=3)
  assert recorder.steps("report") == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
  "at, last, evaluated",
  [
    (("report", 3), 4, []),
    (("evaluate", 5), 5, [5]),
    (("save", 4), 4, []),
    (("save", 20), 20, [5, 10, 15]),
  ],
)
def test_once_it_should_stop_the_last_step_is_reported_saved_once_and_not_evaluated(
  at, last, evaluated
):
  recorder = Recorder()
  state = recorder.train(num_steps=1000, eval_every=5, save_every=4, stop_at=at)
  assert int(state.step) == last
  assert recorder.batches == [*range(last)]
  assert recorder.steps("report") == [*range(1, last + 1)]
  assert recorder.steps("save").count(last) == 1
  assert recorder.steps("save")[-1] == last
  assert recorder.steps("evaluate") == evaluated
