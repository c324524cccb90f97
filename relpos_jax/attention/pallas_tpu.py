"""Attention by fused kernels for TPUs: relative keys and values in memory O(T (H + R)).

The far field costs nothing: `band` has the algebra, `pallas_tpu_tiles` the geometry. On other
platforms the kernels run, slowly, in Pallas' interpret mode.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.attention import band
from relpos_jax.attention import pallas_tpu_tiles as tiles
from relpos_jax.attention.choice import target_platform
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.pallas_tpu_backward import backward
from relpos_jax.attention.pallas_tpu_forward import forward
from relpos_jax.attention.pallas_tpu_tiles import TpuPlan
from relpos_jax.attention.partitioned import over_devices
from relpos_jax.typing import Array, ArrayLike, Bool, Float, Int

LANES = 128
BLOCK = 512
# The maximum of keys per backward call, which keeps their gradients on the chip.
KEYS_A_CALL = 8192
MAX_ROWS = 2048
MAX_WIDTH = 256


class Floats(NamedTuple):
  """The differentiable operands, padded to blocks; tables in the layout of `_periodic`."""

  query: Float[Array, "B N T H"]
  key: Float[Array, "B K S H"]
  value: Float[Array, "B K S H"]
  key_table: Float[Array, "#N W H"] | None
  value_table: Float[Array, "#N W H"] | None


class Masks(NamedTuple):
  """The masks and dropout seeds, padded to blocks."""

  key_visible: Int[Array, "#B S"] | None
  query_segments: Int[Array, "#B T"] | None
  key_segments: Int[Array, "#B S"] | None
  seeds: Int[Array, "B N"] | None


def unsupported(inputs: Inputs, interpret: bool | None = None) -> str | None:
  """Returns why this implementation cannot run the call; None if it can."""
  if reason := band.unsupported(inputs):
    return reason
  if inputs.bias is not None:
    return "a bias is given"
  if inputs.mask is not None and inputs.mask.shape[1:3] != (1, 1):
    return f"mask has shape {inputs.mask.shape}; it needs the same for all heads and queries"
  if isinstance(inputs.scale, jax.core.Tracer):
    return "scale is traced; it needs a number"
  rows = [len(table) for table in jax.tree.leaves(inputs.relations)]
  if rows and rows[0] > MAX_ROWS:
    return f"the tables have {rows[0]} rows; it takes at most {MAX_ROWS}"
  return None if _interpret(interpret) else _uncompilable(inputs)


def _uncompilable(inputs: Inputs) -> str | None:
  """Returns why the call runs only in interpret mode; None if it compiles."""
  if inputs.query.dtype not in (jnp.bfloat16, jnp.float32):
    return f"dtype is {inputs.query.dtype}; TPUs take bfloat16 and float32"
  if inputs.query.shape[3] > MAX_WIDTH:
    return f"heads are {inputs.query.shape[3]} wide; they fit the chip up to {MAX_WIDTH}"
  return None


def attention(
  inputs: Inputs,
  *,
  interpret: bool | None = None,
  block: int | None = None,
  lanes: int | None = None,
) -> Float[Array, "B T N H"]:
  """Computes attention by the fused kernels.

  Args:
    inputs: the call.
    interpret: whether to run in interpret mode, by default if the platform is not a TPU. False
      also compiles for a TPU topology without a device (`jax.experimental.topologies`).
    block: queries and keys of a tile; a multiple of `lanes`.
    lanes: of a vector, 128 on TPUs; fewer in interpret mode, where they only cost time.
  """
  length = inputs.query.shape[1]
  plan, tables = plan_of(inputs, _interpret(interpret), block, lanes)
  pad = lambda x, axis: _pad(x, plan.block, axis)
  heads_first = lambda x: pad(x.swapaxes(1, 2), 2)
  arrays = map(heads_first, (inputs.query, inputs.key, inputs.value))
  visible = _visible_keys(inputs, plan.block)
  segments = inputs.query_segment_ids, inputs.key_segment_ids
  masks = Masks(
    None if visible is None else pad(visible.astype(jnp.int32), 1),
    *(None if ids is None else pad(ids.astype(jnp.int32), 1) for ids in segments),
    inputs.dropout_seeds,
  )
  output = _attend(plan, Floats(*arrays, *tables), masks)[:, :, :length].swapaxes(1, 2)
  real = inputs.real_queries()
  return output if real is None else jnp.where(jnp.moveaxis(real, 1, 2), output, 0)


def _interpret(interpret: bool | None) -> bool:
  return target_platform() != "tpu" if interpret is None else interpret


def plan_of(
  inputs: Inputs, interpret: bool, block: int | None = None, lanes: int | None = None
) -> tuple[TpuPlan, tuple[Array | None, Array | None]]:
  """Returns the static parameters of a call, and its tables [#N, W, H] from `_periodic`."""
  lengths = inputs.query.shape[1], inputs.key.shape[1]
  largest_block, default_lanes = (16, 16) if interpret else (BLOCK, LANES)
  lanes = default_lanes if lanes is None else lanes
  block = min(largest_block, _up(max(lengths), lanes)) if block is None else block
  table = band.band_of(inputs)
  first, last, period, tables = 0, 0, 0, (None, None)
  if table is not None:
    first, last = table.first, table.first + table.num_diagonals
    period = _up(last - first + 2, lanes)
    left = table.left_value
    tables = _periodic(table.key, None, first, period), _periodic(table.value, left, first, period)
  plan = TpuPlan(
    block=block,
    lanes=lanes,
    num_blocks=tuple(-(-length // block) for length in lengths),
    scale=float(inputs.scale),
    is_causal=inputs.is_causal,
    window=inputs.window,
    dropout_rate=inputs.dropout_rate,
    first=first,
    last=last,
    period=period,
    key_block=0,
    interpret=interpret,
  )
  return plan, tables


def _periodic(
  table: Float[Array, "R #N H"] | None,
  left: Float[Array, "#N H"] | None,
  first: int,
  period: int,
) -> Float[Array, "#N {period} H"] | None:
  """Returns a table whose row d % period is distance d's; the row before the band is `left`."""
  if table is None:
    return None
  left = jnp.zeros_like(table[:1]) if left is None else left[None]
  rows = jnp.concatenate([left, table])
  rows = jnp.pad(rows, ((0, period - len(rows)), (0, 0), (0, 0)))
  return jnp.roll(rows, first - 1, axis=0).swapaxes(0, 1)


def _visible_keys(inputs: Inputs, block: int) -> Bool[Array, "#B S"] | None:
  """Returns False for hidden keys; None if all are visible and none are padding."""
  num_keys = inputs.key.shape[1]
  given = [x for x in (inputs.mask, inputs.real_keys()) if x is not None]
  if not given and num_keys % block == 0:
    return None
  visible = functools.reduce(jnp.logical_and, given, jnp.ones((1, 1, 1, num_keys), bool))
  return jnp.broadcast_to(visible[:, 0, 0], (len(visible), num_keys))


def _pad(x: Array, block: int, axis: int) -> Array:
  pad = [(0, 0)] * x.ndim
  pad[axis] = (0, -x.shape[axis] % block)
  return jnp.pad(x, pad)


def _up(size: int, step: int) -> int:
  return -(-size // step) * step


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: TpuPlan, floats: Floats, masks: Masks) -> Float[Array, "B N T H"]:
  return _forward(plan, floats, masks)[0]


def _forward(plan: TpuPlan, floats: Floats, masks: Masks):
  operands = _operands(floats, masks, queries_along=1)
  kernel = lambda part, first: forward(plan, _add_first_block(plan, part, first))
  outputs = over_devices(kernel, tiles.AXES[1], operands, tile=plan.block)
  return outputs["output"], (floats, masks, outputs)


def _backward(plan: TpuPlan, residuals, d_output: Float[Array, "B N T H"]):
  floats, masks, outputs = residuals
  wide = outputs["maximum"].dtype
  output = outputs["output"].astype(wide)
  if "output_rest" in outputs:
    output += outputs["output_rest"].astype(wide)
  delta = jnp.einsum("BNTH,BNTH->BNT", d_output.astype(wide), output)[:, :, None]
  rows = {name: x for name, x in outputs.items() if name not in ("output", "output_rest")}
  operands = _operands(floats, masks, queries_along=2) | rows
  operands |= dict(d_output=d_output, delta=delta)
  kernel = functools.partial(_backward_in_parts, plan)
  grads = over_devices(kernel, tiles.AXES[2], operands, tile=plan.block)
  tables = (
    None if table is None else _sum_heads(grads[f"d_{name}"].sum(0), len(table))
    for name, table in (("key_table", floats.key_table), ("value_table", floats.value_table))
  )
  return Floats(*(grads[name] for name in ("d_query", "d_key", "d_value")), *tables), None


def _add_first_block(
  plan: TpuPlan, operands: dict[str, Array], first_query: ArrayLike
) -> dict[str, Array]:
  """Adds the number of the first block of queries if a device has a part of them."""
  if isinstance(first_query, int):
    return operands
  return operands | dict(first_block=jnp.int32(first_query // plan.block).reshape(1, 1))


def _backward_in_parts(
  plan: TpuPlan, operands: dict[str, Array], first_query: ArrayLike
) -> dict[str, Array]:
  """Computes the gradients with at most `KEYS_A_CALL` keys per call; the calls add up."""
  dtype = operands["query"].dtype
  operands = _add_first_block(plan, operands, first_query)
  step = _up(KEYS_A_CALL, plan.block)
  starts = range(0, operands["key"].shape[2], step)
  wide = dtype if len(starts) == 1 else jnp.promote_types(dtype, jnp.float32)
  of_keys, total = [], {}
  for start in starts:
    part = {name: _some_keys(name, array, start, step) for name, array in operands.items()}
    grads = backward(plan._replace(key_block=start // plan.block), part, dtype=wide)
    of_keys.append([grads.pop(name) for name in ("d_key", "d_value")])
    total = {name: total.get(name, 0) + grad for name, grad in grads.items()}
    # One call after the other, so that only one gradient of the queries is in memory.
    operands, total = jax.lax.optimization_barrier((operands, total))
    if "sums" in operands:  # They are of all keys, and count once.
      operands["sums"] = jnp.zeros_like(operands["sums"])
  d_key, d_value = (jnp.concatenate(parts, 2) for parts in zip(*of_keys, strict=True))
  return total | dict(d_query=total["d_query"].astype(dtype), d_key=d_key, d_value=d_value)


def _some_keys(name: str, array: Array, start: int, size: int) -> Array:
  axis = tiles.AXES[2].get(name, "").find("S")
  if axis < 0:
    return array
  return jax.lax.slice_in_dim(array, start, min(start + size, array.shape[axis]), axis=axis)


def _sum_heads(d_table: Float[Array, "N W H"], heads: int) -> Float[Array, "#N W H"]:
  """Returns a table's gradient, summed over heads if they share the table."""
  return d_table if heads > 1 else d_table.sum(0, keepdims=True)


def _operands(floats: Floats, masks: Masks, queries_along: int) -> dict[str, Array]:
  """Returns the operands by name, with the masks of queries along axis 1 or 2."""
  other = dict(query_segments=3 - queries_along)
  arrays = {
    name: None if x is None else jnp.expand_dims(x, other.get(name, queries_along))
    for name, x in masks._asdict().items()
    if name != "seeds"
  }
  seeds = None if masks.seeds is None else masks.seeds[:, :, None, None]
  operands = floats._asdict() | arrays | dict(seeds=seeds)
  return {name: array for name, array in operands.items() if array is not None}


_attend.defvjp(_forward, _backward)
