"""One matrix product per position on gathered [T, S, H] vectors.

Shaw et al. 2018, section 3.3: batch elements and heads share the relation vectors [S, H] of query
position i, so a relative term is T products of (B N, H) with (H, S).
"""

import functools

import jax

from relpos_jax.attention import softmax
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.reference import vectors
from relpos_jax.typing import Array, Float

# Keeps a transpose out of the adjacent product. XLA's CPU compiler would fuse the two into one with
# strided memory access; with the barrier, forward and backward are a sixth faster.
_apart = jax.lax.optimization_barrier


def attention(inputs: Inputs) -> Float[Array, "B T N H"]:
  """Computes attention with T batched products in each relative term."""
  return softmax.attention(inputs, relative_logits, relative_values)


def relative_logits(inputs: Inputs) -> Float[Array, "B N T S"]:
  """Computes q_i . aK_ij, position by position."""
  query_TNBH = _apart(inputs.query.transpose(1, 2, 0, 3))
  a_TBSNH = vectors(inputs.relations.key, inputs.edges()).swapaxes(0, 1)
  logits_TNBS = jax.vmap(functools.partial(softmax.product, "NBH,BSNH->NBS"))(query_TNBH, a_TBSNH)
  return _apart(logits_TNBS).transpose(2, 1, 0, 3)


def relative_values(inputs: Inputs, weights: Float[Array, "B N T S"]) -> Float[Array, "B T N H"]:
  """Computes sum_j p_ij aV_ij, position by position."""
  weights_TNBS = _apart(weights.transpose(2, 1, 0, 3))
  a_TBSNH = vectors(inputs.relations.value, inputs.edges()).swapaxes(0, 1)
  values_TNBH = jax.vmap(functools.partial(softmax.product, "NBS,BSNH->NBH"))(weights_TNBS, a_TBSNH)
  return _apart(values_TNBH).transpose(2, 0, 1, 3)
