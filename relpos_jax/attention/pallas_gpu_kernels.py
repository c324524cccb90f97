"""The kernels for GPUs: the output, the gradient of queries and band, that of keys and values.

For a block of queries: tiles right of the band, with one relative logit c_i per query; mixed tiles,
with the band's logits; plain tiles left of it. Backward, tiles right of the band use c_i and
delta_i - dSums_i.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from relpos_jax.attention import masks
from relpos_jax.attention import pallas_gpu_tiles as tiles
from relpos_jax.attention.pallas_gpu_tiles import (
  Arrays,
  Cotangents,
  GpuPlan,
  Gradients,
  Outputs,
  Tile,
)
from relpos_jax.typing import Array, Float


def forward(plan: GpuPlan, arrays: Arrays) -> Outputs:
  """Computes attention without the value table, and what the weights' sums by row need."""
  wide = jnp.promote_types(arrays.query.dtype, jnp.float32)
  dtype = wide if plan.sums else arrays.value.dtype  # rounded once, after the table's term
  batch, length, heads, _ = arrays.query.shape
  of_rows = jax.ShapeDtypeStruct((batch, heads, length), wide)
  of_band = jax.ShapeDtypeStruct((*of_rows.shape, plan.num_diagonals + 1), wide)
  shapes = Outputs(
    jax.ShapeDtypeStruct(arrays.query.shape, dtype),
    of_rows,
    of_rows,
    of_rows if plan.sums and arrays.seeds is not None else None,
    of_band if plan.sums else None,
  )
  blocks = plan.blocks.output
  return tiles.call(
    _output_kernel, plan, "T", blocks, (arrays,), (tiles.ARRAYS,), shapes, tiles.OUTPUTS
  )


class _State(NamedTuple):
  """The state of an online softmax: all but the maximum are relative to exp(maximum)."""

  maximum: Float[Array, " Q"]
  total: Float[Array, " Q"]
  kept: Float[Array, " Q"] | None  # the total after dropout
  right: Float[Array, " Q"] | None  # the part of the total right of the band
  output: Float[Array, "Q H"]


def _output_kernel(plan: GpuPlan, arrays: Arrays, outputs: Outputs):
  block, size, parts = plan.blocks.output
  query = arrays.query[...]
  start = pl.program_id(0) * block

  def visit(side: str, t: Array, state: _State) -> _State:
    width = size // parts if side == "mixed" else size
    keys = pl.ds(t * width, width)
    tile = Tile(start, t * width, (block, width), pl.ds(0, block), keys, side)
    logits = tiles.logits(plan, arrays, tile, query, arrays.key[keys])
    if tile.mixed and plan.sums:
      tiles.scatter(plan, outputs.band, tile, logits)
    return _attend(plan, arrays, tile, state, logits, arrays.value[keys])

  begin, left_end, right_begin, end = tiles.key_tiles(plan, arrays, start, (block, size))
  dtype = outputs.maximum.dtype
  zeros = jnp.zeros(block, dtype)
  kept = zeros if plan.sums and plan.rate else None
  output = jnp.zeros((block, arrays.query.shape[1]), dtype)
  state = _State(jnp.full(block, masks.LOWEST, dtype), zeros, kept, None, output)
  if plan.has_right:
    state = lax.fori_loop(right_begin, end, functools.partial(visit, "right"), state)
  if plan.sums:
    state = state._replace(right=state.kept if plan.rate else state.total)
  mixed = left_end * parts, right_begin * parts
  state = lax.fori_loop(*mixed, functools.partial(visit, "mixed"), state)
  right, old_maximum = state.right, state.maximum
  state = state._replace(right=None)
  state = lax.fori_loop(begin, left_end, functools.partial(visit, "left"), state)
  factor = _finish(plan, state, outputs)
  if plan.sums:
    outputs.band[:, plan.num_diagonals] = right * jnp.exp(old_maximum - state.maximum) * factor


