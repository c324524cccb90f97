"""One line adds relative positions to any model of NNX or of Linen."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import filled, quickly
from flax import linen, nnx
from jax.sharding import AxisType

import relpos_jax.linen
from relpos_jax import RelativePositions, attention_weights, dot_product_attention
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
KINDS = ["nnx", "linen"]


def make_hook(rngs, **options):
  return RelativeAttention(K, H, **dict(num_heads=N) | options, rngs=rngs)


def make_layer(hook=make_hook, **options):
  """flax's layer with the hook and random parameters."""
  rngs = nnx.Rngs(0)
  options = dict(decode=False, deterministic=False) | options
  layer = nnx.MultiHeadAttention(N, D, attention_fn=hook(rngs), rngs=rngs, **options)
  nnx.update(layer, filled(nnx.state(layer, nnx.Param)))
  return layer


def make_call(kind, hook=None, **options):
  """Returns a function that calls flax's layer, and sows weights; and the parameters of both."""
  hook = dict(num_heads=N) | (hook or {})
  layer = make_layer(functools.partial(make_hook, **hook), **options)
  params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
  look = nnx.capture(layer, nnx.Intermediate)
  own = relpos_jax.linen.RelativeAttention(K, **hook)
  other = linen.MultiHeadDotProductAttention(N, attention_fn=own, **options)
  init = functools.partial(other.init, deterministic=True)
  shapes = jax.eval_shape(init, jax.random.key(0), X)["params"]
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)

  def call(seed=0, **more):
    with jax.numpy_rank_promotion("raise"):
      if kind == "nnx":
        return look(jnp.asarray(X), rngs=nnx.Rngs(dropout=seed), **more)
      more |= dict(rngs=dict(dropout=jax.random.key(seed)), mutable=["intermediates"])
      y, sown = other.apply(dict(params=params), X, **more)
      return y, sown.get("intermediates", {})

  return call, params


def projections(params):
  """Returns queries, keys and values."""
  product = lambda x: jnp.einsum("btd,dnh->btnh", X, x["kernel"]) + x["bias"]
  return [product(params[name]) for name in ("query", "key", "value")]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
  "kind, is_causal", [("nnx", True), ("nnx", False), ("linen", False)]
)
@pytest.mark.parametrize(
  "hook",
  [dict(num_heads=None, left=1), dict(beyond="zero", logits_soft_cap=0.5)],
  ids=str,
)
def test_the_layer_attends_as_the_operator_does(mask, kind, is_causal, hook):
  call, params = make_call(kind, hook)
  causal = dict(is_causal=True) if is_causal else {}
  visible = (
    None if mask is None else jnp.broadcast_to(jnp.asarray(mask) > 0, (B, 1, T, T))
  )
  sides = {name: x for name, x in hook.items() if name in ("left", "beyond")}
  relations = RelativePositions(**params["attention_fn"]["tables"], **sides)
  options = dict(mask=visible, logits_soft_cap=hook.get("logits_soft_cap")) | causal
  z = dot_product_attention(*projections(params), relations=relations, **options)
  out = params["out"]
  wanted = jnp.einsum("btnh,nhd->btd", z, out["kernel"]) + out["bias"]
  np.testing.assert_allclose(call(mask=mask, **causal)[0], wanted, atol=1e-6)


def test_parameters_have_fixed_names():
  paths = {path for path, _ in nnx.to_flat_state(nnx.state(make_layer(), nnx.Param))}
  own = {(f, x) for f in ("query", "key", "value", "out") for x in ("kernel", "bias")}
  assert paths == own | {("attention_fn", "tables", name) for name in ("key", "value")}


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_decided_by_its_key(kind):
  (call, _), (plain, _) = (make_call(kind, dropout_rate=rate) for rate in (0.5, 0.0))
  of = lambda seed: call(seed, deterministic=False)[0]
  np.testing.assert_array_equal(of(0), of(0))
  assert jnp.abs(of(0) - of(1)).max() > 0.1
  still = call(deterministic=True)[0]
  np.testing.assert_allclose(still, plain(deterministic=True)[0], atol=1e-6)


def test_dropout_draws_each_weight_apart():
  # flax drops the same weights in all heads and sentences: these rows would be equal.
  hook, same = make_hook(nnx.Rngs(0), keys=False), jnp.ones((3, T, N, H))
  z = hook(same, same, same, dropout_rng=jax.random.key(0), dropout_rate=0.5)
  assert len(np.unique(z.sum(axis=(1, 3)).round(3))) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_sown_as_flax_sows_them(kind):
  call, params = make_call(kind, dropout_rate=0.5)
  _, sown = call(mask=MASKS["of_tokens"], sow_weights=True, deterministic=False)
  (weights,) = sown["attention_weights"]
  relations = RelativePositions(**params["attention_fn"]["tables"])
  wanted = attention_weights(
    *projections(params)[:2], is_causal=True, relations=relations
  )
  np.testing.assert_allclose(weights, wanted, atol=1e-6)
  assert not call(deterministic=True)[1]


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


has_input_positions = (
  "input_positions" in inspect.signature(nnx.MultiHeadAttention.__call__).parameters
)
BY_INPUT = pytest.param(
  "input", marks=pytest.mark.skipif(not has_input_positions, reason="flax")
)


@pytest.mark.parametrize(
  "by", ["mask", "view", "view of rows", "no parameters", BY_INPUT]
)
def test_scanned_layers_decode_as_the_full_pass(by):
  without = lambda rngs, **options: RelativeAttention(
    positions=RotaryPositions(), **options
  )
  model = Stack(
    without if by == "no parameters" else make_hook, self_attention=by == "mask"
  )
  full = model(jnp.asarray(X), is_causal=True)
  model.init_cache()
  for t in range(T):
    positions = jnp.full((B, 1) if by in ("view of rows", "input") else 1, t)
    view = (
      nnx.view(model, query_positions=positions)
      if by not in ("mask", "input")
      else model
    )
    given = dict(input_positions=positions) if by == "input" else {}
    y = view(jnp.asarray(X[:, t : t + 1]), decode=True, **given)
    np.testing.assert_allclose(y[:, 0], full[:, t], atol=1e-5)


def test_positions_of_packed_sentences():
  """Checks that queries and keys share positions unless both are given."""
  layer = make_layer()
  hook = layer.attention_fn
  q, k, v = jnp.asarray(RANDOM.standard_normal((3, B, T, N, H), dtype=np.float32))
  positions = jnp.array([[3, 4, 0, 1, 2], [0, 1, 2, 3, 4]])
  attend = lambda **options: dot_product_attention(
    q, k, v, relations=hook.tables(), **options
  )
  both = dict(query_positions=positions, key_positions=positions)
  np.testing.assert_allclose(
    hook(q, k, v, input_positions=positions), attend(**both), atol=1e-6
  )
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

  mask, positions = (
    np.asarray(MASKS["padding_in_numbers"]),
    np.tile(np.arange(T), (B, 1)),
  )
  expected = make(init_table)(jnp.asarray(X), mask=mask)
  call = lambda layer, x, mask, at: nnx.view(layer, query_positions=at)(x, mask=mask)
  with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), (axis_type,) * 2)):
    layer = make(nnx.with_partitioning(init_table, (None, "model", None)))
    y = nnx.jit(call)(
      layer, *(jax.device_put(x, jax.P("data")) for x in (X, mask, positions))
    )
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
    of_one = hook(
      q[i, j], k[i, j], v[i, j], bias[j], mask[i, 0], input_positions=positions[i, j]
    )
    np.testing.assert_allclose(z[i, j], of_one, atol=1e-6)
