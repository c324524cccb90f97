"""The encoder ignores padding, and its schemes read the positions of a batch."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from compiling import make_random
from flax import nnx

from configs.length_tasks import SCHEMES
from experiments import command
from experiments.length_tasks.model import Alibi, Fire, Kerple
from experiments.length_tasks.tasks import TASKS, TaskBatch, TaskBatches, empty_batch
from experiments.length_tasks.train import make_model
from relpos_jax.attention.relations import LinearBias

pytestmark = pytest.mark.usefixtures("in_the_repository")

TASK = TASKS["stack_manipulation"]
SMALL = ("num_layers=2", "width=16", "num_heads=2", "feed_forward=16")


def maker(scheme: str, *changes: str) -> Callable[[], nnx.Module]:
  """Returns a function that makes a small model."""
  words = [f"--config=configs/length_tasks.py:stack_manipulation,{scheme}"]
  words += [f"--config.model.{change}" for change in (*SMALL, *changes)]
  config = command.parse({"config": command.CONFIG}, words)["config"]
  return lambda: make_model(config, TASK, nnx.Rngs(0))


def make_batch(drawn_from: int = 64, num_shapes: int = 1) -> TaskBatch:
  options = dict(rows=3, num_shapes=num_shapes, drawn_from=drawn_from, seed=None)
  return TaskBatches(TASK, range(6, 7), **options)[0]


def pad(batch: TaskBatch, num_more: int) -> TaskBatch:
  rows, num_tokens = batch.tokens.shape
  padded = empty_batch((rows, num_tokens + num_more))
  for name, values in batch._asdict().items():
    getattr(padded, name)[:, :num_tokens] = values
  return padded


KINDS = [(scheme, "random") for scheme in SCHEMES]
KINDS += [("sinusoidal", "plain"), ("alibi", "plain")]


@pytest.mark.parametrize("scheme, kind", KINDS)
def test_answers_depend_on_all_tokens_and_drawn_positions_and_not_on_padding(
  scheme, kind
):
  model = make_random(maker(f"{scheme},{kind}"), scale=0.2)
  batch = make_batch(64 if kind == "random" else 0)
  apply = nnx.jit(lambda model, batch: model(batch))
  logits = apply(model, batch)
  padded = apply(model, pad(batch, 5))[:, : batch.tokens.shape[1]]
  np.testing.assert_allclose(logits, padded, atol=2e-5)
  if kind == "random":
    moved = apply(model, batch._replace(positions=batch.positions * 2))
    assert jnp.abs(logits - moved).max() > 1e-4
  else:
    # Without causality, the first answer depends on the last token.
    tokens = batch.tokens.copy()
    tokens[:, -1] = 1
    changed = apply(model, batch._replace(tokens=tokens))
    assert jnp.abs(logits - changed)[:, 0].max() > 1e-6


def bias(positions, i: int, j: int) -> np.ndarray:
  relation = positions()
  i, j = jnp.asarray(i), jnp.asarray(j)
  return np.asarray(relation.function(relation.params, i, j, None, None, None))


def test_alibi_has_half_a_step_less_on_the_left():
  slopes = LinearBias.alibi(8).slopes
  np.testing.assert_allclose(bias(Alibi(8), 3, 7), -4 * slopes)
  np.testing.assert_allclose(bias(Alibi(8), 7, 3), -3.5 * slopes)
  assert (bias(Alibi(8), 5, 5) == 0).all()


def test_kerple_has_two_sides():
  positions = Kerple(2, rngs=nnx.Rngs(0))
  positions.log_r1[...] = jnp.log(jnp.array([[3.0, 4.0], [1.0, 2.0]]))
  positions.log_r2[...] = jnp.log(jnp.array([[0.3, 0.4], [0.1, 0.2]]))
  right = -np.array([1, 2]) * np.log1p(np.array([0.1, 0.2]) * 5)
  left = -np.array([3, 4]) * np.log1p(np.array([0.3, 0.4]) * 5)
  np.testing.assert_allclose(bias(positions, 2, 7), right, rtol=1e-5)
  np.testing.assert_allclose(bias(positions, 7, 2), left, rtol=1e-5)


def test_fire_is_the_published_function_of_the_distance():
  positions = Fire(2, 20, rngs=nnx.Rngs(0))
  positions.multiplier[...] = jnp.array(-1.5)  # the threshold is 30
  positions.hidden_bias[...] = jnp.linspace(-1, 1, 32)
  hidden, out = (np.float64(x[...]) for x in (positions.hidden, positions.out))
  for i, j in ((25, 7), (90, 11), (25, 70), (4, 4)):
    share = np.log(0.1 * abs(j - i) + 1) / (np.log(0.1 * max(i, 30) + 1) + 1e-6)
    share *= np.sign(j - i)  # in the paper, all keys are on the left
    expected = np.maximum(share * hidden + np.linspace(-1, 1, 32), 0) @ out
    np.testing.assert_allclose(bias(positions, i, j), expected, rtol=1e-4, atol=1e-6)


def assert_drawn(param, low: float, high: float):
  """Checks that a parameter is drawn uniformly between two numbers."""
  values = np.asarray(param[...])
  margin = 0.1 * (high - low)
  assert low <= values.min() <= low + margin
  assert high - margin <= values.max() <= high


def test_kerple_and_fire_begin_as_in_their_authors_code():
  """FIRE's network has the initial values of PyTorch's `Linear`."""
  kerple = Kerple(100, rngs=nnx.Rngs(0))
  assert_drawn(jnp.exp(kerple.log_r1[...]), 0.01, 2)
  assert_drawn(jnp.exp(kerple.log_r2[...]), 0.01, 1)
  fire = Fire(8, 20, rngs=nnx.Rngs(0))
  assert_drawn(fire.hidden, -1, 1)
  assert_drawn(fire.hidden_bias, -1, 1)
  assert_drawn(fire.out, -(32**-0.5), 32**-0.5)


def test_fire_has_no_bias_by_distance_if_c_is_0():
  positions = Fire(2, 20, rngs=nnx.Rngs(0))
  positions.c[...] = jnp.array(0.0)
  np.testing.assert_array_equal(bias(positions, 9, 2), bias(positions, 9, 9))


def test_tables_have_the_wanted_deviation():
  model = nnx.jit(maker("relative,random", "table_stddev=0.1"))()
  tables = [layer.self_attention.tables for layer in model.layers]
  for table in tables:
    for values in (table.key[...], table.value[...]):
      np.testing.assert_allclose(jnp.std(values), 0.1, rtol=0.05)
  assert not np.allclose(tables[0].key[...], tables[1].key[...])
  assert not np.allclose(tables[0].key[...], tables[0].value[...])
