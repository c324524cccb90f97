"""Tests of weights="silu": SiLU(logit) / n in place of a softmax (Zhai et al. 2024)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import ANY_RELATION, call, make_arrays, results, set_tiles
from comparing import assert_close
from formula import formula
from numpy.testing import assert_allclose
from random_calls import RandomCall

from relpos_jax import (
  attention_weights,
  dot_product_attention,
  explain,
)

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("divisor, soft_cap", [(None, None), (100.0, 2.0)])
def test_every_implementation_computes_equation_2(divisor, soft_cap, monkeypatch):
  set_tiles(monkeypatch, 4)
  random = RandomCall(("positions", "distance", "function"), 4)
  arrays = random.arrays
  options = random.options | {"weights": "silu", "divisor": divisor}
  options["logits_soft_cap"] = soft_cap
  wanted = results("reference", arrays, options)
  assert_close(wanted["output"], formula(arrays, options))
  for name in ANY_RELATION:
    assert_close(results(name, arrays, options), wanted, name)


def test_padding_changes_nothing_where_the_divisor_is_given():
  arrays = make_arrays(queries=13, keys=13)
  longer = dict(arrays)
  for name in ("query", "key", "value"):
    axes = (0, 0), (0, 5), (0, 0), (0, 0)
    longer[name] = jnp.pad(arrays[name], axes, constant_values=1)
  options = {"weights": "silu", "divisor": 50.0}
  padded = call(longer, key_value_seq_lengths=jnp.full(2, 13), **options)
  assert_close(padded[:, :13], call(arrays, **options))


def test_masked_pairs_have_no_weight_and_no_gradient():
  x = jnp.ones((1, 3, 1, 2))
  bias = jnp.array([[0.0, -jnp.inf, -1e30], [-jnp.inf] * 3, [0.0] * 3])

  def first_rows(key):
    weights = attention_weights(x, key, bias, weights="silu", divisor=1.0)
    return weights[0, 0, :2]

  expected = jax.nn.silu(2**0.5)
  assert_allclose(first_rows(x), [[expected, 0, 0], [0, 0, 0]], rtol=1e-6)
  gradient = jax.grad(lambda key: first_rows(key).sum())(x)
  assert np.isfinite(gradient).all()
  assert not gradient[0, 1:].any()


@pytest.mark.parametrize(
  "message, options",
  [
    ("weights is 'relu'; want softmax or silu", {"weights": "relu"}),
    ("divisor is given", {"divisor": 3.0}),
    ("divisor has shape", {"weights": "silu", "divisor": np.ones(2)}),
    ("divisor is 0; want a positive number", {"weights": "silu", "divisor": 0}),
    ("takes no sinks", {"weights": "silu", "sinks": np.ones(2)}),
    ("returns no residual", {"weights": "silu", "return_residual": True}),
  ],
)
def test_mistakes_are_named(message, options):
  x = jnp.ones((1, 3, 2, 4))
  with pytest.raises(ValueError, match=message):
    dot_product_attention(x, x, x, **options)


def test_another_divisor_compiles_nothing_and_plain_attention_is_not_taken():
  x = jnp.ones((1, 3, 2, 4))
  assert explain(x, x, x, weights="silu").implementation != "jax.nn"
  dot_product_attention(x, x, x, weights="silu", divisor=3.0)
  with jax.no_tracing():
    dot_product_attention(x, x, x, weights="silu", divisor=4.0)
