"""Attention by fused kernels for GPUs, Pallas through Triton: never [T, S], forward or backward.

This module pads to blocks, computes the thin products with the tables, and defines the derivative
around the kernels of `pallas_gpu_kernels`.
"""

import functools
import math

import jax
import jax.numpy as jnp

from relpos_jax.attention import band as bands
from relpos_jax.attention import dropout, reference
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.pallas_gpu_kernels import AXES, FAR, Blocks, GpuPlan, backward, forward
from relpos_jax.attention.partitioned import axes_of_query, over_devices, target_platform
from relpos_jax.attention.relations import ByDistance, DistanceBias
from relpos_jax.typing import Array, Float

_MIN_TILE = 16  # the smallest side of a product on the tensor cores
_MAX_WIDTH = 256  # of heads whose tiles fit a multiprocessor's memory

Arrays = dict[str, Array]


def attention(inputs: Inputs) -> Float[Array, "B T N H"]:
  """Computes attention by the kernels; interpreted, and slow, without a GPU."""
  interpret = target_platform() != "gpu"
  return attention_in_blocks(inputs, default_blocks(inputs), interpret)


def unsupported(inputs: Inputs) -> str | None:
  """Returns why this implementation cannot run the call; None if it can."""
  width = inputs.query.shape[3]
  if width > _MAX_WIDTH:
    return f"heads are {width} wide; it needs {_MAX_WIDTH} or less"
  if target_platform() == "gpu" and inputs.query.dtype == jnp.float64:
    return "query is float64; on a GPU it needs float32 or narrower"
  return bands.unsupported_by_kernels(inputs)


def held(inputs: Inputs) -> str | None:
  """Returns the memory that the band's arrays take; None without a band."""
  kinds = {type(x) for x in inputs.relations if isinstance(x, ByDistance)}
  if not kinds:
    return None
  first, last = bands.distances(inputs)
  batch, length, heads, _ = inputs.query.shape
  shape = batch, heads, length, last - first + 1
  size = math.prod(shape) * max(4, inputs.query.dtype.itemsize)
  when = "the backward pass" if kinds == {DistanceBias} else "each pass"
  return f"{when} holds arrays of {shape} = {size / 2**20:,.1f} MiB for the band"


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
  if _has_logits(band):
    # Wide, so that the gradient is rounded once, after its two terms are added.
    wide = jnp.promote_types(inputs.query.dtype, jnp.float32)
    inputs = inputs._replace(query=inputs.query.astype(wide))
  length, width = inputs.query.shape[1], inputs.query.shape[3]
  plan = _plan(inputs, band, blocks, interpret)
  output, sums, row_sums = _attend(plan, *_operands(inputs, band, blocks))
  output = output[:, :length, :, :width]
  if plan.sums:
    # sum_j p_ij aV_ij, from the weights' sums by row and their total.
    table = band.tables.value
    relative = reference.product("BNTR,RNH->BTNH", sums[:, :, :length], table[1:])
    row_sums = row_sums[:, :, :length].swapaxes(1, 2)[..., None]
    output += relative + row_sums * table[:1][None]
  if inputs.query_lengths is not None:
    output = jnp.where(jnp.moveaxis(inputs.query_mask(), 1, 2), output, 0)
  return output.astype(inputs.value.dtype)


def _power_of_2(size: int) -> int:
  """Rounds up to a power of 2, at least `_MIN_TILE`."""
  return max(_MIN_TILE, 1 << (size - 1).bit_length())


def _plan(inputs: Inputs, band: bands.Band | None, blocks: Blocks, interpret: bool) -> GpuPlan:
  left, right = (FAR, FAR) if inputs.window is None else inputs.window
  return GpuPlan(
    scale=float(inputs.scale),
    first=FAR if band is None else band.first,
    num_diagonals=0 if band is None else band.num_diagonals,
    lowest=-min(left, FAR),
    highest=0 if inputs.is_causal else min(right, FAR),
    sums=band is not None and band.tables.value is not None,
    rate=0.0 if inputs.dropout_seeds is None else inputs.dropout_rate,
    blocks=blocks,
    num_warps=8 if inputs.key.shape[3] > 64 and inputs.key.dtype.itemsize <= 2 else 4,
    interpret=interpret,
    shards=axes_of_query(inputs.explicit),
    precision=jax.config.jax_default_matmul_precision,
  )


