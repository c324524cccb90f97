"""One line adds relative positions to any model of NNX or of Linen."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_close
from compiling import compile_quickly, fill
from flax import linen, nnx
from jax.sharding import AxisType
from numpy.testing import assert_array_equal

import relpos_jax.linen
from relpos_jax import RelativePositions, attention_weights, dot_product_attention
from relpos_jax.nn import RelativeAttention, RotaryPositions
from relpos_jax.nn.positions import init_table

B, T, D, N, H, K = 2, 5, 8, 2, 4, 2
RANDOM = np.random.default_rng(0)
X = jnp.asarray(RANDOM.standard_normal((B, T, D), dtype=np.float32))
PADDING = np.arange(T)[None] < np.array([[5], [3]])
MASKS = {
  "none": None,
  "padding_in_numbers": nnx.make_attention_mask(jnp.ones((B, T)), jnp.asarray(PADDING)),
  "of_tokens": np.tril(np.ones((T, T), bool)),
}
each_kind = pytest.mark.parametrize("kind", ["nnx", "linen"])


def make_hook(rngs, *, num_heads=N, **options):
  return RelativeAttention(K, H, num_heads=num_heads, **options, rngs=rngs)


def make_layer(hook=make_hook, **options):
  """flax's layer with the hook and random parameters."""
  rngs = nnx.Rngs(0)
  options = {"decode": False, "deterministic": False} | options
  layer = nnx.MultiHeadAttention(N, D, attention_fn=hook(rngs), rngs=rngs, **options)
  nnx.update(layer, fill(nnx.state(layer, nnx.Param)))
  return layer


def make_linen_call(params, hook, **options):
  """Returns a function that calls Linen's layer with these parameters."""
  own = relpos_jax.linen.RelativeAttention(K, **hook)
  layer = linen.MultiHeadDotProductAttention(N, attention_fn=own, **options)
  init = functools.partial(layer.init, deterministic=True)
  shapes = jax.eval_shape(init, jax.random.key(0), X)["params"]
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)

  def call(seed=0, **options):
    options |= {"rngs": {"dropout": jax.random.key(seed)}}
    y, sown = layer.apply({"params": params}, X, mutable=["intermediates"], **options)
    return y, sown.get("intermediates", {})

  return call


def make_call(kind, hook=None, **options):
  """Returns a function that calls flax's layer and sows weights, and the parameters.

  The function promotes no rank.
  """
  hook = {"num_heads": N} | (hook or {})
  layer = make_layer(functools.partial(make_hook, **hook), **options)
  params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
  in_linen = make_linen_call(params, hook, **options)
  in_nnx = nnx.capture(layer, nnx.Intermediate)

  def call(seed=0, **options):
    with jax.numpy_rank_promotion("raise"):
      if kind == "linen":
        return in_linen(seed, **options)
      return in_nnx(X, rngs=nnx.Rngs(dropout=seed), **options)

  return call, params


def project(params):
  """Returns queries, keys and values."""
  projections = []
  for name in ("query", "key", "value"):
    product = jnp.einsum("btd,dnh->btnh", X, params[name]["kernel"])
    projections.append(product + params[name]["bias"])
  return projections


LEFT = {"num_heads": None, "left": 1}, {"left": 1}
ZERO = {"beyond": "zero", "logits_soft_cap": 0.5}, {"beyond": "zero"}


@pytest.mark.parametrize(
  "kind, mask, options, hook, sides",
  [
    ("nnx", "none", {"is_causal": True}, *LEFT),
    ("nnx", "of_tokens", {}, *ZERO),
    ("nnx", "padding_in_numbers", {"is_causal": True}, *LEFT),
    ("linen", "none", {}, *ZERO),
    ("linen", "padding_in_numbers", {}, *LEFT),
  ],
)
def test_the_layer_attends_as_the_operator_does(kind, mask, options, hook, sides):
  call, params = make_call(kind, hook)
  mask = MASKS[mask]
  pairs = mask
  if mask is not None:
    pairs = jnp.broadcast_to(jnp.asarray(mask) > 0, (B, 1, T, T))
  relations = RelativePositions(**params["attention_fn"]["tables"], **sides)
  soft_cap = hook.get("logits_soft_cap")
  all_options = options | {"mask": pairs, "logits_soft_cap": soft_cap}
  z = dot_product_attention(*project(params), relations=relations, **all_options)
  wanted = jnp.einsum("btnh,nhd->btd", z, params["out"]["kernel"])
  wanted += params["out"]["bias"]
  assert_close(call(mask=mask, **options)[0], wanted, atol=1e-6)


@each_kind
def test_dropout_is_decided_by_its_key(kind):
  call, _ = make_call(kind, dropout_rate=0.5)
  output, _ = call(0, deterministic=False)
  assert_array_equal(call(0, deterministic=False)[0], output)
  assert jnp.abs(call(1, deterministic=False)[0] - output).max() > 0.1
  without_dropout, _ = make_call(kind)
  wanted, _ = without_dropout(deterministic=True)
  assert_close(call(deterministic=True)[0], wanted, atol=1e-6)


def test_dropout_draws_each_weight_apart():
  # flax drops the same weights in all heads and sentences: these rows would be equal.
  hook, same = make_hook(nnx.Rngs(0), keys=False), jnp.ones((3, T, N, H))
  z = hook(same, same, same, dropout_rng=jax.random.key(0), dropout_rate=0.5)
  assert len(np.unique(z.sum(axis=(1, 3)).round(3))) > 3


