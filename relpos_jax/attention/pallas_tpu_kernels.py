"""The kernels for TPUs: the output, and all gradients in one pass over the tiles.

A tile is `block` queries by `block` keys. All of it is left of the band, or right of
it, where all keys of a query have the same relative term; or the tile is *mixed*.

Keys are along sublanes and queries along lanes, of tiles and of arrays in memory: heads
narrower than a vector waste none of it, and one number per query is a row.

What a block of queries has for each row of a table is stored *skewed*, `[period,
block]`: that of query i (counted from its block's start) and distance d is in row (i +
d) % period. This is the row j % period of key j, whatever the query. So a mixed tile
reads its terms, and adds its gradients, by slices, without a lookup. They are skewed
and unskewed once per block of queries, by a rotation whose shift grows with the column.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from relpos_jax.attention import dropout, masks
from relpos_jax.attention.band import FAR, KernelPlan
from relpos_jax.attention.partitioned import shapes_like
from relpos_jax.typing import Array, ArrayLike

# A letter for each axis of each array, see `over_devices`: small ones are not sharded.
AXES = dict(key_table="Nrh", value_table="Nrh", bias_table="Nro")
# All sequences share these, and heads may; the kernel's gradients are per sequence and
# head.
TABLES = tuple(AXES)
AXES |= {f"d_{name}": "B" + axes for name, axes in AXES.items()}
AXES |= dict.fromkeys(("query", "d_output", "output", "d_query"), "BNht")
AXES |= dict.fromkeys(("key", "value", "d_key", "d_value"), "BKhS")
# A weight is exp(logit - maximum) * inverse_total: in a logsumexp float32 would lose
# the total.
AXES |= dict.fromkeys(("maximum", "inverse_total", "delta"), "BNot")
AXES |= dict(seeds="BNop", key_mask="BSo", query_segments="Bot", key_segments="BSo")

_VMEM_BYTES = 56 * 2**20  # what a kernel may use; the default is too little

Arrays = dict[str, Any]


class TpuPlan(KernelPlan):
  """The plan of a call, whose tiles have as many queries as keys."""

  @property
  def period(self) -> int:
    """Returns the rows of a skewed array: a divisor or a multiple of the block."""
    period = max(8, 1 << (self.num_rows - 1).bit_length())
    return (
      period if period <= self.block else -(-self.num_rows // self.block) * self.block
    )


# The output
# ---------------------------------------------------------------------------------------


def forward(plan: TpuPlan, operands: Arrays, _: ArrayLike) -> Arrays:
  """Returns the output [B,N,H,T], and two numbers per query [B,N,1,T], in float32 or wider."""
  batch, heads, width, length = operands["query"].shape
  wide = jnp.promote_types(operands["query"].dtype, jnp.float32)
  row = jax.ShapeDtypeStruct((batch, heads, 1, length), wide)
  output = row.update(shape=operands["query"].shape)
  outputs = dict(output=output, maximum=row, inverse_total=row)
  scratch = dict(
    output=(width, plan.block), maximum=(1, plan.block), total=(1, plan.block)
  )
  if _has_logits(operands):
    scratch |= _by_row(plan, "key")
  if "value_table" in operands:
    scratch |= _by_row(plan, "weights")
  return _call(
    plan, _forward_kernel, operands, outputs, scratch, num_parallel=4, num_products=2
  )


def _forward_kernel(
  plan: TpuPlan, operands: Arrays, outputs: Arrays, scratch: Arrays
) -> None:
  query_block, key_block = pl.program_id(3), pl.program_id(4)

  @pl.when(key_block == 0)
  def _():
    _clear(scratch)
    scratch["maximum"][...] += masks.LOWEST
    _store_logits(plan, operands, scratch)

  def add(offset: Array, side: str) -> None:
    """Adds a tile to an online softmax."""
    value, logits = (
      operands["value"][0, 0],
      _logits(plan, operands, scratch, offset, side),
    )
    maximum = jnp.maximum(scratch["maximum"][...], logits.max(0, keepdims=True))
    correction = jnp.exp(scratch["maximum"][...] - maximum)
    scratch["maximum"][...] = maximum
    weights = jnp.exp(logits - maximum)
    scratch["total"][...] = scratch["total"][...] * correction + weights.sum(
      0, keepdims=True
    )
    if plan.dropout_rate:
      weights = jnp.where(_keep(plan, operands, query_block, key_block), weights, 0)
    added = _product(value, weights.astype(value.dtype), (1, 0))
    scratch["output"][...] = scratch["output"][...] * correction + added
    if "value_table" in operands:
      for name in _by_row(plan, "weights"):
        scratch[name][...] *= correction
      _collect(plan, scratch, "weights", weights, offset, side)

  _on_its_side(plan, key_block - query_block, add)

  @pl.when(key_block == pl.num_programs(4) - 1)
  def _():
    maximum, output = scratch["maximum"][...], scratch["output"][...]
    inverse_total = jnp.where(maximum <= masks.LOWEST / 2, 0, 1 / scratch["total"][...])
    if "value_table" in operands:
      weights = _unskewed(plan, scratch, "weights")
      output += _product(operands["value_table"][0], weights, (0, 0))
    outputs["output"][0, 0] = output * (inverse_total / (1 - plan.dropout_rate))
    outputs["maximum"][0, 0] = maximum
    outputs["inverse_total"][0, 0] = inverse_total


# Gradients
# ----------------------------------------------------------------------------------------


def backward(plan: TpuPlan, operands: Arrays, _: ArrayLike) -> Arrays:
  """Returns all gradients; those of the tables per sequence and head.

  Those of keys and values stay on the chip until all queries of a key head are done.
  """
  query, key = operands["query"], operands["key"]
  batch, heads, width, _ = query.shape
  wide = jnp.promote_types(query.dtype, jnp.float32)
  names = "query", "key", "value"
  outputs = {
    f"d_{x}": jax.ShapeDtypeStruct(operands[x].shape, query.dtype) for x in names
  }
  for name in [x for x in TABLES if x in operands]:
    of_heads = batch, heads, *operands[name].shape[1:]
    outputs[f"d_{name}"] = jax.ShapeDtypeStruct(of_heads, wide)
  scratch = dict(query=(width, plan.block)) | dict.fromkeys(
    ("key", "value"), key.shape[2:]
  )
  if _has_logits(operands):
    scratch |= _by_row(plan, "key") | _by_row(plan, "d_logits")
  if "value_table" in operands:
    scratch |= _by_row(plan, "value") | _by_row(plan, "weights")
  return _call(
    plan, _backward_kernel, operands, outputs, scratch, num_parallel=2, num_products=5
  )


def _backward_kernel(
  plan: TpuPlan, operands: Arrays, outputs: Arrays, scratch: Arrays
) -> None:
  group, query_block, key_block = (pl.program_id(axis) for axis in (2, 3, 4))
  last_group, last_query, last_key = (pl.num_programs(axis) - 1 for axis in (2, 3, 4))
  of_keys = {name: scratch[name] for name in ("key", "value")}
  of_tables = {name: outputs[f"d_{name}"] for name in TABLES if name in operands}
  is_first = (query_block == 0) & (key_block == 0)
  pl.when((group == 0) & is_first)(lambda: _clear(of_keys))
  pl.when(is_first)(lambda: _clear(of_tables))

  @pl.when(key_block == 0)
  def _():
    _clear({name: x for name, x in scratch.items() if name not in of_keys})
    _store_logits(plan, operands, scratch)
    if "value_table" in operands:
      rows = _product(operands["value_table"][0], operands["d_output"][0, 0], (1, 0))
      _store(plan, scratch, "value", rows)

  def add(offset: Array, side: str) -> None:
    """Adds the terms of a tile to all gradients."""
    names = "query", "key", "value", "d_output"
    query, key, value, d_output = (operands[name][0, 0] for name in names)
    logits = _logits(plan, operands, scratch, offset, side)
    weights = (
      jnp.exp(logits - operands["maximum"][0, 0]) * operands["inverse_total"][0, 0]
    )
    d_weights = _product(value, d_output, (0, 0))
    if "value_table" in operands:
      d_weights += _terms(plan, scratch, "value", offset, side)
    kept_weights = weights
    if plan.dropout_rate:
      kept = _keep(plan, operands, query_block, key_block)
      factor = jnp.where(kept, 1 / (1 - plan.dropout_rate), 0).astype(weights.dtype)
      d_weights, kept_weights = d_weights * factor, weights * factor
    d_logits = weights * (d_weights - operands["delta"][0, 0])
    if "value_table" in operands:
      _collect(plan, scratch, "weights", kept_weights, offset, side)
    if _has_logits(operands):
      _collect(plan, scratch, "d_logits", d_logits, offset, side)
    kept_weights, d_logits = (
      kept_weights.astype(query.dtype),
      d_logits.astype(query.dtype),
    )
    keys = pl.ds(pl.multiple_of(key_block * plan.block, plan.block), plan.block)
    scratch["value"][:, keys] += _product(d_output, kept_weights, (1, 1))
    scratch["key"][:, keys] += _product(query, d_logits, (1, 1))
    scratch["query"][...] += _product(key, d_logits, (1, 0))

  _on_its_side(plan, key_block - query_block, add)

  @pl.when(key_block == last_key)
  def _():
    d_query, query = scratch["query"][...], operands["query"][0, 0]
    d_logits = _unskewed(plan, scratch, "d_logits") if _has_logits(operands) else None
    if "key_table" in operands:
      d_query += _product(operands["key_table"][0], d_logits, (0, 0))
      outputs["d_key_table"][0, 0] += _product(d_logits, query, (1, 1)) * plan.scale
    if "bias_table" in operands:
      outputs["d_bias_table"][0, 0] += d_logits.sum(1, keepdims=True)
    if "value_table" in operands:
      weights = _unskewed(plan, scratch, "weights")
      outputs["d_value_table"][0, 0] += _product(
        weights, operands["d_output"][0, 0], (1, 1)
      )
    outputs["d_query"][0, 0] = (d_query * plan.scale).astype(outputs["d_query"].dtype)

  @pl.when(
    (group == last_group) & (query_block == last_query) & (key_block == last_key)
  )
  def _():
    outputs["d_key"][0, 0] = (scratch["key"][...] * plan.scale).astype(
      outputs["d_key"].dtype
    )
    outputs["d_value"][0, 0] = scratch["value"][...].astype(outputs["d_value"].dtype)


# Tiles
# --------------------------------------------------------------------------------------------


def _on_its_side(
  plan: TpuPlan, offset: Array, add: Callable[[Array, str], None]
) -> None:
  """Runs `add(offset, side)` for a tile `offset` blocks right of the diagonal, if any
  pair is seen.

  The side of the band is "left", "right" or "mixed"; in a causal call all to the right
  is hidden.
  """
  is_left = (offset + 1) * plan.block - 1 <= plan.low
  is_right = (offset - 1) * plan.block + 1 >= plan.high
  pl.when(is_left)(lambda: add(offset, "left"))
  if plan.high < FAR:
    pl.when(~(is_left | is_right))(lambda: add(offset, "mixed"))
    if not plan.is_causal:
      pl.when(is_right)(lambda: add(offset, "right"))


def _distances(plan: TpuPlan, offset: Array) -> Array:
  """Returns j - i in a tile."""
  iota = functools.partial(
    jax.lax.broadcasted_iota, jnp.int32, (plan.block, plan.block)
  )
  return offset * plan.block + iota(0) - iota(1)


def _logits(
  plan: TpuPlan, operands: Arrays, scratch: Arrays, offset: Array, side: str
) -> Array:
  """Computes a tile's logits, LOWEST for hidden pairs."""
  logits = _product(operands["key"][0, 0], operands["query"][0, 0], (0, 0)) * plan.scale
  if _has_logits(operands):
    logits += _terms(plan, scratch, "key", offset, side)
  hidden = []
  if plan.is_causal and side == "mixed":
    hidden.append(_distances(plan, offset) > 0)
  if "key_mask" in operands:
    hidden.append(operands["key_mask"][0] == 0)
  if "query_segments" in operands:
    hidden.append(operands["query_segments"][0] != operands["key_segments"][0])
  for mask in hidden:
    logits = jnp.where(mask, jnp.asarray(masks.LOWEST, logits.dtype), logits)
  return logits


