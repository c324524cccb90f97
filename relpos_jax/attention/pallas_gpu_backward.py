"""The backward kernels for GPUs: gradient of queries and band; of keys and values.

Tiles right of the band with c_i and delta_i - dSums_i; mixed tiles; plain tiles left.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from relpos_jax.attention import pallas_gpu_tiles as tiles
from relpos_jax.attention.pallas_gpu_tiles import Arrays, Cotangents, Gradients, GpuPlan, Tile
from relpos_jax.typing import Array


def backward(plan: GpuPlan, arrays: Arrays, cotangents: Cotangents) -> Gradients:
  """Those of the query and the band by one kernel, of key and value by another."""
  operands, axes = (arrays, cotangents), (tiles.ARRAYS, tiles.COTANGENTS)
  like = lambda x, dtype: None if x is None else jax.ShapeDtypeStruct(x.shape, dtype)
  batch, _, heads, width = arrays.query.shape
  # What more is added to is rounded later.
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
  """The tile's weights, those dropped left out, and the gradient of its logits."""
  of = cotangents.right if tile.side == "right" else cotangents.left
  delta = of.delta[tile.queries]
  maximum, inverse_total = (
    x[tile.queries][:, None] for x in (cotangents.maximum, cotangents.inverse_total)
  )
  weights = jnp.exp(tiles.logits(plan, arrays, tile, query, key) - maximum) * inverse_total
  d_weights = tiles.dot(d_output, value, 1, 1)
  if tile.mixed and plan.sums:
    d_weights += tiles.gather(plan, cotangents.sums, tile)
  if not plan.rate:
    return weights, weights * (d_weights - delta[:, None])
  if of.d_weights is not None:
    d_weights += of.d_weights[tile.queries][:, None]
  share = jnp.where(tiles.keep(plan, arrays, tile), 1 / (1 - plan.rate), 0).astype(weights.dtype)
  return weights * share, weights * (d_weights * share - delta[:, None])
