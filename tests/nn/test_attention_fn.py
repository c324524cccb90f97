"""One line adds relative positions to any NNX model."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import filled, quickly
from flax import nnx
from jax.sharding import AxisType

from relpos_jax import attention_weights, dot_product_attention
from relpos_jax.nn import RelativeAttention, RotaryPositions
from relpos_jax.nn.positions import init_table

B, T, D, N, H, K = 2, 5, 8, 2, 4, 2
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((B, T, D), dtype=np.float32)
PADDING = np.arange(T)[None] < np.array([[5], [3]])
MASKS = dict(
  none=None,
  padding_in_numbers=nnx.make_attention_mask(jnp.ones((B, T)), jnp.asarray(PADDING)),
  of_tokens=np.tril(np.ones((T, T), bool)),
)


def make_hook(rngs, **options):
  return RelativeAttention(K, H, num_heads=N, rngs=rngs, **options)


def make_layer(hook=make_hook, **options):
  """flax's layer with the hook and random parameters."""
  rngs = nnx.Rngs(0)
  options = dict(decode=False, deterministic=False) | options
  layer = nnx.MultiHeadAttention(N, D, attention_fn=hook(rngs), rngs=rngs, **options)
  nnx.update(layer, filled(nnx.state(layer, nnx.Param)))
  return layer


def projections(layer, x=X):
  return layer.query(x), layer.key(x), layer.value(x)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_layer_attends_as_the_operator_does(mask, is_causal):
  layer = make_layer(functools.partial(make_hook, logits_soft_cap=0.5))
  visible = None if mask is None else jnp.broadcast_to(jnp.asarray(mask) > 0, (B, 1, T, T))
  options = dict(mask=visible, is_causal=is_causal, logits_soft_cap=0.5)
  z = dot_product_attention(*projections(layer), relations=layer.attention_fn.tables(), **options)
  y = layer(jnp.asarray(X), mask=mask, is_causal=is_causal)
  np.testing.assert_allclose(y, layer.out(z), atol=1e-6)


def test_parameters_have_fixed_names():
  paths = {path for path, _ in nnx.to_flat_state(nnx.state(make_layer(), nnx.Param))}
  own = {(f, x) for f in ("query", "key", "value", "out") for x in ("kernel", "bias")}
  assert paths == own | {("attention_fn", "tables", name) for name in ("key", "value")}


def test_dropout_draws_each_weight_apart():
  layer = make_layer(dropout_rate=0.5)
  call = lambda seed, **more: layer(jnp.asarray(X), rngs=nnx.Rngs(dropout=seed), **more)
  np.testing.assert_array_equal(call(0), call(0))
  assert jnp.abs(call(0) - call(1)).max() > 0.1
  still = call(0, deterministic=True)
  np.testing.assert_allclose(still, make_layer()(jnp.asarray(X)), atol=1e-6)

  # flax drops the same weights in all heads and sentences: these rows would be equal.
  hook, same = make_hook(nnx.Rngs(0), keys=False), jnp.ones((3, T, N, H))
  z = hook(same, same, same, dropout_rng=jax.random.key(0), dropout_rate=0.5)
  assert len(np.unique(z.sum(axis=(1, 3)).round(3))) > 3


def test_weights_are_sown_as_flax_sows_them():
  layer = make_layer(dropout_rate=0.5)
  look = nnx.capture(layer, nnx.Intermediate)
  _, sown = look(jnp.asarray(X), is_causal=True, sow_weights=True, rngs=nnx.Rngs(dropout=0))
  (weights,) = sown["attention_weights"]
  relations = layer.attention_fn.tables()
  wanted = attention_weights(*projections(layer)[:2], is_causal=True, relations=relations)
  np.testing.assert_allclose(weights, wanted, atol=1e-6)
  assert not look(jnp.asarray(X), deterministic=True)[1]


def test_decoding_by_the_mask_of_self_attention_is_the_full_pass():
  layer = make_layer()
  layer.attention_fn.self_attention = True
  full = layer(jnp.asarray(X), is_causal=True)
  alone = layer(jnp.asarray(X[1:, 2:]), is_causal=True)
  layer.init_cache((B, T + 2, D))
  for t in range(T):  # the second sentence begins with two tokens of padding
    is_token = jnp.arange(T + 2) >= jnp.array([[0], [2]])
    y = layer(jnp.asarray(X[:, t : t + 1]), decode=True, mask=is_token[:, None, None])
    np.testing.assert_allclose(y[0, 0], full[0, t], atol=1e-5)
    if t >= 2:
      np.testing.assert_allclose(y[1, 0], alone[0, t - 2], atol=1e-5)


