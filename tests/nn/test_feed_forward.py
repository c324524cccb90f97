"""The feed-forward layer and the residual against their equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax.nn.feed_forward import FeedForward, Residual, drop

RANDOM = np.random.default_rng(0)
X = jnp.asarray(RANDOM.standard_normal((3, 5, 8)), jnp.float32)
Y = jnp.asarray(RANDOM.standard_normal((3, 5, 8)), jnp.float32)
RNGS = lambda: nnx.Rngs(dropout=jax.random.key(0))


def standardized(x):
  x = np.asarray(x, np.float64)
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("shape", [(400, 300), (20, 30, 200)])
def test_a_share_of_the_numbers_is_dropped_each_on_its_own(shape):
  dropped = jax.jit(
    lambda seed: drop(jnp.ones(shape), 0.2, nnx.Rngs(dropout=jax.random.key(seed)))
  )
  x, other = np.asarray(dropped(0)), np.asarray(dropped(1))
  assert set(np.unique(x)) == {np.float32(0), np.float32(1.25)}
  np.testing.assert_array_equal(x, dropped(0))
  bound = 5 * 0.2 / np.sqrt(x.size)  # five deviations of the mean of a product of two
  is_zero = (x == 0).reshape(-1, shape[-1])
  assert abs(is_zero.mean() - 0.2) < 5 * 0.4 / np.sqrt(x.size)
  pairs = [is_zero & (other == 0).reshape(is_zero.shape)]  # of keys, then of neighbours
  pairs += [is_zero[1:] & is_zero[:-1], is_zero[:, 1:] & is_zero[:, :-1]]
  for both in pairs:
    assert abs(both.mean() - 0.04) < bound
  rows = is_zero.mean(1), is_zero.mean(0)
  for shares, number in zip(rows, is_zero.shape[::-1], strict=True):
    np.testing.assert_allclose(shares.std(), 0.4 / np.sqrt(number), rtol=0.25)


def test_nothing_is_dropped_without_rngs():
  assert drop(X, 0.5, None) is X


def test_feed_forward_is_two_linear_maps_around_a_relu():
  layer = FeedForward(8, 16, rngs=nnx.Rngs(0))
  layer.hidden.bias[...] = jnp.linspace(-1, 1, 16)
  layer.out.bias[...] = jnp.linspace(2, 3, 8)
  w1, b1, w2, b2 = (
    np.asarray(x[...])
    for x in (layer.hidden.kernel, layer.hidden.bias, layer.out.kernel, layer.out.bias)
  )
  expected = np.maximum(np.asarray(X) @ w1 + b1, 0) @ w2 + b2
  np.testing.assert_allclose(jax.jit(layer)(X), expected, rtol=1e-5, atol=1e-5)


def test_pre_norm_leaves_the_way_around_alone():
  residual = Residual(8, norm="pre", rngs=nnx.Rngs(0))
  np.testing.assert_allclose(jax.jit(residual.before)(X), standardized(X), atol=1e-5)
  np.testing.assert_allclose(jax.jit(residual.after)(X, Y), X + Y, rtol=1e-6)


def test_post_norm_standardizes_the_sum():
  residual = Residual(8, norm="post", rngs=nnx.Rngs(0))
  np.testing.assert_array_equal(jax.jit(residual.before)(X), X)
  np.testing.assert_allclose(
    jax.jit(residual.after)(X, Y), standardized(X + Y), atol=1e-5
  )


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_residual_drops_the_sub_layers_output_only(norm):
  residual = Residual(8, norm=norm, dropout_rate=0.5, rngs=nnx.Rngs(0))
  ones = jnp.ones_like(Y)
  after = jax.jit(lambda x, y: residual.after(x, y, RNGS()))(X, ones)
  if norm == "pre":
    added = np.round(after - X, 5)
    assert set(np.unique(added)) == {0.0, 2.0}
  assert not np.allclose(after, jax.jit(residual.after)(X, ones))
