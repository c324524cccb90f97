"""Devices, microbatches and padding do not matter to a step; a bad one is left out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiling import fill
from flax import nnx
from jax.flatten_util import ravel_pytree

from experiments.data.batching import Batch
from experiments.data.tokenizer import EOS, PAD
from experiments.training.loss import cross_entropy
from experiments.training.sharding import make_mesh, parameter_sharding, put_batch
from experiments.training.step import (
  TrainState,
  init_state,
  inverse_sqrt,
  make_eval_step,
  make_train_step,
)
from experiments.translation import train as train_module
from experiments.translation.train import loss
from relpos_jax.models.seq2seq import Transformer, TransformerConfig

RATES = "dropout_rate", "embedding_dropout_rate"
RATES += "attention_dropout_rate", "feed_forward_dropout_rate"
DROPOUT = dict.fromkeys(RATES, 0.1)
CONFIG = dict(num_layers=1, width=16, num_heads=8, feed_forward=32, max_distance=2)
RATE = inverse_sqrt(0.02, 50)
ADAM = optax.adam(RATE, b2=0.98, eps=1e-9)
SGD = optax.sgd(1.0)  # the parameters lose exactly the gradient

smoothed = functools.partial(loss, smoothing=0.1)


def make_model(**dropout):
  config = TransformerConfig(16, 16, **CONFIG, **dropout)
  return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))


def start(optimizer, num_devices: int = 1) -> TrainState:
  params = fill(make_model()[1], 0.2)
  state = init_state(params, optimizer)
  return jax.device_put(state, parameter_sharding(state, make_mesh(num_devices)))


def copy_task(step: int) -> Batch:
  generator = np.random.default_rng(step)
  rows = generator.integers(4, 12, (8, 8), np.int32)
  ends = generator.integers(1, 8, (8, 1))
  place = np.arange(8)
  rows[place == ends] = EOS
  rows[place > ends] = PAD
  return Batch(rows, rows)


# Gradients, without dropout
# --------------------------------------------------------------------------------------

STILL, _ = make_model(**dict.fromkeys(DROPOUT, 0.0))


def make_sgd_step(num_microbatches: int):
  return make_train_step(STILL, loss, SGD, num_microbatches=num_microbatches)


@pytest.fixture(scope="module")
def sgd_step():
  return make_sgd_step(1)


def gradient(step, batch: Batch):
  """Returns the gradient, as the loss of parameters in a step, and the metrics."""
  before = ravel_pytree(start(SGD).params)[0]
  state, metrics = step(start(SGD), batch)
  return np.asarray(before - ravel_pytree(state.params)[0]), jax.device_get(metrics)


def test_metrics_are_of_the_gradient_and_the_batch(sgd_step):
  batch = copy_task(0)
  grads, metrics = gradient(sgd_step, batch)
  assert metrics["num_tokens"] == (batch.target != PAD).sum()
  assert metrics["grad_norm"] == pytest.approx(np.linalg.norm(grads), rel=1e-4)
  total = make_eval_step(STILL, loss)(start(SGD).params, batch)
  assert total.num_tokens == metrics["num_tokens"]
  mean = float(total.sum) / int(total.num_tokens)
  assert metrics["loss"] == pytest.approx(mean, rel=1e-5)


def test_microbatches_sum_to_the_gradient_of_the_batch_though_one_is_padding(sgd_step):
  batch = copy_task(0)
  for side in batch:
    side[3::4] = PAD
  whole, metrics = gradient(sgd_step, batch)
  parts, metrics_of_parts = gradient(make_sgd_step(4), batch)
  np.testing.assert_allclose(parts, whole, atol=1e-5)
  assert np.abs(whole).max() > 0.01
  for name in metrics:
    np.testing.assert_allclose(metrics_of_parts[name], metrics[name], rtol=1e-5)


# Steps that are not finite
# --------------------------------------------------------------------------------------

SPOILT = 3  # the step with one bad token in its batch


def spoilt_loss(value: float):
  def loss(logits, targets, **options):
    factor = jnp.where(targets == 11, value, 1.0)[..., None]
    return cross_entropy(logits * factor, targets, **options)

  return loss


def spoilt_task(step: int) -> Batch:
  source, target = (np.where(side == 11, 10, side) for side in copy_task(step))
  if step == SPOILT:
    target[5, 0] = 11
  return Batch(source, target)


@pytest.mark.parametrize(
  "num_devices, num_microbatches, value", [(8, 1, np.inf), (1, 4, np.nan)]
)
def test_a_step_that_is_not_finite_is_as_if_left_out(
  num_devices, num_microbatches, value, monkeypatch
):
  monkeypatch.setattr(train_module, "cross_entropy", spoilt_loss(value))
  options = dict(num_microbatches=num_microbatches, schedule=RATE)
  train_step = make_train_step(make_model(**DROPOUT)[0], smoothed, ADAM, **options)
  mesh = make_mesh(num_devices)
  skipping, leaving_out = start(ADAM, num_devices), start(ADAM, num_devices)
  for step in range(6):
    batch = put_batch(spoilt_task(step), mesh)
    if step == SPOILT:
      counted = leaving_out._replace(step=leaving_out.step + 1)
      leaving_out = jax.device_put(counted, parameter_sharding(counted, mesh))
    else:
      leaving_out, _ = train_step(leaving_out, batch)
    skipping, metrics = train_step(skipping, batch)
    assert int(metrics["skipped"]) == (step == SPOILT)
    rate = RATE(step - (step > SPOILT))  # the optimizer does not count a skipped step
    np.testing.assert_allclose(metrics["learning_rate"], rate, rtol=1e-6)
  jax.tree.map(np.testing.assert_array_equal, skipping, leaving_out)
  assert train_step._cache_size() == 1
  assert np.isfinite(jax.tree.leaves(skipping.params)[0]).all()
