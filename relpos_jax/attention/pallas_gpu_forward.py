"""The forward kernel for GPUs: an online softmax over the tiles of a block of queries.

Tiles right of the band, with one number c_i for each query; mixed tiles, with the band's logits;
plain tiles left of it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from relpos_jax.attention import masks
from relpos_jax.attention import pallas_gpu_tiles as tiles
from relpos_jax.attention.pallas_gpu_tiles import Arrays, Outputs, GpuPlan, Tile
from relpos_jax.typing import Array, Float


def forward(plan: GpuPlan, arrays: Arrays) -> Outputs:
  """Attention without the value table, and what makes the sums of its weights."""
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
  """An online softmax: all but the maximum are to be multiplied by exp(maximum)."""

  maximum: Float[Array, " Q"]
  total: Float[Array, " Q"]
  kept: Float[Array, " Q"] | None  # the total of what dropout leaves
  right: Float[Array, " Q"] | None  # the part of it right of the band
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
  state = _empty(plan, arrays, block, outputs.maximum.dtype)
  if plan.has_right:
    state = lax.fori_loop(right_begin, end, functools.partial(visit, "right"), state)
  if plan.sums:
    state = state._replace(right=state.kept if plan.rate else state.total)
  mixed = left_end * parts, right_begin * parts
  state = lax.fori_loop(*mixed, functools.partial(visit, "mixed"), state)
  right, since = state.right, state.maximum
  state = state._replace(right=None)
  state = lax.fori_loop(begin, left_end, functools.partial(visit, "left"), state)
  of_output = _finish(plan, state, outputs)
  if plan.sums:
    outputs.band[:, plan.num_diagonals] = right * jnp.exp(since - state.maximum) * of_output


def _empty(plan: GpuPlan, arrays: Arrays, block: int, dtype: Any) -> _State:
  zeros = jnp.zeros(block, dtype)
  kept = zeros if plan.sums and plan.rate else None
  output = jnp.zeros((block, arrays.query.shape[1]), dtype)
  return _State(jnp.full(block, masks.LOWEST, dtype), zeros, kept, None, output)


def _attend(
  plan: GpuPlan, arrays: Arrays, tile: Tile, state: _State, logits: Array, value: Array
) -> _State:
  """The state after one more tile."""
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
  """Writes the output and what is known of each query; returns what sums are multiplied with.

  It is zero for a query that sees no key.
  """
  sees = state.maximum > masks.LOWEST / 2
  inverse_total = jnp.where(sees, 1 / jnp.where(sees, state.total, 1), 0)
  of_output = inverse_total / (1 - plan.rate)
  outputs.output[...] = (state.output * of_output[:, None]).astype(outputs.output.dtype)
  outputs.maximum[...] = state.maximum
  outputs.inverse_total[...] = inverse_total
  if outputs.row_sums is not None:
    outputs.row_sums[...] = state.kept * of_output
  return of_output
