"""One call of the operator: its arguments, checked and in one layout."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.attention import masks
from relpos_jax.attention.relations import RelativePositions
from relpos_jax.attention.validation import (
  check_dropout,
  check_logits_like,
  check_relative_positions,
  check_shapes,
  check_tokens_like,
)
from relpos_jax.typing import Array, ArrayLike, Bool, Float, Int, Key


class Inputs(NamedTuple):
  """What every implementation is given: batched arrays, tables `[R, 1 or N, H]`, no defaults."""

  query: Float[Array, "B T N H"]
  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K H"]
  bias: Float[Array, "#B #N #T #S"] | None
  mask: Bool[Array, "#B #N #T #S"] | None
  relations: RelativePositions | None
  scale: float | Float[Array, ""]
  is_causal: bool
  query_positions: Int[Array, "#B T"]
  key_positions: Int[Array, "#B S"]
  query_segment_ids: Int[Array, "#B T"] | None
  key_segment_ids: Int[Array, "#B S"] | None
  dropout_rate: float
  dropout_key: Key[Array, ""] | None

  def visible(self) -> Bool[Array, "#B #N #T #S"] | None:
    """Mask, causality and segments in one; None when every query sees every key."""
    causal = masks.causal(self.query_positions, self.key_positions) if self.is_causal else None
    same_segment = (
      None
      if self.query_segment_ids is None
      else masks.same_segment(self.query_segment_ids, self.key_segment_ids)
    )
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
  dropout_key: Key[Array, ""] | None = None,
) -> Inputs:
  """Checks the operator's arguments and fills in the defaults."""
  query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
  check_shapes(query, key, value)
  *batch, num_queries, heads, width = query.shape
  num_keys = key.shape[-3]
  check_dropout(dropout_rate, dropout_key)
  return Inputs(
    query=_batched(query, 4),
    key=_batched(key, 4),
    value=_batched(value, 4),
    bias=_logits_like("bias", bias, (*batch, heads, num_queries, num_keys)),
    mask=_logits_like("mask", mask, (*batch, heads, num_queries, num_keys)),
    relations=_with_head_axis(relations, heads, width),
    scale=width**-0.5 if scale is None else scale,
    is_causal=is_causal,
    query_positions=_positions("query_positions", query_positions, (*batch, num_queries)),
    key_positions=_positions("key_positions", key_positions, (*batch, num_keys)),
    **_segments(query_segment_ids, key_segment_ids, (*batch, num_queries), (*batch, num_keys)),
    dropout_rate=dropout_rate,
    dropout_key=dropout_key,
  )


def _logits_like(name: str, array: ArrayLike | None, shape: tuple[int, ...]) -> Array | None:
  if array is None:
    return None
  check_logits_like(name, jnp.asarray(array), shape)
  return _batched(jnp.asarray(array), 4)


def _positions(name: str, array: ArrayLike | None, shape: tuple[int, ...]) -> Array:
  if array is None:
    return jnp.arange(shape[-1])[None]
  check_tokens_like(name, jnp.asarray(array), shape)
  return _batched(jnp.asarray(array), 2)


def _segments(query_ids, key_ids, query_shape, key_shape) -> dict[str, Array | None]:
  if (query_ids is None) != (key_ids is None):
    missing = "query_segment_ids" if query_ids is None else "key_segment_ids"
    raise ValueError(f"{missing} is None; want both segment ids or none")
  if query_ids is None:
    return {"query_segment_ids": None, "key_segment_ids": None}
  return {
    "query_segment_ids": _positions("query_segment_ids", query_ids, query_shape),
    "key_segment_ids": _positions("key_segment_ids", key_ids, key_shape),
  }


def _with_head_axis(relations, heads: int, width: int) -> RelativePositions | None:
  if relations is None:
    return None
  if not isinstance(relations, RelativePositions):
    raise ValueError(f"relations is {type(relations).__name__}; want RelativePositions or None")
  check_relative_positions(relations, heads, width)
  return jax.tree.map(lambda table: jnp.asarray(table).reshape(len(table), -1, width), relations)


def _batched(array: Array, ndim: int) -> Array:
  return array if array.ndim == ndim else array[None]
