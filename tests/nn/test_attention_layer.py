"""The attention layer: decoding equals the full pass, shared tables, dropout, sown weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import randomly
from flax import nnx

from relpos_jax.nn.attention import MultiHeadAttention
from relpos_jax.nn.positions import RelativePositionTables

B, T, D, N, H = 3, 6, 16, 4, 4
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((B, T, D), dtype=np.float32)


def make_tables(rngs, per_head=True, beyond="clip"):
  return RelativePositionTables(2, H, num_heads=N if per_head else None, beyond=beyond, rngs=rngs)


def make_layer(*, tables=True, per_head=True, beyond="clip", **options):
  def make():
    rngs = nnx.Rngs(0)
    layer_tables = make_tables(rngs, per_head, beyond) if tables else None
    return MultiHeadAttention(D, N, tables=layer_tables, rngs=rngs, **options)

  return randomly(make, 0.3)


VARIANTS = dict(
  plain=dict(tables=False),
  relative=dict(),
  grouped=dict(num_key_heads=2, per_head=False, beyond="zero"),
)


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS)
def causal(request):
  layer = make_layer(**request.param)
  return layer, jax.jit(lambda x: layer(x, is_causal=True))(X), jax.jit(layer.decode)


def spread(x, real):
  """Returns the first tokens of each row where `real`, noise elsewhere, and their positions."""
  positions = np.where(real, np.cumsum(real, axis=1) - 1, -1)
  noise = 100 * np.random.default_rng(0).standard_normal((*real.shape, x.shape[-1]))
  places = np.maximum(positions, 0)[..., None]
  tokens = np.where(real[..., None], np.take_along_axis(x, places, axis=1), noise)
  return tokens.astype(x.dtype), positions


@pytest.mark.parametrize("parts", [[1, 1, 1, 1, 1, 1], [4, 1, 1]], ids=str)
def test_any_split_into_parts_gives_the_full_pass(causal, parts):
  layer, expected, decode = causal
  cache = layer.init_cache(B, num_slots=10)
  outputs, start = [], 0
  for size in parts:
    positions = np.tile(np.arange(start, start + size), (B, 1))
    y, cache = decode(X[:, start : start + size], cache, positions)
    outputs.append(y)
    start += size
  np.testing.assert_allclose(np.concatenate(outputs, axis=1), expected, atol=1e-5)


def test_padding_left_right_and_between_and_beams_in_any_order_give_the_full_pass(causal):
  layer, expected, decode = causal
  left, right, between = [0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0]
  real = np.array([left, right, between], bool)
  tokens, positions = spread(X, real)
  y, cache = decode(tokens, layer.init_cache(B, num_slots=10), positions)
  for row in range(B):
    np.testing.assert_allclose(y[row, real[row]], expected[row, :2], atol=1e-5)

  rows = np.array([2, 0, 2])
  cache = jax.tree.map(lambda leaf: leaf[rows], cache)
  for t in (2, 3, 4):
    y, cache = decode(X[rows, t : t + 1], cache, np.full((B, 1), t))
    np.testing.assert_allclose(y[:, 0], expected[rows, t], atol=1e-5)

  # A row that ended reads padding while the others go on.
  order = np.array([1, 2, 0])
  rows, cache = rows[order], jax.tree.map(lambda leaf: leaf[order], cache)
  y, cache = decode(X[rows, 5:6], cache, np.array([[5], [-1], [5]]))
  np.testing.assert_allclose(y[::2, 0], expected[rows[::2], 5], atol=1e-5)
  y, cache = decode(X[rows, 5:6], cache, np.array([[-1], [5], [-1]]))
  np.testing.assert_allclose(y[1, 0], expected[rows[1], 5], atol=1e-5)


def test_a_full_cache_refuses_a_token():
  layer = make_layer()
  cache = layer.init_cache(B, num_slots=2)
  with pytest.raises(ValueError, match="cache of 2 slots holds 0 tokens: no room for 3"):
    layer.decode(jnp.asarray(X[:, :3]), cache, jnp.zeros((B, 3), int))


def test_a_width_that_heads_do_not_divide_needs_a_head_width():
  with pytest.raises(ValueError, match="width is 18; want a multiple of num_heads, 4"):
    MultiHeadAttention(18, 4, rngs=nnx.Rngs(0))
  layer = randomly(lambda: MultiHeadAttention(18, 4, head_width=5, rngs=nnx.Rngs(0)))
  assert layer.query.kernel.shape == (18, 4, 5)


def test_grouped_heads_have_smaller_projections_and_cache():
  layer = make_layer(num_key_heads=2)
  assert layer.query.kernel.shape == (D, N, H)
  assert layer.key.kernel.shape == layer.value.kernel.shape == (D, 2, H)
  assert layer.init_cache(B, 7).key.shape == (B, 7, 2, H)


def test_projections_start_with_unit_variance():
  layer = MultiHeadAttention(64, 2, head_width=8, rngs=nnx.Rngs(0))
  for projection, fan_in in ((layer.query, 64), (layer.value, 64), (layer.out, 16)):
    limit = (3 / fan_in) ** 0.5
    assert 0.97 * limit < np.abs(projection.kernel[...]).max() <= limit
    assert projection.bias is None


class Stack(nnx.Module):
  """Two attention layers, one after the other."""

  def __init__(self, share: bool):
    rngs = nnx.Rngs(0)
    first = make_tables(rngs)
    tables = [first, first if share else make_tables(rngs)]
    self.layers = nnx.List([MultiHeadAttention(D, N, tables=t, rngs=rngs) for t in tables])

  def __call__(self, x):
    for layer in self.layers:
      x = layer(x)
    return x


def test_shared_tables_are_one_parameter_with_the_sum_of_the_gradients():
  def gradients(stack):
    graphdef, params = nnx.split(stack)
    loss = lambda params, x: jnp.sum(nnx.merge(graphdef, params)(x) ** 2)
    return jax.jit(jax.grad(loss))(params, X)["layers"]

  shared = randomly(lambda: Stack(True))
  separate = randomly(lambda: Stack(False))
  nnx.update(separate, nnx.state(shared))
  nnx.update(separate.layers[1].tables, nnx.state(shared.layers[0].tables))
  of_shared, of_separate = gradients(shared), gradients(separate)
  assert "tables" not in of_shared[1]
  for name in ("key", "value"):
    first, second = (np.asarray(of_separate[i]["tables"][name][...]) for i in (0, 1))
    assert np.abs(first).max() > 0.1 and np.abs(second).max() > 0.1
    np.testing.assert_allclose(of_shared[0]["tables"][name][...], first + second, rtol=1e-4)


def test_dropout_needs_rngs_and_reaches_the_output():
  layer = make_layer(dropout_rate=0.5)
  call = jax.jit(lambda x, seed: layer(x, rngs=nnx.Rngs(dropout=jax.random.key(seed))))
  still = jax.jit(layer)(X)
  np.testing.assert_array_equal(still, jax.jit(make_layer())(X))
  assert jnp.abs(call(X, 0) - still).max() > 0.1
  assert jnp.abs(call(X, 0) - call(X, 1)).max() > 0.1
  np.testing.assert_array_equal(call(X, 0), call(X, 0))


@jax.jit
def look(layer, x):
  return nnx.capture(layer, nnx.Intermediate)(x, is_causal=True)


def test_sown_weights_reproduce_the_output():
  layer = make_layer()
  layer.set_attributes(sow_weights=True)
  assert not look(make_layer(), X)[1]
  y, sown = look(layer, X)
  (weights,) = sown["weights"]
  assert weights.shape == (B, N, T, T)

  @jax.jit
  def attend(weights):
    labels = jnp.clip(jnp.arange(T) - jnp.arange(T)[:, None], -2, 2) + 2
    z = jnp.einsum("bnts,bsnh->btnh", weights, layer.value(X))
    z += jnp.einsum("bnts,tsnh->btnh", weights, layer.tables.value[...][labels])
    return layer.out(z)

  np.testing.assert_allclose(attend(weights), y, atol=1e-5)


def test_low_precision_computes_with_float32_parameters():
  layer = make_layer(dtype="bfloat16")
  x = X.astype(jnp.bfloat16)
  y = jax.jit(layer)(x)
  assert y.dtype == layer.init_cache(1, 1).key.dtype == jnp.bfloat16
  assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(layer))} == {jnp.dtype("float32")}
  np.testing.assert_allclose(y.astype(jnp.float32), jax.jit(make_layer())(X), atol=0.05)


def test_the_implementation_named_is_the_one_asked():
  with pytest.raises(ValueError, match="implementation is 'nonsense'"):
    make_layer(implementation="nonsense")(jnp.asarray(X))
