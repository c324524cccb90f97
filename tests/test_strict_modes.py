"""The operator and the layers pass JAX's strict modes: rank promotion and NaN checks."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import relpos_jax.linen
import relpos_jax.nn
from relpos_jax import RelativePositions, dot_product_attention
from relpos_jax.attention.choice import IMPLEMENTATIONS

ALL = [*IMPLEMENTATIONS, None]
T, N, H, K = 5, 2, 4, 1
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, T, N * H)), jnp.float32)
INTEGERS = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
CALLS = {
  "bare": dict(),
  "causal, dropout": dict(is_causal=True, dropout_rate=0.1, dropout_key=jax.random.key(0)),
  "window, zero": dict(local_window_size=(2**31 - 1, 1), beyond="zero"),
  "lengths": dict(query_seq_lengths=INTEGERS((2,)), key_value_seq_lengths=INTEGERS((2,))),
  "segments": dict(query_segment_ids=INTEGERS((T,)), key_segment_ids=INTEGERS((T,))),
  "bias": dict(bias=jax.ShapeDtypeStruct((2, 1, T, T), jnp.float32)),
  "offset, dropout": dict(query_offset=3, dropout_rate=0.1, dropout_key=jax.random.key(0)),
  "offsets, zero": dict(query_offset=INTEGERS((2,)), is_causal=True, beyond="zero"),
  "positions": dict(query_positions=INTEGERS((T,))),
}
KERNELS = ("pallas_tpu", "pallas_gpu")
REFUSED = [("bias", name) for name in KERNELS]
REFUSED += [("positions", name) for name in ("skew", *KERNELS)]


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("call", CALLS)
def test_the_operator_promotes_no_rank(call, implementation):
  options = dict(CALLS[call])
  beyond = options.pop("beyond", "clip")
  arrays = {n: x for n, x in options.items() if isinstance(x, jax.ShapeDtypeStruct)}
  static = {n: x for n, x in options.items() if n not in arrays}
  token = jax.ShapeDtypeStruct((2, T, N, H), jnp.float32)
  table = jax.ShapeDtypeStruct((2 * K + 1, H), jnp.float32)

  def loss(tokens, table, arrays):
    relations = RelativePositions(table, table, beyond)
    return dot_product_attention(
      *tokens, relations=relations, implementation=implementation, **arrays, **static
    ).sum()

  is_refused = (call, implementation) in REFUSED
  refusal = pytest.raises(NotImplementedError) if is_refused else contextlib.nullcontext()
  with jax.numpy_rank_promotion("raise"), refusal:
    jax.eval_shape(jax.grad(loss, (0, 1)), [token] * 3, table, arrays)


def own_layer(implementation):
  rngs = nnx.Rngs(0)
  tables = relpos_jax.nn.RelativePositionTables(K, H, rngs=rngs)
  layer = relpos_jax.nn.MultiHeadAttention(
    N * H, N, positions=tables, implementation=implementation, rngs=rngs
  )
  nnx.grad(lambda layer: layer(X, is_causal=True).sum())(layer)


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


@pytest.mark.parametrize("layer", [own_layer, layer_of_nnx, layer_of_linen])
def test_layers_promote_no_rank(layer):
  with jax.numpy_rank_promotion("raise"):
    jax.eval_shape(lambda: layer("projected"))


@pytest.mark.parametrize("implementation", ["reference", "chunked", "pallas_tpu", "pallas_gpu"])
def test_no_intermediate_result_is_nan(implementation):
  with jax.debug_nans(True):
    layer_of_nnx(implementation)
