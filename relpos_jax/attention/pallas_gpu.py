"""Attention by fused kernels for GPUs, Pallas through Triton: never [T, S], forward or backward.

This module pads to blocks, computes the thin products with the tables, and defines the derivative
around the kernels of `pallas_gpu_kernels`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from relpos_jax.attention import band as bands
from relpos_jax.attention import dropout, masks, reference
from relpos_jax.attention.choice import target_platform
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.pallas_gpu_kernels import backward, forward
from relpos_jax.attention.pallas_gpu_tiles import (
  AXES,
  Arrays,
  Blocks,
  Cotangents,
  GpuPlan,
  Gradients,
  Outputs,
  Side,
  named,
)
from relpos_jax.attention.partitioned import over_devices
from relpos_jax.typing import Array, Float, Int

_MIN_TILE = 16  # the smallest side of a product on the tensor cores
_MAX_WIDTH = 256  # of heads whose tiles fit a multiprocessor's memory


def attention(inputs: Inputs) -> Float[Array, "B T N H"]:
  """Computes attention by the kernels; interpreted, and slow, without a GPU."""
  return attention_in_blocks(inputs, default_blocks(inputs), interpret=not _on_gpu())


def unsupported(inputs: Inputs) -> str | None:
  """Returns why this implementation cannot run the call; None if it can."""
  if inputs.bias is not None:
    return "bias is given"
  if inputs.mask is not None and inputs.mask.shape[1:3] != (1, 1):
    return f"mask has shape {inputs.mask.shape}; it needs [B or 1, 1, 1, S], a mask of keys"
  width = inputs.query.shape[3]
  if width > _MAX_WIDTH:
    return f"heads are {width} wide; it needs {_MAX_WIDTH} or less"
  if _on_gpu() and inputs.query.dtype == jnp.float64:
    return "query is float64; on a GPU it needs float32 or narrower"
  return bands.unsupported(inputs)


def default_blocks(inputs: Inputs) -> Blocks:
  """Returns tiles that fit an H100's registers. They are not tuned on a device."""
  width, bytes_each = inputs.query.shape[3], inputs.query.dtype.itemsize
  if width <= 128 and bytes_each <= 2:
    tiles = [(128, 64, 2), (64, 64, 4), (64, 64, 4)]
  else:
    tiles = [(64, 32, 2), (32, 32, 2), (32, 32, 2) if width <= 64 else (16, 32, 1)]
  lengths = [_power_of_2(x.shape[1]) for x in (inputs.query, inputs.key)]
  shortest = min(lengths) // _MIN_TILE
  return Blocks(*((*map(min, tile, lengths), min(tile[2], shortest)) for tile in tiles))


def attention_in_blocks(inputs: Inputs, blocks: Blocks, interpret: bool) -> Float[Array, "B T N H"]:
  """Computes attention with tiles of given sizes: powers of 2, on a GPU at least 16."""
  band = bands.band_of(inputs)
  if band is not None and band.key is not None:
    # Wide, so that the gradient is rounded once, after its two terms are added.
    wide = jnp.promote_types(inputs.query.dtype, jnp.float32)
    inputs = inputs._replace(query=inputs.query.astype(wide))
  plan = _plan(inputs, band, blocks, interpret)
  length, width = inputs.query.shape[1], inputs.query.shape[3]
  output, sums, row_sums = _attend(plan, _arrays(inputs, band, blocks))
  output = output[:, :length, :, :width]
  if plan.sums:
    output += _relative_values(sums[:, :, :length], row_sums[:, :, :length], band)
  if inputs.query_lengths is not None:
    output = jnp.where(jnp.moveaxis(inputs.real_queries(), 1, 2), output, 0)
  return output.astype(inputs.value.dtype)


def _on_gpu() -> bool:
  return target_platform() == "gpu"


def _power_of_2(size: int) -> int:
  """Rounds up to a power of 2, at least `_MIN_TILE`."""
  return max(_MIN_TILE, 1 << (size - 1).bit_length())


def _plan(inputs: Inputs, band: bands.Band | None, blocks: Blocks, interpret: bool) -> GpuPlan:
  left, right = (None, None) if inputs.window is None else inputs.window
  return GpuPlan(
    scale=1.0 if _is_traced(inputs.scale) else float(inputs.scale),
    first=None if band is None else band.first,
    num_diagonals=0 if band is None else band.num_diagonals,
    lowest=None if left is None else -left,
    highest=0 if inputs.is_causal else right,
    sums=band is not None and band.value is not None,
    rate=0.0 if inputs.dropout_seeds is None else inputs.dropout_rate,
    blocks=blocks,
    num_warps=8 if inputs.key.shape[3] > 64 and inputs.key.dtype.itemsize <= 2 else 4,
    interpret=interpret,
  )


