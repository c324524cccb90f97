"""The forward kernel for TPUs: an online softmax from the right to the left.

For each block of queries: the plain tiles right of the band, all of whose logits lack the same
c_i = scale * q_i . w'K; then `m += c` at the diagonal, once; the tiles of the band; the plain tiles
left of it. Sums of weights on the band's rows stay skewed until the block is done.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from relpos_jax.attention import pallas_tpu_tiles as tiles
from relpos_jax.attention.pallas_tpu_tiles import Plan

# Of the parallel axes of the grid, batch and heads and blocks of queries; the keys' come in order.
SEMANTICS = ("parallel", "parallel", "parallel", "arbitrary")


def forward(plan: Plan, operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Output [B,N,T,H], log-sum-exp, sums of dropped weights and of those right of the band.

  The last three [B,N,1,T], in float32 or wider.
  """
  query, key = operands["query"], operands["key"]
  batch, heads, length, width = query.shape
  wide = jnp.promote_types(query.dtype, jnp.float32)
  grid = (batch, heads, length // plan.block, key.shape[2] // plan.block)
  row = jax.ShapeDtypeStruct((batch, heads, 1, length), wide)
  outputs = dict(output=jax.ShapeDtypeStruct(query.shape, query.dtype), log_sum=row)
  if "value_table" in operands:
    outputs |= dict(sums=row, right_sums=row)
  if operands.keys() & {"key_table", "value_table"} and wide != query.dtype:
    outputs |= dict(output_rest=outputs["output"])
  tile = (plan.block, plan.lanes)
  scratch = dict(output=(plan.block, width), maximum=tile, sums=tile)
  if "key_table" in operands:
    scratch |= dict(key_band=(plan.block, plan.period), key_right=tile)
  if "value_table" in operands:
    scratch |= dict(band_sums=(plan.block, plan.period), right_sums=tile, band_maximum=tile)
  if plan.dropout_rate:
    scratch |= dict(dropped_sums=tile)
  specs = functools.partial(block_specs, plan, heads // key.shape[1], grid[3])
  return pl.pallas_call(
    functools.partial(_kernel, plan),
    grid=grid,
    in_specs=[specs(operands)],
    out_specs=specs(outputs),
    out_shape=outputs,
    scratch_shapes=[{name: pltpu.VMEM(shape, wide) for name, shape in scratch.items()}],
    compiler_params=pltpu.CompilerParams(dimension_semantics=SEMANTICS),
    interpret=plan.interpret,
    name="relative_attention_forward",
  )(operands)


def block_specs(plan: Plan, group: int, num_key_blocks: int, arrays: dict) -> dict:
  """Which block of each array a step of the grid (batch, head, queries, keys) is given."""
  block = plan.block

  def keys(i, step):
    """From the right to the left. A tile that does not run needs no keys but its neighbour's."""
    j = num_key_blocks - 1 - step
    return jnp.minimum(i, j) if plan.is_causal else j

  def spec(name):
    shape = arrays[name].shape
    head = lambda n: n if shape[1] > 1 else 0
    batch = lambda b: b if shape[0] > 1 else 0
    if name in ("key", "value"):
      size = (1, 1, block, shape[3])
      return pl.BlockSpec(
        size, lambda b, n, i, j: (b, jax.lax.div(n, np.int32(group)), keys(i, j), 0)
      )
    if name in ("query", "output", "output_rest"):
      return pl.BlockSpec((1, 1, block, shape[3]), lambda b, n, i, j: (b, n, i, 0))
    if name in ("key_table", "value_table"):
      return pl.BlockSpec((1, *shape[1:]), lambda b, n, i, j: (n if shape[0] > 1 else 0, 0, 0))
    if name in ("log_sum", "sums", "right_sums"):
      return pl.BlockSpec((1, 1, 1, block), lambda b, n, i, j: (b, n, 0, i))
    if name == "query_segments":
      return pl.BlockSpec((1, block, 1), lambda b, n, i, j: (batch(b), i, 0))
    if name in ("key_segments", "key_visible"):
      return pl.BlockSpec((1, 1, block), lambda b, n, i, j: (batch(b), 0, keys(i, j)))
    assert name == "seeds"
    return pl.BlockSpec((1, 1, 1, 1), lambda b, n, i, j: (b, head(n), 0, 0))

  return {name: spec(name) for name in arrays}


def _kernel(plan: Plan, operands, outputs, scratch) -> None:
  query_block, step = pl.program_id(2), pl.program_id(3)
  key_block = pl.num_programs(3) - 1 - step
  pl.when(step == 0)(lambda: _start(plan, operands, scratch))
  tile = functools.partial(_tile, plan, operands, scratch, query_block, key_block)
  tiles.dispatch(plan, key_block - query_block, tile)
  pl.when(key_block == 0)(lambda: _finish(plan, operands, outputs, scratch))


def _start(plan: Plan, operands, scratch) -> None:
  for name, ref in scratch.items():
    start = tiles.LOWEST if name in ("maximum", "band_maximum") else 0
    ref[...] = jnp.full(ref.shape, start, ref.dtype)
  if "key_table" in operands:
    query = operands["query"][0, 0]
    logits = (
      tiles.precise_product(query, operands["key_table"][0], (1, 1), query.dtype) * plan.scale
    )
    right = logits[:, plan.last_row, None]
    scratch["key_band"][...] = tiles.skew(plan, logits)
    scratch["key_right"][...] = jnp.broadcast_to(right, scratch["key_right"].shape)


def _tile(plan: Plan, operands, scratch, query_block, key_block, offset) -> None:
  """One tile of the online softmax; `offset` is static where the tile touches the band."""
  special = isinstance(offset, int)
  if special and offset == 0:
    _enter_diagonal(plan, operands, scratch)
  query, key, value = (operands[name][0, 0] for name in ("query", "key", "value"))
  logits = tiles.product(query, key, (1, 1)) * plan.scale
  if special and "key_table" in operands:
    band, right = scratch["key_band"], scratch["key_right"]
    logits = tiles.add_band(plan, logits, offset, band, right, keys=1)
  logits = tiles.hide(plan, logits, offset, operands, keys=1)
  columns = tiles.split(logits, plan.lanes, 1)
  maximum = scratch["maximum"][...]
  highest = functools.reduce(jnp.maximum, columns).max(1, keepdims=True)
  new_maximum = jnp.maximum(maximum, highest)
  fade = jnp.exp(maximum - new_maximum)
  columns = [jnp.exp(column - new_maximum) for column in columns]
  scratch["maximum"][...] = new_maximum
  scratch["sums"][...] = scratch["sums"][...] * fade + sum(columns)
  if plan.dropout_rate:
    kept = tiles.keep(plan, operands["seeds"][0, 0], query_block, key_block, keys=1)
    weights = jnp.where(kept, jnp.concatenate(columns, 1) / (1 - plan.dropout_rate), 0)
    columns = tiles.split(weights, plan.lanes, 1)
    scratch["dropped_sums"][...] = scratch["dropped_sums"][...] * fade + sum(columns)
  weights = jnp.concatenate(columns, 1)
  added = tiles.product(weights.astype(value.dtype), value, (1, 0))
  scratch["output"][...] = scratch["output"][...] * fade[:, :1] + added
  if special and "value_table" in operands:
    _collect_band(plan, scratch, weights, fade, offset)
    scratch["band_maximum"][...] = new_maximum


def _enter_diagonal(plan: Plan, operands, scratch) -> None:
  """All keys so far were right of the band, but for those collected: they get their share."""
  if plan.is_causal:
    return
  if "key_table" in operands:
    scratch["maximum"][...] += scratch["key_right"][...]
  if "value_table" in operands:
    sums = scratch["dropped_sums" if plan.dropout_rate else "sums"][...]
    in_band = scratch["band_sums"][...].sum(1, keepdims=True) / plan.lanes
    scratch["right_sums"][...] = sums - in_band


def _collect_band(plan: Plan, scratch, weights, fade, offset) -> None:
  """Adds the weights in the band to their sums, and those right of it."""
  sums, right_sums = scratch["band_sums"], scratch["right_sums"]
  sums[...] *= jnp.broadcast_to(fade[:, :1], sums.shape)
  tiles.collect_band(plan, weights, offset, sums, keys=1)
  if offset > 0:
    return
  right_sums[...] *= fade
  for rows, part in tiles.right_of_band(plan, weights, offset, keys=1) if offset == 0 else []:
    right_sums[rows] += part


def _finish(plan: Plan, operands, outputs, scratch) -> None:
  """Divides by the sum of weights, and adds the value table's share."""
  maximum = scratch["maximum"][:, :1]
  sees_a_key = maximum > tiles.LOWEST / 2
  sums = scratch["sums"][...].sum(1, keepdims=True)
  share = jnp.where(sees_a_key, 1 / jnp.where(sees_a_key, sums, 1), 0)
  output = scratch["output"][...]
  if "value_table" in operands:
    table = operands["value_table"][0]
    kept = scratch["dropped_sums"][...].sum(1, keepdims=True) if plan.dropout_rate else sums
    since = jnp.exp(scratch["band_maximum"][:, :1] - maximum)
    right = scratch["right_sums"][...].sum(1, keepdims=True) * since
    band = tiles.unskew(plan, scratch["band_sums"][...] * since)
    dtype = operands["query"].dtype
    output += tiles.product(band.astype(dtype), table.astype(dtype), (1, 0))
    output += right * table[plan.last_row, None] + kept * table[plan.left_row, None]
    outputs["sums"][0, 0] = _as_row(plan, kept * share)
    outputs["right_sums"][0, 0] = _as_row(plan, right * share)
  output = output * share
  rounded = output.astype(outputs["output"].dtype)
  outputs["output"][0, 0] = rounded
  if "output_rest" in outputs:
    outputs["output_rest"][0, 0] = (output - rounded.astype(output.dtype)).astype(rounded.dtype)
  log_sum = jnp.where(sees_a_key, maximum + jnp.log(jnp.where(sees_a_key, sums, 1)), -tiles.LOWEST)
  outputs["log_sum"][0, 0] = _as_row(plan, log_sum)


def _as_row(plan: Plan, column):
  """[block, 1] as [1, block]."""
  rows = jnp.broadcast_to(column, (column.shape[0], plan.lanes)).T
  return rows[:1]
