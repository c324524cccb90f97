"""Attention in blocks of queries: its memory, and its second derivatives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import set_tiles
from comparing import assert_close
from compiling import compile_fusing, temporary_bytes

from relpos_jax import (
  ContentBias,
  DistanceBias,
  EdgeFeatures,
  EdgeLabels,
  FunctionBias,
  KeyBias,
  LabelBias,
  RelativePositions,
  dot_product_attention,
)
from relpos_jax.attention import band, blocks


def derivatives(x, relations, name):
  """Yields functions of a second and of a forward derivative of a squared output."""

  def loss(x):
    options = {"relations": relations, "implementation": name}
    return jnp.sum(dot_product_attention(x, x, x, **options) ** 2)

  def of_gradient(x):
    return jnp.sum(jnp.sin(jax.grad(loss)(x)))

  yield lambda: jax.grad(of_gradient)(x)
  yield lambda: jax.jvp(loss, (x,), (jnp.cos(x),))[1]


@pytest.mark.parametrize("is_one_device", [True, False])
def test_second_and_forward_derivatives_along_a_band_name_the_remedy(
  is_one_device, monkeypatch
):
  monkeypatch.setattr(band, "is_one_device", lambda: is_one_device)
  jax.clear_caches()  # eager calls would find what was compiled before the patch
  x, relations = jnp.ones((1, 300, 1, 4)), RelativePositions(jnp.ones((3, 4)), None)
  for derivative in derivatives(x, relations, "chunked"):
    with pytest.raises(NotImplementedError, match="name implementation='projected'"):
      derivative()
  for derivative in derivatives(x, relations, "projected"):
    jax.eval_shape(derivative)


@pytest.mark.usefixtures("float64")
def test_second_and_forward_derivatives_without_a_band(monkeypatch):
  set_tiles(monkeypatch, 4)
  random = np.random.default_rng(0)
  x = jnp.asarray(random.normal(size=(1, 11, 2, 4)))
  table = random.normal(size=(3, 4))
  relations = EdgeLabels(random.integers(-1, 3, (11, 11)), table, table)
  pairs = (derivatives(x, relations, name) for name in ("chunked", "projected"))
  for in_blocks, at_once in zip(*pairs, strict=True):
    assert_close(in_blocks(), at_once())


TABLE = jnp.ones((5, 8))


def number_of_distance(table, i, j, *_):
  return table[j - i]


def make_relation(kind, x):
  """Returns a relation of a kind for tokens x."""
  pairs = x.shape[1], x.shape[1]
  labels = jnp.zeros(pairs, int)
  match kind:
    case "positions":
      return RelativePositions(TABLE, TABLE)
    case "labels":
      return EdgeLabels(labels, TABLE, TABLE)
    case "edges":
      senders, receivers = np.random.default_rng(0).integers(0, x.shape[1], (2, 1, 300))
      labels_of_edges = np.zeros((1, 300), int)
      return EdgeLabels.from_edges(senders, receivers, labels_of_edges, TABLE, TABLE)
    case "features":
      return EdgeFeatures(jnp.ones((*pairs, 5)), TABLE, TABLE)
    case "numbers":
      return LabelBias(labels, TABLE[:, :2])
    case "function" | "silu":
      return FunctionBias(number_of_distance, TABLE[:, :2])
    case "content":
      return ContentBias(x, TABLE)
    case "key":
      return KeyBias(TABLE)


# A vector of each pair, and the weight of each pair.
VECTORS_24 = r"24,24,(\d,)?8\]|24,2,24,8\]"
WEIGHTS_1024 = r"2,1024,1024\]"


@pytest.mark.parametrize(
  "name, kind, length, never_formed",
  [
    ("projected", "labels", 24, VECTORS_24),
    ("projected", "features", 24, VECTORS_24),
    ("projected", "content", 24, VECTORS_24),
    ("projected", "key", 24, VECTORS_24),
    ("chunked", "positions", 1024, WEIGHTS_1024),
    ("chunked", "labels", 1024, WEIGHTS_1024),
    ("chunked", "features", 1024, WEIGHTS_1024),
    ("chunked", "numbers", 1024, WEIGHTS_1024),
    ("chunked", "function", 1024, WEIGHTS_1024),
    ("chunked", "silu", 1024, WEIGHTS_1024),
    ("chunked", "edges", 1024, r"1024,1024\]"),
  ],
)
def test_neither_a_vector_of_each_pair_is_formed_nor_its_weight(
  name, kind, length, never_formed
):
  """Compiles both passes: only the call's own arrays are of all pairs."""
  x = jnp.ones((1, length, 2, 8))
  options = {"query_positions": jnp.arange(length), "implementation": name}
  if kind == "silu":
    options["weights"] = "silu"

  def loss(x, relation):
    return dot_product_attention(x, x, x, relations=relation, **options).sum()

  gradient = compile_fusing(jax.grad(loss, (0, 1), allow_int=True))
  compiled = gradient.lower(x, make_relation(kind, x)).compile()
  assert not re.search(never_formed, compiled.as_text())


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
  "kind, beyond, is_causal",
  [
    (RelativePositions, "clip", False),
    (RelativePositions, "zero", True),
    (ContentBias, "zero", False),
    (KeyBias, "clip", True),
    (DistanceBias, "zero", True),
  ],
)
def test_projected_computes_nothing_for_rows_that_no_pair_has(kind, beyond, is_causal):
  random = np.random.default_rng(0)
  x = jnp.asarray(random.normal(size=(2, 7, 2, 4)))
  shape = (1001, 2) if kind is DistanceBias else (1001, 2, 4)
  table = jnp.asarray(random.normal(size=shape))
  tables = dict(table=table)
  if kind is RelativePositions:
    tables = dict(key=table, value=-table)

  def loss(x, tables, name):
    queries = dict(query=2 * x) if kind is ContentBias else {}
    relation = kind(**queries, **tables, beyond=beyond)
    options = {"is_causal": is_causal, "implementation": name}
    y = dot_product_attention(x, x[:, :5], x[:, :5], relations=relation, **options)
    return jnp.sum(y**2)

  gradient = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
  compiled = gradient.lower(x, tables, "projected").compile()
  assert_close(compiled(x, tables), gradient(x, tables, "reference"))
  assert not re.search(r",1001\]", compiled.as_text())