@each_kind
def test_weights_are_sown_as_flax_sows_them(kind):
  call, params = make_call(kind, dropout_rate=0.5)
  _, sown = call(mask=MASKS["of_tokens"], sow_weights=True, deterministic=False)
  query, key, _ = project(params)
  relations = RelativePositions(**params["attention_fn"]["tables"])
  wanted = attention_weights(query, key, is_causal=True, relations=relations)
  (weights,) = sown["attention_weights"]
  assert_close(weights, wanted, atol=1e-6)
  assert not call(deterministic=True)[1]


def test_decoding_by_the_mask_of_self_attention_is_the_full_pass():
  layer = make_layer()
  layer.attention_fn.self_attention = True
  full = layer(X, is_causal=True)
  alone = layer(X[1:, 2:], is_causal=True)
  layer.init_cache((B, T + 2, D))
  # The second sentence begins with two tokens of padding.
  is_token = jnp.arange(T + 2) >= jnp.array([[0], [2]])
  for t in range(T):
    y = layer(X[:, t : t + 1], decode=True, mask=is_token[:, None, None])
    assert_close(y[0, 0], full[0, t], atol=1e-5)
    if t >= 2:
      assert_close(y[1, 0], alone[0, t - 2], atol=1e-5)


class Stack(nnx.Module):
  """Three layers made by `nnx.vmap`, run by `nnx.scan`."""

  def __init__(self, make=make_hook, **options):
    @nnx.vmap
    def make_layer(rngs):
      hook = make(rngs, **options)
      return nnx.MultiHeadAttention(N, D, attention_fn=hook, decode=False, rngs=rngs)

    self.layers = make_layer(nnx.Rngs(0).split(3))

  def init_cache(self):
    @functools.partial(nnx.vmap, out_axes=None)
    def init(layer):
      layer.init_cache((B, T + 2, D))

    init(self.layers)

  def __call__(self, x, **options):
    @functools.partial(nnx.scan, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def apply(layer, x):
      return x + layer(x, **options)

    return apply(self.layers, x)


def check_decoding(model, step):
  """Checks `step(x, t)` for each token against the full pass."""
  full = model(X, is_causal=True)
  model.init_cache()
  for t in range(T):
    y = step(X[:, t : t + 1], t)
    assert_close(y[:, 0], full[:, t], atol=1e-5)


def test_scanned_layers_decode_by_the_mask():
  model = Stack(self_attention=True)
  check_decoding(model, lambda x, t: model(x, decode=True))


def make_hook_without_parameters(rngs):
  return RelativeAttention(positions=RotaryPositions())


@pytest.mark.parametrize(
  "make, shape",
  [(make_hook, (B, 1)), (make_hook_without_parameters, 1)],
  ids=["each row", "no parameters"],
)
def test_scanned_layers_decode_by_a_view_with_positions(make, shape):
  model = Stack(make)

  def step(x, t):
    view = nnx.view(model, query_positions=jnp.full(shape, t))
    return view(x, decode=True)

  check_decoding(model, step)


CALL = inspect.signature(nnx.MultiHeadAttention.__call__)


@pytest.mark.skipif("input_positions" not in CALL.parameters, reason="an older flax")
def test_scanned_layers_decode_by_input_positions():
  model = Stack()

  def step(x, t):
    return model(x, decode=True, input_positions=jnp.full((B, 1), t))

  check_decoding(model, step)


def test_positions_of_packed_sentences():
  """Checks that queries and keys share positions unless both are given."""
  hook = make_layer().attention_fn
  tensors = jnp.asarray(RANDOM.standard_normal((3, B, T, N, H), dtype=np.float32))
  positions = jnp.array([[3, 4, 0, 1, 2], [0, 1, 2, 3, 4]])

  def attend(queries, keys):
    options = {"query_positions": queries, "key_positions": keys}
    return dot_product_attention(*tensors, relations=hook.tables(), **options)

  same = attend(positions, positions)
  assert_close(hook(*tensors, input_positions=positions), same, atol=1e-6)
  view = nnx.view(hook, query_positions=positions[1:], key_positions=positions)
  shifted = attend(positions[1], positions)
  assert_close(view(*tensors), shifted, atol=1e-6)
  assert jnp.abs(shifted - same).max() > 0.1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_and_partitioned_tables_give_the_result_of_one_device(axis_type):
  def make(table_init):
    rngs = nnx.Rngs(0)
    hook = make_hook(rngs, table_init=table_init)
    return nnx.MultiHeadAttention(N, D, attention_fn=hook, decode=False, rngs=rngs)

  @nnx.jit
  def call(layer, x, mask, positions):
    return nnx.view(layer, query_positions=positions)(x, mask=mask)

  mask = np.asarray(MASKS["padding_in_numbers"])
  positions = np.tile(np.arange(T), (B, 1))
  expected = make(init_table)(X, mask=mask)
  spec = None, "model", None
  with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), (axis_type,) * 2)):
    layer = make(nnx.with_partitioning(init_table, spec))
    arrays = jax.device_put((X, mask, positions), jax.P("data"))
    y = call(layer, *arrays)
  assert layer.attention_fn.tables.key[...].sharding.spec == jax.P(*spec)
  assert_close(y, expected, atol=1e-6)


def test_any_number_of_batch_axes():
  hook = compile_quickly(make_hook(nnx.Rngs(0)))
  q, k, v = RANDOM.standard_normal((3, 2, 3, T, N, H), dtype=np.float32)
  bias = RANDOM.standard_normal((3, 1, T, T), dtype=np.float32)
  mask = RANDOM.random((2, 1, N, T, T)) < 0.7
  positions = RANDOM.integers(9, size=(2, 3, T))
  z = hook(q, k, v, bias, mask, input_positions=positions)
  for i, j in np.ndindex(2, 3):
    sentence = q[i, j], k[i, j], v[i, j], bias[j], mask[i, 0]
    alone = hook(*sentence, input_positions=positions[i, j])
    assert_close(z[i, j], alone, atol=1e-6)
