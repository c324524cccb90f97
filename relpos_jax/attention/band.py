"""The band of relations by distance, for implementations without [T, S] weights.

A relation with clipped distances adds a number t_i(r) to a logit of query i, by the row
r of its pair, and only the diagonals within the table need a lookup: the *band*. The
far field costs no lookup: left of the band each logit of a query gets the same number
t_i(0), right of it t_i(-1). Such a number may be as low as -inf, which hides its side.
It is never subtracted from the logits of other parts, where float32 would lose their
digits. `KeyBias` has a number by key.

Values: the weights of a query sum to one, so z_i = w_0 + sum_j p_ij v_j + sum_r P_ir
w'_r, with P_ir the weight of query i on row r, and w'_r = w_r - w_0. (With dropout w_0
is multiplied by the sum of the weights.)

Several relations share one band, from the leftmost of their rows to the rightmost.
`LinearBias` has no rows: its term is computed from the distance, near and far.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.attention import masks
from relpos_jax.attention.by_distance import (
  ByDistance,
  ContentBias,
  DistanceBias,
  KeyBias,
  LinearBias,
  RelativePositions,
)
from relpos_jax.attention.inputs import Inputs, is_symbolic
from relpos_jax.attention.partitioned import Shards, axes_in_context, axes_of_query
from relpos_jax.typing import Array, Int

FAR = 2**30  # a distance beyond all keys

# The name of the sum of each table of relations by distance.
_TABLES = {
  (RelativePositions, "key"): "key_table",
  (RelativePositions, "value"): "value_table",
  (ContentBias, "table"): "content_table",
  (DistanceBias, "table"): "bias_table",
  (KeyBias, "table"): "by_key_table",
}


def unsupported(
  inputs: Inputs, kinds: tuple[type, ...] = (ByDistance, LinearBias)
) -> str | None:
  """Returns why this call has no band of these kinds of relations, or None if it has one."""
  for relation in inputs.relations:
    if not isinstance(relation, kinds):
      return f"it takes no {type(relation).__name__}"
  if not inputs.linear_positions:
    return "positions are given; if they are consecutive, give query_offset instead"
  if is_symbolic(inputs.query, inputs.key):
    return "a dimension is symbolic; it needs numbers"
  return None


def unsupported_by_kernels(inputs: Inputs) -> str | None:
  """Returns why the fused kernels, for any device, cannot run this call; None if they
  can.

  They take what training a Transformer with Shaw's or T5's positions needs, and nothing
  else.
  """
  options = {
    "a bias": inputs.bias,
    "a soft cap": inputs.soft_cap,
    "a local window": inputs.window,
  }
  if given := [name for name, x in options.items() if x is not None]:
    return f"{given[0]} is given"
  if isinstance(inputs.scale, jax.core.Tracer):
    return "scale is traced; it needs a number"
  if (width := inputs.value.shape[3]) != inputs.key.shape[3]:
    return f"values are {width} wide; it needs the keys' width, {inputs.key.shape[3]}"
  if inputs.sinks is not None or inputs.return_residual:
    return "sinks are given, or a residual is asked for"
  has_offset = not isinstance(inputs.query_offset, int) or inputs.query_offset != 0
  if has_offset or not inputs.linear_positions:
    return "positions or query_offset are given; it needs 0, 1, 2, ..."
  if axes := dict(inputs.explicit).get("T") or axes_in_context()["T"]:
    return f"the mesh shards queries over {axes}; it needs whole sequences"
  if inputs.mask is not None and inputs.mask.shape[1:3] != (1, 1):
    return (
      f"mask has shape {inputs.mask.shape}; it needs [B or 1, 1, 1, S], a mask of keys"
    )
  segments = inputs.query_segment_ids, inputs.key_segment_ids
  if wide := [x for x in segments if x is not None and x.dtype != jnp.int32]:
    return f"segment ids are {wide[0].dtype}; it needs int32"
  return unsupported(inputs, (RelativePositions, DistanceBias))


class KernelPlan(NamedTuple):
  """The static parameters of the fused kernels."""

  block: (
    Any  # queries and keys of a tile, one number where they are as many; powers of 2
  )
  low: int  # all keys up to this distance have the same relative term
  high: int  # and so have all from this one on
  scale: float
  is_causal: bool
  dropout_rate: float
  has_values: bool  # whether there is a table for values
  interpret: bool  # runs as plain XLA, without a device
  shards: Shards | None  # the mesh axes that shard the query, see `over_devices`
  precision: (
    str | None
  )  # the default where the call was traced; the TPU's products name theirs

  @classmethod
  def of(
    cls, inputs: Inputs, block: int | tuple[int, int], interpret: bool
  ) -> "KernelPlan":
    """Returns the plan of a call."""
    return cls(
      block,
      *kernel_limits(inputs),
      scale=float(inputs.scale),
      is_causal=inputs.is_causal,
      dropout_rate=inputs.dropout_rate,
      has_values="value_table" in tables(inputs),
      interpret=interpret,
      shards=axes_of_query(inputs.explicit),
      precision=jax.config.jax_default_matmul_precision,
    )

  @property
  def num_rows(self) -> int:
    return self.high - self.low + 1


def kernel_limits(inputs: Inputs) -> tuple[int, int]:
  """Returns two distances: keys up to the first have one relative term, and so from the
  second on.

  In a causal call the latter are hidden. Without relations all keys are alike.
  """
  if inputs.relations:
    return distances(inputs)
  return (0, 1) if inputs.is_causal else (FAR, FAR)


def pad(x: Array, axis: int, block: int) -> Array:
  """Pads an axis with zeros to a multiple of `block`."""
  missing = -x.shape[axis] % block
  return (
    jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])
    if missing
    else x
  )


def kernel_masks(
  inputs: Inputs, queries: int, keys: int
) -> dict[str, Int[Array, "..."]]:
  """Returns segments [#B, T] and [#B, S], seeds, and a mask [#B, S] of 0 for hidden
  keys.

  They are padded to multiples of the queries and keys of a tile; padding is hidden.
  """
  found, num_keys = {}, inputs.key.shape[1]
  mask = masks.combine(inputs.mask, inputs.key_mask)
  if mask is not None or num_keys % keys:
    mask = jnp.ones((1, num_keys), bool) if mask is None else mask[:, 0, 0]
    mask = jnp.broadcast_to(mask, (len(mask), num_keys))
    found["key_mask"] = pad(mask.astype(jnp.int32), 1, keys)
  if inputs.query_segment_ids is not None:
    found["query_segments"] = pad(inputs.query_segment_ids, 1, queries)
    found["key_segments"] = pad(inputs.key_segment_ids, 1, keys)
  if inputs.dropout_seeds is not None:
    found["seeds"] = inputs.dropout_seeds
  return found


def distances(inputs: Inputs) -> tuple[int, int]:
  """Returns the first and the last distance j - i whose table rows a call needs."""
  low, high = 0, 0
  for relation in [x for x in inputs.relations if isinstance(x, ByDistance)]:
    # The distances beyond which all pairs to the left, and to the right, share a row.
    beyond = relation.beyond == "zero"
    low, high = (
      min(low, -relation.reach[0] - beyond),
      max(high, relation.reach[1] + beyond),
    )
  offset = inputs.query_offset
  if isinstance(offset, int):  # the distances that occur; distance 0 stays
    low = max(low, min(-inputs.query.shape[1] - offset, 0))
    high = min(high, max(inputs.key.shape[1] - offset, 0))
  if inputs.window is not None:  # all beside the band is hidden if the table is as wide
    left, right = inputs.window
    low, high = -left - 1 if low <= -left else low, right + 1 if high >= right else high
  if inputs.is_causal:  # distance 0 is on the band, and all right of it is hidden
    high = 1
  return low, max(high, low + 1)


def tables(inputs: Inputs) -> dict[str, Array]:
  """Returns the sums of the tables of relations by distance, [R, 1 or N, H] and [R, 1
  or N].

  They have a row for each distance from the first of `distances` to the last. Products
  with the tables of queries and of keys are scaled; numbers, and products with
  contents, are not.
  """
  low, high = distances(inputs)
  found = {name: [] for name in _TABLES.values()}
  for relation in [x for x in inputs.relations if isinstance(x, ByDistance)]:
    labels = relation.labels(jnp.zeros(1, int), jnp.arange(low, high + 1))[0]
    for (kind, field), name in _TABLES.items():
      if isinstance(relation, kind) and (table := getattr(relation, field)) is not None:
        has_row = (labels >= 0).reshape(-1, *[1] * (table.ndim - 1))
        found[name].append(jnp.where(has_row, table[labels], 0))
  content = found.pop("content_table")
  result = {
    name: functools.reduce(jnp.add, parts) for name, parts in found.items() if parts
  }
  if len(content) > 1:  # side by side, as their queries are
    heads = inputs.query.shape[2]
    content = [jnp.broadcast_to(x, (len(x), heads, x.shape[2])) for x in content]
  if content:
    result["content_table"] = jnp.concatenate(content, axis=-1)
  return result