def _keep(
  plan: TpuPlan, operands: Arrays, query_block: Array, key_block: Array
) -> Array:
  """Returns the dropout mask of a tile, True where a weight is kept."""
  iota = functools.partial(jax.lax.broadcasted_iota, jnp.int32)
  keys = key_block * plan.block + iota((plan.block, 1), 0)
  queries = query_block * plan.block + iota((1, plan.block), 1)
  return dropout.keep(operands["seeds"][0, 0], queries, keys, plan.dropout_rate)


# The rows of the tables
# ---------------------------------------------------------------------------


def _has_logits(operands: Arrays) -> bool:
  """Returns whether any table has a term of the logits."""
  return "key_table" in operands or "bias_table" in operands


def _by_row(plan: TpuPlan, name: str) -> dict[str, tuple[int, int]]:
  """Returns the shapes of numbers by query and row: beside the band, and in it, skewed."""
  row = 1, plan.block
  return {
    f"{name}_left": row,
    f"{name}_right": row,
    f"{name}_band": (plan.period, plan.block),
  }


def _store_logits(plan: TpuPlan, operands: Arrays, scratch: Arrays) -> None:
  """Stores the tables' terms of the logits of a block's queries, if any."""
  if not _has_logits(operands):
    return
  rows = 0
  if "key_table" in operands:
    rows = (
      _product(operands["key_table"][0], operands["query"][0, 0], (1, 0)) * plan.scale
    )
  if "bias_table" in operands:
    rows += jnp.broadcast_to(operands["bias_table"][0], (plan.period, plan.block))
  _store(plan, scratch, "key", rows)


