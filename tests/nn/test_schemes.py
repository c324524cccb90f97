"""Each scheme of positions is its paper's formula, in layers and in flax's hooks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import papers
import pytest
from comparing import assert_close, assert_same
from compiling import compile_quickly, make_random
from flax import linen, nnx
from flax_layers import check_linen_decoding

import relpos_jax.linen
from relpos_jax import DistanceBias, dot_product_attention, rotate
from relpos_jax.models.layers import LayersConfig, make_positions
from relpos_jax.nn import (
  AlibiPositions,
  ContentPositions,
  DebertaPositions,
  RelativeAttention,
  RotaryPositions,
  T5Positions,
  TransformerXLPositions,
)

B, T, N, H = 2, 6, 3, 4
D, K, LEFT = N * H, 3, 2
# By name: the class, its positional arguments, and its options.
SCHEMES = {}
SCHEMES["t5"] = T5Positions, (N, 5), {"num_buckets": 8}
SCHEMES["alibi"] = AlibiPositions, (N,), {}
SCHEMES["rotary"] = RotaryPositions, (), {}
SCHEMES["xl"] = TransformerXLPositions, (D, N, H, K), {"left": LEFT}
SCHEMES["content"] = ContentPositions, (N, H, K), {"left": LEFT}
SCHEMES["deberta"] = DebertaPositions, (N, H, K), {"left": LEFT}
RANDOM = np.random.default_rng(0)
X = jnp.asarray(RANDOM.standard_normal((B, T, D), dtype=np.float32))
Q, KEY, V = jnp.asarray(RANDOM.standard_normal((3, B, T, N, H), dtype=np.float32))
LEARNED = [name for name in SCHEMES if name not in ("alibi", "rotary")]
each_scheme = pytest.mark.parametrize("scheme", SCHEMES)
# For layers: without parameters, with other queries and keys, and with both.
each_kind = pytest.mark.parametrize("scheme", ["alibi", "rotary", "xl"])


def make(scheme):
  kind, arguments, options = SCHEMES[scheme]
  return make_random(lambda: kind(*arguments, **options, rngs=nnx.Rngs(0)))


def arrays_of_paper(scheme, params):
  """Returns arrays and options of `papers.attention` for a scheme's parameters."""
  match scheme:
    case "t5":
      return {"buckets": params["buckets"]}, {"t5": (True, 5)}
    case "alibi":
      return {}, {"alibi": True}
    case "rotary":
      return {}, {"rotary": "halves"}
    case "xl":
      last = D // 2 - 1
      frequencies = 1 / 10_000 ** (np.arange(last + 1) / last)
      angles = -np.arange(-LEFT, K + 1)[:, None] * frequencies
      waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
      table = np.einsum("rd,dnh->rnh", waves, params["projection"])
      biases = {"content_bias": params["u"], "position_bias": params["v"]}
      return {"key_table": table} | biases, {"left": LEFT}
    case "content":
      table = np.einsum("rp,hnp->rnh", params["bank"], params["projection"])
      without_scale = H**0.5 * table
      return {"key_table": without_scale}, {"left": LEFT, "beyond": "zero"}
    case "deberta":
      tables = {"key_table": params["of_query"], "query_table": params["of_key"]}
      return tables, {"left": LEFT, "scale": (3 * H) ** -0.5}


@each_scheme
def test_each_scheme_is_its_papers_formula(scheme):
  module = make(scheme)
  params = jax.tree.map(np.float64, nnx.to_pure_dict(nnx.state(module)))
  arrays, options = arrays_of_paper(scheme, params)
  tensors = {"query": Q, "key": KEY, "value": V, "cotangent": V}
  wanted, _ = papers.attention(jax.tree.map(np.float64, tensors) | arrays, options)
  output = dot_product_attention(value=V, **module.arguments(Q, KEY))
  assert_close(output, wanted, atol=2e-6)


def test_rotary_positions_have_the_frequencies_they_are_given():
  frequencies = np.array([0.3])
  module = RotaryPositions(frequencies=frequencies)
  arguments = module.arguments(Q, KEY, query_offset=2)
  last = 2 + T - 1  # the last query's position, which becomes 0
  for name, x, first in (("query", Q, 2 - last), ("key", KEY, -last)):
    wanted = rotate(x, first + jnp.arange(T), frequencies=frequencies)
    assert_same(arguments[name], wanted)
    assert_same(arguments[name][..., 2:], x[..., 2:])


@each_scheme
def test_only_distances_count(scheme):
  """Gives positions that are shifted; by default they are 0, 1, 2, ..."""
  module, at = make(scheme), 7 + jnp.arange(T)
  arguments = module.arguments(Q, KEY, at, at)
  positions = {"query_positions": at, "key_positions": at}
  shifted = dot_product_attention(value=V, **positions, **arguments)
  wanted = dot_product_attention(value=V, **module.arguments(Q, KEY))
  assert_close(shifted, wanted, atol=2e-5)


