"""The forward kernel for TPUs: an online softmax from right to left.

For each block of queries: the plain tiles right of the band, the tiles of the band, the plain tiles
left of it. All logits of a query in a plain tile lack the same number, the tables' term. It is
added to their maximum, and what is subtracted from them, the *shift*, lacks it too: it is at least
their maximum, even if the number is -inf. Every query has one key on each of the band's diagonals:
their logits are stored, and become weights at the end of the block.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from relpos_jax.attention import dropout, masks
from relpos_jax.attention import pallas_tpu_tiles as tiles
from relpos_jax.attention.pallas_tpu_tiles import TpuPlan


def forward(plan: TpuPlan, operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns the output [B,N,H,T], its rounding error, and numbers per query [B,N,1,T].

  The numbers per query are float32 or wider.
  """
  query = operands["query"]
  batch, heads, width, length = query.shape
  wide = jnp.promote_types(query.dtype, jnp.float32)
  of_query = jax.ShapeDtypeStruct((batch, heads, 1, length), wide)
  outputs = dict(output=jax.ShapeDtypeStruct(query.shape, query.dtype))
  outputs |= dict(maximum=of_query, inverse_total=of_query)
  if "value_table" in operands:
    outputs |= dict(sums=of_query, right_sums=of_query)
  if (plan.period or "slopes" in operands) and wide != query.dtype:
    outputs |= dict(output_rest=outputs["output"])
  row, band = (1, plan.block), (plan.period, plan.block)
  scratch = dict(output=(width, plan.block), maximum=row, sums=row)
  if tiles.has_logits(operands):
    scratch |= dict(key_band=band, key_left=row, key_right=row)
    scratch |= dict(left_maximum=row, right_maximum=row)
    outputs |= dict(left_shift=of_query, right_shift=of_query)
  if "value_table" in operands:
    scratch |= dict(band_logits=band, right_sums=row, right_sums_maximum=row)
  if plan.dropout_rate:
    scratch |= dict(dropped_sums=row)
  return tiles.call(
    plan, "forward", _kernel, operands, outputs, scratch, num_parallel=4, num_products=2
  )


def _kernel(plan: TpuPlan, num_tiles: int, operands, outputs, scratch) -> None:
  query_block, step = pl.program_id(3) + tiles.first_block(plan, operands), pl.program_id(4)
  last_step = pl.num_programs(4) - 1
  first = (last_step - step) * num_tiles

  @pl.when(step == 0)
  def _():
    tiles.fill(scratch, ("output", "sums", "dropped_sums", "right_sums"))
    maxima = "maximum", "right_sums_maximum", "left_maximum", "right_maximum"
    tiles.fill(scratch, ("band_logits", *maxima), masks.LOWEST)
    tiles.store_logits(plan, operands, scratch)

  tile = functools.partial(_tile, plan, scratch, query_block, first)
  tiles.for_tiles(plan, operands, first - query_block, num_tiles, tile)
  if plan.has_earlier_queries and "right_sums" in scratch:

    @pl.when((step == last_step) & (query_block < 0))
    def _():  # all keys are right of the band; the diagonal, where they are counted, is not visited
      scratch["right_sums"][...] += scratch["dropped_sums" if plan.dropout_rate else "sums"][...]
      scratch["right_sums_maximum"][...] = scratch["maximum"][...]

  pl.when(step == last_step)(lambda: _finish(plan, operands, outputs, scratch, query_block))


