"""Dropout drops the same weights of both values, in every implementation."""

import jax
import jax.numpy as jnp
import pytest
from calls import ANY_DTYPE, make_arrays, results
from comparing import assert_close
from numpy.testing import assert_allclose

pytestmark = pytest.mark.usefixtures("float64")


def test_the_same_dropped_weights_feed_both_values():
  """Uses v_j = 0 and one shared row: the output is the row times the weights' sum."""
  options = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}
  arrays = make_arrays(queries=5, keys=40, width=3, rows=1, tables="v")
  table, ones = arrays["v"], jnp.ones_like(arrays["value"])
  values_alone = arrays | {"value": ones, "v": jnp.zeros_like(table)}
  table_alone = arrays | {"value": jnp.zeros_like(ones)}
  sum_of_weights = results("reference", values_alone, options)["output"]
  from_table = results("reference", table_alone, options)["output"]
  assert_close(from_table, sum_of_weights * table[0])
  assert sum_of_weights.std() > 0.01
  assert_allclose(sum_of_weights.mean(), 1, atol=0.2)


def test_dropout_is_the_same_in_every_implementation():
  dropout = {"dropout_rate": 0.3, "dropout_key": jax.random.key(1)}
  options = {"is_causal": True} | dropout
  arrays = make_arrays(queries=5, keys=5, width=3)
  wanted = results("reference", arrays, options)
  for name in ANY_DTYPE:
    assert_close(results(name, arrays, options), wanted, name)
