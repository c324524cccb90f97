"""Law 13: functions of positions and data equal the relations and biases that they compute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quickly, with_gradients

from relpos_jax import DistanceBias, FunctionBias, LinearBias, dot_product_attention
from relpos_jax.attention import blocks

pytestmark = pytest.mark.usefixtures("float64")
LENGTH, HEADS = 12, 2
RNG = np.random.default_rng(0)


def normal(*shape):
  return np.asarray(RNG.normal(size=shape))


def hstu(params, i, j, time, key_time, _):
  """Adds a number by distance and one by logarithm of elapsed time: Zhai et al. 2024."""
  bucket = jnp.floor(jnp.log(jnp.maximum(1.0, abs(time - key_time))) / 0.301).astype(int)
  return params["position"][j - i + LENGTH - 1] + params["time"][jnp.clip(bucket, 0, 7)]


TIMES = np.sort(RNG.integers(0, 10_000, LENGTH))
HSTU = dict(position=normal(2 * LENGTH - 1), time=normal(8, HEADS))
CALL = [normal(2, LENGTH, HEADS, 4) for _ in range(3)]
ROWS = np.arange(LENGTH) - np.arange(LENGTH)[:, None] + LENGTH - 1
ELAPSED = abs(TIMES[:, None] - TIMES)
BUCKET = np.clip(np.log(np.maximum(1, ELAPSED)) // 0.301, 0, 7).astype(int)
REVERSED = dict(query_positions=np.arange(LENGTH)[::-1])

# By name: parameters, the function of them, the relations or bias that it equals, and the options.
PAIRS = {
  "a table": (
    normal(5, HEADS),
    lambda table: FunctionBias(lambda t, i, j, *_: t[jnp.clip(j - i, -2, 2) + 2], table),
    lambda table: dict(relations=DistanceBias(table)),
  ),
  "slopes": (
    normal(HEADS),
    lambda slopes: FunctionBias(lambda s, i, j, *_: -s * abs(j - i), slopes),
    lambda slopes: dict(relations=LinearBias(slopes)),
  ),
  "data of all sequences": (
    HSTU,
    lambda params: FunctionBias(hstu, params, TIMES, TIMES),
    lambda params: dict(
      bias=params["position"][ROWS] + jnp.moveaxis(params["time"][BUCKET], -1, 0)
    ),
  ),
  "data of pairs": (
    normal(2, LENGTH, LENGTH),
    lambda pairs: FunctionBias(lambda _, i, j, x, y, z: z, of_pair=pairs),
    lambda pairs: dict(bias=pairs[:, None]),
  ),
}


def results(params, options):
  """Returns the output, and the gradients of query, key, value and parameters."""
  call = lambda q, k, v, params: dot_product_attention(q, k, v, **options(params))
  return quickly(functools.partial(with_gradients, call))(*CALL, params)


@pytest.mark.parametrize("implementation", ["projected", "chunked"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_function_is_what_it_computes(name, implementation, monkeypatch):
  monkeypatch.setattr(blocks, "_default_block", lambda pairs: 5)
  params, function, same = PAIRS[name]
  named = dict(implementation=implementation)
  by_position = [dict(query_offset=3), REVERSED] if name in ("a table", "slopes") else [{}]
  for at in by_position:
    found = results(params, lambda x, at=at: dict(relations=function(x)) | at | named)
    wanted = results(params, lambda x, at=at: same(x) | at | dict(implementation="reference"))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-10), found, wanted)


def test_gradients_are_the_same_bits_in_every_run(monkeypatch):
  monkeypatch.setattr(blocks, "_default_block", lambda pairs: 5)

  def loss(params):
    own = FunctionBias(hstu, params, TIMES, TIMES)
    return dot_product_attention(*CALL, relations=own, implementation="chunked").sum()

  first, *others = (jax.jit(jax.grad(loss))(HSTU) for _ in range(3))
  for other in others:
    jax.tree.map(np.testing.assert_array_equal, first, other)


@pytest.mark.parametrize(
  "relation, message",
  [
    (FunctionBias(lambda *_: jnp.ones(3)), r"function returns float.* want a number, or \[2\]"),
    (FunctionBias(hstu, {}, normal(5)), r"of_query has an array of shape \(5,\); want \[12, "),
    (
      FunctionBias(hstu, {}, of_pair=normal(12)),
      r"of_pair has .*; want \[12, 12, ...\] or \[2, ",
    ),
  ],
)
def test_a_wrong_function_is_named(relation, message):
  with pytest.raises(ValueError, match=message):
    dot_product_attention(*CALL, relations=relation)


@pytest.mark.parametrize("implementation", ["projected", "chunked"])
def test_a_function_may_use_arrays_of_the_code_around_it(implementation, monkeypatch):
  monkeypatch.setattr(blocks, "_default_block", lambda pairs: 5)

  def call(table, q, *, closes):
    look_up = lambda table, i, j, *_: table[j - i + LENGTH - 1]
    relation = FunctionBias(look_up, table)
    if closes:
      relation = FunctionBias(lambda _, *pair: look_up(table, *pair))
    return dot_product_attention(q, q, q, relations=relation, implementation=implementation)

  arrays = jnp.asarray(normal(2 * LENGTH - 1, HEADS)), jnp.asarray(CALL[0])
  found, wanted = (
    with_gradients(functools.partial(call, closes=closes), *arrays) for closes in (True, False)
  )
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-10), found, wanted)
