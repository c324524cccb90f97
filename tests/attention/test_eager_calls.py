"""Calls outside of `jax.jit`: each is compiled once for its shapes."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from relpos_jax import (
  DistanceBias,
  FunctionBias,
  RelativePositions,
  attention_weights,
  dot_product_attention,
)

_COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def counting_compilations():
  """Yields a list that gets the name of each program that JAX compiles."""
  names = []

  def listen(event, seconds, fun_name="", **_):
    if event == _COMPILED:
      names.append(fun_name)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield names
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def arrays(seed: int, num_tokens: int = 64):
  """Returns a query, a key, a value and a table."""
  generator = np.random.default_rng(seed)
  shapes = [(1, num_tokens, 2, 8)] * 3 + [(9, 8)]
  return [jnp.asarray(generator.standard_normal(x), jnp.float32) for x in shapes]


def distance_decay(rate, i, j, *_):
  return -rate * jnp.abs(i - j)


def by_distance(table):
  return RelativePositions(table, table)


def with_function(table):
  return DistanceBias(table[:, 0]), FunctionBias(distance_decay, table[0, 0])


def no_relation(table):
  return None


each_kind = pytest.mark.parametrize(
  "relation, implementation, num_tokens",
  [
    (by_distance, "chunked", 64),
    (with_function, "chunked", 1024),  # in blocks of queries
    (no_relation, None, 64),
  ],
)


@each_kind
def test_a_later_call_compiles_nothing(relation, implementation, num_tokens):

  def attend(seed, **options):
    *tensors, table = arrays(seed, num_tokens)
    options |= {"relations": relation(table), "implementation": implementation}
    return dot_product_attention(*tensors, is_causal=True, **options)

  attend(0, query_offset=1)
  with counting_compilations() as compiled:
    attend(1, query_offset=1)
    attend(0, query_offset=3)
    attend(0, query_offset=1, scale=0.7)
  assert not compiled


@each_kind
def test_later_gradients_compile_nothing(relation, implementation, num_tokens):

  def gradients(seed, scale, offset):
    def loss(query, key, value, table):
      options = {"implementation": implementation, "scale": scale}
      options |= {"relations": relation(table), "query_offset": offset}
      return jnp.sum(jnp.sin(dot_product_attention(query, key, value, **options)))

    return jax.grad(loss, argnums=(0, 1, 2, 3))(*arrays(seed, num_tokens))

  gradients(0, scale=0.5, offset=1)
  with counting_compilations() as compiled:
    gradients(1, scale=0.7, offset=3)
  assert not compiled


def test_later_weights_compile_nothing():
  def weights(seed):
    query, key, _, table = arrays(seed)
    return attention_weights(query, key, relations=by_distance(table))

  weights(0)
  with counting_compilations() as compiled:
    weights(1)
  assert not compiled


def test_a_function_is_compared_by_its_program():
  *tensors, _ = arrays(0)

  def attend(rate):
    bias = FunctionBias(lambda params, i, j, *_: jax.nn.relu(-rate * jnp.abs(i - j)))
    return dot_product_attention(*tensors, relations=bias)

  gradient = jax.grad(lambda rate: jnp.sum(jnp.sin(attend(rate))))
  attend(jnp.float32(0.1))
  gradient(0.1)
  with counting_compilations() as compiled:
    attend(jnp.float32(-0.2))
    gradient(-0.2)
  assert not compiled


def test_no_call_keeps_a_tracer():
  *tensors, _ = arrays(0)
  rates = jnp.arange(3.0)

  def attend(rate):
    bias = FunctionBias(lambda params, i, j, *_: rate * (i - j))
    return dot_product_attention(*tensors, relations=bias)

  with jax.checking_leaks():
    jax.vmap(attend)(rates)


@pytest.mark.parametrize("kind", [np.array, jnp.float32])
@pytest.mark.parametrize("name", ["chunked", "pallas_gpu"])
def test_any_number_is_a_scale(name, kind):
  *tensors, table = arrays(0)
  options = {"relations": by_distance(table), "is_causal": True}
  wanted = dot_product_attention(*tensors, scale=0.3, **options)
  options |= {"scale": kind(0.3), "implementation": name}
  assert_allclose(dot_product_attention(*tensors, **options), wanted, atol=1e-5)
