"""The forward kernel for TPUs: an online softmax from right to left.

For each block of queries: the plain tiles right of the band, all of whose logits lack the same
c_i, the term of the tables' last row; then `m += c` at the diagonal, once; the tiles of the band;
the plain tiles left of it. Every query has one key on each of the band's diagonals: their logits
are stored, and become weights at the end of the block.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from relpos_jax.attention import dropout, masks
from relpos_jax.attention import pallas_tpu_tiles as tiles
from relpos_jax.attention.pallas_tpu_tiles import TpuPlan
from relpos_jax.attention.partitioned import shapes_like

# Batch, heads and blocks of queries are parallel; blocks of keys are sequential.
SEMANTICS = ("parallel", "parallel", "parallel", "arbitrary")


def forward(plan: TpuPlan, operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns the output [B,N,T,H], its rounding error, and numbers per query [B,N,1,T].

  The numbers per query are float32 or wider.
  """
  query, key = operands["query"], operands["key"]
  batch, heads, length, _ = query.shape
  grid = (batch, heads, length // plan.block, key.shape[2] // plan.block)
  wide = jnp.promote_types(query.dtype, jnp.float32)
  row = jax.ShapeDtypeStruct((batch, heads, 1, length), wide)
  outputs = dict(output=jax.ShapeDtypeStruct(query.shape, query.dtype))
  outputs |= dict(maximum=row, inverse_total=row)
  if _has_far(plan, operands):
    outputs |= dict(far_maximum=row, far_inverse_total=row)
  if "value_table" in operands:
    outputs |= dict(sums=row)
  if (plan.period or "slopes" in operands) and wide != query.dtype:
    outputs |= dict(output_rest=outputs["output"])
  tile, band = (plan.block, plan.lanes), (plan.block, plan.period)
  scratch = dict(output=(plan.block, query.shape[3]), maximum=tile, sums=tile)
  if tiles.has_logits(operands):
    scratch |= dict(key_band=band, key_right=tile)
  if _has_far(plan, operands):
    scratch |= dict(far_maximum=tile)
  if "value_table" in operands:
    scratch |= dict(band_logits=band, right_sums=tile, right_maximum=tile)
  if plan.dropout_rate:
    scratch |= dict(dropped_sums=tile)
  # A device with a part of the queries does not know their numbers here, nor a traced offset.
  known = plan.is_causal and "first_block" not in operands

  def index(b, n, i, step):
    """Returns the blocks of a step, keys from right to left; a hidden tile reads no new ones."""
    j = grid[3] - 1 - step
    keys = j
    if known:
      keys = jnp.clip(i + plan.first_block, 0, j) if plan.first_block else jnp.minimum(i, j)
    return dict(B=b, N=n, K=jax.lax.div(n, np.int32(heads // key.shape[1])), T=i, S=keys)

  specs = lambda arrays: tiles.block_specs(tiles.AXES[1], arrays, plan.block, index)
  return pl.pallas_call(
    functools.partial(_kernel, plan),
    grid=grid,
    in_specs=[specs(operands)],
    out_specs=specs(outputs),
    out_shape=shapes_like(query, outputs),
    scratch_shapes=[{name: pltpu.VMEM(shape, wide) for name, shape in scratch.items()}],
    # The default is too little for a content and as many rows as a call takes.
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=SEMANTICS,
      vmem_limit_bytes=tiles.VMEM_BYTES if "content" in operands else None,
    ),
    cost_estimate=tiles.cost(plan, operands, outputs, num_products=2),
    interpret=plan.interpret,
    name="relative_attention_forward",
  )(operands)


def _has_far(plan: TpuPlan, operands: dict) -> bool:
  """Returns whether logits lack c_i in the tiles right of the diagonal's."""
  return tiles.has_logits(operands) and not plan.is_causal


def _kernel(plan: TpuPlan, operands, outputs, scratch) -> None:
  query_block, step = pl.program_id(2) + tiles.first_block(plan, operands), pl.program_id(3)
  key_block = pl.num_programs(3) - 1 - step
  pl.when(step == 0)(lambda: _start(plan, operands, scratch))
  tile = functools.partial(_tile, plan, operands, scratch, query_block, key_block)
  tiles.dispatch(plan, key_block - query_block, tile)
  if plan.has_earlier_queries:
    pl.when((key_block == 0) & (query_block < 0))(lambda: _pass_diagonal(plan, scratch))
  pl.when(key_block == 0)(lambda: _finish(plan, operands, outputs, scratch, query_block))


def _start(plan: TpuPlan, operands, scratch) -> None:
  lowest = jnp.asarray(masks.LOWEST, scratch["output"].dtype)
  clear = dict(output=0, maximum=lowest, sums=0, dropped_sums=0, band_logits=lowest)
  if not plan.sees_right() or plan.has_earlier_queries or plan.has_later_queries:
    clear |= dict(right_sums=0, right_maximum=lowest, far_maximum=lowest)
  for name, number in clear.items():  # not a set: its order would vary between runs
    if name in scratch:
      scratch[name][...] = jnp.full(scratch[name].shape, number, scratch[name].dtype)
  if "right_sums" in scratch and "right_sums" not in clear:
    for queries in _queries_in_band(plan):
      scratch["right_sums"][queries] = jnp.zeros((plan.height, plan.lanes), lowest.dtype)
  if tiles.has_logits(operands):
    logits = tiles.band_logits(plan, operands, keys=1)
    right = logits[:, plan.last_row, None]
    scratch["key_band"][...] = tiles.skew(plan, logits)
    scratch["key_right"][...] = jnp.broadcast_to(right, scratch["key_right"].shape)


def _queries_in_band(plan: TpuPlan) -> list[slice]:
  """Returns the slices of queries whose band reaches into tiles right of the diagonal's."""
  offsets = [offset for offset in plan.special_offsets() if offset > 0]
  crossing = [pair for offset in offsets for pair in tiles.crossing(plan, offset, keys=1)]
  return list({piece.queries.start: piece.queries for piece, _ in crossing}.values())


def _tile(plan: TpuPlan, operands, scratch, query_block, key_block, offset, _) -> None:
  """Adds a tile to the online softmax; `offset` is static if the tile touches the band."""
  query, key, value = (operands[name][0, 0] for name in ("query", "key", "value"))
  # Right of the diagonal's tile they lack c_i.
  logits = tiles.product(query, key, (1, 1)) * plan.scale
  logits = tiles.add_slopes(plan, logits, offset, operands, keys=1)
  if isinstance(offset, int) and tiles.has_logits(operands):
    band, right = scratch["key_band"], scratch["key_right"]
    logits = tiles.add_band(plan, logits, offset, band, right, keys=1)
  logits = tiles.hide(plan, logits, offset, operands, keys=1)
  by_row = isinstance(offset, int) and "value_table" in operands
  if by_row:
    _store_band_logits(plan, scratch, logits, offset)
  weights, columns, maximum, correction = _weights(plan, scratch, logits, offset)
  kept_sums = scratch["dropped_sums" if plan.dropout_rate else "sums"]
  before = kept_sums[...] * correction
  scratch["maximum"][...] = maximum
  if plan.dropout_rate:
    scratch["sums"][...] = scratch["sums"][...] * correction + sum(columns)
    kept = tiles.keep(plan, operands["seeds"][0, 0], query_block, key_block, keys=1)
    weights = jnp.where(kept, weights / (1 - plan.dropout_rate), 0)
    columns = tiles.split(weights, plan.lanes, 1)
  kept_sums[...] = before + sum(columns)
  added = tiles.product(weights.astype(value.dtype), value, (1, 0))
  scratch["output"][...] = scratch["output"][...] * correction[:, :1] + added
  if by_row and offset >= 0 and plan.sees_right():
    _sum_right(plan, scratch, weights, correction, before, offset)
    scratch["right_maximum"][...] = maximum


def _weights(plan: TpuPlan, scratch, logits, offset):
  """Returns weights, the same by `lanes` columns, the new maximum, and the old sums' factor."""
  maximum = scratch["maximum"][...]
  if isinstance(offset, int) and offset == 0 and "far_maximum" in scratch:
    scratch["far_maximum"][...] = maximum
    maximum += scratch["key_right"][...]
  columns = tiles.split(logits, plan.lanes, 1)
  highest = functools.reduce(jnp.maximum, columns)
  new_maximum = jnp.maximum(maximum, highest.max(1, keepdims=True))
  correction = jnp.exp(maximum - new_maximum)
  columns = [jnp.exp(column - new_maximum) for column in columns]
  return jnp.concatenate(columns, 1), columns, new_maximum, correction


def _store_band_logits(plan: TpuPlan, scratch, logits, offset) -> None:
  """Stores the logits of the band, skewed, with c_i added where they lack it."""
  stored = scratch["band_logits"]
  for piece, inside in tiles.crossing(plan, offset, keys=1):
    part = logits[piece.rows, piece.columns]
    if offset > 0 and "key_right" in scratch:
      part += scratch["key_right"][piece.queries]
    stored[piece.band] = jnp.where(inside, part, stored[piece.band])


def _sum_right(plan: TpuPlan, scratch, weights, correction, before, offset) -> None:
  """Updates the weights' sums right of the band.

  At the diagonal all earlier keys are right of the band, except those in it, which the tiles right
  of the diagonal's subtract.
  """
  sums = scratch["right_sums"]
  if offset > 0:
    for queries in _queries_in_band(plan):
      sums[queries] *= correction[queries]
    for piece, inside in tiles.crossing(plan, offset, keys=1):
      sums[piece.queries] -= jnp.where(inside, weights[piece.rows, piece.columns], 0)
    return
  subtracted = {queries.start for queries in _queries_in_band(plan)}
  right = tiles.right_of_band(plan, weights, 0, keys=1)
  for strip in tiles.pieces(plan, 0, keys=1):
    queries = strip[0].queries
    total = before[queries] + sum(part for rows, part in right if rows == queries)
    if queries.start in subtracted:
      total += sums[queries] * correction[queries]
    sums[queries] = total


def _pass_diagonal(plan: TpuPlan, scratch) -> None:
  """Moves the sums of queries before all keys to the right of the band, as the diagonal would."""
  maximum = scratch["maximum"][...]
  if "far_maximum" in scratch:
    scratch["far_maximum"][...] = maximum
    maximum += scratch["key_right"][...]
    scratch["maximum"][...] = maximum
  if "right_sums" in scratch:
    scratch["right_sums"][...] += scratch["dropped_sums" if plan.dropout_rate else "sums"][...]
    scratch["right_maximum"][...] = maximum


def _finish(plan: TpuPlan, operands, outputs, scratch, query_block) -> None:
  """Divides by the sum of weights, adds the value table's term, and writes the outputs."""
  maximum = scratch["maximum"][...]
  sums = scratch["sums"][...].sum(1, keepdims=True)
  inverse_total = 1 / sums
  hides = plan.window is not None or (plan.is_causal and plan.has_earlier_queries)
  if hides or operands.keys() & {"key_visible", "query_segments"}:
    inverse_total = jnp.where(maximum > masks.LOWEST / 2, inverse_total, 0)
  output = scratch["output"][...] * inverse_total[:, :1]
  rows = dict(maximum=maximum, inverse_total=inverse_total)
  if "far_maximum" in scratch:
    far = scratch["far_maximum"][...]
    correction = jnp.exp(far + scratch["key_right"][...] - maximum)
    rows |= dict(far_maximum=far, far_inverse_total=correction * inverse_total)
  if "value_table" in operands:
    kept = scratch["dropped_sums"][...].sum(1, keepdims=True) if plan.dropout_rate else sums
    kept *= inverse_total
    correction = jnp.exp(scratch["right_maximum"][...] - maximum)
    right = scratch["right_sums"][...] * correction * inverse_total
    table = operands["value_table"][0]
    added = _band_values(plan, operands, scratch, table, query_block, maximum, inverse_total)
    added += kept[:, :1] * table[plan.left_row, None]
    # In float32: an error of the output enters all of a query's gradients, through delta.
    output += added + right.sum(1, keepdims=True) * table[plan.last_row, None]
    rows |= dict(sums=kept)
  rounded = output.astype(outputs["output"].dtype)
  outputs["output"][0, 0] = rounded
  if "output_rest" in outputs:
    outputs["output_rest"][0, 0] = (output - rounded.astype(output.dtype)).astype(rounded.dtype)
  _write_rows(plan, outputs, rows)


def _band_values(plan: TpuPlan, operands, scratch, table, query_block, maximum, inverse_total):
  """Computes the sum of the value table's rows on the band, by their weights."""
  maximum = jnp.concatenate([maximum] * (plan.period // plan.lanes), 1)
  band = jnp.exp(scratch["band_logits"][...] - maximum) * inverse_total[:, :1]
  if plan.dropout_rate:
    query, column = (jax.lax.broadcasted_iota(jnp.int32, band.shape, axis) for axis in (0, 1))
    distance = jnp.remainder(column - query - plan.first, plan.period) + plan.first
    query += query_block * plan.block
    keep = dropout.keep(operands["seeds"][0, 0], query, query + distance, plan.dropout_rate)
    band = jnp.where(keep, band / (1 - plan.dropout_rate), 0)
  dtype = operands["query"].dtype
  return tiles.product(tiles.unskew(plan, band).astype(dtype), table.astype(dtype), (1, 0))


def _write_rows(plan: TpuPlan, outputs, columns) -> None:
  """Writes one number per query along lanes, from columns with equal lanes: one transposition."""
  lane = jax.lax.broadcasted_iota(jnp.int32, (plan.block, plan.lanes), 1)
  # One group on a TPU; in interpret mode there may be fewer lanes than columns.
  columns = list(columns.items())
  for start in range(0, len(columns), plan.lanes):
    group, stacked = columns[start : start + plan.lanes], 0
    for number, (_, column) in enumerate(group):
      stacked = jnp.where(lane == number, column, stacked)
    rows = stacked.T
    for number, (name, _) in enumerate(group):
      outputs[name][0, 0] = rows[number : number + 1]