def _attend(
  plan: GpuPlan, arrays: Arrays, tile: Tile, state: _State, logits: Array, value: Array
) -> _State:
  """Returns the state after one more tile."""
  maximum = jnp.maximum(state.maximum, logits.max(1))
  correction = jnp.exp(state.maximum - maximum)
  weights = jnp.exp(logits - maximum[:, None])
  total = state.total * correction + weights.sum(1)
  kept, right = state.kept, state.right
  if plan.rate:
    weights = jnp.where(tiles.keep(plan, arrays, tile), weights, 0)
  if kept is not None:
    kept = kept * correction + weights.sum(1)
  if right is not None:
    right = right * correction + jnp.where(tile.distances >= plan.right, weights, 0).sum(1)
  output = state.output * correction[:, None] + tiles.dot(weights.astype(value.dtype), value, 1, 0)
  return _State(maximum, total, kept, right, output)


def _finish(plan: GpuPlan, state: _State, outputs: Outputs) -> Float[Array, " Q"]:
  """Writes the outputs, and returns the factor of sums of weights.

  It is zero for a query whose keys are all masked.
  """
  visible = state.maximum > masks.LOWEST / 2
  inverse_total = jnp.where(visible, 1 / jnp.where(visible, state.total, 1), 0)
  factor = inverse_total / (1 - plan.rate)
  outputs.output[...] = (state.output * factor[:, None]).astype(outputs.output.dtype)
  outputs.maximum[...] = state.maximum
  outputs.inverse_total[...] = inverse_total
  if outputs.row_sums is not None:
    outputs.row_sums[...] = state.kept * factor
  return factor


def backward(plan: GpuPlan, arrays: Arrays, cotangents: Cotangents) -> Gradients:
  """Computes gradients by two kernels: of the query and the band, and of key and value."""
  operands, axes = (arrays, cotangents), (tiles.ARRAYS, tiles.COTANGENTS)
  like = lambda x, dtype: None if x is None else jax.ShapeDtypeStruct(x.shape, dtype)
  batch, _, heads, width = arrays.query.shape
  # Gradients to which more is added are rounded later.
  wide = jnp.promote_types(arrays.query.dtype, jnp.float32)
  dtype = arrays.key.dtype if heads == arrays.key.shape[2] else wide
  of_query = like(arrays.query, arrays.query.dtype if arrays.band_logits is None else wide)
  of_keys = jax.ShapeDtypeStruct((batch, arrays.key.shape[1], heads, width), dtype)
  first = Gradients(of_query, like(arrays.band_logits, wide), None, None)
  second = Gradients(None, None, of_keys, of_keys)
  blocks = plan.blocks.d_query, plan.blocks.d_key
  first = tiles.call(_d_query_kernel, plan, "T", blocks[0], operands, axes, first, tiles.GRADIENTS)
  second = tiles.call(_d_key_kernel, plan, "S", blocks[1], operands, axes, second, tiles.GRADIENTS)
  return Gradients(*first[:2], *second[2:])


