"""Tests of eager calls with functions that read what is around them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import FunctionBias, dot_product_attention

QUERY = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 1, 2)), jnp.float32)
TABLE = np.arange(4.0, dtype=np.float32)


def attend(function, query=QUERY):
  relation = FunctionBias(function)
  return dot_product_attention(query, QUERY, QUERY, relations=relation).sum()


def look_up_in(table):
  def look_up(_, i, j, *data):
    return jnp.asarray(table)[jnp.abs(i - j)]

  return look_up


def look_up_by_jit(table):
  compiled = jax.jit(lambda distance: table[distance])

  def look_up(_, i, j, *data):
    return compiled(jnp.abs(i - j))

  return look_up


def call_back(factor):
  def on_host(distance):
    return np.float32(factor * distance)

  def call(_, i, j, *data):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.pure_callback(on_host, shape, j - i, vmap_method="sequential")

  return call


def map_by_rule(factor):
  @jax.custom_batching.custom_vmap
  def double(distance):
    return 2 * distance

  @double.def_vmap
  def rule(size, is_batched, distance):
    return factor * distance, is_batched[0]

  return lambda _, i, j, *data: double(j - i).astype(jnp.float32)


@pytest.fixture(params=[False, True])
def constants_within(request):
  flag = "jax_use_simplified_jaxpr_constants"  # prints arrays as [...]
  jax.config.update(flag, request.param)
  yield
  jax.config.update(flag, False)


@pytest.mark.usefixtures("constants_within")
@pytest.mark.parametrize(
  "make, first, second",
  [
    (look_up_in, TABLE, -5 * TABLE),  # NumPy's arrays
    (look_up_in, jnp.asarray(TABLE), jnp.asarray(-5 * TABLE)),
    (look_up_by_jit, jnp.asarray(TABLE), jnp.asarray(-5 * TABLE)),
    (call_back, 1, 100),
    (map_by_rule, 1, 100),
  ],
)
def test_what_a_function_reads_is_that_of_each_call(make, first, second):
  attend(make(first))
  found = attend(make(second))
  wanted = jax.jit(lambda query: attend(make(second), query))(QUERY)
  np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.usefixtures("constants_within")
def test_a_constant_result_is_that_of_each_call():
  def attend_with_sink(number):
    relation = FunctionBias(lambda *_: number)
    options = {"relations": relation, "sinks": jnp.zeros(1)}
    return dot_product_attention(QUERY, QUERY, QUERY, **options)

  attend_with_sink(jnp.ones(1))
  found = attend_with_sink(jnp.full(1, 3.0))
  bias = jnp.full((1, 1, 1), 3.0)
  wanted = dot_product_attention(QUERY, QUERY, QUERY, bias, sinks=jnp.zeros(1))
  np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_rule_of_derivatives_is_that_of_each_call():
  def times(factor):
    @jax.custom_vjp
    def same(x):
      return x

    def backward(_, cotangent):
      return (factor * cotangent,)

    same.defvjp(lambda x: (x, None), backward)

    def function(params, i, j, *_):
      return same(params * (j - i))

    return function

  def gradient_of_params(function):
    def loss(params):
      relation = FunctionBias(function, params)
      weighted = QUERY * jnp.arange(4.0)[:, None, None]
      return dot_product_attention(QUERY, QUERY, weighted, relations=relation).sum()

    return jax.grad(loss)(jnp.float32(0.5))

  once = gradient_of_params(times(1.0))
  hundredfold = gradient_of_params(times(100.0))
  np.testing.assert_allclose(hundredfold, 100 * once, rtol=1e-5)


def test_what_changes_around_a_function_is_read_at_each_call():
  around = {"rate": 0.5}
  distance = jnp.abs(jnp.arange(4)[:, None] - jnp.arange(4))

  def function(_, i, j, *data):
    return around["rate"] * jnp.abs(i - j)

  for rate in (0.5, 0.1, jnp.float32(2.0)):
    around["rate"] = rate
    wanted = dot_product_attention(QUERY, QUERY, QUERY, rate * distance).sum()
    np.testing.assert_allclose(attend(function), wanted, rtol=1e-6)
