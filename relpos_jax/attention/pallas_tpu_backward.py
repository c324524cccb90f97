"""The backward kernel for TPUs: every gradient in one pass over the tiles.

The gradients of keys and values stay on the chip until all queries are done.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from relpos_jax.attention import pallas_tpu_tiles as tiles
from relpos_jax.attention.pallas_tpu_tiles import TpuPlan


def backward(
  plan: TpuPlan, operands: dict[str, jax.Array], dtype: jax.typing.DTypeLike
) -> dict[str, jax.Array]:
  """Returns all gradients: query and content in `dtype`, the tables per sequence and head."""
  query, key = operands["query"], operands["key"]
  batch, heads, width, _ = query.shape
  wide = jnp.promote_types(query.dtype, jnp.float32)
  # The gradients of several devices are summed wide.
  of_keys = jax.ShapeDtypeStruct(key.shape, wide if "first_block" in operands else key.dtype)
  outputs = dict(d_query=jax.ShapeDtypeStruct(query.shape, dtype), d_key=of_keys, d_value=of_keys)
  if "content" in operands:
    outputs |= dict(d_content=jax.ShapeDtypeStruct(operands["content"].shape, dtype))
  for name in tiles.TABLES:
    if name in operands:
      of_heads = batch, heads, *operands[name].shape[1:]
      outputs[f"d_{name}"] = jax.ShapeDtypeStruct(of_heads, wide)
  band, row = (plan.period, plan.block), (1, plan.block)
  scratch = dict(query=(width, plan.block)) | dict.fromkeys(("key", "value"), key.shape[2:])
  if tiles.has_logits(operands):
    scratch |= dict(key_band=band, key_left=row, key_right=row)
    scratch |= dict(band_d_logits=band, right_d_logits=row)
  if "value_table" in operands:
    scratch |= dict(value_band=band, value_right=row, value_left=row, band_weights=band)
  if "slopes" in operands:
    scratch |= dict(slopes=row)
  return tiles.call(
    plan, "backward", _kernel, operands, outputs, scratch, num_parallel=2, num_products=5
  )


def _kernel(plan: TpuPlan, num_tiles: int, operands, outputs, scratch) -> None:
  group, query_step, step = (pl.program_id(axis) for axis in (2, 3, 4))
  last_group, last_query, last_step = (pl.num_programs(axis) - 1 for axis in (2, 3, 4))
  query_block = query_step + tiles.first_block(plan, operands)
  first = (last_step - step) * num_tiles

  @pl.when((group == 0) & (query_step == 0) & (step == 0))
  def _():
    tiles.fill(scratch, ("key", "value"))

  @pl.when((query_step == 0) & (step == 0))
  def _():
    tiles.fill(outputs, [f"d_{name}" for name in tiles.TABLES])

  pl.when(step == 0)(lambda: _start(plan, operands, scratch))
  tile = functools.partial(_tile, plan, scratch, query_block, first)
  tiles.for_tiles(plan, operands, plan.key_block + first - query_block, num_tiles, tile)
  pl.when(step == last_step)(lambda: _finish(plan, operands, outputs, scratch))

  @pl.when((group == last_group) & (query_step == last_query) & (step == last_step))
  def _():
    outputs["d_key"][0, 0] = (scratch["key"][...] * plan.scale).astype(outputs["d_key"].dtype)
    outputs["d_value"][0, 0] = scratch["value"][...].astype(outputs["d_value"].dtype)


def _start(plan: TpuPlan, operands, scratch) -> None:
  """Computes the terms of a block's queries, and of its cotangents, by row of the tables."""
  tiles.fill(scratch, ("query", "band_d_logits", "band_weights", "right_d_logits", "slopes"))
  tiles.store_logits(plan, operands, scratch)
  if "value_table" in operands:
    d_output, table = operands["d_output"][0, 0], operands["value_table"][0]
    rows = tiles.precise_product(table, d_output, (1, 0), d_output.dtype)
    tiles.store_band(plan, scratch, "value", rows)