def _d_query_kernel(plan: GpuPlan, arrays: Arrays, cotangents: Cotangents, gradients: Gradients):
  block, size, parts = plan.blocks.d_query
  query, d_output = arrays.query[...], cotangents.output[...]
  start = pl.program_id(0) * block
  with_band = arrays.band_logits is not None

  def visit(side: str, t: Array, carry: tuple) -> tuple:
    d_query, d_right = carry
    width = size // parts if side == "mixed" else size
    keys = pl.ds(t * width, width)
    tile = Tile(start, t * width, (block, width), pl.ds(0, block), keys, side)
    key, value = arrays.key[keys], arrays.value[keys]
    _, d_logits = _d_logits(plan, arrays, cotangents, tile, query, key, value, d_output)
    d_query += tiles.dot(d_logits.astype(key.dtype), key, 1, 0)
    if tile.mixed and with_band:
      tiles.scatter(plan, gradients.d_band_logits, tile, d_logits)
      d_right += jnp.where(tile.distances >= plan.right, d_logits, 0).sum(1)
    if side == "right" and with_band:
      d_right += d_logits.sum(1)
    return d_query, d_right

  begin, left_end, right_begin, end = tiles.key_tiles(plan, arrays, start, (block, size))
  wide = cotangents.left.delta.dtype
  carry = jnp.zeros(query.shape, wide), jnp.zeros(block, wide) if with_band else None
  if plan.has_right:
    carry = lax.fori_loop(right_begin, end, functools.partial(visit, "right"), carry)
  mixed = left_end * parts, right_begin * parts
  carry = lax.fori_loop(*mixed, functools.partial(visit, "mixed"), carry)
  carry = lax.fori_loop(begin, left_end, functools.partial(visit, "left"), carry)
  gradients.d_query[...] = (plan.scale * carry[0]).astype(gradients.d_query.dtype)
  if with_band:
    gradients.d_band_logits[:, plan.num_diagonals] = carry[1]


def _d_key_kernel(plan: GpuPlan, arrays: Arrays, cotangents: Cotangents, gradients: Gradients):
  size, block, parts = plan.blocks.d_key
  key, value = arrays.key[...], arrays.value[...]
  start = pl.program_id(0) * block

  def visit(side: str, t: Array, carry: tuple) -> tuple:
    height = size // parts if side == "mixed" else size
    queries = pl.ds(t * height, height)
    tile = Tile(t * height, start, (height, block), queries, pl.ds(0, block), side)
    query, d_output = arrays.query[queries], cotangents.output[queries]
    weights, d_logits = _d_logits(plan, arrays, cotangents, tile, query, key, value, d_output)
    return (
      carry[0] + tiles.dot(d_logits.astype(query.dtype), query, 0, 0),
      carry[1] + tiles.dot(weights.astype(d_output.dtype), d_output, 0, 0),
    )

  begin, right_end, left_begin, end = tiles.query_tiles(plan, arrays, start, (size, block))
  carry = (jnp.zeros(key.shape, cotangents.left.delta.dtype),) * 2
  if plan.has_right:
    carry = lax.fori_loop(begin, right_end, functools.partial(visit, "right"), carry)
  mixed = right_end * parts, left_begin * parts
  carry = lax.fori_loop(*mixed, functools.partial(visit, "mixed"), carry)
  carry = lax.fori_loop(left_begin, end, functools.partial(visit, "left"), carry)
  gradients.d_key[...] = (plan.scale * carry[0]).astype(gradients.d_key.dtype)
  gradients.d_value[...] = carry[1].astype(gradients.d_value.dtype)


def _d_logits(
  plan: GpuPlan,
  arrays: Arrays,
  cotangents: Cotangents,
  tile: Tile,
  query: Array,
  key: Array,
  value: Array,
  d_output: Array,
) -> tuple[Array, Array]:
  """Computes a tile's weights after dropout, and the gradient of its logits."""
  side = cotangents.right if tile.side == "right" else cotangents.left
  delta = side.delta[tile.queries]
  maximum, inverse_total = (
    x[tile.queries][:, None] for x in (cotangents.maximum, cotangents.inverse_total)
  )
  weights = jnp.exp(tiles.logits(plan, arrays, tile, query, key) - maximum) * inverse_total
  d_weights = tiles.dot(d_output, value, 1, 1)
  if tile.mixed and plan.sums:
    d_weights += tiles.gather(plan, cotangents.sums, tile)
  if not plan.rate:
    return weights, weights * (d_weights - delta[:, None])
  if side.d_weights is not None:
    d_weights += side.d_weights[tile.queries][:, None]
  factor = jnp.where(tiles.keep(plan, arrays, tile), 1 / (1 - plan.rate), 0).astype(weights.dtype)
  return weights * factor, weights * (d_weights * factor - delta[:, None])
