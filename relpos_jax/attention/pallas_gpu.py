"""Attention by fused kernels for GPUs, in Pallas with Triton, without a [T, S] tensor.

This module pads the arrays to blocks, multiplies by the tables, and defines the
derivative by the kernels in pallas_gpu_kernels.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from relpos_jax.attention import band, masks
from relpos_jax.attention.arrays import accumulation_dtype
from relpos_jax.attention.by_distance import DistanceBias, RelativePositions
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.lookup import product
from relpos_jax.attention.pallas_gpu_kernels import (
  AXES,
  Arrays,
  KernelPlan,
  backward,
  forward,
)
from relpos_jax.attention.partitioned import (
  axes_of_heads,
  axes_of_tokens,
  on_shards,
  target_platform,
)
from relpos_jax.typing import Array, Float

_MIN_TILE = 16  # the smallest matrix side that tensor cores multiply
_MAX_WIDTH = 256  # the largest head width for which tiles fit in shared memory


def unsupported(inputs: Inputs) -> str | None:
  """Returns the reason why the kernels cannot run the call, or None if they can.

  They support what training a Transformer with Shaw's or T5's positions needs.
  """
  width, value_width = inputs.query.shape[3], inputs.value.shape[3]
  if width > _MAX_WIDTH:
    return f"heads have width {width}; it needs {_MAX_WIDTH} or less"
  if target_platform() == "gpu" and inputs.query.dtype == jnp.float64:
    return "query is float64; on a GPU it needs float32 or narrower"
  if value_width != width:
    return f"values have width {value_width}; it needs the keys' width, {width}"
  if isinstance(inputs.scale, Tracer):
    return "scale is traced; it needs a number"
  if names := axes_of_tokens(inputs.explicit):
    return f"the mesh shards queries over {names}; it needs whole sequences"
  for relation in inputs.relations:
    if not isinstance(relation, RelativePositions | DistanceBias):
      return f"it takes no {type(relation).__name__}"
  if inputs.silu_divisor is not None:
    return "weights are silu; it needs a softmax"
  return _unsupported_option(inputs) or _unsupported_mask(inputs)


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


def attention(
  inputs: Inputs, *, interpret: bool | None = None, block: tuple[int, int] | None = None
) -> Float[Array, "B T N H"]:
  """Computes attention by the kernels.

  Args:
    inputs: the arguments of the call.
    interpret: whether to use Pallas' interpret mode; None uses it except on GPUs.
    block: the numbers of queries and keys in a tile, powers of 2, on a GPU at least 16.
      The default was not tuned.
  """
  length, width = inputs.query.shape[1], inputs.query.shape[3]
  if block is None:
    most = 64 if inputs.query.dtype.itemsize <= 2 else 32
    block = min(most, _power_of_2(length)), min(32, _power_of_2(inputs.key.shape[1]))
  value_table = band.value_table(inputs)
  low, high = band.distances(inputs)
  if not inputs.relations and not inputs.is_causal:
    low, high = band.FAR, band.FAR  # then all keys are left of the band
  plan = KernelPlan(
    block=block,
    low=low,
    high=high,
    scale=np.asarray(inputs.scale).item(),
    is_causal=inputs.is_causal,
    dropout_rate=inputs.dropout_rate,
    has_values=value_table is not None,
    interpret=target_platform() != "gpu" if interpret is None else interpret,
    precision=jax.config.jax_default_matmul_precision,  # pyright: ignore
  )
  operands = _floats(inputs, block), _masks(inputs, *block)
  output, weights = _on_devices(plan, inputs, *operands)
  output = output[:, :length, :, :width]
  if value_table is not None:
    output += product("BNTR,RNH->BTNH", weights[:, :, :length], value_table)
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
  weights = spec("band_weights", None) if plan.has_values else None
  out_specs = spec("output", None), weights
  attend = functools.partial(_attend, plan)
  return on_shards(attend, axes, in_specs, out_specs)(floats, key_masks)


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
    floats[name] = _pad(_pad(x, 1, size), 3, _power_of_2(x.shape[3]))
  rows = band.logits_by_row(inputs)
  if rows is not None:
    floats["band_logits"] = rows if rows.shape[2] == 1 else _pad(rows, 2, block[0])
  return floats


def _masks(inputs: Inputs, queries: int, keys: int) -> Arrays:
  """Returns segments [#B, T] and [#B, S], seeds, and a mask of keys [#B, S].

  They are padded to whole tiles. Masked keys and padding are 0 in the mask.
  """
  arrays, num_keys = {}, inputs.key.shape[1]
  mask = masks.combine(inputs.mask, inputs.key_mask)
  if mask is not None or num_keys % keys:
    mask = jnp.ones((1, num_keys), bool) if mask is None else mask[:, 0, 0]
    mask = jnp.broadcast_to(mask, (len(mask), num_keys))
    arrays["key_mask"] = _pad(mask.astype(jnp.int32), 1, keys)
  if inputs.query_segment_ids is not None and inputs.key_segment_ids is not None:
    arrays["query_segments"] = _pad(inputs.query_segment_ids, 1, queries)
    arrays["key_segments"] = _pad(inputs.key_segment_ids, 1, keys)
  if inputs.dropout_seeds is not None:
    arrays["seeds"] = inputs.dropout_seeds
  return arrays


def _pad(x: Array, axis: int, block: int) -> Array:
  """Pads an axis with zeros to a multiple of `block`."""
  missing = -x.shape[axis] % block
  if not missing:
    return x
  return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
  plan: KernelPlan, floats: Arrays, key_masks: Arrays
) -> tuple[Array, Array | None]:
  """Computes the output without the value table, and the weights by table row."""
  return _attend_forward(plan, floats, key_masks)[0]


def _attend_forward(plan: KernelPlan, floats: Arrays, key_masks: Arrays) -> tuple:
  operands = (
    floats | key_masks | dict(query=floats["query"].astype(floats["key"].dtype))
  )
  with jax.default_matmul_precision(plan.precision):
    outputs = forward(plan, operands)
  return (outputs["output"], outputs.get("band_weights")), (operands, outputs)


def _attend_backward(
  plan: KernelPlan, residuals: tuple, d_results: tuple
) -> tuple[Arrays, None]:
  operands, outputs = residuals
  d_output, d_weights = d_results
  # From an output that is not rounded yet: an error of delta enters all gradients of a
  # query.
  delta = jnp.einsum(
    "BTNH,BTNH->BNT", d_output, outputs["output"], precision=plan.precision
  )
  if plan.has_values:
    delta += (d_weights * outputs["band_weights"]).sum(-1)
    operands = operands | dict(d_band_weights=d_weights)
  operands = operands | {name: outputs[name] for name in ("maximum", "inverse_total")}
  operands |= dict(d_output=d_output.astype(operands["value"].dtype), delta=delta)
  with jax.default_matmul_precision(plan.precision):
    gradients = backward(plan, operands)
  gradients = {name.removeprefix("d_"): x for name, x in gradients.items()}
  for name in ("key", "value"):  # sums over the query heads that share a key head
    batch, num_keys, key_heads, width = operands[name].shape
    x = gradients[name].reshape(batch, num_keys, key_heads, -1, width)
    gradients[name] = x.sum(3).astype(operands[name].dtype)
  return gradients, None


_attend.defvjp(_attend_forward, _attend_backward)
