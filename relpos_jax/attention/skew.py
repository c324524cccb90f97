"""Huang et al.'s memory-efficient form: project on the table, then skew.

Music Transformer, section 3.4.1, extended to later keys and, transposed, to values:
copies of [B, N, T, T + S] instead of lookups, and no [T, S, H] tensor. All relations by
distance are numbers by row for each query or, in `KeyBias`, for each key.
"""

import functools

import jax
import jax.numpy as jnp

from relpos_jax.attention import band, masks, reference
from relpos_jax.attention.by_distance import ByDistance, RelativePositions
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.lookup import product
from relpos_jax.attention.relation import Relation
from relpos_jax.typing import Array, Float, Int

unsupported = band.unsupported


def attention(inputs: Inputs) -> Array | tuple[Array, Array]:
  """Computes attention with a skew in each relative term."""
  return reference.attention(inputs, relative_logits, relative_values)


def relative_logits(
  inputs: Inputs, relation: Relation
) -> Float[Array, "#B #N T S"] | None:
  """Computes a relation's term of the logits, before the scale."""
  if not isinstance(relation, ByDistance):
    return relation.logits(inputs.queries, inputs.keys)
  numbers = relation.project(inputs.queries, inputs.keys)
  if numbers is None:
    return None
  num_queries, num_keys = inputs.query.shape[1], inputs.key.shape[1]
  offset, is_zero = inputs.query_offset, relation.beyond == "zero"
  if relation.is_by_key:
    # The distance from a key to a query is i - j: queries and keys change places.
    reach = relation.reach[::-1]
    numbers = numbers[..., ::-1]
    return _by_key(numbers, num_queries, reach, is_zero, -offset).swapaxes(2, 3)
  shape = (*numbers.shape[:2], num_queries, numbers.shape[3])
  numbers = jnp.broadcast_to(numbers, shape)
  return _by_key(numbers, num_keys, relation.reach, is_zero, offset, inputs.is_causal)


def relative_values(
  inputs: Inputs, relation: Relation, weights: Array
) -> Float[Array, "B T N V"] | None:
  """Computes sum_j p_ij aV_ij from the weights [B, N, T, S]."""
  if not isinstance(relation, RelativePositions) or relation.value is None:
    return None
  if inputs.is_causal:
    # There a skew has entries of other rows; the weights of a NaN row are NaN.
    mask = masks.causal(inputs.query_positions, inputs.key_positions)
    weights = jnp.where(mask, weights, 0)
  sums = jax.typeof(weights).update(shape=(*weights.shape[:3], relation.num_rows))
  by_key = functools.partial(
    _by_key,
    num_keys=inputs.key.shape[1],
    reach=relation.reach,
    is_zero=relation.beyond == "zero",
    offset=inputs.query_offset,
    is_causal=inputs.is_causal,
  )
  (sums_BNTR,) = jax.linear_transpose(by_key, sums)(weights)
  return product("BNTR,RNH->BTNH", sums_BNTR, relation.value)


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
  numbers: Float[Array, "#B #N T R"],
  num_keys: int,
  reach: tuple[int, int],
  is_zero: bool,
  offset: int | Int[Array, "#B"],
  is_causal: bool = False,
) -> Float[Array, "#B #N T S"]:
  """Returns numbers by key from numbers by table row.

  Repeats or drops columns, so that there is one for every distance from -(T - 1) to S -
  1, and skews. An offset is subtracted from both. With causality the last distance is
  at most 0, if known. Beyond the table there are its end rows, or zeros if `is_zero`.
  """
  num_queries, (left, right) = numbers.shape[2], reach
  if not isinstance(offset, int):
    columns = jnp.arange(1 - num_queries, num_keys, dtype=jnp.int32)
    distances_BC = columns[None] - offset[:, None]
    nearest_BC = distances_BC.clip(-left, right)
    rows = (nearest_BC + left)[:, None, None]
    numbers = jnp.take_along_axis(numbers, rows, axis=-1, mode="promise_in_bounds")
    if is_zero:
      in_table = (nearest_BC == distances_BC)[:, None, None]
      numbers = jnp.where(in_table, numbers, 0)
    return skew(numbers, num_keys)
  # Farther away all keys have the same row.
  offset = max(min(offset, num_keys + left), -num_queries - right)
  first, last = 1 - num_queries - offset, num_keys - 1 - offset
  if is_causal:
    last = max(min(last, 0), first)
  ends = numbers[..., :1], numbers[..., -1:]
  if is_zero:
    ends = jnp.zeros_like(ends[0]), jnp.zeros_like(ends[1])
  # Not jnp.pad: the transpose of an edge padding moves data between devices.
  before = jnp.repeat(ends[0], max(0, -left - first), axis=-1)
  after = jnp.repeat(ends[1], max(0, last - right), axis=-1)
  columns = jnp.concatenate([before, numbers, after], axis=-1)
  start = max(0, first + left)
  return skew(columns[..., start : start + last - first + 1], num_keys)
