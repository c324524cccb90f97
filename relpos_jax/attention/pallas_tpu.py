"""Attention by fused kernels for TPUs: relative keys and values in memory O(T (H + R)).

This module pads to blocks and defines the derivative around the kernels of
`pallas_tpu_kernels`. On other platforms these run, slowly, in Pallas' interpret mode.
"""

import functools

import jax
import jax.numpy as jnp

from relpos_jax.attention import band
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.pallas_tpu_kernels import (
  AXES,
  TABLES,
  TpuPlan,
  backward,
  forward,
)
from relpos_jax.attention.partitioned import Arrays, over_devices, target_platform
from relpos_jax.typing import Array, Float

_BLOCKS = 128, 256, 512  # vectors have 128 lanes
_MAX_ROWS = 2048
_MAX_WIDTH = 256
_MAX_HELD = (
  40 * 2**20
)  # bytes of a chip's memory for the gradients of all keys of a head


def unsupported(inputs: Inputs, interpret: bool | None = None) -> str | None:
  """Returns why this implementation cannot run the call; None if it can."""
  if reason := band.unsupported_by_kernels(inputs):
    return reason
  first, last = band.kernel_limits(inputs)
  if (num_rows := last - first + 1) > _MAX_ROWS:
    return (
      f"the call reaches {num_rows} rows of the tables; it takes at most {_MAX_ROWS}"
    )
  if _interpret(interpret):
    return None
  dtype, (_, num_keys, _, width) = inputs.query.dtype, inputs.key.shape
  if dtype not in (jnp.bfloat16, jnp.float32):
    return f"dtype is {dtype}; TPUs take bfloat16 and float32"
  if width > _MAX_WIDTH:
    return f"heads are {width} wide; they fit the chip up to {_MAX_WIDTH}"
  # Two sums in float32, and the gradients twice: one is copied while the other is
  # written.
  most = _MAX_HELD // (width * (8 + 4 * dtype.itemsize))
  if num_keys > most:
    return f"keys are {num_keys}; of {dtype} and {width} wide, {most} fit the chip"
  return None


def attention(
  inputs: Inputs, *, interpret: bool | None = None, block: int | None = None
) -> Float[Array, "B T N H"]:
  """Computes attention by the fused kernels.

  `interpret` selects Pallas' interpret mode, by default if the platform is not a TPU;
  False also compiles for a TPU topology without a device
  (`jax.experimental.topologies`). A tile has `block` queries and as many keys: a power
  of 2, on a TPU a multiple of 128.
  """
  interpret, length = _interpret(interpret), inputs.query.shape[1]
  longest = max(length, inputs.key.shape[1])
  block = block or (
    16 if interpret else next((x for x in _BLOCKS if x >= longest), _BLOCKS[-1])
  )
  plan = TpuPlan.of(inputs, block, interpret)
  floats = dict(query=inputs.query, key=inputs.key, value=inputs.value)
  floats = {
    name: jnp.moveaxis(band.pad(x, 1, block), 1, 3) for name, x in floats.items()
  }
  for name, rows in band.tables(inputs).items():
    # The row of distance d, from `low` on, becomes row d % period.
    rows = jnp.roll(band.pad(rows, 0, plan.period), plan.low, axis=0).swapaxes(0, 1)
    floats[name] = rows[..., None] if name == "bias_table" else rows
  new_axes = dict(key_mask=2, key_segments=2, query_segments=1, seeds=(2, 3))
  masks = band.kernel_masks(inputs, block, block)
  masks = {name: jnp.expand_dims(x, new_axes[name]) for name, x in masks.items()}
  output = jnp.moveaxis(_attend(plan, floats, masks)[..., :length], 3, 1)
  if inputs.query_mask is not None:
    output = jnp.where(jnp.moveaxis(inputs.query_mask, 1, 2), output, 0)
  return output.astype(inputs.value.dtype)


def _interpret(interpret: bool | None) -> bool:
  return target_platform() != "tpu" if interpret is None else interpret


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: TpuPlan, floats: Arrays, masks: Arrays) -> Float[Array, "B N H T"]:
  """Computes attention of operands in `AXES`, in float32 or wider."""
  return _attend_forward(plan, floats, masks)[0]


def _attend_forward(
  plan: TpuPlan, floats: Arrays, masks: Arrays
) -> tuple[Array, tuple]:
  outputs = over_devices(forward, AXES, floats | masks, plan)
  return outputs["output"], (floats, masks, outputs)


def _attend_backward(
  plan: TpuPlan, residuals: tuple, d_output: Array
) -> tuple[Arrays, None]:
  floats, masks, outputs = residuals
  # Of a wide output: an error of delta enters all of a query's gradients.
  delta = (d_output * outputs["output"]).sum(2, keepdims=True)
  operands = (
    floats | masks | {name: outputs[name] for name in ("maximum", "inverse_total")}
  )
  operands |= dict(d_output=d_output.astype(floats["value"].dtype), delta=delta)
  gradients = over_devices(backward, AXES, operands, plan)
  gradients = {name: gradients[f"d_{name}"] for name in floats}
  for name in [x for x in TABLES if x in floats]:
    of_heads = gradients[name].sum(0)
    is_shared = len(floats[name]) == 1
    gradients[name] = of_heads.sum(0, keepdims=True) if is_shared else of_heads
  return gradients, None


_attend.defvjp(_attend_forward, _attend_backward)