@pytest.mark.parametrize("scheme", LEARNED)
def test_every_parameter_learns(scheme):
  graphdef, state = nnx.split(make(scheme))

  @compile_quickly
  @jax.grad
  def gradients(state):
    arguments = nnx.merge(graphdef, state).arguments(Q, KEY)
    return jnp.sum(dot_product_attention(value=V, **arguments) ** 2)

  for gradient in jax.tree.leaves(gradients(state)):
    assert jnp.abs(gradient).max() > 1e-3


def make_layer(scheme):
  """Makes flax's layer with its hook for NNX."""
  kind, arguments, options = SCHEMES[scheme]

  def make():
    rngs = nnx.Rngs(0)
    positions = kind(*arguments, **options, rngs=rngs)
    hook = RelativeAttention(positions=positions, self_attention=True)
    return nnx.MultiHeadAttention(N, D, attention_fn=hook, decode=False, rngs=rngs)

  return make_random(make)


@each_kind
def test_nnx_layers_take_it_and_decode(scheme):
  layer = make_layer(scheme)
  full = layer(X, is_causal=True)
  arguments = layer.attention_fn.tables.arguments(layer.query(X), layer.key(X))
  z = dot_product_attention(value=layer.value(X), is_causal=True, **arguments)
  assert_close(full, layer.out(z), atol=1e-5)
  layer.init_cache((B, T + 2, D))
  step = nnx.jit(lambda layer, x: layer(x, decode=True))
  for t in range(T):
    y = step(layer, X[:, t : t + 1])
    assert_close(y[:, 0], full[:, t], atol=1e-4)


@each_kind
def test_linen_layers_take_it_and_decode(scheme):
  kind, arguments, options = SCHEMES[scheme]
  layer = make_layer(scheme)
  full = layer(X, is_causal=True)
  params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
  hook = params.pop("attention_fn", {})
  if "tables" in hook:
    params["attention_fn"] = {"positions": hook["tables"]}
  positions = nnx.bridge.to_linen(kind, *arguments, **options)
  own = relpos_jax.linen.RelativeAttention(positions=positions)
  make = functools.partial(linen.MultiHeadDotProductAttention, N, attention_fn=own)
  causal = linen.make_causal_mask(jnp.ones((B, T)))
  assert_close(make().apply({"params": params}, X, mask=causal), full, atol=1e-5)
  check_linen_decoding(lambda _: make(decode=True), params, X, full, atol=1e-4)


def test_t5_has_fewer_buckets_than_asked_where_distances_are_few():
  def num_buckets(max_distance, **options):
    return len(T5Positions(N, max_distance, **options, rngs=nnx.Rngs(0)).buckets)

  assert num_buckets(128) == 32
  assert num_buckets(128, bidirectional=False) == 32
  assert num_buckets(16, bidirectional=False) == 31
  assert num_buckets(2) == 6
  with pytest.raises(ValueError, match="max_distance is 1; want 2 or more"):
    num_buckets(1)
  with pytest.raises(ValueError, match="num_buckets is 3; want 4 or more"):
    num_buckets(128, num_buckets=3)


@pytest.mark.parametrize("is_causal, num_rows", [(True, 129), (False, 257)])
def test_decoders_have_all_buckets_for_the_left(is_causal, num_rows):
  config = LayersConfig(positions="t5", max_distance=128, num_heads=N, width=D)
  positions = make_positions(config, is_causal=is_causal, rngs=nnx.Rngs(0))
  relation = positions()
  assert isinstance(relation, DistanceBias)
  assert len(relation.table) == num_rows


def refused(message):
  return pytest.raises(ValueError, match=message)


def test_options_of_other_schemes_are_named():
  with refused("beyond is 'zero', an option that positions 't5' do not have"):
    LayersConfig(positions="t5", beyond="zero")
  with refused("left is 3, an option that positions 'alibi' do not have"):
    LayersConfig(positions="alibi", left=3)


def test_an_odd_width_has_no_waves():
  with refused("width is 31; want an even number"):
    TransformerXLPositions(31, N, H, K, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("scheme", ["xl", "content"])
def test_a_wrong_number_of_heads_is_named(scheme):
  with refused(r"query has shape \(2, 6, 2, 4\); want 3 heads of width 4"):
    make(scheme).arguments(Q[:, :, :2], KEY)


def test_a_scheme_has_no_table_beside_it():
  positions = nnx.bridge.to_linen(RotaryPositions)
  layer = relpos_jax.linen.RelativeAttention(3, positions=positions)
  with refused("max_distance 3; want None for one of them"):
    layer.init(jax.random.key(0), Q, KEY, V)


def test_a_large_offset_of_rotary_positions_keeps_exact_distances():
  query, keys = Q[0, :1], KEY[0]

  def logits(num_before):
    before = jnp.zeros((num_before, N, H))
    arguments = RotaryPositions().arguments(
      query, jnp.concatenate([before, keys]), query_offset=num_before + T - 1
    )
    return jnp.einsum("TNH,SNH->NS", arguments["query"], arguments["key"])[:, -T:]

  assert_close(logits(100_000), logits(0), rtol=1e-6, atol=1e-6)