def _tile(plan: TpuPlan, scratch, query_block, first, operands, number, offset, side) -> None:
  """Adds a tile to the online softmax: a plain one of a side, or one that touches the band."""
  value, logits = operands["value"][0, 0], tiles.logits_of(plan, operands, scratch, offset, side)
  by_row = not side and "value_table" in operands
  if by_row:
    stored = scratch["band_logits"]
    for piece, inside in tiles.crossing(plan, offset):
      stored[piece.band] = jnp.where(inside, logits[piece.keys, piece.queries], stored[piece.band])
  maximum, of_tile = scratch["maximum"][...], logits.max(0, keepdims=True)
  if side and f"key_{side}" in scratch:
    of_side = scratch[f"{side}_maximum"]
    of_side[...] = jnp.maximum(of_side[...], of_tile)
    term = scratch[f"key_{side}"][...]
    new_maximum = jnp.maximum(maximum, of_tile + term)
    shift = jnp.maximum(maximum - term, of_tile)
  else:
    shift = new_maximum = jnp.maximum(maximum, of_tile)
  correction = jnp.exp(maximum - new_maximum)
  weights = jnp.exp(logits - shift)
  scratch["maximum"][...] = new_maximum
  kept_sums = scratch["dropped_sums" if plan.dropout_rate else "sums"]
  before = kept_sums[...] * correction
  if plan.dropout_rate:
    scratch["sums"][...] = scratch["sums"][...] * correction + weights.sum(0, keepdims=True)
    kept = tiles.keep(plan, operands["seeds"][0, 0], query_block, first + number)
    weights = jnp.where(kept, weights / (1 - plan.dropout_rate), 0)
  kept_sums[...] = before + weights.sum(0, keepdims=True)
  # An error of delta is multiplied by the distance, which may be large for all keys of a query.
  if "slopes" in operands:
    added = tiles.precise_product(value, weights, (1, 0), value.dtype)
  else:
    added = tiles.product(value, weights.astype(value.dtype), (1, 0))
  scratch["output"][...] = scratch["output"][...] * correction + added
  if by_row and offset >= 0 and plan.sees_right():
    _sum_right(plan, scratch, weights, correction, before, offset)
    scratch["right_sums_maximum"][...] = new_maximum


def _sum_right(plan: TpuPlan, scratch, weights, correction, before, offset) -> None:
  """Updates the weights' sums right of the band.

  At the diagonal all earlier keys are right of the band, except those in it, which the tiles right
  of the diagonal's subtract.
  """
  sums = scratch["right_sums"]
  sums[...] *= correction
  if offset == 0:
    sums[...] += before + tiles.sum_right(plan, weights, offset)
    return
  for piece, inside in tiles.crossing(plan, offset):
    part = jnp.where(inside, weights[piece.keys, piece.queries], 0)
    sums[:, piece.queries] -= part.sum(0, keepdims=True)


def _finish(plan: TpuPlan, operands, outputs, scratch, query_block) -> None:
  """Divides by the sum of weights, adds the value table's term, and writes the outputs."""
  maximum, sums = scratch["maximum"][...], scratch["sums"][...]
  inverse_total = jnp.where(maximum <= masks.LOWEST / 2, 0, 1 / sums)
  output = scratch["output"][...] * inverse_total
  rows = dict(maximum=maximum, inverse_total=inverse_total)
  for side in ("left", "right") if "key_band" in scratch else ():
    term, of_side = scratch[f"key_{side}"][...], scratch[f"{side}_maximum"][...]
    rows[f"{side}_shift"] = jnp.maximum(maximum - term, of_side)
  if "value_table" in operands:
    kept = scratch["dropped_sums"][...] if plan.dropout_rate else sums
    correction = jnp.exp(scratch["right_sums_maximum"][...] - maximum)
    right = scratch["right_sums"][...] * correction * inverse_total
    rows |= dict(sums=kept * inverse_total, right_sums=right)
    band = jnp.exp(scratch["band_logits"][...] - maximum) * inverse_total
    band = tiles.skew(plan, _drop_band(plan, operands, band, query_block), -1)
    weights = tiles.place_sums(plan, band, rows["sums"], right)
    # As in float32: an error of the output enters all of a query's gradients, through delta.
    output += tiles.precise_product(
      operands["value_table"][0], weights, (0, 0), operands["query"].dtype
    )
  rounded = output.astype(outputs["output"].dtype)
  rows |= dict(output=rounded)
  if "output_rest" in outputs:
    rows |= dict(output_rest=(output - rounded.astype(output.dtype)).astype(rounded.dtype))
  for name, x in rows.items():
    outputs[name][0, 0] = x


def _drop_band(plan: TpuPlan, operands, band, query_block):
  """Applies dropout to the weights of a skewed band."""
  if not plan.dropout_rate:
    return band
  row, query = (jax.lax.broadcasted_iota(jnp.int32, band.shape, axis) for axis in (0, 1))
  distance = jnp.remainder(row - query - plan.first, plan.period) + plan.first
  query += query_block * plan.block
  keep = dropout.keep(operands["seeds"][0, 0], query, query + distance, plan.dropout_rate)
  return jnp.where(keep, band / (1 - plan.dropout_rate), 0)