def _operands(inputs: Inputs, band: bands.Band | None, blocks: Blocks) -> tuple[Arrays, Arrays]:
  """Returns the kernels' floats and masks: padded, and all with a batch axis."""
  block_T, block_S, _ = (max(sizes) for sizes in zip(*blocks, strict=True))
  query, key, value = (
    bands.pad(x, 3, _power_of_2(x.shape[3])) for x in (inputs.query, inputs.key, inputs.value)
  )
  floats = dict(query=bands.pad(query, 1, block_T))
  floats |= dict(key=bands.pad(key, 1, block_S), value=bands.pad(value, 1, block_S))
  if _has_logits(band):
    logits = _band_logits(inputs, band)
    floats["band_logits"] = bands.pad(logits, 2, block_T) if _by_query(band) else logits
  if (slopes := bands.slopes(inputs)) is not None:
    floats["slopes"] = slopes
  batch, arrays = len(inputs.key), {}
  if (mask := bands.key_mask(inputs, block_S)) is not None:
    mask = jnp.broadcast_to(mask, (batch, mask.shape[1]))
    numbers = jnp.arange(1, mask.shape[1] + 1, dtype=jnp.int32)
    arrays |= dict(key_mask=mask, key_ends=jnp.max(mask * numbers[None], axis=1))
  if inputs.query_segment_ids is not None:
    for name, ids, block in (
      ("query_segments", inputs.query_segment_ids, block_T),
      ("key_segments", inputs.key_segment_ids, block_S),
    ):
      arrays[name] = bands.pad(jnp.broadcast_to(ids, (batch, ids.shape[1])), 1, block)
  if inputs.dropout_seeds is not None:
    arrays["seeds"] = dropout.from_row(inputs.dropout_seeds, inputs.query_offset)
  if not isinstance(inputs.query_offset, int) or inputs.query_offset:
    arrays["query_offset"] = jnp.broadcast_to(jnp.int32(inputs.query_offset), batch)
  return floats, arrays


def _has_logits(band: bands.Band | None) -> bool:
  """Returns whether any table of the band has a term of the logits."""
  return band is not None and bool(jax.tree.leaves(band.tables._replace(value=None)))


def _by_query(band: bands.Band) -> bool:
  """Returns whether queries have terms of their own: a `DistanceBias` is the same for all."""
  return band.tables.key is not None or band.tables.content is not None


def _band_logits(inputs: Inputs, band: bands.Band) -> Float[Array, "#B #N #T R"]:
  """Returns the relative term of each query by row of the tables, at last that left of the band."""
  key, _, content, bias, _ = jax.tree.map(lambda rows: jnp.roll(rows, -1, axis=0), band.tables)
  terms = []
  if key is not None:
    logits = reference.product("BTNH,RNH->BNTR", inputs.query, key)
    terms.append(logits * jnp.asarray(inputs.scale, logits.dtype))
  if content is not None:
    wide = band.content.astype(content.dtype)
    terms.append(reference.product("BTNP,RNP->BNTR", wide, content))
  if bias is not None:
    terms.append(bias.T[None, :, None])
  return sum(terms[1:], terms[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: GpuPlan, floats: Arrays, masks: Arrays) -> tuple:
  """Returns the output without the value table, the weights' sums by its rows, their total."""
  return _attend_forward(plan, floats, masks)[0]


def _attend_forward(plan: GpuPlan, floats: Arrays, masks: Arrays) -> tuple:
  operands = floats | masks | dict(query=floats["query"].astype(floats["key"].dtype))

  def kernel(operands, _):
    return forward(plan, operands)

  outputs = over_devices(kernel, AXES, operands, plan.shards, precision=plan.precision)
  results = outputs["output"], outputs.get("sums"), outputs.get("row_sums")
  return results, (operands, outputs)


def _attend_backward(plan: GpuPlan, residuals: tuple, d_results: tuple) -> tuple[Arrays, None]:
  operands, outputs = residuals
  d_output, d_sums, d_row_sums = d_results
  wide = outputs["maximum"].dtype
  d_wide, output = d_output.astype(wide), outputs["output"].astype(wide)
  delta = jnp.einsum("BTNH,BTNH->BNT", d_wide, output, precision=plan.precision)
  cotangents = dict(d_output=d_output.astype(operands["value"].dtype))
  cotangents |= {name: outputs[name] for name in ("maximum", "inverse_total")}
  if plan.sums:
    delta += (d_sums * outputs["sums"]).sum(-1)
    cotangents["d_sums"] = d_sums
    if plan.rate:  # otherwise the sums are constant
      delta += d_row_sums * outputs["row_sums"]
      cotangents["d_row_sums"] = d_row_sums
      right = dict(right_d_row_sums=d_row_sums + d_sums[..., -1])
    else:
      right = dict(right_delta=delta - d_sums[..., -1])
    cotangents |= right if plan.has_right else {}
  operands = operands | cotangents | dict(delta=delta)

  def kernel(operands, _):
    return backward(plan, operands)

  gradients = over_devices(kernel, AXES, operands, plan.shards, precision=plan.precision)
  gradients = {name.removeprefix("d_"): x for name, x in gradients.items()}
  if "slopes" in gradients:
    gradients["slopes"] = gradients["slopes"].sum((0, 2))
  for name in ("key", "value"):  # summed over the query heads that share a key head
    batch, num_keys, key_heads, width = operands[name].shape
    x = gradients[name].reshape(batch, num_keys, key_heads, -1, width)
    gradients[name] = x.sum(3).astype(operands[name].dtype)
  return gradients, None


_attend.defvjp(_attend_forward, _attend_backward)
