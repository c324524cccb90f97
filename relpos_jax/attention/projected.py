"""Projection on the R rows of the table, then lookup by label: no [T, S, H] tensor.

Relations compute their terms so themselves (relation.py).
"""

from relpos_jax.attention import reference
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.relation import Relation
from relpos_jax.typing import Array


def attention(inputs: Inputs) -> Array | tuple[Array, Array]:
  """Computes attention with two projections on the table rows."""
  return reference.attention(inputs, relative_logits, relative_values)


def relative_logits(inputs: Inputs, relation: Relation) -> Array | None:
  """Computes a relation's term of the logits, before the scale."""
  return relation.logits(inputs.queries, inputs.keys)


def relative_values(inputs: Inputs, relation: Relation, weights: Array) -> Array | None:
  """Computes a relation's term of the output from the weights [B, N, T, S]."""
  return relation.values(weights, inputs.queries, inputs.keys)
