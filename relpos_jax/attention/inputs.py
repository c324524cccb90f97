"""One call of the operator: its arguments, checked and in one layout."""

import dataclasses
import math
import operator
import warnings
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from relpos_jax.attention import masks, validation
from relpos_jax.attention.partitioned import Shards, align_manual_axes, explicit_axes
from relpos_jax.attention.relations import (
  ByDistance,
  ContentBias,
  EdgeFeatures,
  EdgeLabels,
  LabelBias,
  LinearBias,
  Numbers,
  Relation,
  Relations,
  Vectors,
  rows_of,
  tables,
)
from relpos_jax.typing import Array, ArrayLike, Bool, Float, Int

_FARTHEST = 2**31 - 1  # a window this wide hides nothing


class AttentionOptions(TypedDict, total=False):
  """The options of `dot_product_attention` that `attention_weights` has, too, for editors."""

  relations: Relations | None
  scale: ArrayLike | None
  logits_soft_cap: float | None
  sinks: ArrayLike | None
  is_causal: bool
  query_positions: ArrayLike | None
  key_positions: ArrayLike | None
  query_offset: ArrayLike | None
  query_seq_lengths: ArrayLike | None
  key_value_seq_lengths: ArrayLike | None
  local_window_size: int | tuple[int, int] | None
  query_segment_ids: ArrayLike | None
  key_segment_ids: ArrayLike | None
  dropout_rate: float
  dropout_key: ArrayLike | None


