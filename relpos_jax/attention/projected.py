"""Projection on the R rows of the table, then lookup by label: no [T, S, H] tensor.

q_i . aK_ij = (q_i . table)[label_ij], and sum_j p_ij aV_ij = (sum of p_ij by label) .
table. With features instead of labels, the lookup and the sum are products with them.
"""

import dataclasses

import jax
import jax.numpy as jnp

from relpos_jax.attention import masks, reference
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.partitioned import zeros
from relpos_jax.attention.relations import (
  ContentBias,
  FunctionBias,
  KeyBias,
  LinearBias,
  Numbers,
  Relation,
  Vectors,
)
from relpos_jax.typing import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ProjectedKeys(KeyBias):
  """A `KeyBias` whose `table` is its products with the keys, `[B, N, S, R]`."""

  @property
  def reach(self) -> tuple[int, int]:
    return self.left, self.table.shape[-1] - 1 - self.left


def attention(inputs: Inputs) -> Array | tuple[Array, Array]:
  """Computes attention with two projections on the table rows."""
  return reference.attention(inputs, relative_logits, relative_values)


def relative_logits(inputs: Inputs, relation: Relation) -> Float[Array, "#B #N T S"]:
  """Computes a relation's term of the logits, before any scale: q_i . aK_ij for most."""
  if isinstance(relation, LinearBias | FunctionBias):
    return reference.relative_logits(inputs, relation)
  edges, numbers = inputs.edges(relation), project(inputs, relation)
  if jnp.issubdtype(edges.dtype, jnp.floating):
    return reference.product("BNTR,BTSR->BNTS", numbers, edges)
  if isinstance(relation, KeyBias):
    return look_up(numbers, edges.swapaxes(1, 2)).swapaxes(2, 3)
  return look_up(numbers, edges)


def project(
  inputs: Inputs, relation: Vectors | Numbers | ContentBias | KeyBias
) -> Array:
  """Computes the terms of each query, [#B, #N, T, R]; those of each key for a `KeyBias`."""
  if isinstance(relation, ProjectedKeys):
    return relation.table
  if isinstance(relation, Numbers):
    finite = jnp.maximum(
      relation.table, masks.LOWEST
    )  # `multiply` would make NaN of -inf
    shape = 1, finite.shape[1], inputs.query.shape[1], finite.shape[0]
    return jnp.broadcast_to(finite.T[None, :, None], shape)
  axes, x, table = reference.content(inputs, relation)
  return reference.product(f"{axes},RNH->BN{axes[1]}R", x, table)


def relative_values(
  inputs: Inputs, relation: Vectors, weights: Array
) -> Float[Array, "B T N V"]:
  """Computes sum_j p_ij aV_ij from the weights [B, N, T, S]."""
  edges, table = inputs.edges(relation), relation.value
  if jnp.issubdtype(edges.dtype, jnp.floating):
    sums_BNTR = reference.product("BNTS,BTSR->BNTR", weights, edges)
  else:
    # The sum of a row's weights by label is the transpose of the lookup.
    sums = zeros((*weights.shape[:3], len(table)), weights)
    (sums_BNTR,) = jax.linear_transpose(lambda x: look_up(x, edges), sums)(weights)
  return reference.product("BNTR,RNH->BTNH", sums_BNTR, table)


def look_up(
  x: Float[Array, "#B N T R"], labels: Int[Array, "#B T S"]
) -> Float[Array, "#B N T S"]:
  """Returns x[b, n, i, labels[i, j]], zero where the label is -1."""
  # TPUs gather slowly, and GPUs would sum by label one weight after the other. By the
  # compiler for TPUs, products move about half of the bytes or less:
  # results/tpu_costs.md.
  return jax.lax.platform_dependent(labels, x, cpu=gather, default=multiply)


def multiply(
  labels: Int[Array, "#B T S"], x: Float[Array, "#B N T R"]
) -> Float[Array, "#B N T S"]:
  """Looks up by products with one-hot labels, at a precision that keeps the numbers of x."""
  one_hot = jax.nn.one_hot(labels, x.shape[-1], dtype=x.dtype)
  return jnp.einsum("BNTR,BTSR->BNTS", x, one_hot, precision=jax.lax.Precision.HIGHEST)


def gather(
  labels: Int[Array, "#B T S"], x: Float[Array, "#B N T R"]
) -> Float[Array, "#B N T S"]:
  """Looks up by index: x[b, n, i, labels[i, j]], zero where the label is -1."""
  *_, length, num_rows = x.shape
  # One index into the flattened [T R] is twice as fast on a CPU as a pair of indices.
  index = jnp.maximum(labels, 0) + num_rows * jnp.arange(length)[None, :, None]
  flat = x.reshape(*x.shape[:2], length * num_rows)
  index = index.reshape(labels.shape[0], 1, -1)
  found = jnp.take_along_axis(flat, index, axis=-1, mode="promise_in_bounds")
  return jnp.where(labels[:, None] >= 0, found.reshape(*found.shape[:2], length, -1), 0)
