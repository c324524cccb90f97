"""Tests of weights="silu": SiLU(logit) / n in place of a softmax (Zhai et al. 2024)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import (
  DistanceBias,
  FunctionBias,
  RelativePositions,
  attention_weights,
  dot_product_attention,
  explain,
)

BATCH, LENGTH, HEADS, WIDTH = 2, 13, 2, 4
BUCKETS = 5
TOLERANCE = dict(rtol=1e-10, atol=1e-10)


@pytest.fixture(autouse=True)
def in_float64():
  with jax.enable_x64(True):
    yield


def random_arrays(length: int = LENGTH) -> dict[str, jax.Array]:
  random = np.random.default_rng(0)
  vectors = BATCH, length, HEADS, WIDTH
  shapes = dict(query=vectors, key=vectors, value=vectors)
  shapes |= dict(table=(7, WIDTH), positions=(7, HEADS), times=(BUCKETS, HEADS))
  return {
    name: jnp.asarray(random.normal(size=shape)) for name, shape in shapes.items()
  }


def seconds(length: int = LENGTH) -> jax.Array:
  """Returns the time of each token, as a recommender has it."""
  gaps = np.random.default_rng(1).exponential(60.0, (BATCH, length))
  return jnp.asarray(np.cumsum(gaps, axis=1))


def bucket_of(gap: jax.Array) -> jax.Array:
  logarithm = jnp.log(jnp.maximum(jnp.abs(gap), 1.0)) / 0.301
  return jnp.clip(logarithm, 0, BUCKETS - 1).astype(jnp.int32)


def time_bias(table, query_place, key_place, query_time, key_time, pair):
  """Adds a number for the bucket of the time between two tokens."""
  return table[bucket_of(query_time - key_time)]


def relations_of(arrays, times):
  relative = RelativePositions(arrays["table"], arrays["table"])
  positions = DistanceBias(arrays["positions"])
  return relative, positions, FunctionBias(time_bias, arrays["times"], times, times)


def by_definition(arrays, times, divisor):
  """Computes equation 2 with NumPy's loops, causally."""
  a = {name: np.asarray(array) for name, array in arrays.items()}
  times = np.asarray(times)
  output = np.zeros_like(a["value"])
  for b, i, n in np.ndindex(BATCH, LENGTH, HEADS):
    for j in range(i + 1):
      row = np.clip(j - i, -3, 3) + 3
      logit = a["query"][b, i, n] @ (a["key"][b, j, n] + a["table"][row]) / WIDTH**0.5
      logit += a["positions"][row, n]
      logit += a["times"][int(bucket_of(times[b, i] - times[b, j])), n]
      weight = logit / (1 + np.exp(-logit)) / divisor
      output[b, i, n] += weight * (a["value"][b, j, n] + a["table"][row])
  return output


def attend(arrays, times, **options):
  tensors = arrays["query"], arrays["key"], arrays["value"]
  relations = relations_of(arrays, times)
  options = dict(weights="silu", is_causal=True, relations=relations) | options
  return dot_product_attention(*tensors, **options)


@pytest.mark.parametrize("divisor", [None, 100.0])
@pytest.mark.parametrize(
  "implementation", ["reference", "per_position", "projected", "chunked"]
)
def test_every_implementation_computes_equation_2(implementation, divisor):
  arrays, times = random_arrays(), seconds()
  found = attend(arrays, times, divisor=divisor, implementation=implementation)
  wanted = by_definition(arrays, times, divisor or LENGTH)
  np.testing.assert_allclose(found, wanted, **TOLERANCE)


def test_blocks_have_the_gradients_of_the_reference(monkeypatch):
  monkeypatch.setattr("relpos_jax.attention.blocks.default_block", lambda *_: 4)
  arrays, times = random_arrays(), seconds()
  weight = jnp.asarray(np.random.default_rng(2).normal(size=arrays["value"].shape))

  def loss(arrays, implementation):
    output = attend(arrays, times, divisor=9.0, implementation=implementation)
    return jnp.sum(weight * output)

  found = jax.jit(jax.grad(lambda arrays: loss(arrays, "chunked")))(arrays)
  wanted = jax.jit(jax.grad(lambda arrays: loss(arrays, "reference")))(arrays)
  for name in arrays:
    np.testing.assert_allclose(found[name], wanted[name], **TOLERANCE)


def test_padding_changes_nothing_where_the_divisor_is_given():
  arrays, times = random_arrays(), seconds()
  longer = {name: arrays[name] for name in ("table", "positions", "times")}
  for name in ("query", "key", "value"):
    longer[name] = jnp.pad(arrays[name], ((0, 0), (0, 5), (0, 0), (0, 0)))
  padded_times = jnp.pad(times, ((0, 0), (0, 5)))
  lengths = jnp.full(BATCH, LENGTH)
  found = attend(longer, padded_times, divisor=50.0, key_value_seq_lengths=lengths)
  wanted = attend(arrays, times, divisor=50.0)
  np.testing.assert_allclose(found[:, :LENGTH], wanted, **TOLERANCE)


def test_masked_pairs_have_no_weight_and_no_gradient():
  x = jnp.ones((1, 3, 1, 2))
  bias = jnp.array([[0.0, -jnp.inf, -1e30], [-jnp.inf] * 3, [0.0] * 3])

  def first_rows(key):
    weights = attention_weights(x, key, bias, weights="silu", divisor=1.0)
    return weights[0, 0, :2]

  expected = jax.nn.silu(2**0.5)
  np.testing.assert_allclose(first_rows(x), [[expected, 0, 0], [0, 0, 0]], rtol=1e-6)
  gradient = jax.grad(lambda key: first_rows(key).sum())(x)
  assert np.all(gradient[0, 1:] == 0) and np.all(np.isfinite(gradient))


@pytest.mark.parametrize(
  "options, words",
  [
    (dict(weights="relu"), "weights is 'relu'; want softmax or silu"),
    (dict(divisor=3.0), "divisor is given"),
    (dict(weights="silu", divisor=jnp.ones(2)), "divisor has shape"),
    (dict(weights="silu", sinks=jnp.ones(HEADS)), "no sinks and no residual"),
    (dict(weights="silu", return_residual=True), "no sinks and no residual"),
  ],
)
def test_mistakes_are_named(options, words):
  arrays = random_arrays()
  with pytest.raises(ValueError, match=words):
    dot_product_attention(arrays["query"], arrays["key"], arrays["value"], **options)


def test_another_divisor_compiles_nothing_and_plain_attention_is_not_taken():
  arrays = random_arrays()
  tensors = arrays["query"], arrays["key"], arrays["value"]
  assert explain(*tensors, weights="silu").implementation != "jax.nn"
  dot_product_attention(*tensors, weights="silu", divisor=3.0)
  with jax.no_tracing():
    dot_product_attention(*tensors, weights="silu", divisor=4.0)


def test_long_histories_take_memory_for_a_block():
  length = 8192
  x = jax.ShapeDtypeStruct((1, length, 1, WIDTH), jnp.float32)
  table = jax.ShapeDtypeStruct((BUCKETS, 1), jnp.float32)
  times = jax.ShapeDtypeStruct((1, length), jnp.float32)

  def memory(weights):
    def loss(x, table, times):
      relation = FunctionBias(time_bias, table, times, times)
      options = dict(relations=relation, is_causal=True, implementation="chunked")
      return jnp.sum(dot_product_attention(x, x, x, weights=weights, **options))

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    compiled = gradient.lower(x, table, times).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert memory("silu") < 2 * memory("softmax")
  assert memory("silu") < length * length  # a quarter of the logits of all pairs
