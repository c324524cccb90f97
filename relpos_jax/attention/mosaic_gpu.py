"""Attention by fused kernels for Hopper GPUs, in Pallas with Mosaic.

This module pads the arrays to blocks, multiplies queries by the tables, and calls the
kernels in mosaic_gpu_kernels.py for the output and for its derivative. The kernels have
been run only in interpret mode on a CPU, with race detection; never on a GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from relpos_jax.attention import band, pallas_calls
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.mosaic_gpu_kernels import (
  AXES,
  TILE,
  WIDTH,
  KernelPlan,
  backward,
  forward,
  to_tiles,
)
from relpos_jax.attention.pallas_calls import Arrays, pad, sum_over_groups
from relpos_jax.attention.partitioned import target_device, target_platform
from relpos_jax.typing import Array, Float

# The oldest versions that compile the kernels for a GPU, and that interpret them.
_OLDEST_COMPILER, _OLDEST_INTERPRETER = (0, 11, 2), (0, 12)
_MAX_WIDTH = 128  # the largest head width for which sums fit in registers


def unsupported(inputs: Inputs) -> str | None:
  """Returns the reason why the kernels cannot run the call, or None if they can."""
  return pallas_calls.unsupported(inputs) or _unsupported_kind(inputs)


def _unsupported_kind(inputs: Inputs) -> str | None:
  """Returns the reason if a width, a dtype, JAX's version or the GPU is unsupported."""
  for name in ("key", "value"):
    width = getattr(inputs, name).shape[3]
    if width > _MAX_WIDTH:
      return f"{name} has width {width}; it needs {_MAX_WIDTH} or less"
  if inputs.query.dtype not in (jnp.bfloat16, jnp.float16):
    return f"query is {inputs.query.dtype}; it needs bfloat16 or float16"
  is_compiled = target_platform() == "gpu"
  oldest = _OLDEST_COMPILER if is_compiled else _OLDEST_INTERPRETER
  if jax.__version_info__ < oldest:
    needed = ".".join(map(str, oldest))
    return f"jax is {jax.__version__}; it needs {needed} or newer"
  # Descriptions of devices have no compute capability.
  capability = getattr(target_device(), "compute_capability", "9.0")
  if is_compiled and not capability.startswith("9."):
    return f"the GPU has compute capability {capability}; it needs 9, Hopper"
  return None


def attention(
  inputs: Inputs, *, interpret: bool | None = None
) -> Float[Array, "B T N V"]:
  """Computes attention with the kernels.

  Args:
    inputs: the arguments of the call.
    interpret: whether to interpret the kernels on a CPU; None does so except on GPUs.
      On one core with one CPU device, JAX's interpreter once waited forever. With eight
      CPU devices (`jax_num_cpu_devices`) it did not.
  """
  low, high = pallas_calls.ends(inputs)
  plan = KernelPlan(
    low=low,
    high=high,
    scale=np.asarray(inputs.scale).item(),
    is_causal=inputs.is_causal,
    dropout_rate=inputs.dropout_rate,
    has_values=band.value_table(inputs) is not None,
    interpret=target_platform() != "gpu" if interpret is None else interpret,
  )
  output, weights = pallas_calls.on_devices(
    functools.partial(_attend, plan),
    inputs,
    _floats(plan, inputs),
    pallas_calls.prepare_masks(inputs, TILE, TILE),
    axes_of=AXES,
    weights=_WEIGHTS if plan.has_values else (),
  )
  by_row = _rows(plan, weights) if plan.has_values else None
  return pallas_calls.finish(inputs, output, by_row)


def _floats(plan: KernelPlan, inputs: Inputs) -> Arrays:
  """Returns the differentiable arrays, padded to whole tiles."""
  # Promoted, so that its gradient is rounded once, after its two terms are added.
  query = inputs.query.astype(jnp.float32)
  floats = {}
  for name, x in dict(query=query, key=inputs.key, value=inputs.value).items():
    floats[name] = pad(pad(x, 1, TILE), 3, WIDTH)
  rows = band.logits_by_row(inputs)
  if rows is None:
    return floats
  if rows.shape[2] > 1:
    rows = pad(rows, 2, TILE)
  floats["logit_tiles"] = to_tiles(plan, rows)
  batch, length, heads, _ = floats["query"].shape
  for name, column in dict(left=0, right=-1).items():
    side = jnp.broadcast_to(rows[..., column], (batch, heads, length))
    floats[f"logit_{name}"] = side
  return floats


def _rows(plan: KernelPlan, weights: Arrays) -> Float[Array, "B N T R"]:
  """Returns each query's sum of weights for every table row.

  `weights` has the three arrays that the kernel returns.
  """
  left, right = weights["weight_left"], weights["weight_right"]
  rows = jax.ShapeDtypeStruct((*left.shape, plan.num_rows), left.dtype)
  (by_row,) = jax.linear_transpose(functools.partial(to_tiles, plan), rows)(
    weights["weight_tiles"]
  )
  return by_row.at[..., 0].add(left).at[..., -1].add(right)


_WEIGHTS = "weight_tiles", "weight_left", "weight_right"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
  plan: KernelPlan, floats: Arrays, key_masks: Arrays
) -> tuple[Array, Arrays]:
  """Computes the output without the value table's term, and weights for that term.

  The weights are a dictionary of the arrays `_WEIGHTS`, empty without a value table.
  """
  return _attend_forward(plan, floats, key_masks)[0]


def _attend_forward(plan: KernelPlan, floats: Arrays, key_masks: Arrays) -> tuple:
  query = floats["query"].astype(floats["key"].dtype)
  operands = floats | key_masks | dict(query=query)
  outputs = forward(plan, operands)
  weights = {name: outputs[name] for name in _WEIGHTS if plan.has_values}
  return (outputs["output"], weights), (operands, outputs)


def _attend_backward(
  plan: KernelPlan, residuals: tuple, d_results: tuple
) -> tuple[Arrays, None]:
  operands, outputs = residuals
  d_output, d_weights = d_results
  # Uses the output before it is rounded, since an error of delta enters all gradients
  # of a query. It is a sum of products in float32, not a product of matrices.
  delta = (d_output * outputs["output"]).sum(3).swapaxes(1, 2)
  for name, d_weight in d_weights.items():
    terms = d_weight * outputs[name]
    delta += terms.sum(-1).reshape(delta.shape) if terms.ndim > 3 else terms
    operands = operands | {f"d_{name}": d_weight}
  operands = operands | {name: outputs[name] for name in ("maximum", "inverse_total")}
  operands |= dict(d_output=d_output.astype(operands["value"].dtype), delta=delta)
  gradients = backward(plan, operands)
  return sum_over_groups(operands, gradients), None


_attend.defvjp(_attend_forward, _attend_backward)