def _store(plan: TpuPlan, scratch: Arrays, name: str, rows: Array) -> None:
  """Stores the terms of a block's queries, `[period, block]`."""
  scratch[f"{name}_left"][...] = rows[plan.low % plan.period, None]
  scratch[f"{name}_right"][...] = rows[plan.high % plan.period, None]
  scratch[f"{name}_band"][...] = _skew(plan, rows)


def _terms(
  plan: TpuPlan, scratch: Arrays, name: str, offset: Array, side: str
) -> Array:
  """Returns a tile's relative terms, `[block, block]`, or `[1, block]` beside the band."""
  if side != "mixed":
    return scratch[f"{name}_{side}"][...]
  distances = _distances(plan, offset)
  rows, num_copies = _rows_of(plan, offset)
  band = jnp.concatenate([scratch[f"{name}_band"][rows, :]] * num_copies)
  terms = jnp.where(distances <= plan.low, scratch[f"{name}_left"][...], band)
  return jnp.where(distances >= plan.high, scratch[f"{name}_right"][...], terms)


def _collect(
  plan: TpuPlan, scratch: Arrays, name: str, tile: Array, offset: Array, side: str
):
  """Adds a tile to the sums by query and row."""
  if side != "mixed":
    scratch[f"{name}_{side}"][...] += tile.sum(0, keepdims=True)
    return
  distances = _distances(plan, offset)
  is_left, is_right = distances <= plan.low, distances >= plan.high
  scratch[f"{name}_left"][...] += jnp.where(is_left, tile, 0).sum(0, keepdims=True)
  scratch[f"{name}_right"][...] += jnp.where(is_right, tile, 0).sum(0, keepdims=True)
  rows, num_copies = _rows_of(plan, offset)
  in_band = jnp.where(is_left | is_right, 0, tile)
  scratch[f"{name}_band"][rows, :] += sum(jnp.split(in_band, num_copies))


