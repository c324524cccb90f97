"""Tests the paper's models at full size, mostly by their shapes.

`pytest -m slow tests/experiments/test_paper.py -n0` trains two steps: minutes, and 12 GB.
"""

import functools
import itertools
import math

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from experiments import command
from experiments.plan.__main__ import batch_of, first_state
from experiments.run import make_optimizer, make_step, plan_model
from relpos_jax.data.batching import Batch
from relpos_jax.training.sharding import AXES
from relpos_jax.training.step import init_state
from relpos_jax.translation.task import Translation

pytestmark = pytest.mark.usefixtures("in_the_repository")

VOCABULARY = 32_768
NUM_CHIPS = 8
ONE_LAYER = "model.num_layers=1"  # per stack, for quick tracing


def load(argument: str, *changes: str):
  """Returns the config of one of the paper's trainings, as the commands parse it."""
  arguments = [f"--config=configs/wmt14.py:{argument}", *(f"--config.{x}" for x in changes)]
  return command.parse(dict(config=command.CONFIG), arguments)["config"]


def plan(config):
  """Returns the model of a config and its parameters' shapes."""
  task = Translation(config)
  return plan_model(task, task.mock_vocabulary())


# Per head at k = 16, and shared by the heads at k = 8.
TABLES = dict(base=(33, 8, 64), big=(17, 64))


@pytest.mark.parametrize("argument", ["base,relative", "big,relative"])
def test_each_self_attention_has_two_tables_and_cross_attention_none(argument):
  size = argument.partition(",")[0]
  params = nnx.to_flat_state(plan(load(argument))[1])
  tables = {path: leaf.shape for path, leaf in params if "tables" in path}
  paths = {
    (stack, "layers", layer, "self_attention", "tables", name)
    for stack, layer, name in itertools.product(("encoder", "decoder"), range(6), ("key", "value"))
  }
  assert tables == dict.fromkeys(paths, TABLES[size])


@pytest.mark.parametrize("size, limit", [("base", 0.105), ("big", 0.272)])
def test_tables_start_in_the_glorot_range(size, limit):
  config = load(f"{size},relative", ONE_LAYER)
  task = Translation(config)

  @jax.jit  # drops all but the tables
  def draw(key):
    model = task.make_model(task.mock_vocabulary(), nnx.Rngs(key))
    return [leaf for path, leaf in jax.tree.leaves_with_path(nnx.state(model)) if _is_table(path)]

  tables = np.stack(draw(jax.random.key(0)))
  assert tables.shape == (4, *TABLES[size]) and len({*tables.reshape(4, -1)[:, 0].tolist()}) == 4
  rows, *columns = TABLES[size]
  exact = math.sqrt(6 / (rows + math.prod(columns)))
  assert limit == round(exact, 3)
  assert 0.999 * exact < np.abs(tables).max() <= exact
  np.testing.assert_allclose(tables.std(), exact / 3**0.5, rtol=0.03)


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
  graphdef, state = first_state(config, CHIPS)
  step = make_step(Translation(config), graphdef)
  with use_abstract_mesh(CHIPS):
    once, _ = jax.eval_shape(step, state, batch_of(config, shape, CHIPS))
    twice, metrics = jax.eval_shape(step, once, batch_of(config, shape, CHIPS))
  assert {*metrics} == {"loss", "grad_norm", "num_tokens", "skipped", "learning_rate"}
  assert all(value.shape == () for value in metrics.values())
  like = lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype)
  assert jax.tree.all(jax.tree.map(like, state, twice))


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["base,relative", "big,relative"])
def test_two_steps_train_the_whole_model(argument):
  config = load(argument)
  task = Translation(config)
  graphdef, params = nnx.split(
    jax.jit(lambda: task.make_model(task.mock_vocabulary(), nnx.Rngs(0)))()
  )
  before = jax.tree.map(np.asarray, params)
  state, step = init_state(params, make_optimizer(config)), make_step(Translation(config), graphdef)
  random, losses = np.random.default_rng(0), []
  batch = Batch(*(random.integers(4, VOCABULARY, (16, 256), np.int32) for _ in range(2)))
  for _ in range(2):
    state, metrics = step(state, batch)
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
