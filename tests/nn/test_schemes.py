"""Each scheme of positions is its paper's formula, in layers and in both of flax's hooks."""

import cmath

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quickly, randomly
from flax import linen, nnx

import relpos_jax.linen
from relpos_jax import DistanceBias, attention_weights, dot_product_attention, rotate
from relpos_jax import nn as layers
from relpos_jax.models.layers import LayersConfig, make_positions

B, T, N, H = 2, 6, 3, 4
D, K, LEFT, RANK = N * H, 3, 2, 16
SIDES = dict(left=LEFT)
SCHEMES = dict(
  t5=(layers.T5Positions, (N, 5), dict(num_buckets=8)),
  alibi=(layers.AlibiPositions, (N,), {}),
  rotary=(layers.RotaryPositions, (), {}),
  xl=(layers.TransformerXLPositions, (D, N, H, K), SIDES),
  content=(layers.ContentPositions, (N, H, K), SIDES),
  deberta=(layers.DebertaPositions, (N, H, K), SIDES),
)
RANDOM = np.random.default_rng(0)
X = jnp.asarray(RANDOM.standard_normal((B, T, D), dtype=np.float32))
Q, KEY, V = jnp.asarray(RANDOM.standard_normal((3, B, T, N, H), dtype=np.float32))


def make(scheme):
  kind, arguments, options = SCHEMES[scheme]
  return randomly(lambda: kind(*arguments, **options, rngs=nnx.Rngs(0)))


