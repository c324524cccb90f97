"""The hooks of Flax's layers pass JAX's strict modes: rank promotion and NaN checks.

Tests of the operator and of the attention layer forbid rank promotion themselves.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import relpos_jax.linen
import relpos_jax.nn
from relpos_jax import dot_product_attention, merge

T, N, H, K = 5, 2, 4, 1
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, T, N * H)), jnp.float32)


def layer_of_nnx(implementation):
  rngs = nnx.Rngs(0)
  hook = relpos_jax.nn.RelativeAttention(K, H, implementation=implementation, rngs=rngs)
  layer = nnx.MultiHeadAttention(N, N * H, attention_fn=hook, decode=False, rngs=rngs)
  nnx.grad(lambda layer: layer(X).sum())(layer)


def layer_of_linen(implementation):
  hook = relpos_jax.linen.RelativeAttention(K, implementation=implementation)
  layer = linen.MultiHeadDotProductAttention(N, attention_fn=hook)
  parameters = layer.init(jax.random.key(0), X)
  jax.grad(lambda parameters: layer.apply(parameters, X).sum())(parameters)


def test_parts_promote_no_rank():
  tokens = X.reshape(2, T, N, H)
  with jax.numpy_rank_promotion("raise"):
    part = functools.partial(dot_product_attention, tokens, tokens, tokens, return_residual=True)
    jax.eval_shape(lambda: merge(*zip(part(), part(is_causal=True), strict=True)))


@pytest.mark.parametrize("layer", [layer_of_nnx, layer_of_linen])
def test_layers_promote_no_rank(layer):
  with jax.numpy_rank_promotion("raise"):
    jax.eval_shape(lambda: layer("projected"))


@pytest.mark.parametrize("implementation", ["reference", "chunked", "pallas_tpu", "pallas_gpu"])
def test_no_intermediate_result_is_nan(implementation):
  with jax.debug_nans(True):
    layer_of_nnx(implementation)
