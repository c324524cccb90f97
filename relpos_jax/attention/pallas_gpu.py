"""Attention by fused kernels for GPUs, in Pallas with Triton, without a [T, S] tensor.

This module pads the arrays to blocks, multiplies queries by the tables, and calls the
kernels in pallas_gpu_kernels.py for the output and for its derivative.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from relpos_jax.attention import band, pallas_calls
from relpos_jax.attention.arrays import accumulation_dtype
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.pallas_calls import Arrays, pad, sum_over_groups
from relpos_jax.attention.pallas_gpu_kernels import AXES, KernelPlan, backward, forward
from relpos_jax.attention.partitioned import target_platform
from relpos_jax.typing import Array, Float

_MIN_TILE = 16  # the smallest matrix side that tensor cores multiply
_MAX_WIDTH = 256  # the largest head width for which tiles fit in shared memory


def unsupported(inputs: Inputs) -> str | None:
  """Returns the reason why the kernels cannot run the call, or None if they can."""
  width, value_width = inputs.query.shape[3], inputs.value.shape[3]
  if width > _MAX_WIDTH:
    return f"heads have width {width}; it needs {_MAX_WIDTH} or less"
  if target_platform() == "gpu" and inputs.query.dtype == jnp.float64:
    return "query is float64; on a GPU it needs float32 or narrower"
  if value_width != width:
    return f"values have width {value_width}; it needs the keys' width, {width}"
  return pallas_calls.unsupported(inputs)


def attention(
  inputs: Inputs, *, interpret: bool | None = None, block: tuple[int, int] | None = None
) -> Float[Array, "B T N H"]:
  """Computes attention with the kernels.

  Args:
    inputs: the arguments of the call.
    interpret: whether to use Pallas' interpret mode; None uses it except on GPUs.
    block: the numbers of queries and keys in a tile. They are powers of 2, and at least
      16 on a GPU. The default was not tuned.
  """
  if block is None:
    most = 64 if inputs.query.dtype.itemsize <= 2 else 32
    length, num_keys = inputs.query.shape[1], inputs.key.shape[1]
    block = min(most, _power_of_2(length)), min(32, _power_of_2(num_keys))
  low, high = pallas_calls.ends(inputs)
  plan = KernelPlan(
    block=block,
    low=low,
    high=high,
    scale=np.asarray(inputs.scale).item(),
    is_causal=inputs.is_causal,
    dropout_rate=inputs.dropout_rate,
    has_values=band.value_table(inputs) is not None,
    interpret=target_platform() != "gpu" if interpret is None else interpret,
    precision=jax.config.jax_default_matmul_precision,  # pyright: ignore
  )
  output, weights = pallas_calls.on_devices(
    functools.partial(_attend, plan),
    inputs,
    _floats(inputs, block),
    pallas_calls.prepare_masks(inputs, *block),
    axes_of=AXES,
    weights=("band_weights",) if plan.has_values else (),
  )
  return pallas_calls.finish(inputs, output, weights.get("band_weights"))


def _power_of_2(size: int) -> int:
  """Rounds up to a power of 2, at least `_MIN_TILE`."""
  return max(_MIN_TILE, 1 << (size - 1).bit_length())


def _floats(inputs: Inputs, block: tuple[int, int]) -> Arrays:
  """Returns the differentiable arrays, padded to whole tiles."""
  # Promoted, so that its gradient is rounded once, after its two terms are added.
  query = inputs.query.astype(accumulation_dtype(inputs.query.dtype))
  arrays = dict(
    query=(query, block[0]), key=(inputs.key, block[1]), value=(inputs.value, block[1])
  )
  floats = {}
  for name, (x, size) in arrays.items():
    floats[name] = pad(pad(x, 1, size), 3, _power_of_2(x.shape[3]))
  rows = band.logits_by_row(inputs)
  if rows is not None:
    floats["band_logits"] = rows if rows.shape[2] == 1 else pad(rows, 2, block[0])
  return floats


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
  plan: KernelPlan, floats: Arrays, key_masks: Arrays
) -> tuple[Array, Arrays]:
  """Computes the output without the value table's term, and weights for that term.

  The weights are a dictionary with `band_weights`, empty without a value table.
  """
  return _attend_forward(plan, floats, key_masks)[0]


def _attend_forward(plan: KernelPlan, floats: Arrays, key_masks: Arrays) -> tuple:
  operands = (
    floats | key_masks | dict(query=floats["query"].astype(floats["key"].dtype))
  )
  with jax.default_matmul_precision(plan.precision):
    outputs = forward(plan, operands)
  weights = {}
  if plan.has_values:
    weights["band_weights"] = outputs["band_weights"]
  return (outputs["output"], weights), (operands, outputs)


def _attend_backward(
  plan: KernelPlan, residuals: tuple, d_results: tuple
) -> tuple[Arrays, None]:
  operands, outputs = residuals
  d_output, d_weights = d_results
  # Uses the output before it is rounded, since an error of delta enters all gradients
  # of a query.
  delta = jnp.einsum(
    "BTNH,BTNH->BNT", d_output, outputs["output"], precision=plan.precision
  )
  if plan.has_values:
    d_band_weights = d_weights["band_weights"]
    delta += (d_band_weights * outputs["band_weights"]).sum(-1)
    operands = operands | dict(d_band_weights=d_band_weights)
  operands = operands | {name: outputs[name] for name in ("maximum", "inverse_total")}
  operands |= dict(d_output=d_output.astype(operands["value"].dtype), delta=delta)
  with jax.default_matmul_precision(plan.precision):
    gradients = backward(plan, operands)
  return sum_over_groups(operands, gradients), None


_attend.defvjp(_attend_forward, _attend_backward)
