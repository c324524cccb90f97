"""One call of the operator: its arguments, checked and in one layout."""

import math
import numbers
import operator
import warnings
from typing import Any, NamedTuple, TypedDict

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
from relpos_jax.typing import Array, ArrayLike, Bool, Float, Int

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


class _Options(NamedTuple):
  """The options as a user gives them, with their defaults."""

  relations: Relations | None = None
  scale: ArrayLike | None = None
  logits_soft_cap: float | None = None
  sinks: ArrayLike | None = None
  is_causal: bool = False
  query_positions: ArrayLike | None = None
  key_positions: ArrayLike | None = None
  query_offset: ArrayLike | None = None
  query_seq_lengths: ArrayLike | None = None
  key_value_seq_lengths: ArrayLike | None = None
  local_window_size: int | tuple[int, int] | None = None
  query_segment_ids: ArrayLike | None = None
  key_segment_ids: ArrayLike | None = None
  dropout_rate: float = 0.0
  dropout_key: ArrayLike | None = None
  return_residual: bool = False


class Inputs(NamedTuple):
  """The checked arguments of a call, with one batch axis and with defaults.

  The terms of all relations are added. Each of A biases belongs to B / A consecutive
  sequences.
  """

  query: Float[Array, "B T N H"]
  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K V"]
  bias: Float[Array, "A #N #T #S"] | None = None
  mask: Bool[Array, "#B #N #T #S"] | None = None
  relations: tuple[Relation, ...] = ()
  scale: ArrayLike = 1.0
  soft_cap: float | None = None
  sinks: Float[Array, " N"] | None = None
  is_causal: bool = False
  window: tuple[int, int] | None = None  # the distances to the left and to the right
  # 0, 1, 2, ... for keys, query_offset + 0, 1, 2, ... for queries
  linear_positions: bool = True
  query_offset: int | Int[Array, "#B"] = 0  # an int is static
  query_positions: Int[Array, "#B T"] | None = None
  key_positions: Int[Array, "#B S"] | None = None
  query_mask: Bool[Array, "#B 1 T 1"] | None = None  # False past the lengths
  key_mask: Bool[Array, "#B 1 1 S"] | None = None
  query_segment_ids: Int[Array, "#B T"] | None = None
  key_segment_ids: Int[Array, "#B S"] | None = None
  dropout_rate: float = 0.0
  dropout_seeds: Int[Array, "B N"] | None = None  # None without dropout
  return_residual: bool = False
  explicit: Shards = ()  # the explicit mesh axes that shard the query

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
  **options: Any,
) -> Inputs:
  """Checks the operator's arguments and fills in the defaults.

  Without values, the keys take their place, and value tables have any width.
  """
  given = _Options(**options)
  has_values = value is not None
  query, key, value = check_tensors(query, key, value if has_values else key)
  sizes = Sizes(
    batch=query.shape[:-3],
    queries=query.shape[-3],
    keys=key.shape[-3],
    heads=query.shape[-2],
    width=query.shape[-1],
    value_width=value.shape[-1] if has_values else None,
    dtype=query.dtype,
  )
  inputs = _with_arrays(given, sizes, query, key, value, bias)
  inputs = _with_positions_and_masks(given, sizes, inputs, mask)
  inputs = inputs._replace(relations=_checked_relations(given, sizes))
  inputs = align_manual_axes(inputs)
  return inputs._replace(explicit=explicit_axes(query))


def is_symbolic(*arrays: Array) -> bool:
  """Returns whether a dimension of an array is a variable of `jax.export`."""
  return any(export.is_symbolic_dim(size) for array in arrays for size in array.shape)


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
  is_positive = isinstance(soft_cap, numbers.Real) and 0 < soft_cap < float("inf")
  if soft_cap is not None and not is_positive:
    raise ValueError(f"logits_soft_cap is {soft_cap!r}; want a positive number or None")


