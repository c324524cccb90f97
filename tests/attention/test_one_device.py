"""Tests of chunked on one CPU, where it takes a few heads of a sequence at a time.

Tests have eight simulated devices, where it takes all heads and sequences at once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import (
  DistanceBias,
  LinearBias,
  RelativePositions,
  dot_product_attention,
)
from relpos_jax.nn import sinusoids


@pytest.fixture(params=[True, False], ids=["one_device", "several"], autouse=True)
def devices(request, monkeypatch):
  monkeypatch.setattr("relpos_jax.attention.band.is_one_device", lambda: request.param)


def random(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def attend(query, table, implementation="chunked", **options):
  relations = RelativePositions(table, table)
  options = dict(relations=relations, implementation=implementation) | options
  return dot_product_attention(query, query, query, **options)


@pytest.mark.parametrize("is_causal", [False, True])
def test_values_and_gradients_are_those_of_the_reference(is_causal):
  query, table = random(3, 70, 2, 4), random(9, 2, 4, seed=1)

  def loss(query, table, implementation):
    output = attend(query, table, implementation, is_causal=is_causal)
    return jnp.sum(jnp.sin(output))

  value_and_gradients = jax.value_and_grad(loss, (0, 1))
  found = jax.jit(lambda *x: value_and_gradients(*x, "chunked"))(query, table)
  wanted = jax.jit(lambda *x: value_and_gradients(*x, "reference"))(query, table)
  for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_second_derivatives_are_refused_with_the_remedy():
  query, table = random(1, 70, 1, 4), random(9, 4, seed=1)

  def loss(query):
    return jnp.sum(attend(query, table))

  def squared_gradient(query):
    return jnp.sum(jax.grad(loss)(query) ** 2)

  with pytest.raises(NotImplementedError, match="projected"):
    jax.grad(squared_gradient)(query)
  with pytest.raises(NotImplementedError, match="projected"):
    jax.hessian(lambda table: jnp.sum(attend(query, table)))(table)


@pytest.mark.parametrize("options", [{}, {"local_window_size": 5}, {"is_causal": True}])
def test_rows_that_no_pair_has_get_no_gradient(options):
  length = 128
  query, table = random(1, length, 1, 4), random(2 * 512 + 1, 4, seed=1)

  def loss(table):
    return jnp.sum(jnp.sin(attend(query, table, **options)))

  gradient = jax.grad(loss)(table)
  distances = np.arange(-512, 513)
  reach = options.get("local_window_size", length - 1)
  occurs = np.abs(distances) <= reach
  if options.get("is_causal"):
    occurs &= distances <= 0
  assert np.all(np.asarray(gradient)[~occurs] == 0)
  assert np.all(np.any(np.asarray(gradient)[occurs] != 0, axis=-1))


def test_values_may_have_no_width():
  query = random(2, 70, 2, 4)
  relation = DistanceBias(random(9, seed=1))
  options = dict(relations=relation, implementation="chunked")
  output = dot_product_attention(query, query, query[..., :0], **options)
  assert output.shape == (2, 70, 2, 0)


def test_small_mistakes_are_named():
  query = random(1, 3, 2, 4)
  with pytest.raises(ValueError, match="local_window_size is -1"):
    dot_product_attention(query, query, query, local_window_size=-1)
  with pytest.raises(ValueError, match="want heads of some width"):
    dot_product_attention(query[..., :0], query[..., :0], query)
  with pytest.raises(ValueError, match="want heads of some width"):
    dot_product_attention(query, query[:, :, :0], query[:, :, :0])
  with pytest.raises(ValueError, match="want one or more"):
    LinearBias.alibi(0)
  with pytest.raises(ValueError, match="width is 5"):
    sinusoids(jnp.arange(3), 5)
