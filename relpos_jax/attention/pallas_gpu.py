"""Attention by fused kernels for GPUs, Pallas through Triton: never [T, S], forward or
backward.

This module pads to blocks, computes the thin products with the tables, and defines the
derivative around the kernels of `pallas_gpu_kernels`.
"""

import functools

import jax
import jax.numpy as jnp

from relpos_jax.attention import band
from relpos_jax.attention.band import KernelPlan
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.lookup import product
from relpos_jax.attention.pallas_gpu_kernels import AXES, backward, forward
from relpos_jax.attention.partitioned import Arrays, over_devices, target_platform
from relpos_jax.typing import Array, Float

_MIN_TILE = 16  # the smallest side of a product on the tensor cores
_MAX_WIDTH = 256  # of heads whose tiles fit a multiprocessor's memory


def unsupported(inputs: Inputs) -> str | None:
  """Returns why this implementation cannot run the call; None if it can."""
  width = inputs.query.shape[3]
  if width > _MAX_WIDTH:
    return f"heads are {width} wide; it needs {_MAX_WIDTH} or less"
  if target_platform() == "gpu" and inputs.query.dtype == jnp.float64:
    return "query is float64; on a GPU it needs float32 or narrower"
  return band.unsupported_by_kernels(inputs)


def attention(
  inputs: Inputs, *, interpret: bool | None = None, block: tuple[int, int] | None = None
) -> Float[Array, "B T N H"]:
  """Computes attention by the kernels.

  `interpret` selects Pallas' interpret mode, by default if the platform is not a GPU.
  `block` has the queries and keys of a tile: powers of 2, on a GPU at least 16. Its
  default was not tuned.
  """
  length, width = inputs.query.shape[1], inputs.query.shape[3]
  if block is None:
    most = 64 if inputs.query.dtype.itemsize <= 2 else 32
    block = min(most, _power_of_2(length)), min(32, _power_of_2(inputs.key.shape[1]))
  interpret = target_platform() != "gpu" if interpret is None else interpret
  plan, tables = KernelPlan.of(inputs, block, interpret), band.tables(inputs)
  masks = band.kernel_masks(inputs, *block)
  output, weights = _attend(plan, _floats(inputs, tables, block), masks)
  output = output[:, :length, :, :width]
  if plan.has_values:
    output += product("BNTR,RNH->BTNH", weights[:, :, :length], tables["value_table"])
  if inputs.query_mask is not None:
    output = jnp.where(jnp.moveaxis(inputs.query_mask, 1, 2), output, 0)
  return output.astype(inputs.value.dtype)


def _power_of_2(size: int) -> int:
  """Rounds up to a power of 2, at least `_MIN_TILE`."""
  return max(_MIN_TILE, 1 << (size - 1).bit_length())


def _floats(inputs: Inputs, tables: Arrays, block: tuple[int, int]) -> Arrays:
  """Returns the operands that have gradients, padded to whole tiles."""
  # Wide, so that the gradient is rounded once, after its two terms are added.
  query = inputs.query.astype(jnp.promote_types(inputs.query.dtype, jnp.float32))
  arrays = dict(
    query=(query, block[0]), key=(inputs.key, block[1]), value=(inputs.value, block[1])
  )
  floats = {
    name: band.pad(band.pad(x, 1, size), 3, _power_of_2(x.shape[3]))
    for name, (x, size) in arrays.items()
  }
  terms = []
  if "key_table" in tables:
    logits = product("BTNH,RNH->BNTR", query, tables["key_table"])
    terms.append(
      band.pad(logits * jnp.asarray(inputs.scale, logits.dtype), 2, block[0])
    )
  if "bias_table" in tables:
    terms.append(tables["bias_table"].T[None, :, None])
  return floats | (dict(band_logits=sum(terms[1:], terms[0])) if terms else {})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
  plan: KernelPlan, floats: Arrays, masks: Arrays
) -> tuple[Array, Array | None]:
  """Returns the output without the value table's term, and the weights by row of the tables."""
  return _attend_forward(plan, floats, masks)[0]


def _attend_forward(plan: KernelPlan, floats: Arrays, masks: Arrays) -> tuple:
  operands = floats | masks | dict(query=floats["query"].astype(floats["key"].dtype))
  outputs = over_devices(forward, AXES, operands, plan)
  return (outputs["output"], outputs.get("band_weights")), (operands, outputs)


def _attend_backward(
  plan: KernelPlan, residuals: tuple, d_results: tuple
) -> tuple[Arrays, None]:
  operands, outputs = residuals
  d_output, d_weights = d_results
  # Of a wide output: an error of delta enters all of a query's gradients.
  delta = jnp.einsum(
    "BTNH,BTNH->BNT", d_output, outputs["output"], precision=plan.precision
  )
  if plan.has_values:
    delta += (d_weights * outputs["band_weights"]).sum(-1)
    operands = operands | dict(d_band_weights=d_weights)
  operands = operands | {name: outputs[name] for name in ("maximum", "inverse_total")}
  operands |= dict(d_output=d_output.astype(operands["value"].dtype), delta=delta)
  gradients = over_devices(backward, AXES, operands, plan)
  gradients = {name.removeprefix("d_"): x for name, x in gradients.items()}
  for name in ("key", "value"):  # summed over the query heads that share a key head
    batch, num_keys, key_heads, width = operands[name].shape
    x = gradients[name].reshape(batch, num_keys, key_heads, -1, width)
    gradients[name] = x.sum(3).astype(operands[name].dtype)
  return gradients, None


_attend.defvjp(_attend_forward, _attend_backward)