def _with_arrays(
  given: _Options,
  sizes: Sizes,
  query: Array,
  key: Array,
  value: Array,
  bias: ArrayLike | None,
) -> Inputs:
  """Returns the inputs with tensors, bias, sinks, and the numbers of softmax."""
  rate, dropout_key = given.dropout_rate, given.dropout_key
  check_numbers(given.scale, rate, dropout_key, given.logits_soft_cap)
  sinks, seeds = given.sinks, None
  if sinks is not None:
    sinks = check_array("sinks", sinks, jnp.floating, (sizes.heads,))
    sinks = sinks.astype(sizes.accumulation_dtype)
  if bias is not None:
    bias = as_array("bias", bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
      want = "give it as mask=" if bias.dtype == bool else "want floating numbers"
      raise ValueError(f"bias has dtype {bias.dtype}; {want}")
    bias = _of_logits("bias", bias, sizes)
  if rate:  # a seed for every head; `dropout.keep` derives the rest
    bits = jax.random.bits(dropout_key, (*sizes.batch, sizes.heads), "uint32")
    seeds = with_one_batch_axis(jax.lax.bitcast_convert_type(bits, jnp.int32), 1)
  return Inputs(
    query=with_one_batch_axis(query, 3),
    key=with_one_batch_axis(key, 3),
    value=with_one_batch_axis(value, 3),
    bias=bias,
    scale=sizes.width**-0.5 if given.scale is None else given.scale,
    soft_cap=given.logits_soft_cap,
    sinks=sinks,
    dropout_rate=rate,
    dropout_seeds=seeds,
    return_residual=given.return_residual,
  )


def _of_logits(name: str, x: Array, sizes: Sizes) -> Array:
  """Returns a bias or mask with one batch axis.

  A mask has it in full or of size 1. A bias that the last batch axes share stays as
  small as it is.
  """
  logits = (*sizes.batch, sizes.heads, sizes.queries, sizes.keys)
  sizes_of_both = zip(x.shape[::-1], logits[::-1], strict=False)
  is_broadcast = all(size in (1, wanted) for size, wanted in sizes_of_both)
  if x.ndim > len(logits) or not is_broadcast:
    raise ValueError(
      f"{name} has shape {x.shape}; want one that broadcasts to {logits}"
    )
  x = jnp.expand_dims(x, (*range(len(logits) - x.ndim),))
  num_own = 0  # the batch axes up to the last one that sequences do not share
  for axis, size in enumerate(x.shape[:-3]):
    if size != 1:
      num_own = axis + 1
  if num_own and name == "mask":
    num_own = len(sizes.batch)
  own, shared = sizes.batch[:num_own], (1,) * (len(sizes.batch) - num_own)
  x = jnp.broadcast_to(x, (*own, *shared, *x.shape[-3:]))
  return x.reshape(math.prod(own), *x.shape[-3:])


# Positions and masks.


def _with_positions_and_masks(
  given: _Options, sizes: Sizes, inputs: Inputs, mask: ArrayLike | None
) -> Inputs:
  """Returns the inputs with positions and all that masks."""
  if (given.query_segment_ids is None) != (given.key_segment_ids is None):
    raise ValueError("want both query_segment_ids and key_segment_ids, or neither")
  query_positions, key_positions = given.query_positions, given.key_positions
  if query_positions is None:
    query_positions = jnp.arange(sizes.queries, dtype=jnp.int32)
  if key_positions is None:
    key_positions = jnp.arange(sizes.keys, dtype=jnp.int32)
  if mask is not None:
    mask = as_array("mask", mask)
    if mask.dtype != bool:
      raise ValueError(
        f"mask has dtype {mask.dtype}; want bool, True where a key may be seen"
      )
    mask = _of_logits("mask", mask, sizes)
  query_mask = _lengths("query_seq_lengths", given.query_seq_lengths, sizes)
  key_mask = _lengths("key_value_seq_lengths", given.key_value_seq_lengths, sizes)
  query_mask = masks.within(query_mask, sizes.queries)
  of_queries, of_keys = (sizes.batch, sizes.queries), (sizes.batch, sizes.keys)
  inputs = inputs._replace(
    mask=mask,
    is_causal=bool(given.is_causal),
    window=_window(given.local_window_size),
    linear_positions=given.query_positions is None and given.key_positions is None,
    query_positions=_of_tokens("query_positions", query_positions, *of_queries),
    key_positions=_of_tokens("key_positions", key_positions, *of_keys),
    query_mask=None if query_mask is None else query_mask.swapaxes(2, 3),
    key_mask=masks.within(key_mask, sizes.keys),
    query_segment_ids=_of_tokens(
      "query_segment_ids", given.query_segment_ids, *of_queries
    ),
    key_segment_ids=_of_tokens("key_segment_ids", given.key_segment_ids, *of_keys),
  )
  return _with_offset(given.query_offset, sizes, inputs)


def _with_offset(offset: ArrayLike | None, sizes: Sizes, inputs: Inputs) -> Inputs:
  """Returns the inputs with an offset, and with positions that begin with it."""
  if offset is None or (isinstance(offset, int) and offset == 0):
    return inputs
  if not inputs.linear_positions:
    raise ValueError("query_offset is given with positions; want it or query_positions")
  is_static = isinstance(offset, int | np.integer)
  if is_static:
    low = high = int(offset)
  else:
    low, high = range_of(as_array("query_offset", offset))
  if low < -(2**30) or high > 2**30:  # distances must fit in 32 bits
    raise ValueError(f"query_offset goes from {low} to {high}; want -2**30 to 2**30")
  offsets = _integers("query_offset", offset, 0, (), sizes.batch)
  return inputs._replace(
    query_offset=low if is_static else offsets,
    query_positions=inputs.query_positions + offsets[:, None],
  )


def _window(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
  """Returns the distances to the left and right, clipped to the largest possible."""
  if size is None:
    return None
  left, right = size if isinstance(size, tuple | list) else (size, size)
  left, right = operator.index(left), operator.index(right)
  if min(left, right) < 0:
    raise ValueError(f"local_window_size is {size}; want None, or one or two distances")
  return min(left, _FARTHEST), min(right, _FARTHEST)


def _of_tokens(
  name: str, x: ArrayLike | None, batch: Shape, length: int
) -> Int[Array, "#B T"] | None:
  return None if x is None else _integers(name, x, 1, (*batch, length), (length,))


def _lengths(name: str, x: ArrayLike | None, sizes: Sizes) -> Int[Array, "#B"] | None:
  return None if x is None else _integers(name, x, 0, sizes.batch)


def _integers(name: str, x: ArrayLike, rank: int, *shapes: Shape) -> Array:
  """Returns checked integers with a batch axis before the last `rank` axes.

  They become int32, unless they are traced in 64 bits: then their values are not
  checked.
  """
  x = check_array(name, x, jnp.integer, *shapes)
  is_wide = isinstance(x, jax.core.Tracer) and x.dtype.itemsize == 8
  return with_one_batch_axis(x.astype(jnp.int64 if is_wide else jnp.int32), rank)


# Relations.


def _checked_relations(given: _Options, sizes: Sizes) -> tuple[Relation, ...]:
  """Returns the relations, checked, and warns of calls that may be mistaken."""
  if given.relations is None:
    return ()
  several = isinstance(given.relations, tuple)
  checked = []
  for i, relation in enumerate(given.relations if several else (given.relations,)):
    name = f"relations[{i}]" if several else "relations"
    if not isinstance(relation, Relation):
      # Positions of a layer, or a class.
      remedy = ": call it" if callable(relation) else ""
      wanted = "RelativePositions, EdgeLabels, EdgeFeatures or another relation"
      wanted += "" if several else ", a tuple of them or None"
      raise ValueError(f"{name} is {describe(relation)}{remedy}; want {wanted}")
    checked.append(relation.checked(name, sizes))
  if checked:
    _warn(given, sizes)
  return tuple(checked)


def _warn(given: _Options, sizes: Sizes) -> None:
  """Warns at the line that calls the operator."""
  places = given.query_positions, given.key_positions, given.query_offset
  is_placed = any(place is not None for place in places)
  is_one_of_several = sizes.queries == 1 and sizes.keys not in (0, 1)
  if given.is_causal and is_one_of_several and not is_placed:
    warnings.warn(
      f"the one query is at position 0 of {sizes.keys} keys, and is_causal masks the "
      "others: give its position as query_offset=, or 0 if that is meant",
      stacklevel=5,
    )
  lengths = sizes.queries, sizes.keys
  has_symbols = any(map(export.is_symbolic_dim, (*sizes.batch, *lengths)))
  if not has_symbols and sizes.heads > max(*lengths, _MOST_HEADS):
    warnings.warn(
      f"query has {sizes.heads} heads and {sizes.queries} tokens: the layout is "
      "[B, T, N, H], tokens before heads",
      stacklevel=5,
    )