def gradient_bytes(attend, *shapes):
  """Compiles both passes of a squared output."""

  def loss(*arrays):
    return jnp.sum(attend(*arrays) ** 2)

  arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return temporary_bytes(compile_fusing(jax.grad(loss, (0, 1))), *arrays)


def attend_by_jax_nn(x, bias):
  tokens = x.reshape(-1, *x.shape[-3:])
  if bias.ndim == 5:
    bias = bias.repeat(16, 1).reshape(-1, *bias.shape[-3:])
  return jax.nn.dot_product_attention(tokens, tokens, tokens, bias)


@pytest.mark.parametrize(
  "tokens, bias",
  [
    ((64, 64, 4, 8), (1, 4, 64, 64)),
    ((4, 16, 64, 4, 8), (4, 1, 4, 64, 64)),
    ((1, 1024, 1, 8), (1024, 1024)),
  ],
  ids=str,
)
def test_biases_take_less_memory_than_jax_nn(tokens, bias):
  def attend(x, bias):
    return dot_product_attention(x, x, x, bias)

  usual = gradient_bytes(attend_by_jax_nn, tokens, bias)
  assert gradient_bytes(attend, tokens, bias) < 0.8 * usual


def test_key_biases_take_little_more_memory_than_positions():
  """Forms no number for every row and every token."""
  length, rows, heads, width = 2048, 513, 2, 16
  shapes = (1, length, heads, width), (rows, heads, width)
  options = {"is_causal": True, "implementation": "chunked"}

  def by_key(x, table):
    return dot_product_attention(x, x, x, relations=KeyBias(table), **options)

  def by_query(x, table):
    relations = RelativePositions(table, None)
    return dot_product_attention(x, x, x, relations=relations, **options)

  ours = gradient_bytes(by_key, *shapes)
  assert ours < 1.2 * gradient_bytes(by_query, *shapes)
  assert ours < rows * length * heads * width


def test_tables_of_all_distances_take_less_memory_than_the_weights():
  length, heads = 4096, 2

  def attend(x, table):
    by_query = ContentBias(x, table), RelativePositions(table, table)
    relations = *by_query, KeyBias(table)
    return dot_product_attention(x, x, x, relations=relations)

  shapes = (1, length, heads, 8), (2 * length - 1, heads, 8)
  bytes_of_weights = 4 * heads * length**2
  assert gradient_bytes(attend, *shapes) < 0.5 * bytes_of_weights


@pytest.mark.parametrize("query_axis", [1, 8192])
def test_gradients_of_a_bias_in_bfloat16_are_not_summed_in_it(query_axis, monkeypatch):
  """Each of 8,192 queries adds a quarter, in blocks of 16 queries."""
  monkeypatch.setattr(blocks, "_PAIRS", 1)
  query = jnp.zeros((8192, 1, 1), jnp.bfloat16)
  key = jnp.zeros((2, 1, 1), jnp.bfloat16)
  value = jnp.array([0, 1], jnp.bfloat16)[:, None, None]
  positions = jnp.arange(8192)  # not along a band

  def attend(bias):
    options = {"query_positions": positions, "implementation": "chunked"}
    return dot_product_attention(query, key, value, bias, **options)

  bias = jnp.zeros((1, query_axis, 2), jnp.bfloat16)
  output, pull_back = jax.vjp(jax.jit(attend), bias)
  (gradient,) = pull_back(jnp.ones_like(output))
  total = gradient.astype(jnp.float32).sum((0, 1))
  np.testing.assert_array_equal(total, [-2048, 2048])
