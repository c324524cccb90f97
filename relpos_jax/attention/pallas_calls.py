"""What the calls of the kernels in Pallas have in common.

pallas_gpu.py (Triton) and mosaic_gpu.py (Mosaic) pad their arrays to whole tiles and
run a kernel on each device.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec

from relpos_jax.attention import band, masks
from relpos_jax.attention.by_distance import DistanceBias, RelativePositions
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.lookup import product
from relpos_jax.attention.partitioned import axes_of_heads, axes_of_tokens, on_shards
from relpos_jax.typing import Array, Float

Arrays = dict[str, Any]


def unsupported(inputs: Inputs) -> str | None:
  """Returns the reason why no kernel can run the call, or None.

  Kernels support what training a Transformer with Shaw's or T5's positions needs.
  """
  if isinstance(inputs.scale, Tracer):
    return "scale is traced; it needs a number"
  if names := axes_of_tokens(inputs.explicit):
    return f"the mesh shards queries over {names}; it needs whole sequences"
  for relation in inputs.relations:
    if not isinstance(relation, RelativePositions | DistanceBias):
      return f"it takes no {type(relation).__name__}"
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
  if not inputs.starts_at_zero:
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


def ends(inputs: Inputs) -> tuple[int, int]:
  """Returns the last distance left of the band, and the first right of it."""
  if not inputs.relations and not inputs.is_causal:
    return band.FAR, band.FAR  # all keys are left of the band
  return band.ends(inputs)


def prepare_masks(inputs: Inputs, queries: int, keys: int) -> Arrays:
  """Returns the integer arrays that the call needs, by name.

  They are a mask of keys [#B, S], segment ids of queries [#B, T] and of keys [#B, S],
  and dropout seeds [B, N]. T is padded to a multiple of `queries`, and S to a multiple
  of `keys`. Masked keys and padding are 0 in the mask.
  """
  arrays, num_keys = {}, inputs.key.shape[1]
  mask = masks.combine(inputs.mask, inputs.key_mask)
  if mask is not None or num_keys % keys:
    mask = jnp.ones((1, num_keys), bool) if mask is None else mask[:, 0, 0]
    mask = jnp.broadcast_to(mask, (len(mask), num_keys))
    arrays["key_mask"] = pad(mask.astype(jnp.int32), 1, keys)
  if inputs.query_segment_ids is not None and inputs.key_segment_ids is not None:
    arrays["query_segments"] = pad(inputs.query_segment_ids, 1, queries)
    arrays["key_segments"] = pad(inputs.key_segment_ids, 1, keys)
  if inputs.dropout_seeds is not None:
    arrays["seeds"] = inputs.dropout_seeds
  return arrays


def pad(x: Array, axis: int, block: int) -> Array:
  """Pads an axis with zeros to a multiple of `block`."""
  missing = -x.shape[axis] % block
  if not missing:
    return x
  return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])


def on_devices(
  attend: Callable,
  inputs: Inputs,
  floats: Arrays,
  key_masks: Arrays,
  *,
  axes_of: Mapping[str, str],
  weights: tuple[str, ...],
) -> tuple[Array, Arrays]:
  """Runs the kernels on each device with its sequences and heads.

  XLA cannot partition a kernel. Without a mesh in context, XLA gathers the arrays.

  `attend(floats, key_masks)` returns the output, and a dictionary of arrays with the
  names `weights`. `axes_of` maps the name of each array to the letters of its axes.
  """
  batch_axes, head_axes = axes = axes_of_heads(inputs.explicit, inputs.key.shape)
  mesh_axes = dict(B=batch_axes, N=head_axes, K=head_axes)

  def spec(name: str, sizes: tuple[int, ...]) -> PartitionSpec:
    parts = []
    for letter, size in zip(axes_of[name], sizes, strict=True):
      parts.append(mesh_axes.get(letter) if size > 1 else None)
    return PartitionSpec(*parts)

  def spec_of_result(name: str) -> PartitionSpec:
    return spec(name, (2,) * len(axes_of[name]))  # no axis has size 1

  in_specs = tuple(
    {name: spec(name, x.shape) for name, x in arrays.items()}
    for arrays in (floats, key_masks)
  )
  out_specs = spec_of_result("output"), {x: spec_of_result(x) for x in weights}
  return on_shards(attend, axes, in_specs, out_specs)(floats, key_masks)


def finish(
  inputs: Inputs, output: Array, weights: Float[Array, "B N _ R"] | None
) -> Float[Array, "B T N V"]:
  """Returns the output of a call, from the padded output of its kernel.

  Drops the padding, adds the term of the value table and zeroes masked queries.
  `weights` has the sum of each query's weights for every table row, so the term is the
  product of these sums and the table.
  """
  output = output[:, : inputs.query.shape[1], :, : inputs.value.shape[3]]
  value_table = band.value_table(inputs)
  if weights is not None and value_table is not None:
    weights = weights[:, :, : inputs.query.shape[1]]
    output += product("BNTR,RNH->BTNH", weights, value_table)
  if inputs.query_mask is not None:
    output = jnp.where(jnp.moveaxis(inputs.query_mask, 1, 2), output, 0)
  return output.astype(inputs.value.dtype)


def sum_over_groups(operands: Arrays, gradients: Arrays) -> Arrays:
  """Renames each gradient d_x to x, and sums the gradients of keys and values.

  The sum is over the query heads that share a key head.
  """
  gradients = {name.removeprefix("d_"): x for name, x in gradients.items()}
  for name in ("key", "value"):
    batch, num_keys, key_heads, width = operands[name].shape
    x = gradients[name].reshape(batch, num_keys, key_heads, -1, width)
    gradients[name] = x.sum(3).astype(operands[name].dtype)
  return gradients