def turned(x, position):
  """The components d and d + H/2 as complex numbers, multiplied by those of the position."""
  numbers = x[: H // 2] + 1j * x[H // 2 :]
  return numbers * [
    cmath.exp(1j * position * 10_000 ** (-2 * d / H)) for d in range(H // 2)
  ]


def logit(scheme, module, q, k, i, j, n):
  """Computes a pair's logit as the scheme's paper has it, in float64."""
  values = {
    name: np.asarray(x, np.float64)
    for name, x in nnx.to_pure_dict(nnx.state(module)).items()
  }
  clipped = min(max(j - i, -LEFT), K)
  match scheme:
    case (
      "t5"
    ):  # 8 buckets: distances 0, 1, 2 to the left, more; 1, 2 to the right, more
      bucket = min(abs(j - i), 2) if abs(j - i) < 4 else 3
      return q @ k / H**0.5 + values["buckets"][bucket + 4 * (j > i), n]
    case "alibi":
      return q @ k / H**0.5 - [2**-4, 2**-8, 2**-2][n] * abs(j - i)
    case "rotary":
      return (turned(q, i) @ turned(k, j).conj()).real / H**0.5
    case "xl":
      wave = [
        f(-clipped / 10_000 ** (d / (D // 2 - 1)))
        for f in (np.sin, np.cos)
        for d in range(D // 2)
      ]
      r = np.array(wave) @ values["projection"][:, n]
      return (q @ k + q @ r + values["u"][n] @ k + values["v"][n] @ r) / H**0.5
    case "content":
      inside = clipped == j - i
      return (
        q @ k / H**0.5
        + inside * q @ values["projection"][:, n] @ values["bank"][clipped + LEFT]
      )
    case "deberta":
      of_query, of_key = (
        values[name][clipped + LEFT, n] for name in ("of_query", "of_key")
      )
      return (q @ k + q @ of_query + k @ of_key) / (3 * H) ** 0.5


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_scheme_is_its_papers_formula(scheme):
  module = make(scheme)
  q, k = np.asarray(Q, np.float64), np.asarray(KEY, np.float64)
  logits = np.zeros((B, N, T, T))
  for b, n, i, j in np.ndindex(logits.shape):
    logits[b, n, i, j] = logit(scheme, module, q[b, i, n], k[b, j, n], i, j, n)
  wanted = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  found = attention_weights(**module.arguments(Q, KEY))
  np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)


def test_rotary_positions_have_the_frequencies_they_are_given():
  found = layers.RotaryPositions(frequencies=np.array([0.3])).arguments(
    Q, KEY, query_offset=2
  )
  for name, x, first in (("query", Q, 2), ("key", KEY, 0)):
    wanted = rotate(x, first + jnp.arange(T), frequencies=np.array([0.3]))
    np.testing.assert_array_equal(found[name], wanted)
    np.testing.assert_array_equal(found[name][..., 2:], x[..., 2:])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_only_distances_count_and_every_parameter_learns(scheme):
  graphdef, state = nnx.split(make(scheme))

  def attend(state, shift):
    at = jnp.arange(T) + shift
    arguments = nnx.merge(graphdef, state).arguments(Q, KEY, at, at)
    return dot_product_attention(
      value=V, query_positions=at, key_positions=at, **arguments
    )

  call = quickly(attend)
  np.testing.assert_allclose(call(state, 0), call(state, 7), atol=2e-5)
  squares = lambda state: jnp.sum(attend(state, 0) ** 2)
  for gradient in jax.tree.leaves(quickly(jax.grad(squares))(state)):
    assert jnp.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_both_of_flaxs_hooks_take_it_and_decode(scheme):
  kind, arguments, options = SCHEMES[scheme]

  def make_layer():
    rngs = nnx.Rngs(0)
    module = kind(*arguments, **options, rngs=rngs)
    hook = layers.RelativeAttention(positions=module, self_attention=True)
    return nnx.MultiHeadAttention(N, D, attention_fn=hook, decode=False, rngs=rngs)

  layer = randomly(make_layer)
  full = layer(X, is_causal=True)
  q, k, v = layer.query(X), layer.key(X), layer.value(X)
  z = dot_product_attention(
    value=v, is_causal=True, **layer.attention_fn.tables.arguments(q, k)
  )
  np.testing.assert_allclose(full, layer.out(z), atol=1e-5)
  layer.init_cache((B, T + 2, D))
  step = nnx.jit(lambda layer, x: layer(x, decode=True))
  outputs = [step(layer, X[:, t : t + 1]) for t in range(T)]
  np.testing.assert_allclose(np.concatenate(outputs, axis=1), full, atol=1e-4)

  positions = nnx.bridge.to_linen(kind, *arguments, **options)
  make_linen = lambda decode: linen.MultiHeadDotProductAttention(
    N,
    attention_fn=relpos_jax.linen.RelativeAttention(None, positions=positions),
    decode=decode,
  )
  params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
  if tables := params.pop("attention_fn", {}).get("tables"):
    params["attention_fn"] = dict(positions=tables)
  causal = linen.make_causal_mask(jnp.ones((B, T)))
  np.testing.assert_allclose(
    make_linen(False).apply({"params": params}, X, mask=causal), full, atol=1e-5
  )
  cache = make_linen(True).init(jax.random.key(0), X)["cache"]
  read = quickly(
    lambda cache, x: make_linen(True).apply(
      dict(params=params, cache=cache), x, mutable=["cache"]
    )
  )
  for t in range(T):
    y, updated = read(cache, X[:, t : t + 1])
    np.testing.assert_allclose(y[:, 0], full[:, t], atol=1e-4)
    cache = updated["cache"]


def test_t5_has_fewer_buckets_than_asked_where_distances_are_few():
  make = lambda k, **options: layers.T5Positions(N, k, **options, rngs=nnx.Rngs(0))
  rows = lambda k, **options: len(make(k, **options).buckets)
  assert rows(128) == rows(128, bidirectional=False) == 32
  assert rows(16, bidirectional=False) == 31 and rows(2) == 6
  with pytest.raises(ValueError, match="max_distance is 1; want 2 or more"):
    make(1)


def test_decoders_have_all_buckets_for_the_left():
  config = LayersConfig(positions="t5", max_distance=128, num_heads=N, width=D)
  relation = lambda is_causal: make_positions(
    config, is_causal=is_causal, rngs=nnx.Rngs(0)
  )()
  assert isinstance(relation(True), DistanceBias)
  assert [len(relation(is_causal).table) for is_causal in (True, False)] == [129, 257]


def test_wrong_arguments_are_named():
  rngs = nnx.Rngs(0)
  refused = lambda message: pytest.raises(ValueError, match=message)
  with refused("beyond is 'zero', an option that positions 't5' do not have"):
    LayersConfig(positions="t5", beyond="zero")
  with refused("left is 3, an option that positions 'alibi' do not have"):
    LayersConfig(positions="alibi", left=3)
  with refused("width is 31; want an even number"):
    layers.TransformerXLPositions(31, N, H, K, rngs=rngs)
  for scheme in ("xl", "content"):
    with refused(r"query has shape \(2, 6, 2, 4\); want 3 heads of width 4"):
      make(scheme).arguments(Q[:, :, :2], KEY)
  linear = relpos_jax.linen.RelativeAttention(
    3, positions=nnx.bridge.to_linen(layers.RotaryPositions)
  )
  with refused("max_distance 3; want None for one of them"):
    linear.init(jax.random.key(0), Q, KEY, V)
