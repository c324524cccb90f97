"""One call of the operator: its arguments, checked and in one layout."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from relpos_jax.attention import masks
from relpos_jax.attention.relations import RelativePositions
from relpos_jax.attention.validation import (
  check_dropout,
  check_logits_like,
  check_relative_positions,
  check_segment_pair,
  check_shapes,
  check_tokens_like,
)
from relpos_jax.typing import Array, ArrayLike, Bool, Float, Int


class Inputs(NamedTuple):
  """What every implementation is given: batched arrays, tables `[R, 1 or N, H]`, no defaults."""

  query: Float[Array, "B T N H"]
  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K H"]
  bias: Float[Array, "#B #N #T #S"] | None
  mask: Bool[Array, "#B #N #T #S"] | None
  relations: RelativePositions | None
  scale: ArrayLike
  is_causal: bool
  query_positions: Int[Array, "#B T"]
  key_positions: Int[Array, "#B S"]
  query_segment_ids: Int[Array, "#B T"] | None
  key_segment_ids: Int[Array, "#B S"] | None
  dropout_rate: float
  dropout_key: Array | None  # None exactly where nothing is dropped

  def visible(self) -> Bool[Array, "#B #N #T #S"] | None:
    """Mask, causality and segments in one; None when every query sees every key."""
    causal = masks.causal(self.query_positions, self.key_positions) if self.is_causal else None
    same_segment = None
    if self.query_segment_ids is not None and self.key_segment_ids is not None:
      same_segment = masks.same_segment(self.query_segment_ids, self.key_segment_ids)
    return masks.combine(self.mask, causal, same_segment)


def gather_inputs(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  bias: ArrayLike | None,
  mask: ArrayLike | None,
  *,
  relations: RelativePositions | None,
  scale: ArrayLike | None,
  is_causal: bool,
  query_positions: ArrayLike | None,
  key_positions: ArrayLike | None,
  query_segment_ids: ArrayLike | None,
  key_segment_ids: ArrayLike | None,
  dropout_rate: float = 0.0,
  dropout_key: Array | None = None,
) -> Inputs:
  """Checks the operator's arguments and fills in the defaults."""
  query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
  check_shapes(query, key, value)
  check_dropout(dropout_rate, dropout_key)
  check_segment_pair(query_segment_ids, key_segment_ids)
  *batch, num_queries, heads, width = query.shape
  queries, keys = (*batch, num_queries), (*batch, key.shape[-3])
  logits = (*batch, heads, num_queries, key.shape[-3])
  return Inputs(
    query=_batched(query, 4),
    key=_batched(key, 4),
    value=_batched(value, 4),
    bias=_logits_like("bias", bias, logits),
    mask=_logits_like("mask", mask, logits),
    relations=_relations(relations, heads, width, query.dtype),
    scale=width**-0.5 if scale is None else scale,
    is_causal=is_causal,
    query_positions=_positions("query_positions", query_positions, queries),
    key_positions=_positions("key_positions", key_positions, keys),
    query_segment_ids=_segment_ids("query_segment_ids", query_segment_ids, queries),
    key_segment_ids=_segment_ids("key_segment_ids", key_segment_ids, keys),
    dropout_rate=dropout_rate,
    dropout_key=dropout_key if dropout_rate > 0 else None,
  )


def _logits_like(name: str, array: ArrayLike | None, shape: tuple[int, ...]) -> Array | None:
  if array is None:
    return None
  check_logits_like(name, jnp.asarray(array), shape)
  return _batched(jnp.asarray(array), 4)


def _positions(name: str, positions: ArrayLike | None, shape: tuple[int, ...]) -> Array:
  if positions is None:
    return jnp.arange(shape[-1], dtype=jnp.int32)[None]
  check_tokens_like(name, jnp.asarray(positions), shape)
  # Signed and wide, whatever came in: they are subtracted.
  return _batched(jnp.asarray(positions).astype(jnp.int32), 2)


def _segment_ids(name: str, ids: ArrayLike | None, shape: tuple[int, ...]) -> Array | None:
  if ids is None:
    return None
  check_tokens_like(name, jnp.asarray(ids), shape)
  return _batched(jnp.asarray(ids), 2)


def _relations(
  relations: RelativePositions | None, heads: int, width: int, dtype: DTypeLike
) -> RelativePositions | None:
  """Tables with a head axis, in float32 or wider: so are the sums in their gradients."""
  if relations is None:
    return None
  check_relative_positions(relations, heads, width)
  wide = jnp.promote_types(dtype, jnp.float32)
  return jax.tree.map(
    lambda table: jnp.asarray(table, wide).reshape(len(table), -1, width), relations
  )


def _batched(array: Array, ndim: int) -> Array:
  return array if array.ndim == ndim else array[None]