def _is_traced(scale: object) -> bool:
  """Returns whether the scale is no static number; the queries are then multiplied by it."""
  return isinstance(scale, jax.core.Tracer)


def _arrays(inputs: Inputs, band: bands.Band | None, blocks: Blocks) -> Arrays:
  """Returns the kernels' operands: padded, and all with a batch axis."""
  block_T, block_S, _ = (max(sizes) for sizes in zip(*blocks, strict=True))
  query, key, value = (
    _padded(x, 3, _power_of_2(x.shape[3])) for x in (inputs.query, inputs.key, inputs.value)
  )
  if _is_traced(inputs.scale):
    query *= jnp.asarray(inputs.scale, query.dtype)
  logits = None
  if band is not None and band.key is not None:
    logits = _padded(_relative_logits(inputs, band), 2, block_T)
  visible = _visible_keys(inputs, block_S)
  segments = inputs.query_segment_ids, inputs.key_segment_ids
  return Arrays(
    _padded(query, 1, block_T),
    _padded(key, 1, block_S),
    _padded(value, 1, block_S),
    logits,
    visible,
    None if visible is None else _key_ends(visible),
    *(_segments(x, len(query), n) for x, n in zip(segments, (block_T, block_S), strict=True)),
    inputs.dropout_seeds,
  )


def _relative_logits(inputs: Inputs, band: bands.Band) -> Float[Array, "B N T R"]:
  """Computes scale * q_i . w'K_r, in float32 or wider."""
  logits = reference.product("BTNH,RNH->BNTR", inputs.query, band.key)
  return logits * jnp.asarray(inputs.scale, logits.dtype)


def _relative_values(
  sums: Float[Array, "B N T R"], row_sums: Float[Array, "B N T"], band: bands.Band
) -> Float[Array, "B T N H"]:
  """Computes sum_j p_ij aV_ij from the weights' sums by row and their total."""
  output = reference.product("BNTR,RNH->BTNH", sums, band.value)
  return output + row_sums.swapaxes(1, 2)[..., None] * band.left_value[None, None]


def _padded(x: Array, axis: int, block: int) -> Array:
  """Pads an axis with zeros to a multiple of `block`."""
  missing = -x.shape[axis] % block
  return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)]) if missing else x


def _visible_keys(inputs: Inputs, block: int) -> Int[Array, "B S"] | None:
  """Returns 1 for visible keys, 0 for others; None if all are visible and none are padding."""
  batch, num_keys = inputs.key.shape[:2]
  visible = masks.combine(inputs.mask, inputs.real_keys())
  if visible is None and num_keys % block == 0:
    return None
  visible = jnp.ones((batch, 1, 1, num_keys), jnp.int32) * (1 if visible is None else visible)
  return _padded(visible[:, 0, 0], 1, block)


def _key_ends(visible: Int[Array, "B S"]) -> Int[Array, " B"]:
  numbers = jnp.arange(1, visible.shape[1] + 1, dtype=jnp.int32)
  return jnp.max(visible * numbers[None], axis=1)


def _segments(ids: Array | None, batch: int, block: int) -> Int[Array, "B L"] | None:
  if ids is None:
    return None
  return _padded(jnp.broadcast_to(ids, (batch, ids.shape[1])).astype(jnp.int32), 1, block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: GpuPlan, arrays: Arrays) -> tuple[Array, Array | None, Array | None]:
  """Returns the output without the value table, the weights' sums by its rows, their total."""
  return _attend_forward(plan, arrays)[0]


def _attend_forward(plan: GpuPlan, arrays: Arrays) -> tuple:
  arrays = arrays._replace(query=arrays.query.astype(arrays.key.dtype))
  outputs = _on_each_device(functools.partial(_forward, plan), arrays)
  sums, row_sums = None, None
  if plan.sums:
    row_sums = outputs.row_sums
    if row_sums is None:
      row_sums = (outputs.inverse_total > 0).astype(outputs.inverse_total.dtype)
    sums = _sums(plan, arrays, outputs)
  results = outputs.output, sums, row_sums
  return results, (arrays, outputs.maximum, outputs.inverse_total, *results)


