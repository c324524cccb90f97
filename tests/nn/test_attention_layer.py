"""The attention layer: decoding equals the full pass, shared tables, dropout, sown weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax.nn.attention import MultiHeadAttention
from relpos_jax.nn.positions import RelativePositionTables

B, T, D, N, H = 3, 6, 16, 4, 4
X = jax.random.normal(jax.random.key(0), (B, T, D))
MEMORY = jax.random.normal(jax.random.key(1), (B, 5, D))


def make_layer(*, num_key_heads=None, tables=True, per_head=True, beyond="clip", **options):
  rngs = nnx.Rngs(0)
  if tables:
    tables = RelativePositionTables(
      2, H, num_heads=N if per_head else None, beyond=beyond, rngs=rngs
    )
  return MultiHeadAttention(
    D, N, num_key_heads=num_key_heads, tables=tables or None, rngs=rngs, **options
  )


VARIANTS = dict(
  plain=dict(tables=False),
  relative=dict(),
  grouped=dict(num_key_heads=2, per_head=False, beyond="zero"),
)


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS)
def causal(request):
  """A layer's full causal pass over X, and its compiled `decode`."""
  layer = make_layer(**request.param)
  return layer, jax.jit(lambda x: layer(x, is_causal=True))(X), jax.jit(layer.decode)


def spread(x, real):
  """The first tokens of each row where `real`, noise elsewhere, and their positions."""
  positions = np.where(real, np.cumsum(real, axis=1) - 1, -1)
  noise = 100 * np.random.default_rng(0).standard_normal((*real.shape, x.shape[-1]))
  places = np.maximum(positions, 0)[..., None]
  tokens = np.where(real[..., None], np.take_along_axis(np.array(x), places, axis=1), noise)
  return jnp.asarray(tokens, x.dtype), jnp.asarray(positions)


@pytest.mark.parametrize("parts", [[1, 1, 1, 1, 1, 1], [4, 1, 1]], ids=str)
def test_any_split_into_parts_gives_the_full_pass(causal, parts):
  layer, expected, decode = causal
  cache = layer.init_cache(B, num_slots=T)
  outputs, start = [], 0
  for size in parts:
    positions = jnp.tile(jnp.arange(start, start + size), (B, 1))
    y, cache = decode(X[:, start : start + size], cache, positions)
    outputs.append(y)
    start += size
  np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), expected, atol=1e-5)


def test_padding_left_right_and_between_and_beams_in_any_order_give_the_full_pass(causal):
  layer, expected, decode = causal
  left, right, between = [0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0]
  real = np.array([left, right, between], bool)
  tokens, positions = spread(X, real)
  y, cache = decode(tokens, layer.init_cache(B, num_slots=10), positions)
  for row in range(B):
    np.testing.assert_allclose(y[row, real[row]], expected[row, :2], atol=1e-5)

  rows = jnp.array([2, 0, 2])
  cache = jax.tree.map(lambda leaf: leaf[rows], cache)
  for t in (2, 3, 4):
    y, cache = decode(X[rows, t : t + 1], cache, jnp.full((B, 1), t))
    np.testing.assert_allclose(y[:, 0], expected[rows, t], atol=1e-5)

  # A row that ended reads padding while the others go on.
  order = jnp.array([1, 2, 0])
  rows, cache = rows[order], jax.tree.map(lambda leaf: leaf[order], cache)
  y, cache = decode(X[rows, 5:6], cache, jnp.array([[5], [-1], [5]]))
  np.testing.assert_allclose(y[::2, 0], expected[rows[::2], 5], atol=1e-5)
  y, cache = decode(X[rows, 5:6], cache, jnp.array([[-1], [5], [-1]]))
  np.testing.assert_allclose(y[1, 0], expected[rows[1], 5], atol=1e-5)


def test_a_full_cache_refuses_a_token():
  layer = make_layer()
  cache = layer.init_cache(B, num_slots=2)
  with pytest.raises(ValueError, match="cache of 2 slots holds 0 tokens: no room for 3"):
    layer.decode(X[:, :3], cache, jnp.tile(jnp.arange(3), (B, 1)))


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

  def __init__(self, first: RelativePositionTables, second: RelativePositionTables):
    layer = lambda tables, seed: MultiHeadAttention(D, N, tables=tables, rngs=nnx.Rngs(seed))
    self.layers = nnx.List([layer(first, 1), layer(second, 2)])

  def __call__(self, x):
    for layer in self.layers:
      x = layer(x)
    return x


def test_shared_tables_are_one_parameter_with_the_sum_of_the_gradients():
  tables = lambda: RelativePositionTables(2, H, num_heads=N, rngs=nnx.Rngs(0))
  one = tables()
  grads = []
  for stack in (Stack(one, one), Stack(tables(), tables())):
    graphdef, params = nnx.split(stack)
    loss = lambda params, graphdef=graphdef: jnp.sum(nnx.merge(graphdef, params)(X) ** 2)
    grads.append(jax.jit(jax.grad(loss))(params)["layers"])
  shared, separate = grads
  assert "tables" not in shared[1]
  for name in ("key", "value"):
    first, second = (separate[i]["tables"][name][...] for i in (0, 1))
    assert jnp.abs(first).max() > 0.1 and jnp.abs(second).max() > 0.1
    np.testing.assert_allclose(shared[0]["tables"][name][...], first + second, rtol=1e-4)


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
  """A causal pass and what it sowed."""
  return nnx.capture(layer, nnx.Intermediate)(x, is_causal=True)


def test_sown_weights_reproduce_the_output():
  layer = make_layer()
  layer.set_attributes(sow_weights=True)
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


def test_nothing_is_sown_unasked():
  layer = make_layer()
  assert not look(layer, X)[1]


def test_padding_of_a_memory_is_inert():
  layer = make_layer(tables=False)
  mask = jnp.array([1, 1, 1, 0, 0], bool)[None, None, None]
  call = jax.jit(lambda memory: layer(X, memory, mask=mask))
  noisy = MEMORY.at[:, 3:].set(1e4)
  np.testing.assert_array_equal(call(MEMORY), call(noisy))
  np.testing.assert_allclose(call(MEMORY), jax.jit(layer)(X, MEMORY[:, :3]), atol=1e-6)
  gradient = jax.jit(jax.grad(lambda memory: jnp.sum(call(memory) ** 2)))(noisy)
  assert not gradient[:, 3:].any() and gradient[:, :3].all()


def test_low_precision_computes_with_float32_parameters():
  layer = make_layer(dtype="bfloat16")
  x = X.astype(jnp.bfloat16)
  y = jax.jit(layer)(x)
  assert y.dtype == layer.init_cache(1, 1).key.dtype == jnp.bfloat16
  assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(layer))} == {jnp.dtype("float32")}
  np.testing.assert_allclose(y.astype(jnp.float32), jax.jit(make_layer())(X), atol=0.05)


def test_the_implementation_named_is_the_one_asked():
  with pytest.raises(ValueError, match="implementation is 'nonsense'"):
    make_layer(implementation="nonsense")(X)