class Stack(nnx.Module):
  """Three layers made by `nnx.vmap`, run by `nnx.scan`."""

  def __init__(self, make=make_hook, **options):
    @nnx.vmap
    def make_layer(rngs):
      hook = make(rngs, **options)
      return nnx.MultiHeadAttention(N, D, attention_fn=hook, decode=False, rngs=rngs)

    self.layers = make_layer(nnx.Rngs(0).split(3))

  def init_cache(self):
    nnx.vmap(lambda layer: layer.init_cache((B, T + 2, D)), out_axes=None)(self.layers)

  def __call__(self, x, **options):
    axes = dict(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    return nnx.scan(lambda layer, x: x + layer(x, **options), **axes)(self.layers, x)


@pytest.mark.parametrize("by", ["mask", "view", "view_of_rows", "view without parameters"])
def test_scanned_layers_decode_as_the_full_pass(by):
  without = lambda rngs, **options: RelativeAttention(positions=RotaryPositions(), **options)
  model = Stack(without if "without" in by else make_hook, self_attention=by == "mask")
  full = model(jnp.asarray(X), is_causal=True)
  model.init_cache()
  for t in range(T):
    positions = jnp.full((B, 1) if by == "view_of_rows" else 1, t)
    view = model if by == "mask" else nnx.view(model, query_positions=positions)
    y = view(jnp.asarray(X[:, t : t + 1]), decode=True)
    np.testing.assert_allclose(y[:, 0], full[:, t], atol=1e-5)


@pytest.mark.skipif(
  "input_positions" not in inspect.signature(nnx.MultiHeadAttention.__call__).parameters,
  reason="this flax has no input_positions",
)
def test_decoding_with_input_positions_is_the_full_pass():
  layer = make_layer()
  full = layer(jnp.asarray(X), is_causal=True)
  layer.init_cache((B, T, D))
  for t in range(T):
    y = layer(jnp.asarray(X[:, t : t + 1]), decode=True, input_positions=jnp.full((B, 1), t))
    np.testing.assert_allclose(y[:, 0], full[:, t], atol=1e-5)


def test_positions_of_packed_sentences():
  """Checks that queries and keys share positions unless both are given."""
  layer = make_layer()
  hook, (q, k, v) = layer.attention_fn, projections(layer)
  positions = jnp.array([[3, 4, 0, 1, 2], [0, 1, 2, 3, 4]])
  attend = lambda **options: dot_product_attention(q, k, v, relations=hook.tables(), **options)
  both = dict(query_positions=positions, key_positions=positions)
  np.testing.assert_allclose(hook(q, k, v, input_positions=positions), attend(**both), atol=1e-6)
  view = nnx.view(hook, **both | dict(query_positions=positions[1:]))
  shifted = attend(**both | dict(query_positions=positions[1]))
  np.testing.assert_allclose(view(q, k, v), shifted, atol=1e-6)
  assert jnp.abs(shifted - attend(**both)).max() > 0.1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_and_partitioned_tables_give_the_result_of_one_device(axis_type):
  def make(init):
    rngs = nnx.Rngs(0)
    hook = make_hook(rngs, table_init=init)
    return nnx.MultiHeadAttention(N, D, attention_fn=hook, decode=False, rngs=rngs)

  mask, positions = np.asarray(MASKS["padding_in_numbers"]), np.tile(np.arange(T), (B, 1))
  expected = make(init_table)(jnp.asarray(X), mask=mask)
  call = lambda layer, x, mask, at: nnx.view(layer, query_positions=at)(x, mask=mask)
  with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), (axis_type,) * 2)):
    layer = make(nnx.with_partitioning(init_table, (None, "model", None)))
    y = nnx.jit(call)(layer, *(jax.device_put(x, jax.P("data")) for x in (X, mask, positions)))
  assert layer.attention_fn.tables.key[...].sharding.spec == jax.P(None, "model", None)
  np.testing.assert_allclose(y, expected, atol=1e-6)


def test_any_number_of_batch_axes():
  hook = quickly(make_hook(nnx.Rngs(0)))
  q, k, v = RANDOM.standard_normal((3, 2, 3, T, N, H), dtype=np.float32)
  bias = RANDOM.standard_normal((3, 1, T, T), dtype=np.float32)
  mask = RANDOM.random((2, 1, N, T, T)) < 0.7
  positions = RANDOM.integers(9, size=(2, 3, T))
  z = hook(q, k, v, bias, mask, input_positions=positions)
  for i, j in np.ndindex(2, 3):
    of_one = hook(q[i, j], k[i, j], v[i, j], bias[j], mask[i, 0], input_positions=positions[i, j])
    np.testing.assert_allclose(z[i, j], of_one, atol=1e-6)
