"""Cross-entropy against its definition with dense distributions in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from compiling import compile_as_users_do

from experiments.training.loss import cross_entropy


def example(vocabulary=11):
  generator = np.random.default_rng(0)
  logits = 3 * generator.normal(size=(3, 5, vocabulary)).astype(np.float32)
  targets = generator.integers(1, vocabulary, (3, 5)).astype(np.int32)
  targets[0, 3:] = 0
  return jnp.asarray(logits), jnp.asarray(targets)


def dense(logits, targets, smoothing):
  """Returns the divergence from the smoothed targets, and its gradient."""
  logits, targets = np.asarray(logits, np.float64), np.asarray(targets)
  q = np.full(logits.shape, smoothing / (logits.shape[-1] - 1))
  np.put_along_axis(q, targets[..., None], 1 - smoothing, axis=-1)
  p = scipy.special.softmax(logits, axis=-1)
  is_token = (targets != 0)[..., None]
  return np.sum(is_token * scipy.special.rel_entr(q, p)), is_token * (p - q)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_loss_and_gradient_are_the_definition(smoothing):
  logits, targets = example()
  total = cross_entropy(logits, targets, smoothing=smoothing)
  gradient = jax.grad(lambda x: cross_entropy(x, targets, smoothing=smoothing).sum)
  wanted, wanted_gradient = dense(logits, targets, smoothing)
  np.testing.assert_allclose(total.sum, wanted, rtol=1e-5)
  np.testing.assert_allclose(gradient(logits), wanted_gradient, atol=1e-6)
  assert total.num_tokens == 13


def test_bfloat16_logits_are_summed_in_float32():
  logits, targets = example(vocabulary=2000)
  half = jnp.asarray(logits, jnp.bfloat16)
  total = cross_entropy(half, targets, smoothing=0.1).sum
  wanted, _ = dense(half, targets, 0.1)
  np.testing.assert_allclose(total, wanted, rtol=1e-5)


def test_no_distribution_over_the_vocabulary_is_held_besides_the_gradient():
  logits = jax.ShapeDtypeStruct((8, 16, 4096), jnp.float32)
  targets = jax.ShapeDtypeStruct((8, 16), jnp.int32)

  def loss(logits, targets):
    return cross_entropy(logits, targets, smoothing=0.1).sum

  size = 8 * 16 * 4096 * 4
  for function, limit in ((loss, 0.1), (jax.grad(loss), 1.1)):
    compiled = compile_as_users_do(function).lower(logits, targets).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < limit * size
