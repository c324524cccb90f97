"""Data of a function may be shared by sequences, with or without an axis of size 1."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import normal, set_tiles
from comparing import assert_close
from compiling import run_with_gradients
from numpy.testing import assert_allclose

from relpos_jax import FunctionBias, dot_product_attention

pytestmark = pytest.mark.usefixtures("float64")


def number_of_all(params, i, j, x, y, z):
  return params @ jnp.tanh(x + y * z)


@pytest.mark.parametrize(
  "batch, implementation",
  [
    ((3,), "reference"),
    ((3, 3), "reference"),
    ((), "reference"),
    ((3,), "chunked"),
  ],
)
def test_shared_data_may_have_axes_of_size_1(batch, implementation, monkeypatch):
  """Gives data for which a leading axis of queries could be that of the sequences."""
  set_tiles(monkeypatch, 2)
  tokens = normal(3, *batch, 3, 4, 3)
  own = {"of_query": normal(3, 3), "of_key": normal(3, 3), "of_pair": normal(3, 3, 3)}
  ones = (1,) * len(batch)
  shared = {name: x.reshape(*ones, *x.shape) for name, x in own.items()}

  def attend(params, data, tokens=tokens):
    relation = FunctionBias(number_of_all, params, **data)
    options = {"implementation": implementation, "is_causal": True}
    return dot_product_attention(*tokens, relations=relation, **options)

  def attend_one_by_one(params, data):
    each = jnp.moveaxis(tokens.reshape(3, -1, *tokens.shape[-3:]), 1, 0)
    output = jax.vmap(functools.partial(attend, params, data))(each)
    return output.reshape(*batch, *output.shape[1:])

  params = normal(4, 3)
  output, (of_params, of_shared) = run_with_gradients(attend, params, shared)
  of_own = jax.tree.map(lambda x, y: x.reshape(y.shape), of_shared, own)
  wanted = run_with_gradients(attend_one_by_one, params, own)
  assert_close((output, (of_params, of_own)), wanted)


def test_data_of_one_query_that_fit_two_readings_are_refused():
  query, keys = normal(4, 1, 4, 3), normal(4, 5, 4, 3)

  def attend(data):
    relation = FunctionBias(lambda params, i, j, x, *_: j * x.sum(), of_query=data)
    return dot_product_attention(query, keys, keys, relations=relation)

  with pytest.raises(ValueError, match=r"may be shared or not; want \[1, 1, \.\.\.\]"):
    attend(np.ones((1, 1)))  # [1, T], or [T, P]
  shared, own = attend(np.ones((1, 1, 1))), attend(np.full((1, 2), 0.5))
  assert_allclose(shared, own, atol=1e-12)
