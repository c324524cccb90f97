"""Tests the paper's models at full size, mostly by their shapes.

`pytest -m slow tests/experiments/test_paper.py -n0` trains two steps: minutes, and 12 GB.
"""

import functools
import math

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from experiments import command
from experiments.data.batching import Batch
from experiments.run import build
from experiments.training.sharding import AXES, batch_sharding, make_mesh
from experiments.translation.task import Translation

pytestmark = pytest.mark.usefixtures("in_the_repository")

VOCABULARY = 32_768
NUM_CHIPS = 8
ONE_LAYER = "model.num_layers=1"  # per stack, for quick tracing


def load(argument: str, *changes: str):
  """Returns the config of one of the paper's trainings, as the commands parse it."""
  arguments = [f"--config=configs/wmt14.py:{argument}", *(f"--config.{x}" for x in changes)]
  return command.parse(dict(config=command.CONFIG), arguments)["config"]


def _is_table(path) -> bool:
  return "tables" in jax.tree_util.keystr(path)


CHIP = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
CHIPS = AbstractMesh((NUM_CHIPS, 1, 1, 1), AXES, (AxisType.Auto,) * 4, abstract_device=CHIP)


@functools.cache
def batch_shapes() -> tuple:
  """Returns the shapes of batches, which all trainings of the paper share."""
  return Translation(load("")).mock_batches(CHIPS).shapes


def test_batches_have_32768_tokens():
  assert len(batch_shapes()) == 8 and batch_shapes()[-1][1] == 256
  for rows, length in batch_shapes():
    assert rows % NUM_CHIPS == 0
    assert 0.99 < rows * length / 32_768 < 1 + NUM_CHIPS * length / 32_768


@pytest.mark.parametrize("number, argument", [(0, "base,sinusoidal,v1"), (7, "big,relative,v2")])
def test_two_steps_keep_the_shapes_of_the_state(number, argument):
  config, shape = load(argument, ONE_LAYER), batch_shapes()[number]
  task = Translation(config)
  training = build(task, task.mock_vocabulary(), CHIPS)

  def shape_of(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(CHIPS, x.ndim))

  batch = jax.tree.map(shape_of, task.empty_batch(shape))
  with use_abstract_mesh(CHIPS):
    once, _ = jax.eval_shape(training.step, training.shapes, batch)
    twice, metrics = jax.eval_shape(training.step, once, batch)
  assert {*metrics} == {"loss", "grad_norm", "num_tokens", "skipped", "learning_rate"}
  assert all(value.shape == () for value in metrics.values())
  like = lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype)
  assert jax.tree.all(jax.tree.map(like, training.shapes, twice))


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["base,relative", "big,relative"])
def test_two_steps_train_the_whole_model(argument):
  config = load(argument)
  task = Translation(config)
  training = build(task, task.mock_vocabulary(), make_mesh(data=1))
  state = training.init()
  before = jax.tree.map(np.asarray, state.params)
  random, losses = np.random.default_rng(0), []
  batch = Batch(*(random.integers(4, VOCABULARY, (16, 256), np.int32) for _ in range(2)))
  for _ in range(2):
    state, metrics = training.step(state, batch)
    losses.append(float(metrics["loss"]))
  # The loss leaves out the entropy of the smoothed targets.
  entropy = -0.9 * math.log(0.9) - 0.1 * math.log(0.1 / (VOCABULARY - 1))
  least = math.log(VOCABULARY) - entropy
  assert all(least - 0.5 < loss < least + 1.5 for loss in losses)
  assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, before, state.params)))
  moments = jax.tree.leaves_with_path(state.opt_state[0].nu)
  tables = {jax.tree_util.keystr(path): leaf for path, leaf in moments if _is_table(path)}
  assert len(tables) == 24
  for name, table in tables.items():
    distance = np.arange(len(table)) - len(table) // 2
    is_seen = (distance <= 0) | ("encoder" in name)  # the decoder attends to no later token
    np.testing.assert_array_equal((table > 0).reshape(len(table), -1).all(1), is_seen, err_msg=name)
