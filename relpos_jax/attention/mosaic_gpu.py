"""Attention by fused kernels for Hopper GPUs, in Pallas with Mosaic.

This module pads the arrays to blocks, multiplies by the tables, and defines the
derivative by the kernels in mosaic_gpu_kernels.py. The kernels were interpreted on a
CPU, with checks for races, and never ran on a GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from relpos_jax.attention import band, masks
from relpos_jax.attention.by_distance import DistanceBias, RelativePositions
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.lookup import product
from relpos_jax.attention.mosaic_gpu_kernels import (
  AXES,
  TILE,
  WIDTH,
  Arrays,
  KernelPlan,
  backward,
  forward,
  to_tiles,
)
from relpos_jax.attention.partitioned import (
  axes_of_heads,
  axes_of_tokens,
  on_shards,
  target_device,
  target_platform,
)
from relpos_jax.typing import Array, Float

_OLDEST_JAX = (0, 12)  # the oldest whose interpreter runs the kernels
_MAX_WIDTH = 128  # the largest head width for which sums fit in registers


def unsupported(inputs: Inputs) -> str | None:
  """Returns the reason why the kernels cannot run the call, or None if they can.

  They support what training a Transformer with Shaw's or T5's positions needs.
  """
  if isinstance(inputs.scale, Tracer):
    return "scale is traced; it needs a number"
  if names := axes_of_tokens(inputs.explicit):
    return f"the mesh shards queries over {names}; it needs whole sequences"
  for relation in inputs.relations:
    if not isinstance(relation, RelativePositions | DistanceBias):
      return f"it takes no {type(relation).__name__}"
  if inputs.silu_divisor is not None:
    return "weights are silu; it needs a softmax"
  return (
    _unsupported_option(inputs)
    or _unsupported_mask(inputs)
    or _unsupported_kind(inputs)
  )


def _unsupported_option(inputs: Inputs) -> str | None:
  if inputs.bias is not None:
    return "a bias is given"
  if inputs.soft_cap is not None:
    return "a soft cap is given"
  if inputs.window is not None:
    return "a local window is given"
  if inputs.sinks is not None or inputs.return_residual:
    return "sinks are given, or a residual is asked for"
  has_offset = not isinstance(inputs.query_offset, int) or inputs.query_offset != 0
  if has_offset or not inputs.linear_positions:
    return "positions or query_offset are given; it needs 0, 1, 2, ..."
  return band.unsupported(inputs)


def _unsupported_mask(inputs: Inputs) -> str | None:
  if inputs.mask is not None and inputs.mask.shape[1:3] != (1, 1):
    shape = inputs.mask.shape
    return f"mask has shape {shape}; it needs [B or 1, 1, 1, S], a mask of keys"
  for segments in (inputs.query_segment_ids, inputs.key_segment_ids):
    if segments is not None and segments.dtype != jnp.int32:
      return f"segment ids are {segments.dtype}; it needs int32"
  return None


def _unsupported_kind(inputs: Inputs) -> str | None:
  """Returns a reason in the arrays, in JAX or in the GPU."""
  for name in ("key", "value"):
    width = getattr(inputs, name).shape[3]
    if width > _MAX_WIDTH:
      return f"{name} has width {width}; it needs {_MAX_WIDTH} or less"
  if inputs.query.dtype not in (jnp.bfloat16, jnp.float16):
    return f"query is {inputs.query.dtype}; it needs bfloat16 or float16"
  if jax.__version_info__ < _OLDEST_JAX:
    oldest = ".".join(map(str, _OLDEST_JAX))
    return f"jax is {jax.__version__}; it needs {oldest} or newer"
  # Descriptions of devices have no compute capability.
  capability = getattr(target_device(), "compute_capability", "9.0")
  if target_platform() == "gpu" and not capability.startswith("9."):
    return f"the GPU has compute capability {capability}; it needs 9, Hopper"
  return None


def attention(
  inputs: Inputs, *, interpret: bool | None = None
) -> Float[Array, "B T N V"]:
  """Computes attention by the kernels.

  Args:
    inputs: the arguments of the call.
    interpret: whether to interpret them on a CPU; None does so except on GPUs. With one
      core and one CPU device JAX's interpreter once waited forever. With eight devices
      (`jax_num_cpu_devices`) it did not.
  """
  length, value_width = inputs.query.shape[1], inputs.value.shape[3]
  value_table = band.value_table(inputs)
  low, high = band.distances(inputs)
  if not inputs.relations and not inputs.is_causal:
    low, high = band.FAR, band.FAR  # then all keys are left of the band
  plan = KernelPlan(
    low=low,
    high=high,
    scale=np.asarray(inputs.scale).item(),
    is_causal=inputs.is_causal,
    dropout_rate=inputs.dropout_rate,
    has_values=value_table is not None,
    interpret=target_platform() != "gpu" if interpret is None else interpret,
  )
  output, weights = _on_devices(plan, inputs, _floats(plan, inputs), _masks(inputs))
  output = output[:, :length, :, :value_width]
  if value_table is not None:
    weights = _rows(plan, weights)[:, :, :length]
    output += product("BNTR,RNH->BTNH", weights, value_table)
  if inputs.query_mask is not None:
    output = jnp.where(jnp.moveaxis(inputs.query_mask, 1, 2), output, 0)
  return output.astype(inputs.value.dtype)


def _on_devices(plan: KernelPlan, inputs: Inputs, floats: Arrays, key_masks: Arrays):
  """Runs the kernels on each device with its sequences and heads.

  XLA cannot partition a kernel. Without a mesh in context, it gathers the arrays.
  """
  batch_axes, head_axes = axes = axes_of_heads(inputs.explicit, inputs.key.shape)
  names = dict(B=batch_axes, N=head_axes, K=head_axes)

  def spec(name: str, shape: tuple[int, ...] | None) -> PartitionSpec:
    letters = AXES[name]
    sizes = shape or (2,) * len(letters)  # results have no axis of size 1
    parts = [
      names.get(x) if n > 1 else None for x, n in zip(letters, sizes, strict=True)
    ]
    return PartitionSpec(*parts)

  in_specs = tuple(
    {name: spec(name, x.shape) for name, x in arrays.items()}
    for arrays in (floats, key_masks)
  )
  weights = {}
  if plan.has_values:
    weights = {name: spec(name, None) for name in _WEIGHTS}
  out_specs = spec("output", None), weights
  attend = functools.partial(_attend, plan)
  return on_shards(attend, axes, in_specs, out_specs)(floats, key_masks)


def _floats(plan: KernelPlan, inputs: Inputs) -> Arrays:
  """Returns the differentiable arrays, padded to whole tiles."""
  # Promoted, so that its gradient is rounded once, after its two terms are added.
  query = inputs.query.astype(jnp.float32)
  floats = {}
  for name, x in dict(query=query, key=inputs.key, value=inputs.value).items():
    floats[name] = _pad(_pad(x, 1, TILE), 3, WIDTH)
  rows = band.logits_by_row(inputs)
  if rows is None:
    return floats
  if rows.shape[2] > 1:
    rows = _pad(rows, 2, TILE)
  floats["logit_tiles"] = to_tiles(plan, rows)
  batch, length, heads, _ = floats["query"].shape
  for name, column in dict(left=0, right=-1).items():
    side = jnp.broadcast_to(rows[..., column], (batch, heads, length))
    floats[f"logit_{name}"] = side
  return floats


def _masks(inputs: Inputs) -> Arrays:
  """Returns segments [#B, T] and [#B, S], seeds, and a mask of keys [#B, S].

  They are padded to whole tiles. Masked keys and padding are 0 in the mask.
  """
  arrays, num_keys = {}, inputs.key.shape[1]
  mask = masks.combine(inputs.mask, inputs.key_mask)
  if mask is not None or num_keys % TILE:
    mask = jnp.ones((1, num_keys), bool) if mask is None else mask[:, 0, 0]
    mask = jnp.broadcast_to(mask, (len(mask), num_keys))
    arrays["key_mask"] = _pad(mask.astype(jnp.int32), 1, TILE)
  if inputs.query_segment_ids is not None and inputs.key_segment_ids is not None:
    arrays["query_segments"] = _pad(inputs.query_segment_ids, 1, TILE)
    arrays["key_segments"] = _pad(inputs.key_segment_ids, 1, TILE)
  if inputs.dropout_seeds is not None:
    arrays["seeds"] = inputs.dropout_seeds
  return arrays


def _pad(x: Array, axis: int, block: int) -> Array:
  """Pads an axis with zeros to a multiple of `block`."""
  missing = -x.shape[axis] % block
  if not missing:
    return x
  return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])


def _rows(plan: KernelPlan, weights: Arrays) -> Float[Array, "B N T R"]:
  """Sums weights by table row."""
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
  """Computes the output without the value table, and the weights of tiles and sides."""
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
  # From an output that is not rounded yet: an error of delta enters all gradients of a
  # query. It is a sum of products in float32, not a product of matrices.
  delta = (d_output * outputs["output"]).sum(3).swapaxes(1, 2)
  for name, d_weight in d_weights.items():
    terms = d_weight * outputs[name]
    delta += terms.sum(-1).reshape(delta.shape) if terms.ndim > 3 else terms
    operands = operands | {f"d_{name}": d_weight}
  operands = operands | {name: outputs[name] for name in ("maximum", "inverse_total")}
  operands |= dict(d_output=d_output.astype(operands["value"].dtype), delta=delta)
  gradients = backward(plan, operands)
  gradients = {name.removeprefix("d_"): x for name, x in gradients.items()}
  for name in ("key", "value"):  # sums over the query heads that share a key head
    batch, num_keys, key_heads, width = operands[name].shape
    x = gradients[name].reshape(batch, num_keys, key_heads, -1, width)
    gradients[name] = x.sum(3).astype(operands[name].dtype)
  return gradients, None


_attend.defvjp(_attend_forward, _attend_backward)
