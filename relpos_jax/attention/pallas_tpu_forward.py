"""The forward kernel for TPUs: an online softmax from the right to the left.

For each block of queries: the plain tiles right of the band, all of whose logits lack the same
c_i = scale * q_i . w'K; then `m += c` at the diagonal, once; the tiles of the band; the plain tiles
left of it. Every query has one key on each of the band's diagonals: their logits are put aside as
they come, and are made weights when the block is done.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from relpos_jax.attention import dropout, masks
from relpos_jax.attention import pallas_tpu_tiles as tiles
from relpos_jax.attention.pallas_tpu_cost import cost
from relpos_jax.attention.pallas_tpu_tiles import TpuPlan

# Of the parallel axes of the grid, batch and heads and blocks of queries; the keys' come in order.
SEMANTICS = ("parallel", "parallel", "parallel", "arbitrary")


def forward(plan: TpuPlan, operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns the output [B,N,T,H], its rounding error, and what `tiles.ROWS` names [B,N,1,T].

  The latter in float32 or wider.
  """
  query, key = operands["query"], operands["key"]
  batch, heads, length, _ = query.shape
  grid = (batch, heads, length // plan.block, key.shape[2] // plan.block)
  outputs = _outputs(plan, operands)
  specs = functools.partial(block_specs, plan, heads // key.shape[1], grid[3])
  return pl.pallas_call(
    functools.partial(_kernel, plan),
    grid=grid,
    in_specs=[specs(operands)],
    out_specs=specs(outputs),
    out_shape=outputs,
    scratch_shapes=[_scratch(plan, operands)],
    compiler_params=pltpu.CompilerParams(dimension_semantics=SEMANTICS),
    cost_estimate=cost(plan, operands, outputs, num_products=2),
    interpret=plan.interpret,
    name="relative_attention_forward",
  )(operands)


def _outputs(plan: TpuPlan, operands: dict) -> dict[str, jax.ShapeDtypeStruct]:
  query = operands["query"]
  batch, heads, length, _ = query.shape
  wide = jnp.promote_types(query.dtype, jnp.float32)
  row = jax.ShapeDtypeStruct((batch, heads, 1, length), wide)
  output = jax.ShapeDtypeStruct(query.shape, query.dtype)
  outputs = dict(output=output, maximum=row, inverse_total=row)
  if _has_far(plan, operands):
    outputs |= dict(far_maximum=row, far_inverse_total=row)
  if "value_table" in operands:
    outputs |= dict(sums=row)
  if operands.keys() & {"key_table", "value_table"} and wide != query.dtype:
    outputs |= dict(output_rest=outputs["output"])
  return outputs


def _has_far(plan: TpuPlan, operands: dict) -> bool:
  """Whether logits lack c_i in the tiles right of the diagonal's."""
  return "key_table" in operands and not plan.is_causal


def _scratch(plan: TpuPlan, operands: dict) -> dict:
  """What stays on the chip while a block of queries meets its keys."""
  query = operands["query"]
  tile, band = (plan.block, plan.lanes), (plan.block, plan.period)
  shapes = dict(output=(plan.block, query.shape[3]), maximum=tile, sums=tile)
  if "key_table" in operands:
    shapes |= dict(key_band=band, key_right=tile)
  if _has_far(plan, operands):
    shapes |= dict(far_maximum=tile)
  if "value_table" in operands:
    shapes |= dict(band_logits=band, right_sums=tile, right_maximum=tile)
  if plan.dropout_rate:
    shapes |= dict(dropped_sums=tile)
  wide = jnp.promote_types(query.dtype, jnp.float32)
  return {name: pltpu.VMEM(shape, wide) for name, shape in shapes.items()}


def block_specs(plan: TpuPlan, group: int, num_key_blocks: int, arrays: dict) -> dict:
  """Which block of each array a step of the grid (batch, head, queries, keys) is given."""
  block = plan.block

  def keys(i, step):
    """From the right to the left. A tile that does not run needs no keys but its neighbour's."""
    j = num_key_blocks - 1 - step
    # Where a device has some of the queries, their number is not known here.
    return jnp.minimum(i, j) if plan.is_causal and "first_block" not in arrays else j

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
    if name in tiles.ROWS:
      return pl.BlockSpec((1, 1, 1, block), lambda b, n, i, j: (b, n, 0, i))
    if name == "query_segments":
      return pl.BlockSpec((1, block, 1), lambda b, n, i, j: (batch(b), i, 0))
    if name in ("key_segments", "key_visible"):
      return pl.BlockSpec((1, 1, block), lambda b, n, i, j: (batch(b), 0, keys(i, j)))
    if name == "first_block":
      return pl.BlockSpec(memory_space=pltpu.SMEM)
    assert name == "seeds"
    return pl.BlockSpec((1, 1, 1, 1), lambda b, n, i, j: (b, head(n), 0, 0))

  return {name: spec(name) for name in arrays}


def _kernel(plan: TpuPlan, operands, outputs, scratch) -> None:
  query_block, step = pl.program_id(2) + tiles.first_block(operands), pl.program_id(3)
  key_block = pl.num_programs(3) - 1 - step
  pl.when(step == 0)(lambda: _start(plan, operands, scratch))
  tile = functools.partial(_tile, plan, operands, scratch, query_block, key_block)
  tiles.dispatch(plan, key_block - query_block, tile)
  pl.when(key_block == 0)(lambda: _finish(plan, operands, outputs, scratch, query_block))


def _start(plan: TpuPlan, operands, scratch) -> None:
  lowest = jnp.asarray(masks.LOWEST, scratch["output"].dtype)
  clear = dict(output=0, maximum=lowest, sums=0, dropped_sums=0, band_logits=lowest)
  if not plan.sees_right() or plan.num_blocks[0] > plan.num_blocks[1]:
    clear |= dict(right_sums=0, right_maximum=lowest, far_maximum=lowest)
  for name, number in clear.items():  # not a set: the kernel is to be the same every time
    if name in scratch:
      scratch[name][...] = jnp.full(scratch[name].shape, number, scratch[name].dtype)
  if "right_sums" in scratch and "right_sums" not in clear:
    for queries in _not_all_right(plan):
      scratch["right_sums"][queries] = jnp.zeros((plan.height, plan.lanes), lowest.dtype)
  if "key_table" in operands:
    query, table = operands["query"][0, 0], operands["key_table"][0]
    logits = tiles.precise_product(query, table, (1, 1), query.dtype) * plan.scale
    right = logits[:, plan.last_row, None]
    scratch["key_band"][...] = tiles.skew(plan, logits)
    scratch["key_right"][...] = jnp.broadcast_to(right, scratch["key_right"].shape)


def _not_all_right(plan: TpuPlan) -> list[slice]:
  """The queries whose band reaches into tiles right of the diagonal's."""
  offsets = [offset for offset in plan.special_offsets() if offset > 0]
  found = [tiles.crossing(plan, offset, keys=1) for offset in offsets]
  return list({piece.queries.start: piece.queries for of in found for piece, _ in of}.values())


def _tile(plan: TpuPlan, operands, scratch, query_block, key_block, offset, _) -> None:
  """One tile of the online softmax; `offset` is static where the tile touches the band."""
  query, key, value = (operands[name][0, 0] for name in ("query", "key", "value"))
  logits = _logits(plan, operands, scratch, query, key, offset)
  by_row = isinstance(offset, int) and "value_table" in operands
  if by_row:
    _put_aside(plan, scratch, logits, offset)
  weights, columns, maximum, correction = _weights(plan, scratch, logits, offset)
  kept_sums = scratch["dropped_sums" if plan.dropout_rate else "sums"]
  before = kept_sums[...] * correction
  scratch["maximum"][...] = maximum
  if plan.dropout_rate:
    scratch["sums"][...] = scratch["sums"][...] * correction + sum(columns)
    weights = _drop(plan, operands, query_block, key_block, weights)
    columns = tiles.split(weights, plan.lanes, 1)
  kept_sums[...] = before + sum(columns)
  added = tiles.product(weights.astype(value.dtype), value, (1, 0))
  scratch["output"][...] = scratch["output"][...] * correction[:, :1] + added
  if by_row and offset >= 0 and plan.sees_right():
    _sum_right(plan, scratch, weights, correction, before, offset)
    scratch["right_maximum"][...] = maximum


def _logits(plan: TpuPlan, operands, scratch, query, key, offset):
  """They lack c_i in tiles right of the diagonal's."""
  logits = tiles.product(query, key, (1, 1)) * plan.scale
  if isinstance(offset, int) and "key_table" in operands:
    band, right = scratch["key_band"], scratch["key_right"]
    logits = tiles.add_band(plan, logits, offset, band, right, keys=1)
  return tiles.hide(plan, logits, offset, operands, keys=1)


def _weights(plan: TpuPlan, scratch, logits, offset):
  """Weights, whole and by `lanes` columns; the new maximum; what corrects sums of the old one."""
  maximum = scratch["maximum"][...]
  if isinstance(offset, int) and offset == 0 and "far_maximum" in scratch:
    scratch["far_maximum"][...] = maximum
    maximum += scratch["key_right"][...]
  columns = tiles.split(logits, plan.lanes, 1)
  new_maximum, correction = _raised(maximum, functools.reduce(jnp.maximum, columns))
  columns = [jnp.exp(column - new_maximum) for column in columns]
  return jnp.concatenate(columns, 1), columns, new_maximum, correction


def _raised(maximum, highest):
  """The maximum of what was seen and what is new, and what the weights so far are to be times."""
  raised = jnp.maximum(maximum, highest.max(1, keepdims=True))
  return raised, jnp.exp(maximum - raised)


def _drop(plan: TpuPlan, operands, query_block, key_block, weights):
  kept = tiles.keep(plan, operands["seeds"][0, 0], query_block, key_block, keys=1)
  return jnp.where(kept, weights / (1 - plan.dropout_rate), 0)


def _put_aside(plan: TpuPlan, scratch, logits, offset) -> None:
  """Keeps the logits in the band, skewed; those that lack c_i are given it."""
  aside = scratch["band_logits"]
  for piece, inside in tiles.crossing(plan, offset, keys=1):
    part = logits[piece.rows, piece.columns]
    if offset > 0 and "key_right" in scratch:
      part += scratch["key_right"][piece.queries]
    aside[piece.band] = jnp.where(inside, part, aside[piece.band])


def _sum_right(plan: TpuPlan, scratch, weights, correction, before, offset) -> None:
  """At the diagonal all keys so far are right of the band, but for those counted off before."""
  sums = scratch["right_sums"]
  if offset > 0:
    for queries in _not_all_right(plan):
      sums[queries] *= correction[queries]
    for piece, inside in tiles.crossing(plan, offset, keys=1):
      sums[piece.queries] -= jnp.where(inside, weights[piece.rows, piece.columns], 0)
    return
  off = {queries.start for queries in _not_all_right(plan)}
  right = tiles.right_of_band(plan, weights, 0, keys=1)
  for strip in tiles.pieces(plan, 0, keys=1):
    queries = strip[0].queries
    total = before[queries] + sum(part for of, part in right if of == queries)
    if queries.start in off:
      total += sums[queries] * correction[queries]
    sums[queries] = total


def _finish(plan: TpuPlan, operands, outputs, scratch, query_block) -> None:
  """Divides by the sum of weights, and adds the value table's share."""
  maximum = scratch["maximum"][...]
  sums = scratch["sums"][...].sum(1, keepdims=True)
  share = 1 / sums
  if plan.window is not None or operands.keys() & {"key_visible", "query_segments"}:
    share = jnp.where(maximum > masks.LOWEST / 2, share, 0)
  output = scratch["output"][...] * share[:, :1]
  rows = dict(maximum=maximum, inverse_total=share)
  if "far_maximum" in scratch:
    far = scratch["far_maximum"][...]
    since = jnp.exp(far + scratch["key_right"][...] - maximum)
    rows |= dict(far_maximum=far, far_inverse_total=since * share)
  if "value_table" in operands:
    kept = (
      sums * share
      if not plan.dropout_rate
      else (scratch["dropped_sums"][...].sum(1, keepdims=True) * share)
    )
    since = jnp.exp(scratch["right_maximum"][...] - maximum)
    right = scratch["right_sums"][...] * since * share
    output += _relative_values(plan, operands, scratch, query_block, maximum, share, right, kept)
    rows |= dict(sums=kept)
  rounded = output.astype(outputs["output"].dtype)
  outputs["output"][0, 0] = rounded
  if "output_rest" in outputs:
    outputs["output_rest"][0, 0] = (output - rounded.astype(output.dtype)).astype(rounded.dtype)
  _write_rows(plan, outputs, rows)


def _relative_values(plan: TpuPlan, operands, scratch, query_block, maximum, share, right, kept):
  table, dtype = operands["value_table"][0], operands["query"].dtype
  maximum = jnp.concatenate([maximum] * (plan.period // plan.lanes), 1)
  band = jnp.exp(scratch["band_logits"][...] - maximum) * share[:, :1]
  if plan.dropout_rate:
    query, place = (jax.lax.broadcasted_iota(jnp.int32, band.shape, axis) for axis in (0, 1))
    distance = jnp.remainder(place - query - plan.first, plan.period) + plan.first
    query += query_block * plan.block
    drawn = (operands["seeds"][0, 0], query, query + distance, plan.dropout_rate)
    band = jnp.where(dropout.keep(*drawn), band / (1 - plan.dropout_rate), 0)
  band = tiles.unskew(plan, band).astype(dtype)
  added = (
    tiles.product(band, table.astype(dtype), (1, 0)) + kept[:, :1] * table[plan.left_row, None]
  )
  # In float32: the output's error is the backward pass's, in all of a query's gradients.
  return added + right.sum(1, keepdims=True) * table[plan.last_row, None]


def _write_rows(plan: TpuPlan, outputs, columns) -> None:
  """Writes along lanes one number for each query, the same in all lanes: one transposition."""
  lane = jax.lax.broadcasted_iota(jnp.int32, (plan.block, plan.lanes), 1)
  # On a TPU all at once; in interpret mode there may be fewer lanes than columns.
  columns = list(columns.items())
  for start in range(0, len(columns), plan.lanes):
    some, stacked = columns[start : start + plan.lanes], 0
    for number, (_, column) in enumerate(some):
      stacked = jnp.where(lane == number, column, stacked)
    rows = stacked.T
    for number, (name, _) in enumerate(some):
      outputs[name][0, 0] = rows[number : number + 1]
