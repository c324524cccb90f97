"""Law 15: low numbers of a relation or a bias mask as a mask does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import (
  ANY_RELATION,
  LOW,
  call,
  make_arrays,
  normal,
  results,
  set_tiles,
)
from comparing import assert_close
from compiling import run_with_gradients

from relpos_jax import (
  DistanceBias,
  FunctionBias,
  LabelBias,
  LinearBias,
  RelativePositions,
  dot_product_attention,
)
from relpos_jax.attention import lookup

pytestmark = pytest.mark.usefixtures("float64")

OPTIONS = {"mask": jnp.arange(40)[None, None, None] % 7 != 3}
# A soft cap bounds a number that does not mask.
CAPPED = OPTIONS | {"query_offset": jnp.array([2]), "logits_soft_cap": 3.0}
LOWEST = [x for x in LOW if x < -1e38]


@pytest.mark.parametrize(
  "rows, is_causal", [([2, 4], False), ([0, 1, 8], True)], ids=str
)
@pytest.mark.parametrize(
  "options, numbers", [(OPTIONS, LOW), (CAPPED, LOWEST)], ids=["plain", "capped"]
)
def test_rows_that_mask_distances_cost_no_digits(
  rows, is_causal, options, numbers, monkeypatch
):
  """Compares float32 with float64; each head has a number of its own.

  A table has other rows, slopes and a value table beside it.
  """
  set_tiles(monkeypatch, 16, 31)
  random, heads = np.random.default_rng(0), len(numbers)

  def normal(*shape):
    return jnp.asarray(random.normal(size=shape), jnp.float32)

  table = normal(9, heads).at[jnp.array(rows)].set(jnp.array(numbers))
  arrays = {name: normal(1, 40, heads, 4) for name in ("query", "key", "value")}
  positions = RelativePositions(normal(5, 4), normal(5, heads, 4))
  slopes = jnp.linspace(0.1, 0.5, heads)
  arrays["more"] = DistanceBias(table), positions, LinearBias(slopes)
  options = options | {"is_causal": is_causal}
  wanted = results("reference", jax.tree.map(jnp.float64, arrays), options)
  for name in ("reference", "skew", "projected", "chunked"):
    assert_close(results(name, arrays, options), wanted, name, rtol=2e-6, atol=2e-5)


# Two relations mask the pairs of query 3 and of key 2, and one masks by distance.
QUERY, KEY = np.ogrid[:7, :7]
CROSS = (QUERY == 3) | (KEY == 2)


def mask_far_left(low, table):
  low_first = jnp.full((7, 2), low).at[1:].set(table[:6])
  return DistanceBias(low_first, left=3)


def mask_labels(low, table):
  labels = np.where(CROSS, 0, 1 + (QUERY + KEY) % 4)
  return LabelBias(labels, table.at[0].set(low))


def mask_by_function(low, table):
  def number(table, i, j, *_):
    return jnp.where((i == 3) | (j == 2), low, table[i] * j)

  return FunctionBias(number, table)


@pytest.mark.parametrize(
  "relation, is_masked, masked_query, by_products",
  [
    (mask_far_left, (KEY - QUERY < -2)[:, :3], 6, False),
    (mask_far_left, (KEY - QUERY < -2)[:, :3], 6, True),
    (mask_labels, CROSS, 3, False),
    (mask_labels, CROSS, 3, True),
    (mask_by_function, CROSS, 3, False),
  ],
)
def test_numbers_of_minus_infinity_mask_as_a_mask_does(
  relation, is_masked, masked_query, by_products, monkeypatch
):
  """Masks a query fully, without a mask. Lookups on accelerators are products."""
  set_tiles(monkeypatch, 4)
  if by_products:
    monkeypatch.setattr(lookup, "look_up", lookup.multiply)
  random, num_keys = np.random.default_rng(0), is_masked.shape[1]
  x = jnp.asarray(random.normal(size=(7, 2, 3)))
  table = jnp.asarray(random.normal(size=(7, 2)))

  def attend(low, mask, name, x, table):
    keys = x[:num_keys]
    options = {"mask": mask, "implementation": name}
    relations = relation(low, table)
    return dot_product_attention(x, keys, keys, relations=relations, **options)

  by_mask = functools.partial(attend, 0.0, ~is_masked, "reference")
  wanted = run_with_gradients(by_mask, x, table)
  for name in ANY_RELATION:
    by_numbers = functools.partial(attend, -jnp.inf, None, name)
    masked = run_with_gradients(by_numbers, x, table)
    assert_close(masked, wanted, name)
    assert not masked[0][masked_query].any()


@pytest.mark.parametrize("shape", [(6,), (4, 5, 6), (5, 1)], ids=str)
def test_masks_and_biases_of_lower_rank_are_broadcast(shape):
  arrays = make_arrays(queries=5, keys=6, heads=4)

  def attend(bias):
    return call(arrays, bias=bias, mask=bias > -1)

  def attend_with_all_axes(bias):
    return attend(bias[(None,) * (4 - bias.ndim)])

  bias = jnp.asarray(normal(*shape))
  wanted = run_with_gradients(attend_with_all_axes, bias)
  assert_close(run_with_gradients(attend, bias), wanted)