def _attend_backward(plan: GpuPlan, residuals: tuple, d_results: tuple) -> tuple[Arrays]:
  arrays, maximum, inverse_total, output, sums, row_sums = residuals
  d_output, d_sums, d_row_sums = d_results
  wide = maximum.dtype
  delta = jnp.einsum("BTNH,BTNH->BNT", d_output.astype(wide), output.astype(wide))
  if plan.sums:
    delta += (d_sums * sums).sum(-1)
  if not plan.rate:
    d_row_sums = None  # the sums are constant
  elif plan.sums:
    delta += d_row_sums * row_sums
  left = Side(delta, d_row_sums)
  right = _right_side(plan, left, d_sums) if plan.has_right else None
  d_output = d_output.astype(arrays.value.dtype)
  cotangents = Cotangents(d_output, d_sums, maximum, inverse_total, left, right)
  gradients = functools.partial(_backward, plan)
  d_query, d_logits, d_key, d_value = _on_each_device(gradients, arrays, cotangents)
  d_key, d_value = (_sum_shared(x, arrays.key) for x in (d_key, d_value))
  integers = dict.fromkeys(("visible", "key_ends", "query_segments", "key_segments", "seeds"))
  return (Arrays(d_query, d_key, d_value, d_logits, **integers),)


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(plan: GpuPlan, arrays: Arrays) -> Outputs:
  outputs = forward(plan, arrays)
  return outputs._replace(band=_fill_hidden(plan, arrays, outputs.band, masks.LOWEST))


def _backward(plan: GpuPlan, arrays: Arrays, cotangents: Cotangents) -> Gradients:
  gradients = backward(plan, arrays, cotangents)
  d_band_logits = _fill_hidden(plan, arrays, gradients.d_band_logits, 0.0)
  return gradients._replace(d_band_logits=d_band_logits)


def _on_each_device(function: Callable[..., Any], *operands: Any) -> Any:
  """Returns `function(*operands)`, tuples of arrays, sharded over batch and heads on a mesh."""
  structure = jax.tree.structure(operands)
  arrays = {name: x for operand in operands for name, x in named(operand).items()}
  to_tuples = lambda by_name: structure.unflatten([by_name[name] for name in arrays])
  results = jax.eval_shape(function, *operands)
  kernel = lambda by_name, _: named(function(*to_tuples(by_name)))
  computed = over_devices(kernel, AXES, arrays)
  return jax.tree.structure(results).unflatten([computed[name] for name in named(results)])


def _right_side(plan: GpuPlan, left: Side, d_sums: Array | None) -> Side:
  """Returns the numbers per query right of the band, where dP has one more term."""
  if not plan.sums:
    return left
  if plan.rate:
    return left._replace(d_weights=left.d_weights + d_sums[..., -1])
  return left._replace(delta=left.delta - d_sums[..., -1])


def _sums(plan: GpuPlan, arrays: Arrays, outputs: Outputs) -> Float[Array, "B N T R"]:
  """Computes each query's weights on the rows of the table."""
  sums = jnp.exp(outputs.band - outputs.maximum[..., None]) * outputs.inverse_total[..., None]
  if plan.rate:
    kept = dropout.keep(arrays.seeds[..., None, None], *_pairs(plan, sums.shape), plan.rate)
    sums = jnp.where(kept, sums / (1 - plan.rate), 0)
  return sums.at[..., -1].set(outputs.band[..., -1])


def _pairs(
  plan: GpuPlan, shape: tuple[int, ...]
) -> tuple[Int[Array, "1 1 T 1"], Int[Array, "1 1 T R"]]:
  """Returns the query and the key of each entry of [T, R], the last column excepted."""
  row, column = (jax.lax.broadcasted_iota(jnp.int32, (1, 1, *shape[2:]), axis) for axis in (2, 3))
  return row[..., :1], row + plan.first + column


def _fill_hidden(
  plan: GpuPlan, arrays: Arrays, band: Float[Array, "B N T R"] | None, fill: float
) -> Float[Array, "B N T R"] | None:
  """Fills in `fill` where the kernels wrote nothing: pairs without a key, and hidden pairs."""
  if band is None:
    return None
  rows, columns = _pairs(plan, band.shape)
  ends = arrays.key_ends
  ends = arrays.key.shape[1] if ends is None else ends[:, None, None, None]
  lowest, highest = plan.limits
  visible = (columns >= 0) & (columns - rows >= lowest) & (columns - rows <= highest)
  visible &= columns < ends
  return jnp.where(visible.at[..., -1].set(True), band, fill)


def _sum_shared(x: Array, like: Array) -> Float[Array, "B S K H"]:
  """Returns the sums over the query heads that share a key head."""
  batch, num_keys, key_heads, width = like.shape
  x = x.reshape(batch, num_keys, key_heads, -1, width)
  return x.sum(3).astype(like.dtype)