class Inputs(NamedTuple):
  """The checked arguments of a call, with one batch axis, defaults and tables `[R, 1 or
  N, H]`.

  A table of `DistanceBias` has no last axis. The terms of all relations are added. Each
  of A biases belongs to B / A consecutive sequences.
  """

  query: Float[Array, "B T N H"]
  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K V"]
  bias: Float[Array, "A #N #T #S"] | None
  mask: Bool[Array, "#B #N #T #S"] | None
  relations: tuple[Relation, ...]
  scale: ArrayLike
  soft_cap: float | None
  sinks: Float[Array, " N"] | None
  is_causal: bool
  window: tuple[int, int] | None  # how far a query sees to the left and to the right
  linear_positions: (
    bool  # 0, 1, 2, ... for keys, query_offset + 0, 1, 2, ... for queries
  )
  query_offset: int | Int[Array, "#B"]  # an int is static
  query_positions: Int[Array, "#B T"]
  key_positions: Int[Array, "#B S"]
  query_mask: Bool[Array, "#B 1 T 1"] | None  # False past the lengths
  key_mask: Bool[Array, "#B 1 1 S"] | None
  query_segment_ids: Int[Array, "#B T"] | None
  key_segment_ids: Int[Array, "#B S"] | None
  dropout_rate: float
  dropout_seeds: Int[Array, "B N"] | None  # None without dropout
  return_residual: bool
  explicit: Shards = ()  # the explicit mesh axes that shard the query

  def pair_mask(self) -> Bool[Array, "#B #N #T #S"] | None:
    """Combines mask, causality, window, lengths and segments; returns None if nothing is hidden."""
    found = [self.mask, self.key_mask, self.query_mask]
    if self.is_causal:
      found.append(masks.causal(self.query_positions, self.key_positions))
    if self.window is not None:
      left, right = self.window
      distance = (
        self.key_positions[:, None, None] - self.query_positions[:, None, :, None]
      )
      found.append((-left <= distance) & (distance <= right))
    if self.query_segment_ids is not None:
      segments = (
        self.query_segment_ids[:, None, :, None],
        self.key_segment_ids[:, None, None],
      )
      found.append(jnp.equal(*segments))
    return masks.combine(*found)

  def bias_of_each(self) -> Float[Array, "#B #N #T #S"] | None:
    """Returns the bias of each sequence, or that of all; None without one."""
    batch = self.query.shape[0]
    if self.bias is None or self.bias.shape[0] in (1, batch):
      return self.bias
    return self.bias.repeat(batch // self.bias.shape[0], 0)

  def edges(self, relation: Relation) -> Array:
    """Returns the table row of each pair of query and key, or the pair's features."""
    match relation:
      case EdgeLabels() | LabelBias():
        return rows_of(relation)
      case EdgeFeatures():
        return relation.features
      case _:
        return relation.labels(self.query_positions, self.key_positions)

  def value_terms(self) -> list[Vectors]:
    """Returns the relations that add vectors to the values."""
    return [x for x in self.relations if isinstance(x, Vectors) and x.value is not None]


def gather_inputs(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike | None,
  bias: ArrayLike | None = None,
  mask: ArrayLike | None = None,
  *,
  relations: Relations | None = None,
  scale: ArrayLike | None = None,
  logits_soft_cap: float | None = None,
  sinks: ArrayLike | None = None,
  is_causal: bool = False,
  query_positions: ArrayLike | None = None,
  key_positions: ArrayLike | None = None,
  query_offset: ArrayLike | None = None,
  query_seq_lengths: ArrayLike | None = None,
  key_value_seq_lengths: ArrayLike | None = None,
  local_window_size: int | tuple[int, int] | None = None,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
  dropout_rate: float = 0.0,
  dropout_key: ArrayLike | None = None,
  return_residual: bool = False,
) -> Inputs:
  """Checks the operator's arguments and fills in the defaults.

  Without values, the keys take their place, and value tables have any width.
  """
  value_width = None if value is None else jnp.shape(value)[-1]
  arrays = dict(query=query, key=key, value=key if value is None else value)
  query, key, value = (validation.as_array(name, x) for name, x in arrays.items())
  validation.check_shapes(query, key, value)
  if (query_segment_ids is None) != (key_segment_ids is None):
    raise ValueError("want both query_segment_ids and key_segment_ids, or neither")
  *batch, num_queries, heads, width = query.shape
  scale = width**-0.5 if scale is None else scale
  validation.check_numbers(scale, dropout_rate, dropout_key, logits_soft_cap)
  if sinks is not None:
    sinks = validation.check_array("sinks", sinks, jnp.floating, (heads,))
    sinks = sinks.astype(jnp.promote_types(query.dtype, jnp.float32))
  num_keys = key.shape[-3]
  of_queries = (*batch, num_queries), (num_queries,)
  of_keys = (*batch, num_keys), (num_keys,)
  logits = (*batch, heads, num_queries, num_keys)
  linear = query_positions is None and key_positions is None
  has_place = query_offset is not None or not linear
  query_offset = 0 if query_offset is None else query_offset
  has_offset = not isinstance(query_offset, int) or query_offset != 0
  if has_offset and not linear:
    raise ValueError("query_offset is given with positions; want it or query_positions")
  window = _window(local_window_size)
  checked = validation.check_relations(
    relations, logits, (width, value_width), query.dtype
  )
  goes_by_distance = any(isinstance(relation, ByDistance) for relation in checked)
  if goes_by_distance and not is_symbolic(query, key):
    _warn_of_another_layout(query.shape, num_keys)
  relations = tuple(_relation(relation, query.dtype) for relation in checked)
  if relations and is_causal and not has_place:
    _warn_of_one_query(num_queries, num_keys)
  if query_positions is None:
    query_positions = jnp.arange(num_queries, dtype=jnp.int32)
  if key_positions is None:
    key_positions = jnp.arange(num_keys, dtype=jnp.int32)
  query_positions = _given("query_positions", query_positions, 1, *of_queries)
  if has_offset:
    validation.check_offset(query_offset)
    offsets = _given("query_offset", query_offset, 0, (), tuple(batch))
    if isinstance(query_offset, int | np.integer):
      query_offset = int(query_offset)
      query_positions += query_offset
    else:
      query_offset = offsets
      query_positions += query_offset[:, None]
  query_lengths = _given("query_seq_lengths", query_seq_lengths, 0, tuple(batch))
  query_mask = masks.within(query_lengths, num_queries)
  key_lengths = _given("key_value_seq_lengths", key_value_seq_lengths, 0, tuple(batch))
  seeds = None
  if dropout_rate:  # a seed for every head; `dropout.keep` derives the rest
    bits = jax.random.bits(dropout_key, (*batch, heads), "uint32")
    seeds = _batched(jax.lax.bitcast_convert_type(bits, jnp.int32), 1)
  inputs = Inputs(
    query=_batched(query, 3),
    key=_batched(key, 3),
    value=_batched(value, 3),
    bias=_of_logits("bias", bias, logits),
    mask=_of_logits("mask", mask, logits),
    relations=relations,
    scale=scale,
    soft_cap=logits_soft_cap,
    sinks=sinks,
    is_causal=bool(is_causal),
    window=window,
    linear_positions=linear,
    query_offset=query_offset,
    query_positions=query_positions,
    key_positions=_given("key_positions", key_positions, 1, *of_keys),
    query_mask=None if query_mask is None else query_mask.swapaxes(2, 3),
    key_mask=masks.within(key_lengths, num_keys),
    query_segment_ids=_given("query_segment_ids", query_segment_ids, 1, *of_queries),
    key_segment_ids=_given("key_segment_ids", key_segment_ids, 1, *of_keys),
    dropout_rate=dropout_rate,
    dropout_seeds=seeds,
    return_residual=return_residual,
  )
  return align_manual_axes(inputs)._replace(explicit=explicit_axes(inputs.query))


def is_symbolic(*arrays: Array) -> bool:
  """Returns whether a dimension of an array is a variable of `jax.export`."""
  return any(export.is_symbolic_dim(size) for array in arrays for size in array.shape)


def _of_logits(name: str, x: ArrayLike | None, logits: tuple[int, ...]) -> Array | None:
  """Returns a bias or mask with one batch axis, which a mask has in full or of size 1.

  A bias that the last batch axes share stays as small as it is.
  """
  if x is None:
    return None
  x, batch = validation.as_array(name, x), logits[:-3]
  sizes = zip(x.shape[::-1], logits[::-1], strict=False)
  if x.ndim > len(logits) or any(n not in (1, m) for n, m in sizes):
    raise ValueError(
      f"{name} has shape {x.shape}; want one that broadcasts to {logits}"
    )
  if name == "mask" and x.dtype != bool:
    raise ValueError(
      f"mask has dtype {x.dtype}; want bool, True where a key may be seen"
    )
  if name == "bias" and not jnp.issubdtype(x.dtype, jnp.floating):
    want = "give it as mask=" if x.dtype == bool else "want floating numbers"
    raise ValueError(f"bias has dtype {x.dtype}; {want}")
  x = jnp.expand_dims(x, (*range(len(logits) - x.ndim),))
  num_own = max((i + 1 for i, n in enumerate(x.shape[:-3]) if n != 1), default=0)
  if num_own and name == "mask":
    num_own = len(batch)
  rest = x.shape[-3:]
  x = jnp.broadcast_to(x, (*batch[:num_own], *[1] * (len(batch) - num_own), *rest))
  return x.reshape(math.prod(batch[:num_own]), *rest)


def _given(
  name: str, x: ArrayLike | None, rank: int, *shapes: tuple[int, ...]
) -> Array | None:
  """Returns an optional argument as a checked array with a batch axis before its last
  `rank`.

  Integers become int32, unless they are traced in 64 bits: then their values are not
  checked.
  """
  if x is None:
    return None
  x = validation.check_array(name, x, jnp.integer, *shapes)
  is_wide = isinstance(x, jax.core.Tracer) and x.dtype.itemsize == 8
  return _batched(x.astype(jnp.int64 if is_wide else jnp.int32), rank)


def _warn_of_one_query(num_queries: int, num_keys: int) -> None:
  """Warns of decoding without a position, at the line that calls the operator."""
  if num_queries == 1 and num_keys not in (0, 1):
    warnings.warn(
      f"the one query is at position 0 of {num_keys} keys, and is_causal hides the "
      "others: give its position as query_offset=, or 0 if that is meant",
      stacklevel=4,
    )


def _warn_of_another_layout(query_shape: tuple[int, ...], num_keys: int) -> None:
  """Warns of heads before tokens, at the line that calls the operator."""
  *_, num_queries, heads, _ = query_shape
  most_heads = 64  # of the models that are known, few have more
  if heads > max(num_queries, num_keys, most_heads):
    warnings.warn(
      f"query has {heads} heads and {num_queries} tokens: the layout is [B, T, N, H], "
      "tokens before heads",
      stacklevel=4,
    )


def _window(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
  """Returns the distances to the left and right, clipped to the largest one possible."""
  if size is None:
    return None
  left, right = map(
    operator.index, size if isinstance(size, tuple | list) else (size, size)
  )
  if min(left, right) < 0:
    raise ValueError(f"local_window_size is {size}; want None, or one or two distances")
  return min(left, _FARTHEST), min(right, _FARTHEST)


def _relation(relation: Relation, dtype: np.dtype) -> Relation:
  """Adds a head axis to tables and casts them to float32 or wider, for sums in their gradients."""
  wide = jnp.promote_types(dtype, jnp.float32)
  changes = {}
  for name, table in tables(relation).items():
    row = () if isinstance(relation, Numbers) else table.shape[-1:]
    changes[name] = table.astype(wide).reshape(len(table), -1, *row)
  match relation:
    case EdgeLabels() | LabelBias():
      changes["labels"] = _batched(relation.labels, 2)
    case EdgeFeatures():
      changes["features"] = _batched(relation.features.astype(wide), 3)
    case ContentBias():
      changes["query"] = _batched(relation.query, 3)
    case LinearBias():
      changes["slopes"] = relation.slopes.astype(wide)
  return dataclasses.replace(relation, **changes)


def _batched(array: Array, rank: int) -> Array:
  """Merges the axes before the last `rank` into one, or adds one."""
  batch, rest = array.shape[: array.ndim - rank], array.shape[array.ndim - rank :]
  return array if len(batch) == 1 else array.reshape(math.prod(batch), *rest)