def _tile(plan: TpuPlan, scratch, query_block, first, operands, number, offset, side) -> None:
  """Adds the terms of a tile to all gradients: of a plain one, or one that touches the band."""
  query, key, value, d_output = (
    operands[name][0, 0] for name in ("query", "key", "value", "d_output")
  )
  logits = tiles.logits_of(plan, operands, scratch, offset, side)
  shift = operands[f"{side}_shift" if side and "key_band" in scratch else "maximum"][0, 0]
  weights = jnp.exp(logits - shift) * operands["inverse_total"][0, 0]
  d_weights = tiles.product(value, d_output, (0, 0))
  common = 0  # The weights' gradient has this term for all keys of the tile.
  if "value_table" in operands:
    common = scratch["value_left"][...]
    if side == "right":
      common += scratch["value_right"][...]
    if not side:
      terms = (scratch[f"value_{name}"] for name in ("band", "right"))
      d_weights = tiles.add_band(plan, d_weights, offset, *terms)
  delta = operands["delta"][0, 0]
  if plan.dropout_rate:
    global_block, seed = plan.key_block + first + number, operands["seeds"][0, 0]
    kept = tiles.keep(plan, seed, query_block, global_block)
    factor = jnp.where(kept, 1 / (1 - plan.dropout_rate), 0).astype(weights.dtype)
    d_logits = weights * ((d_weights + common) * factor - delta)
    weights = weights * factor
  else:
    d_logits = weights * (d_weights - (delta - common))
  _collect(plan, scratch, "weights", weights, offset, side)
  _collect(plan, scratch, "d_logits", d_logits, offset, side)
  if "slopes" in scratch:
    distance = tiles.all_distances(plan, offset)
    steps = jnp.abs(distance).astype(d_logits.dtype)
    scratch["slopes"][...] -= (d_logits * steps).sum(0, keepdims=True)
  low_weights, low_d_logits = (x.astype(query.dtype) for x in (weights, d_logits))
  keys = pl.ds(pl.multiple_of((first + number) * plan.block, plan.block), plan.block)
  scratch["value"][:, keys] += tiles.product(d_output, low_weights, (1, 1))
  scratch["key"][:, keys] += tiles.product(query, low_d_logits, (1, 1))
  scratch["query"][...] += tiles.product(key, low_d_logits, (1, 0))


def _collect(plan: TpuPlan, scratch, name: str, tile, offset, side: str | None) -> None:
  """Adds a tile to the skewed sums of the band, and to the sums right of it."""
  right, band = (scratch.get(f"{place}_{name}") for place in ("right", "band"))
  if side:
    if side == "right" and right is not None:
      right[...] += tile.sum(0, keepdims=True)
    return
  if band is not None:
    for piece, inside in tiles.crossing(plan, offset):
      band[piece.band] += jnp.where(inside, tile[piece.keys, piece.queries], 0)
  if right is not None and offset >= 0 and plan.sees_right():
    right[...] += tiles.sum_right(plan, tile, offset)


def _finish(plan: TpuPlan, operands, outputs, scratch) -> None:
  d_query = scratch["query"][...]
  query, d_output = operands["query"][0, 0], operands["d_output"][0, 0]
  row = jax.lax.broadcasted_iota(jnp.int32, (plan.period, plan.block), 0)

  def product(x, y):
    return tiles.product(x.astype(y.dtype), y, (1, 1))

  if tiles.has_logits(operands):
    d_logits = tiles.skew(plan, scratch["band_d_logits"][...], -1)
    d_logits = jnp.where(row == plan.last_row, scratch["right_d_logits"][...], d_logits)

    # The gradients of a query's logits sum to zero: that left of the band is minus the others.
    def relative(table):
      return table - table[plan.left_row, None]

    if "key_table" in operands:
      table = relative(operands["key_table"][0])
      d_query += tiles.precise_product(table, d_logits, (0, 0), query.dtype)
      outputs["d_key_table"][0, 0] += product(d_logits, query) * plan.scale
    if "content_table" in operands:
      content, table = operands["content"][0, 0], relative(operands["content_table"][0])
      d_content = tiles.precise_product(table, d_logits, (0, 0), content.dtype)
      outputs["d_content"][0, 0] = d_content.astype(outputs["d_content"].dtype)
      outputs["d_content_table"][0, 0] += product(d_logits, content)
    if "bias_table" in operands:
      outputs["d_bias_table"][0, 0] += d_logits.sum(1, keepdims=True)
  if "slopes" in operands:
    outputs["d_slopes"][0, 0] += scratch["slopes"][...].sum(1, keepdims=True)
  if "value_table" in operands:
    weights = tiles.skew(plan, scratch["band_weights"][...], -1)
    sums = (operands[name][0, 0] for name in ("sums", "right_sums"))
    outputs["d_value_table"][0, 0] += product(tiles.place_sums(plan, weights, *sums), d_output)
  outputs["d_query"][0, 0] = (d_query * plan.scale).astype(outputs["d_query"].dtype)
