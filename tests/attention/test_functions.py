"""Functions of positions and data equal the bias that they compute, with gradients of everything.

Each published scheme is a function of one pair of a query and a key.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quickly

from relpos_jax import DistanceBias, FunctionBias, LinearBias, dot_product_attention
from relpos_jax.attention import blocks

pytestmark = pytest.mark.usefixtures("float64")
LENGTH, HEADS = 12, 2
RNG = np.random.default_rng(0)


def normal(*shape):
  return np.asarray(RNG.normal(size=shape))


def fire(params, i, j, *_):
  """Computes FIRE: Li et al. 2024, equation 8, with hidden units of a perceptron."""
  near = jnp.log1p(params["c"] ** 2 * abs(i - j))
  share = near / jnp.log1p(params["c"] ** 2 * jnp.maximum(params["threshold"], 1.0 * i))
  return jax.nn.relu(share * params["w1"] + params["b1"]) @ params["w2"]


def beit(params, i, j, x, y, _):
  """Looks up the offset of two patches; the class token has its own numbers (Bao et al. 2021)."""
  row, column = y - x + params["table"].shape[0] // 2
  to_class, from_class = y[0] < 0, x[0] < 0
  own = jnp.where(to_class & from_class, params["both"], jnp.where(to_class, *params["one"]))
  return jnp.where(to_class | from_class, own, params["table"][row, column])


def graphormer(table, i, j, x, y, distance):
  """Looks up the length of the shortest path: Ying et al. 2021, section 3.1.2."""
  return table[distance]


def hstu(params, i, j, time, key_time, _):
  """Adds a number by distance and one by logarithm of elapsed time: Zhai et al. 2024."""
  bucket = jnp.floor(jnp.log(jnp.maximum(1.0, abs(time - key_time))) / 0.301).astype(int)
  return params["position"][j - i + LENGTH - 1] + params["time"][jnp.clip(bucket, 0, 7)]


GRID = np.stack(np.divmod(np.arange(LENGTH), 4), -1)
PATCHES = np.concatenate([[[-1, -1]], GRID[:-1]])
TIMES = np.sort(RNG.integers(0, 10_000, LENGTH))
TABLE = normal(7, 9, HEADS)
SCHEMES = dict(
  fire=FunctionBias(
    fire,
    dict(c=normal(), threshold=normal(), w1=normal(8), b1=normal(8), w2=normal(8, HEADS)),
  ),
  beit=FunctionBias(
    beit, dict(table=TABLE, both=normal(HEADS), one=normal(2, HEADS)), PATCHES, PATCHES
  ),
  graphormer=FunctionBias(
    graphormer, normal(5, HEADS), of_pair=RNG.integers(0, 5, (2, LENGTH, LENGTH))
  ),
  hstu=FunctionBias(
    hstu, dict(position=normal(2 * LENGTH - 1), time=normal(8, HEADS)), TIMES, TIMES
  ),
)
CALL = [normal(2, LENGTH, HEADS, 4) for _ in range(3)]


def results(function, *floats):
  output, pull_back = quickly(lambda *floats: jax.vjp(function, *floats))(*floats)
  return output, pull_back(jnp.cos(output))


def dense(relation):
  """Returns the function's numbers for all pairs, one pair at a time, as a bias."""
  batch = 1 if relation.of_pair is None else len(relation.of_pair)
  found = []
  for b, i, j in np.ndindex(batch, LENGTH, LENGTH):
    x, y = (
      None if data is None else jnp.asarray(data)[at]
      for data, at in ((relation.of_query, i), (relation.of_key, j))
    )
    z = None if relation.of_pair is None else jnp.asarray(relation.of_pair)[b, i, j]
    found.append(relation.function(relation.params, i, j, x, y, z))
  return jnp.moveaxis(jnp.stack(found).reshape(batch, LENGTH, LENGTH, HEADS), -1, 1)


@pytest.mark.parametrize("implementation", ["projected", "chunked"])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_published_scheme_is_its_dense_bias(name, implementation, monkeypatch):
  monkeypatch.setattr(blocks, "_default_block", lambda pairs: 5)
  relation = SCHEMES[name]
  fields = dict(of_query=relation.of_query, of_key=relation.of_key, of_pair=relation.of_pair)

  def ours(q, k, v, params):
    own = FunctionBias(relation.function, params, **fields)
    return dot_product_attention(q, k, v, relations=own, implementation=implementation)

  def theirs(q, k, v, params):
    bias = dense(FunctionBias(relation.function, params, **fields))
    return dot_product_attention(q, k, v, bias, implementation="reference")

  actual, wanted = (results(f, *CALL, relation.params) for f in (ours, theirs))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-10), actual, wanted)


def test_functions_that_look_up_or_multiply_are_the_relations_by_distance():
  table, slopes = normal(5, HEADS), normal(HEADS)
  pairs = [
    (lambda table: DistanceBias(table), lambda t, i, j, *_: t[jnp.clip(j - i, -2, 2) + 2], table),
    (lambda slopes: LinearBias(slopes), lambda s, i, j, *_: -s * abs(j - i), slopes),
  ]
  for relation, function, params in pairs:
    for options in (dict(query_offset=3), dict(query_positions=jnp.arange(LENGTH)[::-1])):
      actual, wanted = (
        results(
          lambda q, k, v, p, of=of, options=options: dot_product_attention(
            q, k, v, relations=of(p), **options
          ),
          *CALL,
          params,
        )
        for of in (lambda p, function=function: FunctionBias(function, p), relation)
      )
      jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-10), actual, wanted)


def test_gradients_are_the_same_bits_in_every_run(monkeypatch):
  monkeypatch.setattr(blocks, "_default_block", lambda pairs: 5)
  relation = SCHEMES["hstu"]

  def loss(params):
    own = FunctionBias(hstu, params, TIMES, TIMES)
    return dot_product_attention(*CALL, relations=own, implementation="chunked").sum()

  first, *others = (jax.jit(jax.grad(loss))(relation.params) for _ in range(3))
  for other in others:
    jax.tree.map(np.testing.assert_array_equal, first, other)


@pytest.mark.parametrize(
  "relation, message",
  [
    (FunctionBias(lambda *_: jnp.ones(3)), r"function returns float.* want a number, or \[2\]"),
    (FunctionBias(fire, {}, normal(5)), r"of_query has an array of shape \(5,\); want \[12, "),
    (
      FunctionBias(fire, {}, of_pair=normal(12)),
      r"of_pair has .*; want \[12, 12, ...\] or \[2, ",
    ),
  ],
)
def test_a_wrong_function_is_named(relation, message):
  with pytest.raises(ValueError, match=message):
    dot_product_attention(*CALL, relations=relation)
