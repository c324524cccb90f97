"""The attention layer: decoding equals the full pass, without rank promotion."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_close
from compiling import make_random
from flax import nnx

from relpos_jax.nn import (
  DebertaPositions,
  MultiHeadAttention,
  RelativePositionTables,
  RotaryPositions,
  TransformerXLPositions,
)

B, T, D, N, H = 3, 6, 16, 4, 4
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((B, T, D), dtype=np.float32)


def tables_of_heads(rngs):
  return RelativePositionTables(2, H, num_heads=N, rngs=rngs)


def make_layer(make_positions=tables_of_heads, **options):
  def make():
    rngs = nnx.Rngs(0)
    positions = make_positions(rngs)
    return MultiHeadAttention(D, N, positions=positions, rngs=rngs, **options)

  return make_random(make, 0.3)


def no_positions(rngs):
  return None


def shared_tables(rngs):
  return RelativePositionTables(2, H, beyond="zero", rngs=rngs)


def rotary(rngs):
  return RotaryPositions()


def transformer_xl(rngs):
  return TransformerXLPositions(D, N, H, 4, rngs=rngs)


def deberta(rngs):
  return DebertaPositions(N, H, 4, rngs=rngs)


@pytest.fixture(scope="module", autouse=True)
def no_rank_promotion():
  with jax.numpy_rank_promotion("raise"):
    yield


@pytest.fixture(
  scope="module",
  params=[
    (no_positions, N),
    (tables_of_heads, N),
    (shared_tables, 2),
    (rotary, N),
    (deberta, N),
  ],
)
def causal(request):
  make_positions, num_key_heads = request.param
  layer = make_layer(make_positions, num_key_heads=num_key_heads)
  return layer, jax.jit(lambda x: layer(x, is_causal=True))(X), jax.jit(layer.decode)


@pytest.mark.parametrize(
  "sizes, num_slots, fewest", [([1] * 6, 10, 32), ([4, 1, 1], 11, 1)], ids=str
)
def test_any_split_into_parts_gives_the_full_pass(
  causal, sizes, num_slots, fewest, monkeypatch
):
  monkeypatch.setattr("relpos_jax.nn.attention.FEWEST_SLOTS", fewest)
  layer, expected, decode = causal
  cache = layer.init_cache(B, num_slots)
  for rows in np.split(np.arange(T), np.cumsum(sizes)[:-1]):
    y, cache = decode(X[:, rows], cache, np.tile(rows, (B, 1)))
    assert_close(y, expected[:, rows], atol=1e-5)


def spread(x, is_token):
  """Returns the first tokens of rows, noise where not `is_token`, and positions."""
  positions = np.where(is_token, np.cumsum(is_token, axis=1) - 1, -1)
  noise = 100 * np.random.default_rng(0).standard_normal((*is_token.shape, x.shape[-1]))
  indices = np.maximum(positions, 0)[..., None]
  in_order = np.take_along_axis(x, indices, axis=1)
  tokens = np.where(is_token[..., None], in_order, noise)
  return tokens.astype(x.dtype), positions


def test_padding_left_right_and_between_and_beams_in_any_order_give_the_full_pass(
  causal,
):
  layer, expected, decode = causal
  left, right, between = [0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0]
  is_token = np.array([left, right, between], bool)
  tokens, positions = spread(X, is_token)
  y, cache = decode(tokens, layer.init_cache(B, num_slots=10), positions)
  for row in range(B):
    assert_close(y[row, is_token[row]], expected[row, :2], atol=1e-5)

  rows = np.array([2, 0, 2])
  cache = jax.tree.map(lambda leaf: leaf[rows], cache)
  for t in (2, 3, 4):
    y, cache = decode(X[rows, t : t + 1], cache, np.full((B, 1), t))
    assert_close(y[:, 0], expected[rows, t], atol=1e-5)

  # A row that ended reads padding while the others go on.
  order = np.array([1, 2, 0])
  rows, cache = rows[order], jax.tree.map(lambda leaf: leaf[order], cache)
  last = X[rows, 5:6]
  y, cache = decode(last, cache, np.array([[5], [-1], [5]]))
  assert_close(y[::2, 0], expected[rows[::2], 5], atol=1e-5)
  y, cache = decode(last, cache, np.array([[-1], [5], [-1]]))
  assert_close(y[1, 0], expected[rows[1], 5], atol=1e-5)


def test_cross_attention_is_self_attention_over_both_sequences():
  layer = make_layer()
  x, encoded = jnp.asarray(X), jnp.asarray(X[:, :4] * 2 - 1)
  of_queries, of_keys = np.arange(T), 2 * np.arange(4) - 1
  y = layer(x, encoded, query_positions=of_queries, key_positions=of_keys)
  both = jnp.concatenate([x, encoded], axis=1)
  positions = np.concatenate([of_queries, of_keys])
  options = {"query_positions": positions, "key_positions": positions}
  options["mask"] = (np.arange(T + 4) >= T)[None, None, None]
  assert_close(y, layer(both, **options)[:, :T], atol=1e-5)
  assert jnp.abs(y - layer(x, encoded)).max() > 0.1


def test_a_full_cache_refuses_a_token():
  layer = make_layer()
  cache = layer.init_cache(B, num_slots=2)
  message = "cache of 2 slots holds 0 tokens: no room for 3"
  with pytest.raises(ValueError, match=message):
    layer.decode(jnp.asarray(X[:, :3]), cache, jnp.zeros((B, 3), int))


def test_a_cache_may_be_closed_over_and_empty():
  layer = make_layer()
  cache, x = layer.init_cache(B, num_slots=4), jnp.asarray(X[:, :1])
  positions = jnp.zeros((B, 1), int)
  y, _ = layer.decode(x, cache, positions)
  found = jax.jit(lambda x: layer.decode(x, cache, positions)[0])(x)
  assert_close(found, y, atol=1e-6)
  for size in (0, 1):
    y, _ = layer.decode(x[:0, :size], layer.init_cache(0, 4), positions[:0, :size])
    assert y.shape == (0, size, D)
  y, cache = layer.decode(x[:, :0], cache, positions[:, :0])
  assert y.shape == (B, 0, D)
  assert not cache.length.any()


@pytest.mark.parametrize("kind", ["init_cache", "init_rolling_cache"])
def test_a_cache_may_be_donated(kind):
  layer = make_layer()
  positions = jnp.zeros((B, 1), int)
  decode = jax.jit(layer.decode, donate_argnums=1)
  y, _ = decode(jnp.asarray(X[:, :1]), getattr(layer, kind)(B, 4), positions)
  assert_close(y, layer(jnp.asarray(X[:, :1])), atol=1e-6)


def test_a_row_that_outgrows_its_cache_becomes_nan_and_the_others_do_not():
  layer = make_layer()
  x, decode = jnp.asarray(X), jax.jit(layer.decode)
  full = layer(x, is_causal=True)
  # One slot of a row is taken.
  cache = layer.init_cache(B, T)._replace(length=jnp.array([0, 1, 0]))
  for t in range(T):
    y, cache = decode(x[:, t : t + 1], cache, jnp.full((B, 1), t))
    rows = [0, 1, 2] if t < T - 1 else [0, 2]
    assert_close(y[rows, 0], full[rows, t], atol=1e-5)
  assert jnp.isnan(y[1]).all()
  assert cache.positions[1].tolist() == [-1, 0, 1, 2, 3, 4]


def test_a_width_that_heads_do_not_divide_needs_a_head_width():
  with pytest.raises(ValueError, match="width is 18; want a multiple of num_heads, 4"):
    MultiHeadAttention(18, 4, rngs=nnx.Rngs(0))
  layer = make_random(lambda: MultiHeadAttention(18, 4, head_width=5, rngs=nnx.Rngs(0)))
  assert layer.query.kernel.shape == (18, 4, 5)


def test_key_heads_that_do_not_divide_the_heads_are_named():
  with pytest.raises(ValueError, match="num_key_heads is 3; want a divisor of"):
    MultiHeadAttention(D, N, num_key_heads=3, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("make_positions", [deberta, transformer_xl])
def test_a_scale_beside_that_of_the_positions_is_refused(make_positions):
  layer = make_layer(make_positions)
  with pytest.raises(ValueError, match="takes no scale"):
    layer(jnp.asarray(X), scale=2.0)


def test_projections_start_with_unit_variance():
  layer = MultiHeadAttention(64, 2, head_width=8, rngs=nnx.Rngs(0))
  for projection, fan_in in ((layer.query, 64), (layer.value, 64), (layer.out, 16)):
    limit = (3 / fan_in) ** 0.5
    assert 0.97 * limit < np.abs(projection.kernel[...]).max() <= limit
    assert projection.bias is None


def test_the_implementation_named_is_the_one_asked():
  layer, x = make_layer(implementation="nonsense"), jnp.asarray(X)
  assert_close(layer(x, implementation="reference"), make_layer()(x), atol=1e-6)
  with pytest.raises(ValueError, match="implementation is 'nonsense'"):
    layer(jnp.asarray(X))
