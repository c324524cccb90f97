"""The band of relations by distance: the diagonals whose pairs look up a row.

A relation with clipped distances adds a number t_i(r) to a logit of query i, by the row
r of its pair. Only the diagonals within the table need a lookup: the *band*. Left of it
all logits of a query get the same number t_i(0), right of it t_i(-1). Such a number may
be as low as -inf, which masks its side. So it is never subtracted from the logits of
other pairs, where float32 would lose their digits.

Values: a query's output adds sum_r P_ir w_r, with P_ir its weight on row r.

Several relations share one band, from the leftmost of their rows to the rightmost. Rows
are in the order of distances: the left side, a row for each diagonal, the right side.
`KeyBias` has numbers of each key instead, and `LinearBias` no rows.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from relpos_jax.attention import dropout, masks
from relpos_jax.attention.by_distance import ByDistance, LinearBias
from relpos_jax.attention.diagonals import Band
from relpos_jax.attention.inputs import Inputs, is_symbolic
from relpos_jax.attention.partitioned import (
  axes_of_heads,
  is_one_device,
  on_shards,
  target_platform,
)
from relpos_jax.attention.tiles import (
  UNLIMITED,
  Keys,
  Marks,
  Plan,
  Queries,
  Results,
  Sides,
  default_block,
)
from relpos_jax.typing import Array, Float

FAR = 2**30  # a distance beyond all keys

# The most pairs of a block and a tile, over all their heads. Measured on two cores: four
# times as many take 15% more time.
_PAIRS_ON_CPU = 2**18
# On several of its devices all heads and sequences are in a block.
_PAIRS_ON_CPUS = 2**19
# Elsewhere their weights take 128 MiB in float32.
_PAIRS = 2**25


def unsupported(inputs: Inputs) -> str | None:
  """Returns why this call has no band, or None if it has one."""
  if inputs.silu_divisor is not None:
    return "weights are silu; it needs a softmax"
  for relation in inputs.relations:
    if not isinstance(relation, ByDistance | LinearBias):
      return f"it takes no {type(relation).__name__}"
  if not inputs.linear_positions:
    return "positions are given; if they are consecutive, give query_offset instead"
  if is_symbolic(inputs.query, inputs.key):
    return "a dimension is symbolic; it needs numbers"
  return None


def distances(inputs: Inputs) -> tuple[int, int]:
  """Returns the distances of the left side's row and of the right side's."""
  low, high = 0, 0
  for relation in _by_distance(inputs):
    # The distances beyond which all pairs to the left, and to the right, share a row.
    beyond = relation.beyond == "zero"
    left, right = relation.reach
    low, high = min(low, -left - beyond), max(high, right + beyond)
  offset = inputs.query_offset
  if isinstance(offset, int):  # the distances that occur; distance 0 stays
    low = max(low, min(-inputs.query.shape[1] - offset, 0))
    high = min(high, max(inputs.key.shape[1] - offset, 0))
  if inputs.window is not None:  # a side that the window masks needs no row of its own
    left, right = inputs.window
    low = -left - 1 if low <= -left else low
    high = right + 1 if high >= right else high
  if inputs.is_causal:  # distance 0 is on the band, and all right of it is masked
    high = 1
  return low, max(high, low + 1)


def logits_by_row(
  inputs: Inputs, of_keys: bool = False
) -> Float[Array, "#B #N #T R"] | None:
  """Returns the logits that relations add, by row, for each query or for each key.

  None if they add none.
  """
  terms = []
  for relation in _by_distance(inputs):
    if relation.is_by_key != of_keys:
      continue
    numbers = _on_rows(inputs, relation).project(inputs.queries, inputs.keys)
    if numbers is not None and relation.is_scaled:
      numbers *= jnp.asarray(inputs.scale, numbers.dtype)
    terms.append(numbers)
  return _sum(terms)


def slopes(inputs: Inputs) -> Float[Array, "1 1 N"] | None:
  """Returns the slopes of all linear biases; None if there are none."""
  biases = [x for x in inputs.relations if isinstance(x, LinearBias)]
  return _sum([x.slopes[None, None] for x in biases])


def value_table(inputs: Inputs) -> Float[Array, "R #N V"] | None:
  """Returns the sum of the tables for values, by row; None if there are none."""
  relations = [_on_rows(inputs, x) for x in _by_distance(inputs)]
  return _sum([getattr(x, "value", None) for x in relations])


def _sum(terms: list[Array | None]) -> Array | None:
  """Adds the terms that are given; None if there are none."""
  given = [term for term in terms if term is not None]
  return functools.reduce(jnp.add, given) if given else None


def _by_distance(inputs: Inputs) -> list[ByDistance]:
  return [x for x in inputs.relations if isinstance(x, ByDistance)]


def _on_rows(inputs: Inputs, relation: ByDistance) -> ByDistance:
  """Returns a relation whose tables have the rows of the band."""
  low, high = distances(inputs)
  labels = relation.labels(jnp.zeros(1, jnp.int32), jnp.arange(low, high + 1))
  return relation.with_rows(labels[0], left=-low)


# A call as arrays of queries, keys and pairs.


def prepare(inputs: Inputs) -> tuple[Plan, Sides, Sides]:
  """Returns the static parameters of a call, and its arrays with and without gradients."""
  wide = jnp.promote_types(inputs.query.dtype, jnp.float32)
  low, high = distances(inputs)
  left, right = inputs.window or (UNLIMITED, UNLIMITED)
  if inputs.is_causal:
    right = 0
  block, tile, heads = _sizes(inputs)
  plan = Plan(
    block=block,
    tile=tile,
    heads=heads,
    band=Band(low + 1, high - low - 1, has_right=high <= right),
    has_values=value_table(inputs) is not None,
    soft_cap=inputs.soft_cap,
    reach=(left, right),
    dropout_rate=inputs.dropout_rate,
    precision=jax.config.jax_default_matmul_precision,
  )
  query = inputs.query.astype(wide) * jnp.asarray(inputs.scale, wide)
  of_queries, of_keys = (logits_by_row(inputs, of_keys=x) for x in (False, True))
  queries = Queries(query, _heads_last(of_queries), slopes(inputs))
  keys = Keys(inputs.key, inputs.value, _heads_last(of_keys))
  bias = None if inputs.bias is None else inputs.bias.astype(wide)
  return plan, Sides(queries, keys, bias), _marks(inputs)


def _heads_last(x: Array | None) -> Array | None:
  return None if x is None else x.swapaxes(1, 2)


def _marks(inputs: Inputs) -> Sides:
  valid, pairs = inputs.key_mask, inputs.mask
  if pairs is not None and pairs.shape[2] == 1:  # the same for all queries
    valid = masks.combine(valid, pairs)
  if pairs is not None and 1 in pairs.shape[2:]:  # `finish` masks queries
    pairs = None
  if valid is not None:
    valid = valid[:, :, 0].swapaxes(1, 2)
  seeds = inputs.dropout_seeds
  if seeds is not None:  # rows of weights count from the first query
    seeds = dropout.from_row(seeds, inputs.query_offset)[:, None]
  of_queries = inputs.query_positions, inputs.query_segment_ids
  of_keys = inputs.key_positions, inputs.key_segment_ids
  of_queries, of_keys = jax.tree.map(lambda x: x[..., None], (of_queries, of_keys))
  queries, keys = Marks(*of_queries, seeds=seeds), Marks(*of_keys, valid=valid)
  return Sides(queries, keys, pairs)


def finish(inputs: Inputs, results: Results) -> Any:
  """Returns the output [B, T, N, V], and the residual [B, T, N] if the call asks for it."""
  output, weights, log_total = results
  table = value_table(inputs)
  if table is not None:
    output += jnp.einsum("BTNR,RNV->BTNV", weights, table)
  of_queries = inputs.query_mask
  if inputs.mask is not None and inputs.mask.shape[3] == 1:
    of_queries = masks.combine(of_queries, inputs.mask)
  if of_queries is not None:
    is_valid = of_queries.swapaxes(1, 2)
    output = jnp.where(is_valid, output, 0)
    log_total = jnp.where(is_valid[..., 0], log_total, -jnp.inf)
  if inputs.sinks is not None:  # a part of the keys whose value is zero
    sinks = inputs.sinks[None, None]
    has_key = ~jnp.isneginf(log_total)
    finite = jnp.where(has_key, log_total, 0)
    output *= jax.nn.sigmoid(finite - sinks)[..., None]
    log_total = jnp.where(has_key, jnp.logaddexp(finite, sinks), -jnp.inf)
  output = output.astype(inputs.value.dtype)
  return (output, log_total) if inputs.return_residual else output


def attend_on_devices(
  attend: Callable, inputs: Inputs, names: tuple[str, ...], names_of_keys: tuple
) -> Any:
  """Computes attention of each device's queries, and its residual if asked for.

  Mesh axes of these names shard the queries, and the keys, along their sequence. A
  device calls `attend` with the plan and its arrays.
  """
  plan, floats, marks = prepare(inputs)
  of_batch, of_heads = axes_of_heads(inputs.explicit, inputs.key.shape)

  def specs(tree: Any, *axes: tuple[str, ...]) -> Any:
    def spec(x: Array) -> PartitionSpec:
      sizes = x.shape[: len(axes)]
      pairs = zip(axes, sizes, strict=True)
      return PartitionSpec(*(axis if size > 1 else None for axis, size in pairs))

    return jax.tree.map(spec, tree)

  of_sides = []
  for queries, keys, pairs in (floats, marks):
    of_queries = specs(queries, of_batch, names, of_heads)
    of_keys = specs(keys, of_batch, names_of_keys, of_heads)
    of_pairs = specs(pairs, of_batch, of_heads, names)
    of_sides.append(Sides(of_queries, of_keys, of_pairs))
  attend = functools.partial(attend, plan)
  of_results = PartitionSpec(of_batch, names, of_heads)
  axes = of_batch, of_heads, names
  results = on_shards(attend, axes, tuple(of_sides), of_results)(floats, marks)
  return finish(inputs, results)


def _sizes(inputs: Inputs) -> tuple[int, int, int | None]:
  """Returns the queries in a block, the keys in a tile, and the heads at a time."""
  batch, num_queries, heads, _ = inputs.query.shape
  num_keys = inputs.key.shape[1]
  is_on_cpu = target_platform() == "cpu"
  if not is_on_cpu or not is_one_device():
    tile = min(2048, num_keys)
    most = _PAIRS_ON_CPUS if is_on_cpu else _PAIRS
    return default_block(batch * heads * tile, most), tile, None
  # Small tiles skip more masked pairs; products of large ones are faster.
  is_short = inputs.is_causal and num_keys < 2048
  size = 256 if is_short or inputs.window is not None else 512
  block, tile = min(size, num_queries), min(size, num_keys)
  most = max(1, _PAIRS_ON_CPU // (block * tile))
  return block, tile, max(n for n in range(1, most + 1) if heads % n == 0)
