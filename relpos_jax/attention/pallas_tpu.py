"""Attention by fused kernels for TPUs: relative keys and values in memory O(T (H + R)).

The far field costs nothing: `band` has the algebra, `pallas_tpu_tiles` the geometry. On other
platforms the kernels run, slowly, in Pallas' interpret mode.
"""

import functools

import jax
import jax.numpy as jnp

from relpos_jax.attention import band, dropout
from relpos_jax.attention import pallas_tpu_tiles as tiles
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.pallas_tpu_backward import backward
from relpos_jax.attention.pallas_tpu_forward import forward
from relpos_jax.attention.pallas_tpu_tiles import TpuPlan
from relpos_jax.attention.partitioned import axes_of_query, over_devices, target_platform
from relpos_jax.typing import Array, ArrayLike, Float, Int

LANES = 128
BLOCK = 512
# The maximum of keys per backward call, which keeps their gradients on the chip.
KEYS_A_CALL = 8192
MAX_ROWS = 2048
MAX_WIDTH = 256


def unsupported(inputs: Inputs, interpret: bool | None = None) -> str | None:
  """Returns why this implementation cannot run the call; None if it can."""
  if reason := band.unsupported_by_kernels(inputs):
    return reason
  if inputs.relations:
    first, last = band.distances(inputs)
    if (num_rows := last - first + 1) > MAX_ROWS:
      return f"the call reaches {num_rows} rows of the tables; it takes at most {MAX_ROWS}"
  if _interpret(interpret):
    return None
  dtype, width = inputs.query.dtype, inputs.query.shape[3]
  if dtype not in (jnp.bfloat16, jnp.float32):
    return f"dtype is {dtype}; TPUs take bfloat16 and float32"
  if width > MAX_WIDTH:
    return f"heads are {width} wide; they fit the chip up to {MAX_WIDTH}"
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
  plan, relative = plan_of(inputs, _interpret(interpret), block, lanes)
  first = inputs.query_offset % plan.block  # the number of the first query in its block

  def pad_queries(x, axis):
    return _roll(band.pad(x, axis, plan.num_blocks[0] * plan.block), first, axis)

  def pad_keys(x, axis):
    return band.pad(x, axis, plan.block)

  def last(x):
    return jnp.moveaxis(x, 1, 3)

  floats = relative | dict(query=pad_queries(last(inputs.query), 3))
  floats |= dict(key=pad_keys(last(inputs.key), 3), value=pad_keys(last(inputs.value), 3))
  if "content" in floats:
    floats["content"] = pad_queries(last(floats["content"]), 3)
  masks = {}
  if (mask := band.key_mask(inputs, plan.block)) is not None:
    masks["key_mask"] = mask[..., None]
  if inputs.query_segment_ids is not None:
    masks["query_segments"] = pad_queries(inputs.query_segment_ids, 1)[:, None]
    masks["key_segments"] = pad_keys(inputs.key_segment_ids, 1)[..., None]
  if inputs.dropout_seeds is not None:
    seeds = dropout.from_row(inputs.dropout_seeds, inputs.query_offset)
    masks["seeds"] = seeds[:, :, None, None]
  if plan.first_block is None:
    masks["first_block"] = (inputs.query_offset // plan.block)[None]
  output = jnp.moveaxis(_roll(_attend(plan, floats, masks), -first, 3)[..., :length], 3, 1)
  real = inputs.query_mask()
  return output if real is None else jnp.where(jnp.moveaxis(real, 1, 2), output, 0)


def _interpret(interpret: bool | None) -> bool:
  return target_platform() != "tpu" if interpret is None else interpret


def plan_of(
  inputs: Inputs, interpret: bool, block: int | None = None, lanes: int | None = None
) -> tuple[TpuPlan, dict[str, Array]]:
  """Returns the static parameters of a call, and the arrays of its relations."""
  lengths = inputs.query.shape[1], inputs.key.shape[1]
  largest_block, default_lanes = (16, 16) if interpret else (BLOCK, LANES)
  lanes = lanes or default_lanes
  block = block or min(largest_block, _up(max(lengths), lanes))
  table = band.band_of(inputs)
  first, last, period, arrays = 0, 0, 0, {}
  if table is not None:
    first, last = table.first, table.first + table.num_diagonals
    period = _up(last - first + 2, tiles.height(lanes))
    for name, rows in table.tables._asdict().items():
      if rows is not None:  # the row of distance d, from first - 1 on, becomes row d % period
        rows = jnp.roll(band.pad(rows, 0, period), first - 1, axis=0)
        arrays[f"{name}_table"] = rows.swapaxes(0, 1)
    if "bias_table" in arrays:
      arrays["bias_table"] = arrays["bias_table"][..., None]
    if table.content is not None:
      arrays["content"] = table.content
  if (slopes := band.slopes(inputs)) is not None:
    arrays["slopes"] = slopes[:, None, None]
  offset = inputs.query_offset
  is_static = isinstance(offset, int)
  padded = lengths[0] + (offset % block if is_static else block - 1), lengths[1]
  plan = TpuPlan(
    block=block,
    lanes=lanes,
    num_blocks=tuple(-(-length // block) for length in padded),
    first_block=offset // block if is_static else None,
    scale=float(inputs.scale),
    is_causal=inputs.is_causal,
    window=inputs.window,
    dropout_rate=inputs.dropout_rate,
    first=first,
    last=last,
    period=period,
    key_block=0,
    interpret=interpret,
    shards=axes_of_query(inputs.explicit),
  )
  return plan, arrays


def _roll(x: Array, shift: int | Int[Array, "#B"], axis: int) -> Array:
  """Rolls an axis, each sequence by its shift if there are several."""
  if isinstance(shift, int):
    return jnp.roll(x, shift, axis) if shift else x
  if len(shift) == 1:
    return jnp.roll(x, shift[0], axis)
  x = jnp.broadcast_to(x, (len(shift), *x.shape[1:]))
  return jax.vmap(lambda x, shift: jnp.roll(x, shift, axis - 1))(x, shift)


def _up(size: int, step: int) -> int:
  return -(-size // step) * step


Arrays = dict[str, Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: TpuPlan, floats: Arrays, masks: Arrays) -> Float[Array, "B N H T"]:
  """Computes attention of operands in `tiles.AXES`."""
  return _forward(plan, floats, masks)[0]


def _forward(plan: TpuPlan, floats: Arrays, masks: Arrays) -> tuple[Array, tuple]:
  def kernel(part, first):
    return forward(plan, _add_first_block(plan, part, first))

  outputs = over_devices(kernel, tiles.AXES, floats | masks, plan.shards, tile=plan.block)
  return outputs["output"], (floats, masks, outputs)


def _backward(
  plan: TpuPlan, residuals: tuple, d_output: Float[Array, "B N H T"]
) -> tuple[Arrays, None]:
  floats, masks, outputs = residuals
  wide = outputs["maximum"].dtype
  output = outputs["output"].astype(wide)
  if "output_rest" in outputs:
    output += outputs["output_rest"].astype(wide)
  # As precise as the products inside the kernels, whatever the default.
  delta = (d_output.astype(wide) * output).sum(2, keepdims=True)
  rows = {name: x for name, x in outputs.items() if name not in ("output", "output_rest")}
  operands = floats | masks | rows | dict(d_output=d_output, delta=delta)
  kernel = functools.partial(_backward_in_parts, plan)
  gradients = over_devices(kernel, tiles.AXES, operands, plan.shards, tile=plan.block)
  gradients = {name: gradients[f"d_{name}"] for name in floats}
  for name in tiles.TABLES:
    if name in floats:
      of_heads = gradients[name].sum(0)
      if name in tiles.LOGIT_TABLES:  # the row left of the band is zero: all add up to zero
        of_heads = of_heads.at[:, plan.left_row].set(-of_heads.sum(1))
      is_shared = len(floats[name]) == 1
      gradients[name] = of_heads.sum(0, keepdims=True) if is_shared else of_heads
  return gradients, None


_attend.defvjp(_forward, _backward)


def _add_first_block(plan: TpuPlan, operands: Arrays, first_query: ArrayLike) -> Arrays:
  """Adds the number of the first block of queries if a device has a part of them."""
  if isinstance(first_query, int):
    return operands
  first_block = operands.get("first_block", jnp.int32(plan.first_block or 0).reshape(1, 1))
  return operands | dict(first_block=first_block + jnp.int32(first_query // plan.block))


def _backward_in_parts(plan: TpuPlan, operands: Arrays, first_query: ArrayLike) -> Arrays:
  """Computes the gradients with at most `KEYS_A_CALL` keys per call; the calls add up."""
  dtype, num_keys = operands["query"].dtype, operands["key"].shape[3]
  operands = _add_first_block(plan, operands, first_query)
  step = _up(KEYS_A_CALL, plan.block)
  wide = dtype if num_keys <= step else jnp.promote_types(dtype, jnp.float32)
  of_keys, total = [], {}
  for start in range(0, num_keys, step):
    part = dict(operands)
    for name, x in operands.items():
      if (axis := tiles.AXES.get(name, "").find("S")) >= 0:
        part[name] = jax.lax.slice_in_dim(x, start, min(start + step, num_keys), axis=axis)
    gradients = backward(plan._replace(key_block=start // plan.block), part, dtype=wide)
    of_keys.append([gradients.pop(name) for name in ("d_key", "d_value")])
    total = {name: total.get(name, 0) + x for name, x in gradients.items()}
    # One call after the other, so that only one gradient of the queries is in memory.
    operands, total = jax.lax.optimization_barrier((operands, total))
    for name in operands.keys() & {"sums", "right_sums"}:  # They are of all keys, and count once.
      operands[name] = jnp.zeros_like(operands[name])
  d_key, d_value = (jnp.concatenate(parts, 3) for parts in zip(*of_keys, strict=True))
  if isinstance(first_query, int):  # otherwise rounded after the sum over devices
    d_key, d_value = d_key.astype(dtype), d_value.astype(dtype)
  total |= {name: total[name].astype(dtype) for name in ("d_query", "d_content") if name in total}
  return total | dict(d_key=d_key, d_value=d_value)
