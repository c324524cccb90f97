"""The paper's equations on gathered [T, S, H] vectors: slow, obvious, the oracle of the others.

Shaw et al. 2018, equations 3 and 4.
"""

from relpos_jax.attention import softmax
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.relations import vectors
from relpos_jax.typing import Array, Float, Int


def attention(inputs: Inputs) -> Float[Array, "B T N H"]:
  """Attention with every relation vector a_ij laid out in memory."""
  return softmax.attention(inputs, relative_logits, relative_values)


def relative_logits(
  query: Float[Array, "B T N H"], labels: Int[Array, "#B T S"], table: Float[Array, "R #N H"]
) -> Float[Array, "B N T S"]:
  """q_i . aK_ij."""
  return softmax.product("BTNH,BTSNH->BNTS", query, vectors(table, labels))


def relative_values(
  weights: Float[Array, "B N T S"], labels: Int[Array, "#B T S"], table: Float[Array, "R #N H"]
) -> Float[Array, "B T N H"]:
  """sum_j p_ij aV_ij."""
  return softmax.product("BNTS,BTSNH->BTNH", weights, vectors(table, labels))
