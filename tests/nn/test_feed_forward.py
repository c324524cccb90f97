"""The feed-forward layer and the residual against their equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from relpos_jax.nn.feed_forward import FeedForward, Residual, drop

RANDOM = np.random.default_rng(0)
X = jnp.asarray(RANDOM.standard_normal((3, 5, 8)), jnp.float32)
Y = jnp.asarray(RANDOM.standard_normal((3, 5, 8)), jnp.float32)


def standardize(x):
  x = np.asarray(x, np.float64)
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


def check_share(is_dropped, wanted):
  """Allows five deviations of the mean."""
  deviation = np.sqrt(wanted * (1 - wanted) / is_dropped.size)
  assert abs(is_dropped.mean() - wanted) < 5 * deviation


@pytest.mark.parametrize("shape", [(400, 300), (20, 30, 200)], ids=str)
def test_a_share_of_the_numbers_is_dropped_each_on_its_own(shape):
  @jax.jit
  def drop_ones(seed):
    return drop(jnp.ones(shape), 0.2, nnx.Rngs(dropout=jax.random.key(seed)))

  x = drop_ones(0)
  assert {*np.unique(x)} == {np.float32(0), np.float32(1.25)}
  assert_array_equal(drop_ones(0), x)
  is_zero = np.reshape(x == 0, (-1, shape[-1]))
  is_zero_of_other = np.reshape(drop_ones(1) == 0, is_zero.shape)
  check_share(is_zero, 0.2)
  check_share(is_zero & is_zero_of_other, 0.04)
  check_share(is_zero[1:] & is_zero[:-1], 0.04)
  check_share(is_zero[:, 1:] & is_zero[:, :-1], 0.04)
  for axis in (0, 1):
    deviation = 0.4 / np.sqrt(is_zero.shape[axis])
    assert_allclose(is_zero.mean(axis).std(), deviation, rtol=0.25)


def test_nothing_is_dropped_without_rngs():
  assert drop(X, 0.5, None) is X


def test_feed_forward_is_two_linear_maps_around_a_relu():
  layer = FeedForward(8, 16, rngs=nnx.Rngs(0))
  layer.hidden.bias[...] = jnp.linspace(-1, 1, 16)
  layer.out.bias[...] = jnp.linspace(2, 3, 8)
  hidden = X @ layer.hidden.kernel[...] + layer.hidden.bias[...]
  expected = np.maximum(hidden, 0) @ layer.out.kernel[...] + layer.out.bias[...]
  assert_allclose(jax.jit(layer)(X), expected, rtol=1e-5, atol=1e-5)


def test_pre_norm_leaves_the_way_around_alone():
  residual = Residual(8, norm="pre", rngs=nnx.Rngs(0))
  assert_allclose(residual.before(X), standardize(X), atol=1e-5)
  assert_allclose(residual.after(X, Y), X + Y, rtol=1e-6)


def test_post_norm_standardizes_the_sum():
  residual = Residual(8, norm="post", rngs=nnx.Rngs(0))
  assert_array_equal(residual.before(X), X)
  assert_allclose(residual.after(X, Y), standardize(X + Y), atol=1e-5)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_residual_drops_the_sub_layers_output_only(norm):
  residual = Residual(8, norm=norm, dropout_rate=0.5, rngs=nnx.Rngs(0))
  ones = jnp.ones_like(Y)

  after = residual.after(X, ones, nnx.Rngs(dropout=jax.random.key(0)))
  if norm == "pre":
    assert {*np.unique(np.round(after - X, 5))} == {0.0, 2.0}
  assert not np.allclose(after, residual.after(X, ones))


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_a_wrong_rate_is_named(rate):
  with pytest.raises(ValueError, match=f"dropout_rate is {rate}; want 0 <= rate < 1"):
    drop(X, rate, nnx.Rngs(dropout=0))
