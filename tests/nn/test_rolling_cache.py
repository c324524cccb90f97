"""Law 17: decoding with W slots equals the pass in a window, however it is read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_close, assert_same
from flax import nnx

from relpos_jax.nn import (
  AlibiPositions,
  MultiHeadAttention,
  RelativePositionTables,
  RotaryPositions,
)

WIDTH, HEADS = 16, 2


def make_layer(positions="tables", **options):
  rngs = nnx.Rngs(0)
  if positions == "tables":
    positions = RelativePositionTables(3, WIDTH // HEADS, num_heads=HEADS, rngs=rngs)
  return MultiHeadAttention(WIDTH, HEADS, positions=positions, rngs=rngs, **options)


def tokens(length):
  return jax.random.normal(jax.random.key(1), (2, length, WIDTH))


def read(layer, x, portions, window, first=0):
  """Returns the outputs of tokens read in portions, at positions from `first`."""
  cache = layer.init_rolling_cache(len(x), window)
  decode, outputs = jax.jit(layer.decode), []
  for rows in np.split(np.arange(x.shape[1]), np.cumsum(portions)[:-1]):
    positions = jnp.broadcast_to(first + rows, (len(x), len(rows)))
    y, cache = decode(x[:, rows], cache, positions)
    outputs.append(y)
  return jnp.concatenate(outputs, axis=1)


@pytest.mark.parametrize(
  "positions, num_key_heads, window, portions",
  [
    ("tables", HEADS, 4, [1] * 11),
    ("tables", HEADS, 4, [3, 1, 7]),  # more tokens at once than slots
    ("tables", HEADS, 4, [4, 4, 3]),
    ("tables", HEADS, 1, [2, 9]),
    ("tables", HEADS, 16, [5, 6]),  # more slots than tokens
    (AlibiPositions(HEADS), 1, 4, [3, 1, 7]),
    (RotaryPositions(), 1, 4, [3, 1, 7]),
    (None, 1, 4, [3, 1, 7]),
  ],
)
def test_decoding_equals_the_pass_in_a_window(
  positions, num_key_heads, window, portions
):
  layer = make_layer(positions, num_key_heads=num_key_heads)
  x = tokens(sum(portions))
  full = layer(x, is_causal=True, local_window_size=(window - 1, 0))
  assert_close(read(layer, x, portions, window), full, rtol=1e-5, atol=1e-5)


def test_padding_takes_no_slot_and_rows_have_their_own_lengths():
  layer, x = make_layer(), tokens(6)
  alone = read(layer, x[:1, 2:], [4], window=3)
  cache = layer.init_rolling_cache(2, 3)
  positions = jnp.array([[-1, -1, 0, 1], [0, 1, 2, 3]])
  _, cache = layer.decode(x[:, :4], cache, positions)
  y, cache = layer.decode(x[:, 4:], cache, jnp.array([[2, 3], [4, 5]]))
  assert_close(y[0], alone[0, 2:], rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(np.sort(cache.positions), [[1, 2, 3], [3, 4, 5]])
  _, same = layer.decode(x[:, :1], cache, jnp.full((2, 1), -1))
  assert_same(same, cache)


@pytest.mark.parametrize(
  "positions, dtype",
  [("tables", "int8"), ("tables", "uint8"), (RotaryPositions(), "uint32")],
)
def test_positions_may_have_any_integer_dtype(positions, dtype):
  layer, x = make_layer(positions), tokens(8)
  at = jnp.broadcast_to(jnp.arange(8), (2, 8))
  cache = layer.init_rolling_cache(2, 4)
  outputs = []
  for portion in (slice(3), slice(3, 8)):
    y, cache = layer.decode(x[:, portion], cache, at[:, portion].astype(dtype))
    outputs.append(y)
  assert_close(jnp.concatenate(outputs, 1), read(layer, x, [3, 5], window=4), atol=1e-6)


def test_a_portion_without_tokens_changes_nothing():
  layer = make_layer()
  cache = layer.init_rolling_cache(2, 4)
  y, same = layer.decode(tokens(0), cache, jnp.zeros((2, 0), int))
  assert y.shape == (2, 0, WIDTH)
  assert_same(same, cache)


@pytest.mark.parametrize("positions", ["tables", RotaryPositions()])
def test_large_positions_keep_exact_distances(positions):
  layer, x = make_layer(positions), tokens(8)
  near = read(layer, x, [3, 5], window=4)
  far = read(layer, x, [3, 5], window=4, first=2**31 - 9)
  assert_close(far, near, rtol=1e-6, atol=1e-6)


def test_a_mask_is_refused():
  layer, mask = make_layer(), jnp.ones((2, 1, 1, 5), bool)
  cache = layer.init_rolling_cache(2, 4)
  with pytest.raises(ValueError, match="takes no mask"):
    layer.decode(tokens(1), cache, jnp.zeros((2, 1), int), mask)


def test_a_window_without_slots_is_refused():
  with pytest.raises(ValueError, match="window is 0; want 1 or more"):
    make_layer().init_rolling_cache(2, 0)


def test_a_cache_of_another_batch_is_named():
  layer = make_layer()
  cache = layer.init_rolling_cache(3, 4)
  with pytest.raises(ValueError, match="cache has batch size 3; want 2, as x"):
    layer.decode(tokens(1), cache, jnp.zeros((2, 1), int))


@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 2)])
def test_positions_of_another_shape_are_named(shape):
  layer = make_layer()
  cache = layer.init_rolling_cache(2, 4)
  with pytest.raises(ValueError, match=r"positions has shape .*; want \(2, 3\)"):
    layer.decode(tokens(3), cache, jnp.zeros(shape, int))
