"""Computes Huang et al.'s memory-efficient attention by skewing.

See Music Transformer, section 3.4.1; here it also covers keys after the query. Each
query is multiplied by every table row, which gives a number for each query and row. The
skew moves each number to the key at that distance. For the values, the transposed skew
sums the weights by table row. A skew copies an array [B, N, T, T + S] instead of
gathering, and needs no [T, S, H] tensor. In `KeyBias`, keys take the place of queries.
"""

import dataclasses

import jax
import jax.numpy as jnp

from relpos_jax.attention import band, masks, reference
from relpos_jax.attention.by_distance import ByDistance
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.lookup import product
from relpos_jax.attention.relation import Relation, VectorRelation
from relpos_jax.typing import Array, Float, Int

unsupported = band.unsupported


def attention(inputs: Inputs) -> Array | tuple[Array, Array]:
  """Computes attention, with relative terms by skewing."""
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
  if relation.is_by_key:
    # Exchanges queries and keys: the distance from a key to a query is i - j.
    _, right = relation.reach
    mirrored = dataclasses.replace(relation, left=right)
    numbers = numbers[..., ::-1]
    logits_BNST = _skew_rows(numbers, mirrored, num_queries, -inputs.query_offset)
    return logits_BNST.swapaxes(2, 3)
  batch, heads, _, num_rows = numbers.shape
  numbers = jnp.broadcast_to(numbers, (batch, heads, num_queries, num_rows))
  return _skew_rows(numbers, relation, num_keys, inputs.query_offset, inputs.is_causal)


def relative_values(
  inputs: Inputs, relation: Relation, weights: Array
) -> Float[Array, "B T N V"] | None:
  """Computes sum_j p_ij aV_ij from the weights [B, N, T, S]."""
  if not isinstance(relation, ByDistance) or not isinstance(relation, VectorRelation):
    return None
  if relation.value is None:
    return None
  if inputs.is_causal:
    # In a row of NaN, masked weights are NaN, too. A skew moves them to other rows.
    mask = masks.causal(inputs.query_positions, inputs.key_positions)
    weights = jnp.where(mask, weights, 0)
  *rows, num_keys = weights.shape

  def skew_rows(numbers):
    return _skew_rows(
      numbers, relation, num_keys, inputs.query_offset, inputs.is_causal
    )

  sums = jax.typeof(weights).update(shape=(*rows, relation.num_rows))
  (sums_BNTR,) = jax.linear_transpose(skew_rows, sums)(weights)
  return product("BNTR,RNH->BTNH", sums_BNTR, relation.value)


def skew(x: Float[Array, "*B T C"], num_keys: int) -> Float[Array, "*B T {num_keys}"]:
  """Shifts row t so that columns indexed by distance become columns indexed by key.

  Column c of row t moves to column c - (T - 1) + t; column 0 is distance -(T - 1). If C
  is less than T + S - 1, the last entries of a row come from other rows: mask them.
  Huang et al. 2018, section 3.4.1. It copies, and computes nothing.

  >>> skew(jnp.arange(8.0).reshape(2, 4), 3)
  Array([[1., 2., 3.],
         [4., 5., 6.]], dtype=float32)
  """
  *batch, length, columns = x.shape
  padding = max(0, num_keys + 1 - columns)
  no_padding = [(0, 0)] * (x.ndim - 1)
  x = jnp.pad(x, [*no_padding, (0, padding)])
  columns += padding
  flat = x.reshape(*batch, length * columns)
  flat = flat[..., length - 1 : -1]
  return flat.reshape(*batch, length, columns - 1)[..., :num_keys]


def _skew_rows(
  numbers: Float[Array, "#B #N T R"],
  relation: ByDistance,
  num_keys: int,
  offset: int | Int[Array, "#B"],
  is_causal: bool = False,
) -> Float[Array, "#B #N T S"]:
  """Returns numbers indexed by key from numbers indexed by table row.

  First it makes one column for every distance between a query and a key. Beyond the
  table, it repeats the end rows or inserts zeros. Then it skews. If `is_causal` and the
  offset is an int, it leaves out positive distances, which are masked.
  """
  num_queries = numbers.shape[2]
  if not isinstance(offset, int):
    columns = jnp.arange(1 - num_queries, num_keys, dtype=jnp.int32)
    rows = relation.labels(offset[:, None], columns[None])[:, None]
    index = jnp.maximum(rows, 0)
    numbers = jnp.take_along_axis(numbers, index, axis=-1, mode="promise_in_bounds")
    return skew(jnp.where(rows >= 0, numbers, 0), num_keys)
  left, right = relation.reach
  # Larger offsets give the same rows: all keys are beyond the table.
  offset = max(min(offset, num_keys + left), -num_queries - right)
  first, last = 1 - num_queries - offset, num_keys - 1 - offset
  if is_causal:
    last = max(min(last, 0), first)
  left_end, right_end = numbers[..., :1], numbers[..., -1:]
  if relation.beyond == "zero":
    left_end = right_end = jnp.zeros_like(left_end)
  # The transpose of jnp.pad with mode="edge" would move data between devices.
  before = jnp.repeat(left_end, max(0, -left - first), axis=-1)
  after = jnp.repeat(right_end, max(0, last - right), axis=-1)
  columns = jnp.concatenate([before, numbers, after], axis=-1)
  start = max(0, first + left)
  stop = start + last - first + 1
  return skew(columns[..., start:stop], num_keys)
