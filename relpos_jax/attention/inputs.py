"""One call of the operator: its arguments, checked and in one layout."""

import math
import numbers
import operator
import warnings
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from relpos_jax.attention import dropout, masks
from relpos_jax.attention.arrays import (
  Shape,
  as_array,
  check_array,
  describe,
  range_of,
  shape_text,
  slice_queries,
  with_one_batch_axis,
)
from relpos_jax.attention.partitioned import Shards, align_manual_axes, explicit_axes
from relpos_jax.attention.relation import Relation, Relations, Sizes, Tokens
from relpos_jax.typing import Array, ArrayLike, Bool, Float, Int, WeightsName

_FARTHEST = 2**31 - 1  # a window this wide masks nothing
_MOST_HEADS = 64  # of the models that are known, few have more


class AttentionOptions(TypedDict, total=False):
  """The options of `dot_product_attention` that `attention_weights` has, too, for
  editors.
  """

  relations: Relations | None
  scale: ArrayLike | None
  logits_soft_cap: float | None
  sinks: ArrayLike | None
  weights: WeightsName
  divisor: ArrayLike | None
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
  """The checked arguments of a call, with one batch axis and with defaults.

  The terms of all relations are added. Each of A biases belongs to B / A consecutive
  sequences.
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
  silu_divisor: ArrayLike | None  # None: the weights are a softmax
  is_causal: bool
  window: tuple[int, int] | None  # the distances to the left and to the right
  # 0, 1, 2, ... for keys, query_offset + 0, 1, 2, ... for queries
  linear_positions: bool
  query_offset: int | Int[Array, "#B"]  # an int is static
  query_positions: Int[Array, "#B T"] | None
  key_positions: Int[Array, "#B S"] | None
  query_mask: Bool[Array, "#B 1 T 1"] | None  # False past the lengths
  key_mask: Bool[Array, "#B 1 1 S"] | None
  query_segment_ids: Int[Array, "#B T"] | None
  key_segment_ids: Int[Array, "#B S"] | None
  dropout_rate: float
  dropout_seeds: Int[Array, "B N"] | None  # None without dropout
  return_residual: bool
  explicit: Shards  # the explicit mesh axes that shard the query

  @property
  def queries(self) -> Tokens:
    return Tokens(self.query, self.query_positions)

  @property
  def keys(self) -> Tokens:
    return Tokens(self.key, self.key_positions)

  def pair_mask(self) -> Bool[Array, "#B #N #T #S"] | None:
    """Combines mask, causality, window, lengths and segments; None without any."""
    parts = [self.mask, self.key_mask, self.query_mask]
    if self.is_causal:
      parts.append(masks.causal(self.query_positions, self.key_positions))
    if self.window is not None:
      left, right = self.window
      of_queries = self.query_positions[:, None, :, None]
      distance = self.key_positions[:, None, None] - of_queries
      parts.append((-left <= distance) & (distance <= right))
    if self.query_segment_ids is not None:
      of_queries = self.query_segment_ids[:, None, :, None]
      parts.append(of_queries == self.key_segment_ids[:, None, None])
    return masks.combine(*parts)

  def bias_of_each(self) -> Float[Array, "#B #N #T #S"] | None:
    """Returns the bias of each sequence, or that of all; None without one."""
    batch = self.query.shape[0]
    if self.bias is None or self.bias.shape[0] in (1, batch):
      return self.bias
    return self.bias.repeat(batch // self.bias.shape[0], 0)

  def block(self, start: Int[Array, ""], size: int) -> "Inputs":
    """Returns the inputs of a block of queries, which have positions of their own."""
    return self._replace(
      query=slice_queries(self.query, start, size),
      bias=slice_queries(self.bias, start, size, axis=2),
      mask=slice_queries(self.mask, start, size, axis=2),
      relations=tuple(relation.block(start, size) for relation in self.relations),
      query_positions=slice_queries(self.query_positions, start, size),
      query_mask=slice_queries(self.query_mask, start, size, axis=2),
      query_segment_ids=slice_queries(self.query_segment_ids, start, size),
      dropout_seeds=dropout.from_row(self.dropout_seeds, -start),
    )


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
  weights: WeightsName = "softmax",
  divisor: ArrayLike | None = None,
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
  has_values = value is not None
  query, key, value = check_tensors(query, key, value if has_values else key)
  sizes = sizes_of(query, key, value if has_values else None)
  check_numbers(scale, dropout_rate, dropout_key, logits_soft_cap)
  is_placed = query_positions is not None or key_positions is not None
  offset = _offset(query_offset, sizes.batch, is_placed)
  of_queries, of_keys = (sizes.batch, sizes.queries), (sizes.batch, sizes.keys)
  query_lengths = _integers("query_seq_lengths", query_seq_lengths, sizes.batch)
  key_lengths = _integers("key_value_seq_lengths", key_value_seq_lengths, sizes.batch)
  query_mask = masks.within(query_lengths, sizes.queries)
  if query_mask is not None:
    query_mask = query_mask.swapaxes(2, 3)
  if (query_segment_ids is None) != (key_segment_ids is None):
    raise ValueError("want both query_segment_ids and key_segment_ids, or neither")
  query_segment_ids = _integers("query_segment_ids", query_segment_ids, *of_queries)
  key_segment_ids = _integers("key_segment_ids", key_segment_ids, *of_keys)

  inputs = Inputs(
    query=with_one_batch_axis(query, 3),
    key=with_one_batch_axis(key, 3),
    value=with_one_batch_axis(value, 3),
    bias=_checked_bias(bias, sizes),
    mask=_checked_mask(mask, sizes),
    relations=_checked_relations(relations, sizes),
    scale=sizes.width**-0.5 if scale is None else scale,
    soft_cap=logits_soft_cap,
    sinks=_checked_sinks(sinks, sizes),
    silu_divisor=_silu_divisor(weights, divisor, sizes.keys),
    is_causal=bool(is_causal),
    window=_window(local_window_size),
    linear_positions=not is_placed,
    query_offset=offset,
    query_positions=_positions("query_positions", query_positions, offset, *of_queries),
    key_positions=_positions("key_positions", key_positions, 0, *of_keys),
    query_mask=query_mask,
    key_mask=masks.within(key_lengths, sizes.keys),
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
    dropout_rate=dropout_rate,
    dropout_seeds=_seeds(dropout_rate, dropout_key, sizes),
    return_residual=return_residual,
    explicit=(),
  )
  if inputs.silu_divisor is not None and (sinks is not None or return_residual):
    raise ValueError('weights="silu" have no sum, and so no sinks and no residual')
  if inputs.relations:
    _warn(inputs, has_place=is_placed or query_offset is not None)
  inputs = align_manual_axes(inputs)  # takes arrays and numbers, no names
  return inputs._replace(explicit=explicit_axes(query))


def is_symbolic(*arrays: Array) -> bool:
  """Returns whether a dimension of an array is a variable of `jax.export`."""
  return any(export.is_symbolic_dim(size) for array in arrays for size in array.shape)


def sizes_of(query: Array, key: Array, value: Array | None) -> Sizes:
  """Returns the sizes of a call from its checked arrays; None stands for any values."""
  *batch, num_queries, heads, width = query.shape
  value_width = None if value is None else value.shape[-1]
  num_keys = key.shape[-3]
  return Sizes(
    tuple(batch), num_queries, num_keys, heads, width, value_width, query.dtype
  )


# Arrays.


def check_tensors(
  query: ArrayLike, key: ArrayLike, value: ArrayLike
) -> tuple[Array, Array, Array]:
  """Returns checked arrays: query [*B,T,N,H], key [*B,S,K,H], value [*B,S,K,V]."""
  query, key = as_array("query", query), as_array("key", key)
  value = as_array("value", value)
  if query.ndim < 3 or not jnp.issubdtype(query.dtype, jnp.floating):
    raise ValueError(
      f"query is {describe(query)}; want floating numbers of shape [*B, T, N, H], B "
      "any axes"
    )
  *batch, _, heads, width = query.shape
  if key.ndim != query.ndim or [*key.shape[:-3], key.shape[-1]] != [*batch, width]:
    want = shape_text(*batch, "S", "K", width)
    raise ValueError(
      f"key has shape {key.shape}; want {want} for query of shape {query.shape}"
    )
  if heads % key.shape[-2]:
    raise ValueError(
      f"key has {key.shape[-2]} heads; want a divisor of the query's {heads} heads"
    )
  if value.shape[:-1] != key.shape[:-1]:
    want = shape_text(*key.shape[:-1], "V")
    raise ValueError(
      f"value has shape {value.shape}; want {want} for key of shape {key.shape}"
    )
  if {key.dtype, value.dtype} != {query.dtype}:
    raise ValueError(
      f"key and value have dtypes {key.dtype} and {value.dtype}; want the query's, "
      f"{query.dtype}"
    )
  return query, key, value


def check_numbers(
  scale: ArrayLike | None,
  rate: float,
  key: ArrayLike | None,
  soft_cap: float | None = None,
) -> None:
  """Checks the scale of a call, its dropout and its soft cap."""
  if scale is not None and jnp.ndim(scale):
    raise ValueError(f"scale has shape {jnp.shape(scale)}; want one number")
  if not isinstance(rate, numbers.Real) or not 0 <= rate < 1:
    raise ValueError(f"dropout_rate is {rate!r}; want 0 <= rate < 1")
  if rate > 0 and key is None:
    raise ValueError(
      f"dropout_rate is {rate} and dropout_key is None; want a jax.random.key"
    )
  is_positive = isinstance(soft_cap, numbers.Real) and 0 < soft_cap < math.inf
  if soft_cap is not None and not is_positive:
    raise ValueError(f"logits_soft_cap is {soft_cap!r}; want a positive number or None")


def _seeds(
  rate: float, key: ArrayLike | None, sizes: Sizes
) -> Int[Array, "B N"] | None:
  """Returns a seed for every head, from which `dropout.keep` derives the rest."""
  if not rate:
    return None
  bits = jax.random.bits(key, (*sizes.batch, sizes.heads), "uint32")
  return with_one_batch_axis(jax.lax.bitcast_convert_type(bits, jnp.int32), 1)


def _checked_sinks(sinks: ArrayLike | None, sizes: Sizes) -> Float[Array, " N"] | None:
  if sinks is None:
    return None
  sinks = check_array("sinks", sinks, jnp.floating, (sizes.heads,))
  return sinks.astype(sizes.accumulation_dtype)


def _silu_divisor(
  weights: str, divisor: ArrayLike | None, num_keys: int
) -> ArrayLike | None:
  """Returns n of SiLU(logit) / n; None for a softmax."""
  if weights == "softmax":
    if divisor is not None:
      raise ValueError('divisor is given; it needs weights="silu"')
    return None
  if weights != "silu":
    raise ValueError(f"weights is {weights!r}; want softmax or silu")
  if divisor is None:
    return num_keys
  if jnp.ndim(divisor):
    raise ValueError(f"divisor has shape {jnp.shape(divisor)}; want one number")
  return divisor


def _checked_bias(bias: ArrayLike | None, sizes: Sizes) -> Float[Array, "..."] | None:
  if bias is None:
    return None
  bias = as_array("bias", bias)
  if bias.dtype == bool:
    raise ValueError("bias has dtype bool; give it as mask=")
  if not jnp.issubdtype(bias.dtype, jnp.floating):
    raise ValueError(f"bias has dtype {bias.dtype}; want floating numbers")
  return _of_logits("bias", bias, sizes)


def _checked_mask(mask: ArrayLike | None, sizes: Sizes) -> Bool[Array, "..."] | None:
  if mask is None:
    return None
  mask = as_array("mask", mask)
  if mask.dtype != bool:
    raise ValueError(
      f"mask has dtype {mask.dtype}; want bool, True where a key may be seen"
    )
  return _of_logits("mask", mask, sizes)


def _of_logits(name: str, x: Array, sizes: Sizes) -> Array:
  """Returns a bias or mask with one batch axis.

  A mask has it in full or of size 1. A bias that the last batch axes share stays as
  small as it is.
  """
  logits = (*sizes.batch, sizes.heads, sizes.queries, sizes.keys)
  shape = (1,) * (len(logits) - x.ndim) + x.shape
  sizes_of_both = zip(shape, logits, strict=False)
  is_broadcast = all(size in (1, wanted) for size, wanted in sizes_of_both)
  if len(shape) > len(logits) or not is_broadcast:
    raise ValueError(
      f"{name} has shape {x.shape}; want one that broadcasts to {logits}"
    )
  # The batch axes up to the last one that sequences do not share.
  num_own = len(sizes.batch)
  while num_own and shape[num_own - 1] == 1:
    num_own -= 1
  if num_own and name == "mask":
    num_own = len(sizes.batch)
  shape = *sizes.batch[:num_own], *shape[num_own:]
  return with_one_batch_axis(jnp.broadcast_to(x, shape), 3)


# Positions and masks.


def _integers(
  name: str, x: ArrayLike | None, batch: Shape, *tokens: int
) -> Int[Array, "#B *tokens"] | None:
  """Returns checked integers, of each sequence or of all; None stays None.

  They become int32, unless they are traced in 64 bits: then their values are not
  checked.
  """
  if x is None:
    return None
  x = check_array(name, x, jnp.integer, (*batch, *tokens), tokens)
  is_wide = isinstance(x, jax.core.Tracer) and x.dtype.itemsize == 8
  x = x.astype(jnp.int64 if is_wide else jnp.int32)
  return with_one_batch_axis(x, len(tokens))


def _offset(
  offset: ArrayLike | None, batch: Shape, is_placed: bool
) -> int | Int[Array, "#B"]:
  """Returns the position of the first query, static if it is an int."""
  if offset is None or (isinstance(offset, int) and offset == 0):
    return 0
  if is_placed:
    raise ValueError("query_offset is given with positions; want it or query_positions")
  if isinstance(offset, int | np.integer):
    low = high = offset = int(offset)
  else:
    offset = _integers("query_offset", offset, batch)
    low, high = range_of(offset)
  if low < -(2**30) or high > 2**30:  # distances must fit in 32 bits
    raise ValueError(f"query_offset goes from {low} to {high}; want -2**30 to 2**30")
  return offset


def _positions(
  name: str,
  x: ArrayLike | None,
  first: int | Int[Array, "#B"],
  batch: Shape,
  length: int,
) -> Int[Array, "#B {length}"]:
  """Returns checked positions, by default those that follow the first one."""
  if x is not None:
    return _integers(name, x, batch, length)
  if isinstance(first, int):
    return jnp.arange(first, first + length, dtype=jnp.int32).reshape(1, length)
  return jnp.arange(length, dtype=jnp.int32)[None] + first[:, None]


def _window(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
  """Returns the distances to the left and right, clipped to the largest possible."""
  if size is None:
    return None
  left, right = size if isinstance(size, tuple | list) else (size, size)
  left, right = operator.index(left), operator.index(right)
  if min(left, right) < 0:
    raise ValueError(f"local_window_size is {size}; want None, or one or two distances")
  return min(left, _FARTHEST), min(right, _FARTHEST)


# Relations.


def _checked_relations(
  relations: Relations | None, sizes: Sizes
) -> tuple[Relation, ...]:
  if relations is None:
    return ()
  if not isinstance(relations, tuple):
    return (
      _checked_relation("relations", relations, sizes, ", a tuple of them or None"),
    )
  checked = []
  for i, relation in enumerate(relations):
    checked.append(_checked_relation(f"relations[{i}]", relation, sizes))
  return tuple(checked)


def _checked_relation(
  name: str, relation: Relation, sizes: Sizes, or_else: str = ""
) -> Relation:
  if isinstance(relation, Relation):
    return relation.checked(name, sizes)
  # Positions of a layer, or a class.
  remedy = ": call it" if callable(relation) else ""
  raise ValueError(
    f"{name} is {describe(relation)}{remedy}; want RelativePositions, EdgeLabels, "
    f"EdgeFeatures or another relation{or_else}"
  )


def _warn(inputs: Inputs, has_place: bool) -> None:
  """Warns, at the line that calls the operator, of calls that may be mistaken."""
  num_queries, heads = inputs.query.shape[1:3]
  num_keys = inputs.key.shape[1]
  is_one_of_several = num_queries == 1 and num_keys not in (0, 1)
  if inputs.is_causal and is_one_of_several and not has_place:
    warnings.warn(
      f"the one query is at position 0 of {num_keys} keys, and is_causal masks the "
      "others: give its position as query_offset=, or 0 if that is meant",
      stacklevel=4,
    )
  has_symbols = is_symbolic(inputs.query, inputs.key)
  if not has_symbols and heads > max(num_queries, num_keys, _MOST_HEADS):
    warnings.warn(
      f"query has {heads} heads and {num_queries} tokens: the layout is "
      "[B, T, N, H], tokens before heads",
      stacklevel=4,
    )
