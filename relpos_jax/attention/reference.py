"""The paper's equations on gathered [T, S, H] vectors: slow and simple, for tests to compare with.

Shaw et al. 2018, equations 3 and 4.
"""

import jax.numpy as jnp

from relpos_jax.attention import softmax
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.relations import Edges
from relpos_jax.typing import Array, Float


def attention(inputs: Inputs) -> Float[Array, "B T N H"]:
  """Computes attention with every relation vector a_ij in memory."""
  return softmax.attention(inputs, relative_logits, relative_values)


def relative_logits(inputs: Inputs) -> Float[Array, "B N T S"]:
  """Computes q_i . aK_ij."""
  a_BTSNH = vectors(inputs.relations.key, inputs.edges())
  return softmax.product("BTNH,BTSNH->BNTS", inputs.query, a_BTSNH)


def relative_values(inputs: Inputs, weights: Float[Array, "B N T S"]) -> Float[Array, "B T N H"]:
  """Computes sum_j p_ij aV_ij."""
  a_BTSNH = vectors(inputs.relations.value, inputs.edges())
  return softmax.product("BNTS,BTSNH->BTNH", weights, a_BTSNH)


def vectors(table: Float[Array, "R #N H"], edges: Edges) -> Float[Array, "#B T S #N H"]:
  """Returns a_ij: the row of each label, zero where it is -1, or features times kernel."""
  if jnp.issubdtype(edges.dtype, jnp.floating):
    return jnp.einsum("BTSR,RNH->BTSNH", edges, table)
  return jnp.where(edges[..., None, None] >= 0, table[edges], 0)
