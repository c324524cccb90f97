"""The arguments of a call, checked and in one layout."""

import math
import numbers
import operator
import warnings
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import Tracer
from jax.typing import DTypeLike

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

_MOST_HEADS = 64  # few published models have more
# The dtypes of biases and masks, in errors.
_BIASES = "floating numbers, or give mask="
_MASKS = "bool, True where a query attends to a key"


class AttentionOptions(TypedDict, total=False):
  """Names the options that the operator and `attention_weights` have in common."""

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
  """Holds the checked arguments of a call, with one batch axis and with defaults.

  The bias has its own batch size A, a divisor of B: each bias belongs to B / A
  consecutive sequences.
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
  # Whether keys are at 0, 1, 2, ... and queries at query_offset + 0, 1, 2, ...
  linear_positions: bool
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
  explicit: Shards  # the explicit mesh axes that shard the query

  @property
  def queries(self) -> Tokens:
    return Tokens(self.query, self.query_positions)

  @property
  def keys(self) -> Tokens:
    return Tokens(self.key, self.key_positions)

  @property
  def starts_at_zero(self) -> bool:
    """Returns whether queries and keys are known to be at 0, 1, 2, ..."""
    has_no_offset = isinstance(self.query_offset, int) and self.query_offset == 0
    return self.linear_positions and has_no_offset

  def pair_mask(self) -> Bool[Array, "#B #N #T #S"] | None:
    """Combines mask, causality, window, lengths and segments; None without any."""
    parts = [self.mask, self.key_mask, self.query_mask]
    if self.is_causal:
      parts.append(masks.causal(self.query_positions, self.key_positions))
    if self.window is not None:
      left, right = self.window
      query_positions = self.query_positions[:, None, :, None]
      distance = self.key_positions[:, None, None] - query_positions
      parts.append((-left <= distance) & (distance <= right))
    if self.query_segment_ids is not None and self.key_segment_ids is not None:
      query_segments = self.query_segment_ids[:, None, :, None]
      parts.append(query_segments == self.key_segment_ids[:, None, None])
    return masks.combine(*parts)

  def bias_of_each(self) -> Float[Array, "#B #N #T #S"] | None:
    """Returns a bias for each sequence, or one for all; None without a bias."""
    batch = self.query.shape[0]
    if self.bias is None or self.bias.shape[0] in (1, batch):
      return self.bias
    return self.bias.repeat(batch // self.bias.shape[0], 0)

  def block(self, start: Int[Array, ""], size: int) -> "Inputs":
    """Returns the inputs for one block of queries, with the positions of the block."""
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

  If the value is None, the keys take its place and value tables may have any width.
  """
  has_values = value is not None
  query, key, value = check_tensors(query, key, value if has_values else key)
  sizes = call_sizes(query, key, value if has_values else None)
  check_numbers(scale, dropout_rate, dropout_key, logits_soft_cap)
  has_positions = query_positions is not None or key_positions is not None
  offset = _check_offset(query_offset, sizes.batch, has_positions)
  batch, num_queries, num_keys = sizes.batch, sizes.queries, sizes.keys
  query_mask = _check_lengths(
    "query_seq_lengths", query_seq_lengths, batch, num_queries
  )
  if query_mask is not None:
    query_mask = query_mask.swapaxes(2, 3)
  key_mask = _check_lengths(
    "key_value_seq_lengths", key_value_seq_lengths, batch, num_keys
  )
  query_positions = _check_positions(
    "query_positions", query_positions, offset, batch, num_queries
  )
  key_positions = _check_positions("key_positions", key_positions, 0, batch, num_keys)
  query_segment_ids, key_segment_ids = _check_segments(
    query_segment_ids, key_segment_ids, sizes
  )
  silu_divisor = _check_divisor(
    weights, divisor, num_keys, sinks=sinks, return_residual=return_residual
  )

  inputs = Inputs(
    query=with_one_batch_axis(query, 3),
    key=with_one_batch_axis(key, 3),
    value=with_one_batch_axis(value, 3),
    bias=_check_broadcast("bias", bias, jnp.floating, _BIASES, sizes),
    mask=_check_broadcast("mask", mask, jnp.bool_, _MASKS, sizes),
    relations=_check_relations(relations, sizes),
    scale=sizes.width**-0.5 if scale is None else scale,
    soft_cap=logits_soft_cap,
    sinks=_check_sinks(sinks, sizes),
    silu_divisor=silu_divisor,
    is_causal=bool(is_causal),
    window=_check_window(local_window_size),
    linear_positions=not has_positions,
    query_offset=offset,
    query_positions=query_positions,
    key_positions=key_positions,
    query_mask=query_mask,
    key_mask=key_mask,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
    dropout_rate=dropout_rate,
    dropout_seeds=_draw_seeds(dropout_rate, dropout_key, sizes),
    return_residual=return_residual,
    explicit=(),
  )
  if inputs.relations:
    _warn(inputs, is_located=has_positions or query_offset is not None)
  inputs = align_manual_axes(inputs)  # before `explicit` gets names, which it rejects
  return inputs._replace(explicit=explicit_axes(inputs.query))


