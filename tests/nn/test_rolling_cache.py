"""Tests of law 17: decoding with W slots equals the pass in a window, however it is read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax.nn import (
  AlibiPositions,
  MultiHeadAttention,
  RelativePositionTables,
  RotaryPositions,
)

WIDTH, HEADS = 16, 2
TOLERANCE = dict(rtol=1e-5, atol=1e-5)


def make_layer(scheme: str = "tables", **options) -> MultiHeadAttention:
  rngs = nnx.Rngs(0)
  positions = None
  if scheme == "tables":
    positions = RelativePositionTables(3, WIDTH // HEADS, num_heads=HEADS, rngs=rngs)
  elif scheme == "alibi":
    positions = AlibiPositions(HEADS)
  elif scheme == "rotary":
    positions = RotaryPositions()
  return MultiHeadAttention(WIDTH, HEADS, positions=positions, rngs=rngs, **options)


def read(layer, x, portions, window, first=0):
  """Returns the outputs of tokens that are read in portions, at positions from `first`."""
  cache = layer.init_rolling_cache(len(x), window)
  outputs, start = [], 0
  for size in portions:
    positions = first + jnp.broadcast_to(
      jnp.arange(start, start + size), (len(x), size)
    )
    y, cache = layer.decode(x[:, start : start + size], cache, positions)
    outputs.append(y)
    start += size
  return jnp.concatenate(outputs, axis=1)


def tokens(length: int, batch: int = 2) -> jax.Array:
  return jax.random.normal(jax.random.key(1), (batch, length, WIDTH))


@pytest.mark.parametrize("scheme", ["tables", "alibi", "rotary", "none"])
@pytest.mark.parametrize(
  "window, portions",
  [
    (4, [1] * 11),
    (4, [3, 1, 7]),  # more tokens at once than slots
    (4, [4, 4, 3]),
    (1, [2, 9]),
    (16, [5, 6]),  # more slots than tokens
  ],
)
def test_decoding_equals_the_pass_in_a_window(scheme, window, portions):
  layer, x = make_layer(scheme), tokens(11)
  full = layer(x, is_causal=True, local_window_size=(window - 1, 0))
  np.testing.assert_allclose(read(layer, x, portions, window), full, **TOLERANCE)


def test_fewer_key_heads_share_the_cache():
  layer, x = make_layer("none", num_key_heads=1), tokens(9)
  full = layer(x, is_causal=True, local_window_size=(2, 0))
  np.testing.assert_allclose(read(layer, x, [2, 5, 2], 3), full, **TOLERANCE)


def test_a_hundred_thousand_tokens_need_512_slots():
  rngs, portion = nnx.Rngs(0), 125
  layer = MultiHeadAttention(
    8, 1, positions=RelativePositionTables(3, 8, rngs=rngs), rngs=rngs
  )
  x = jax.random.normal(jax.random.key(1), (100_000, 8))

  @nnx.jit
  def read_all(layer, x):
    def read_portion(cache, inputs):
      y, cache = layer.decode(inputs[0][None], cache, inputs[1][None])
      return cache, y[0]

    positions = jnp.arange(len(x)).reshape(-1, portion)
    cache = layer.init_rolling_cache(1, window=512)
    _, y = jax.lax.scan(read_portion, cache, (x.reshape(-1, portion, 8), positions))
    return y.reshape(len(x), 8)

  y = read_all(layer, x)
  # The last 500 outputs depend on the 511 tokens before them at most.
  full = layer(x[None, -1100:], is_causal=True, local_window_size=(511, 0))
  np.testing.assert_allclose(y[-500:], full[0, -500:], **TOLERANCE)


def test_padding_takes_no_slot_and_rows_have_their_own_lengths():
  layer, x = make_layer(), tokens(6)
  alone = read(layer, x[:1, 2:], [4], window=3)
  cache = layer.init_rolling_cache(2, 3)
  positions = jnp.array([[-1, -1, 0, 1], [0, 1, 2, 3]])
  _, cache = layer.decode(x[:, :4], cache, positions)
  y, cache = layer.decode(x[:, 4:], cache, jnp.array([[2, 3], [4, 5]]))
  np.testing.assert_allclose(y[0], alone[0, 2:], **TOLERANCE)
  np.testing.assert_array_equal(np.sort(cache.positions), [[1, 2, 3], [3, 4, 5]])


def test_large_positions_keep_exact_distances():
  layer, x = make_layer(), tokens(8)
  near = read(layer, x, [3, 5], window=4)
  far = read(layer, x, [3, 5], window=4, first=2**31 - 9)
  np.testing.assert_allclose(far, near, rtol=1e-6, atol=1e-6)


def test_a_mask_is_refused():
  layer, x = make_layer(), tokens(1)
  cache = layer.init_rolling_cache(2, 4)
  mask = jnp.ones((2, 1, 1, 5), bool)
  with pytest.raises(ValueError, match="takes no mask"):
    layer.decode(x, cache, jnp.zeros((2, 1), int), mask)
