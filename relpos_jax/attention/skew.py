"""Huang et al.'s memory-efficient form: project on the table, then skew.

Music Transformer, section 3.4.1, extended to later keys and, transposed, to values:
copies of [B, N, T, T + S] instead of lookups, and no [T, S, H] tensor. All relations by
distance are numbers by row for each query or, in `KeyBias`, for each key.
"""

import dataclasses

import jax
import jax.numpy as jnp

from relpos_jax.attention import band as bands
from relpos_jax.attention import masks, projected, reference
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.partitioned import zeros
from relpos_jax.attention.relations import (
  ByDistance,
  KeyBias,
  LinearBias,
  RelativePositions,
)
from relpos_jax.typing import Array, Float

unsupported = bands.unsupported


def attention(inputs: Inputs) -> Array | tuple[Array, Array]:
  """Computes attention with a skew in each relative term."""
  return reference.attention(inputs, relative_logits, relative_values)


def relative_logits(
  inputs: Inputs, relation: ByDistance | LinearBias
) -> Float[Array, "#B #N T S"]:
  """Computes a relation's term of the logits, before any scale: q_i . aK_ij for most."""
  if isinstance(relation, LinearBias):
    return reference.relative_logits(inputs, relation)
  numbers = projected.project(inputs, relation)
  if not isinstance(relation, KeyBias):
    return _by_key(numbers, inputs, relation)
  # The distance from a key to a query is i - j: queries and keys change places.
  seen = dict(query=inputs.key, key=inputs.query, query_offset=-inputs.query_offset)
  mirrored = dataclasses.replace(relation, left=relation.reach[1])
  skewed = _by_key(
    numbers[..., ::-1], inputs._replace(**seen, is_causal=False), mirrored
  )
  return skewed.swapaxes(2, 3)


def relative_values(
  inputs: Inputs, relation: RelativePositions, weights: Array
) -> Array:
  """Computes sum_j p_ij aV_ij, [B, T, N, V], from the weights [B, N, T, S]."""
  table = relation.value
  if (
    inputs.is_causal
  ):  # where a skew has entries of other rows; the weights of a NaN row are NaN
    mask = masks.causal(inputs.query_positions, inputs.key_positions)
    weights = jnp.where(mask, weights, 0)
  sums = zeros((*weights.shape[:3], len(table)), weights)
  (sums_BNTR,) = jax.linear_transpose(lambda x: _by_key(x, inputs, relation), sums)(
    weights
  )
  return reference.product("BNTR,RNH->BTNH", sums_BNTR, table)


def skew(x: Float[Array, "*B T C"], num_keys: int) -> Float[Array, "*B T {num_keys}"]:
  """Moves column c of row t to column c - (T - 1) + t: columns are distances, then
  keys.

  Column 0 is distance -(T - 1). If C is less than T + S - 1, the last entries of a row
  come from other rows: mask them. Huang et al. 2018, section 3.4.1. Copies, no
  arithmetic.

  >>> skew(jnp.arange(8.0).reshape(2, 4), 3)
  Array([[1., 2., 3.],
         [4., 5., 6.]], dtype=float32)
  """
  *batch, length, columns = x.shape
  padding = max(0, num_keys + 1 - columns)
  x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
  columns += padding
  flat = x.reshape(*batch, length * columns)[..., length - 1 : length * columns - 1]
  return flat.reshape(*batch, length, columns - 1)[..., :num_keys]


def _by_key(
  x: Array, inputs: Inputs, relation: ByDistance
) -> Float[Array, "#B #N T S"]:
  """Returns numbers by key from numbers by table row, [#B, #N, T, R].

  Repeats or drops columns, so that there is one for every distance from -(T - 1) to S -
  1, and skews. An offset is subtracted from both. With causality the last distance is
  at most 0, if known.
  """
  num_queries, num_keys = x.shape[2], inputs.key.shape[1]
  left, right = relation.reach
  is_zero = relation.beyond == "zero"
  if not isinstance(inputs.query_offset, int):
    columns = jnp.arange(num_queries + num_keys - 1, dtype=jnp.int32) - (
      num_queries - 1
    )
    distances_BC = columns[None] - inputs.query_offset[:, None]
    rows_BC = distances_BC.clip(-left, right) + left
    x = jnp.take_along_axis(
      x, rows_BC[:, None, None], axis=-1, mode="promise_in_bounds"
    )
    in_table = (rows_BC - left == distances_BC)[:, None, None]
    return skew(jnp.where(in_table, x, 0) if is_zero else x, num_keys)
  first = 1 - num_queries - inputs.query_offset
  last = num_keys - 1 - inputs.query_offset
  last = max(min(last, 0), first) if inputs.is_causal else last

  # Not jnp.pad: the transpose of an edge padding moves data between devices.
  def repeated(end, columns):
    end = jnp.zeros_like(end) if is_zero else end
    return jnp.broadcast_to(end, (*x.shape[:-1], max(0, columns)))

  before = repeated(x[..., :1], min(last + 1, -left) - first)
  after = repeated(x[..., -1:], last - max(first - 1, right))
  middle = x[..., max(first, -left) + left : max(min(last, right) + left + 1, 0)]
  return skew(jnp.concatenate([before, middle, after], axis=-1), num_keys)
