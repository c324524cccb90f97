"""What the loop does at which step, and when it stops."""

import itertools
from collections.abc import Set

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.data.batching import Batch
from experiments.training.loop import NonFiniteError, take_steps
from experiments.training.step import TrainState


def numbered_batches(start: int = 0):
  for step in itertools.count(start):
    yield Batch(np.full((2, 3), step), np.full((2, 4), step))


class Recorder:
  """A training step that learns nothing, and all that the loop asked for, in order."""

  def __init__(self, skipped: Set[int] = frozenset()):
    self.skipped = skipped
    self.batches, self.events = [], []

  def train_step(self, state: TrainState, batch: Batch):
    self.batches.append(int(batch.source[0, 0]))
    step = int(state.step) + 1
    skip = step in self.skipped
    metrics = dict(
      loss=jnp.float32(np.nan if skip else 1 / step),
      grad_norm=jnp.float32(np.inf if skip else step),
      num_tokens=jnp.int32(10 * step),
      skipped=jnp.int32(skip),
    )
    return state._replace(step=jnp.int32(step)), metrics

  def train(
    self,
    *,
    start=0,
    num_steps,
    eval_every=100,
    save_every=100,
    max_skipped=1,
    stop_at=(),
  ):
    state = TrainState(jnp.int32(start), params={}, opt_state=())
    return take_steps(
      state,
      self.train_step,
      numbered_batches(start),
      num_steps=num_steps,
      report=lambda step, metrics: self.events.append(
        ("report", step, metrics["num_tokens"])
      ),
      evaluate=lambda state: self.events.append(("evaluate", int(state.step))),
      save=lambda state: self.events.append(("save", int(state.step))),
      eval_every=eval_every,
      save_every=save_every,
      max_skipped=max_skipped,
      should_stop=lambda: stop_at in [event[:2] for event in self.events],
    )

  def steps(self, kind: str) -> list[int]:
    return [event[1] for event in self.events if event[0] == kind]


def test_a_state_is_saved_after_all_its_steps_are_reported_and_before_it_is_evaluated():
  recorder = Recorder()
  recorder.train(num_steps=5, eval_every=2, save_every=2)
  kinds = [(event[0], event[1]) for event in recorder.events]
  for step in (2, 4, 5):
    at = kinds.index(("save", step))
    assert kinds[at - 1] == ("report", step)
    assert kinds[at + 1] == ("evaluate", step)


def test_so_many_steps_skipped_in_a_row_stop_with_step_and_batch():
  recorder = Recorder(skipped={2, 3, 5, 6, 7})
  with pytest.raises(NonFiniteError) as raised:
    recorder.train(num_steps=9, max_skipped=3)
  message = str(raised.value)
  assert message.startswith(
    "step 7: loss nan, gradient norm inf on batch 6 of shape 2x4, number 3"
  )
  assert "\n" not in message
  assert recorder.steps("report") == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
  "at, last",
  [(("report", 3), 4), (("evaluate", 5), 5), (("save", 4), 4), (("save", 20), 20)],
)
def test_once_it_should_stop_the_last_step_is_reported_saved_once_and_not_evaluated(
  at, last
):
  recorder = Recorder()
  state = recorder.train(num_steps=1000, eval_every=5, save_every=4, stop_at=at)
  assert int(state.step) == last
  assert (
    recorder.steps("report")
    == [*range(1, last + 1)]
    == [x + 1 for x in recorder.batches]
  )
  assert recorder.steps("save").count(last) == 1 and recorder.steps("save")[-1] == last
  evaluated = range(5, last + 1 if at[0] == "evaluate" else last, 5)
  assert recorder.steps("evaluate") == [*evaluated]