def is_symbolic(*arrays: Array) -> bool:
  """Returns whether any dimension of the arrays is symbolic, as in `jax.export`."""
  return any(export.is_symbolic_dim(size) for array in arrays for size in array.shape)


def call_sizes(query: Array, key: Array, value: Array | None) -> Sizes:
  """Returns the sizes of a call from its checked arrays; the value may be None."""
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
      f"query is {describe(query)}; want floating numbers of shape [*B, T, N, H], with "
      "any batch axes B"
    )
  *batch, _, heads, width = query.shape
  if key.ndim != query.ndim or [*key.shape[:-3], key.shape[-1]] != [*batch, width]:
    want = shape_text(*batch, "S", "K", width)
    raise ValueError(
      f"key has shape {key.shape}; want {want} for query of shape {query.shape}"
    )
  key_heads = key.shape[-2]
  if 0 in (heads, key_heads, width):
    shapes = f"{query.shape} and {key.shape}"
    raise ValueError(f"query and key have shapes {shapes}; want heads of some width")
  if heads % key_heads:
    raise ValueError(
      f"key has {key_heads} heads; want a divisor of the query's {heads} heads"
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
  dropout.check_rate(rate)
  if rate > 0 and key is None:
    raise ValueError(
      f"dropout_rate is {rate} and dropout_key is None; want a jax.random.key"
    )
  is_positive = isinstance(soft_cap, numbers.Real) and 0 < soft_cap < math.inf
  if soft_cap is not None and not is_positive:
    raise ValueError(f"logits_soft_cap is {soft_cap!r}; want a positive number or None")


def _draw_seeds(
  rate: float, key: ArrayLike | None, sizes: Sizes
) -> Int[Array, "B N"] | None:
  """Draws a seed for each sequence and head, for `dropout.keep`."""
  if not rate or key is None:
    return None
  bits = jax.random.bits(key, (*sizes.batch, sizes.heads), "uint32")
  return with_one_batch_axis(jax.lax.bitcast_convert_type(bits, jnp.int32), 1)


def _check_sinks(sinks: ArrayLike | None, sizes: Sizes) -> Float[Array, " N"] | None:
  if sinks is None:
    return None
  sinks = check_array("sinks", sinks, jnp.floating, (sizes.heads,))
  return sinks.astype(sizes.accumulation_dtype)


def _check_divisor(
  weights: str,
  divisor: ArrayLike | None,
  num_keys: int,
  *,
  sinks: ArrayLike | None,
  return_residual: bool,
) -> ArrayLike | None:
  """Returns n of SiLU(logit) / n; None for a softmax."""
  if weights == "softmax":
    if divisor is not None:
      raise ValueError('divisor is given; it needs weights="silu"')
    return None
  if weights != "silu":
    raise ValueError(f"weights is {weights!r}; want softmax or silu")
  if sinks is not None or return_residual:
    raise ValueError('weights="silu" takes no sinks and returns no residual')
  if divisor is None:
    return num_keys
  if jnp.ndim(divisor):
    raise ValueError(f"divisor has shape {jnp.shape(divisor)}; want one number")
  if isinstance(divisor, numbers.Real) and divisor <= 0:
    raise ValueError(f"divisor is {divisor}; want a positive number")
  return divisor


def _check_broadcast(
  name: str, x: ArrayLike | None, kind: DTypeLike, wanted: str, sizes: Sizes
) -> Array | None:
  """Checks a bias or mask, and merges its batch axes into one.

  `wanted` describes the dtypes of `kind` in the error for any other dtype. The merged
  axis of a mask has size 1 or B. A bias first drops trailing batch axes of size 1, so
  that a bias shared by many sequences is not copied.
  """
  if x is None:
    return None
  x = as_array(name, x)
  if not jnp.issubdtype(x.dtype, kind):
    raise ValueError(f"{name} has dtype {x.dtype}; want {wanted}")
  logits = (*sizes.batch, sizes.heads, sizes.queries, sizes.keys)
  shape = (1,) * (len(logits) - x.ndim) + x.shape
  paired_sizes = zip(shape, logits, strict=False)
  is_broadcast = all(size in (1, full) for size, full in paired_sizes)
  if len(shape) > len(logits) or not is_broadcast:
    raise ValueError(
      f"{name} has shape {x.shape}; want one that broadcasts to {logits}, [*B, N, T, S]"
    )
  # Counts the batch axes up to the last one of size above 1.
  num_batch_axes = len(sizes.batch)
  while num_batch_axes and shape[num_batch_axes - 1] == 1:
    num_batch_axes -= 1
  if num_batch_axes and kind is jnp.bool_:
    num_batch_axes = len(sizes.batch)
  shape = *sizes.batch[:num_batch_axes], *shape[num_batch_axes:]
  return with_one_batch_axis(jnp.broadcast_to(x, shape), 3)


# Positions and masks.


def _check_integers(
  name: str, x: ArrayLike, batch: Shape, *tokens: int
) -> Int[Array, "#B *tokens"]:
  """Checks integers, given per sequence or shared, and converts them to int32.

  Traced 64-bit integers are not converted, because their values cannot be checked.
  """
  x = check_array(name, x, jnp.integer, (*batch, *tokens), tokens)
  is_64_bit = isinstance(x, Tracer) and x.dtype.itemsize == 8
  x = x.astype(jnp.int64 if is_64_bit else jnp.int32)
  return with_one_batch_axis(x, len(tokens))


def _check_lengths(
  name: str, lengths: ArrayLike | None, batch: Shape, size: int
) -> Bool[Array, "#B 1 1 {size}"] | None:
  """Returns a mask of the tokens within the lengths; None without lengths."""
  if lengths is None:
    return None
  lengths = _check_integers(name, lengths, batch)
  return jnp.arange(size)[None, None, None] < lengths[:, None, None, None]


def _check_segments(
  query_ids: ArrayLike | None, key_ids: ArrayLike | None, sizes: Sizes
) -> tuple[Int[Array, "#B T"] | None, Int[Array, "#B S"] | None]:
  """Returns checked segment ids."""
  if query_ids is None and key_ids is None:
    return None, None
  if query_ids is None or key_ids is None:
    raise ValueError("want both query_segment_ids and key_segment_ids, or neither")
  batch = sizes.batch
  return (
    _check_integers("query_segment_ids", query_ids, batch, sizes.queries),
    _check_integers("key_segment_ids", key_ids, batch, sizes.keys),
  )


def _check_offset(
  offset: ArrayLike | None, batch: Shape, has_positions: bool
) -> int | Int[Array, "#B"]:
  """Returns the position of the first query; a Python int stays static."""
  if offset is None or (isinstance(offset, int | np.integer) and offset == 0):
    return 0
  if has_positions:
    raise ValueError("query_offset is given with positions; want it or query_positions")
  if isinstance(offset, int | np.integer):
    low = high = offset = int(offset)
  else:
    offset = _check_integers("query_offset", offset, batch)
    low, high = range_of(offset)
  if low < -(2**30) or high > 2**30:  # distances must fit in 32 bits
    raise ValueError(f"query_offset goes from {low} to {high}; want -2**30 to 2**30")
  return offset


def _check_positions(
  name: str,
  x: ArrayLike | None,
  first: int | Int[Array, "#B"],
  batch: Shape,
  length: int,
) -> Int[Array, "#B {length}"]:
  """Returns checked positions; the default counts up from `first`."""
  if x is not None:
    return _check_integers(name, x, batch, length)
  return jnp.reshape(first, (-1, 1)) + jnp.arange(length, dtype=jnp.int32)[None]


def _check_window(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
  """Returns the window's distances to the left and right, clipped to 32 bits."""
  if size is None:
    return None
  sizes = size if isinstance(size, tuple | list) else (size, size)
  try:
    left, right = map(operator.index, sizes)
  except (TypeError, ValueError):  # no integers, or not two
    left = right = -1
  if min(left, right) < 0:
    raise ValueError(f"local_window_size is {size}; want None, or one or two distances")
  return min(left, masks.UNLIMITED), min(right, masks.UNLIMITED)


# Relations.


def _check_relations(relations: Relations | None, sizes: Sizes) -> tuple[Relation, ...]:
  if relations is None:
    return ()
  is_tuple = isinstance(relations, tuple)
  checked = []
  for i, relation in enumerate(relations if is_tuple else (relations,)):
    name = f"relations[{i}]" if is_tuple else "relations"
    if not isinstance(relation, Relation):
      # A layer's `Positions`, or a class, must be called first.
      remedy = ": call it" if callable(relation) else ""
      raise ValueError(
        f"{name} is {describe(relation)}{remedy}; want RelativePositions, EdgeLabels, "
        "EdgeFeatures or another relation, a tuple of them or None"
      )
    checked.append(relation.checked(name, sizes))
  return tuple(checked)


def _warn(inputs: Inputs, is_located: bool) -> None:
  """Warns of calls that are probably mistakes, at the line of the caller.

  `is_located` says whether the call gives positions or an offset.
  """
  num_queries, heads = inputs.query.shape[1:3]
  num_keys = inputs.key.shape[1]
  is_one_of_several = num_queries == 1 and num_keys not in (0, 1)
  if inputs.is_causal and is_one_of_several and not is_located:
    warnings.warn(
      f"the one query is at position 0 of {num_keys} keys, and is_causal masks the "
      "later ones: give its position as query_offset=, or 0 if that is meant",
      stacklevel=4,
    )
  has_symbols = is_symbolic(inputs.query, inputs.key)
  if not has_symbols and heads > max(num_queries, num_keys, _MOST_HEADS):
    warnings.warn(
      f"query has {heads} heads and {num_queries} tokens: the layout is "
      "[B, T, N, H], tokens before heads",
      stacklevel=4,
    )