def _rows_of(plan: TpuPlan, offset: Array) -> tuple[Any, int]:
  """Returns the rows of a skewed array that a tile's keys have, and how often they repeat."""
  if plan.period <= plan.block:
    return slice(None), plan.block // plan.period
  start = jnp.remainder(offset, plan.period // plan.block) * plan.block
  return pl.ds(pl.multiple_of(start, plan.block), plan.block), 1


def _unskewed(plan: TpuPlan, scratch: Arrays, name: str) -> Array:
  """Returns the sums by row of the table and query, `[period, block]`."""
  sums = _skew(plan, scratch[f"{name}_band"][...], -1)
  row = jax.lax.broadcasted_iota(jnp.int32, sums.shape, 0)
  sums = jnp.where(row == plan.low % plan.period, scratch[f"{name}_left"][...], sums)
  return jnp.where(row == plan.high % plan.period, scratch[f"{name}_right"][...], sums)


def _skew(plan: TpuPlan, x: Array, sign: int = 1) -> Array:
  """Moves row d of column i to row (i + d) % period, or the other way if `sign` is -1.

  Rotates by 1, 2, 4, ... rows the columns whose number has that bit.
  """
  column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
  for bit in range((min(plan.period, plan.block) - 1).bit_length()):
    x = jnp.where(
      column & 2**bit != 0, pltpu.roll(x, sign * 2**bit % plan.period, 0), x
    )
  return x


# Pallas
# -------------------------------------------------------------------------------------------


def _clear(arrays: Arrays) -> None:
  for x in arrays.values():
    x[...] = jnp.zeros(x.shape, x.dtype)


def _product(x: Array, y: Array, contract: tuple[int, int]) -> Array:
  """Computes the matrix product over an axis of each, in float32 or wider.

  A product with a table is wide: its rounding error would be the same for every query.
  """
  dtype = jnp.promote_types(x.dtype, y.dtype)
  wide = jnp.promote_types(dtype, jnp.float32)
  # Not None, the default in force: the compiler refuses a higher one for bfloat16,
  # which is exact.
  precision = (
    jax.lax.Precision.DEFAULT if dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
  )
  dimensions = ((contract[:1], contract[1:]), ((), ()))
  x, y = x.astype(dtype), y.astype(dtype)
  return jax.lax.dot_general(
    x, y, dimensions, precision=precision, preferred_element_type=wide
  )


def _call(
  plan: TpuPlan,
  kernel,
  operands: Arrays,
  outputs: Arrays,
  scratch,
  *,
  num_parallel,
  num_products,
) -> Arrays:
  """Runs `kernel(plan, operands, outputs, scratch)` for every tile.

  The grid is of the batch, key heads, query heads of a key head, blocks of queries, and
  blocks of keys; the first `num_parallel` of these are parallel. `scratch` has shapes;
  a tile takes `num_products` products of [block, H] by [block, block].
  """
  query, key = operands["query"], operands["key"]
  batch, heads, width, length = query.shape
  key_heads, num_keys = key.shape[1], key.shape[3]
  grid = (
    batch,
    key_heads,
    heads // key_heads,
    length // plan.block,
    num_keys // plan.block,
  )
  sizes = dict(B=1, N=1, K=1, t=plan.block, S=plan.block)
  # The gradients of all keys stay on the chip.
  axes = AXES | dict.fromkeys(("d_key", "d_value"), "BKhs")

  def spec(name, x):
    pairs = list(zip(axes[name], x.shape, strict=True))

    def index(b, m, g, i, j):
      j = jnp.minimum(i, j) if plan.is_causal else j  # a hidden tile reads no new keys
      at = dict(B=b, N=m * grid[2] + g, K=m, t=i, S=j)
      return tuple(at.get(letter, 0) if size > 1 else 0 for letter, size in pairs)

    return pl.BlockSpec(
      [min(sizes.get(letter, size), size) for letter, size in pairs], index
    )

  wide = jnp.promote_types(query.dtype, jnp.float32)
  num_pairs = batch * heads * length * num_keys // (2 if plan.is_causal else 1)
  cost = pl.CostEstimate(
    flops=2 * num_products * num_pairs * width,
    transcendentals=num_pairs,
    bytes_accessed=sum(
      x.size * x.dtype.itemsize for x in (operands | outputs).values()
    ),
  )
  return pl.pallas_call(
    functools.partial(kernel, plan),
    grid=grid,
    in_specs=[{name: spec(name, x) for name, x in operands.items()}],
    out_specs={name: spec(name, x) for name, x in outputs.items()},
    out_shape=shapes_like(query, outputs),
    scratch_shapes=[{name: pltpu.VMEM(shape, wide) for name, shape in scratch.items()}],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=["parallel"] * num_parallel
      + ["arbitrary"] * (len(grid) - num_parallel),
      vmem_limit_bytes=_VMEM_BYTES,
    ),
    cost_estimate=cost,
    interpret=plan.interpret,
    name=f"relative_attention{kernel.__name__}",
  )(operands)
