"""The kernels for GPUs: the output, the gradient of queries and band, that of keys and values.

For a block of queries the keys fall into three runs of tiles. The distance j - i is right of the
band in all of a tile, or left of it in all, or the tile is *mixed*. Tiles left and right of the
band have one relative logit per query, and right ones delta_i - dSums_i.

In a mixed tile the pair (i, j) has column j - i - first of [T, R], gathered through a reference.
Every (i, r) of the band has one j, so gradients by rows of the table are scattered there without
atomics; the last row, all keys further right, is summed. Logits have one more column, of all keys
left of the band; the gradients of a query's logits sum to zero, which gives its own.

A hidden pair has a very low logit, so that nothing is ever infinite. A weight is
exp(logit - maximum) * inverse_total, forward and backward, in this order: float32 loses a small
summand beside a large logit, and rounds a large one that is multiplied with log2(e).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from relpos_jax.attention import dropout, masks
from relpos_jax.attention.partitioned import Shards, shapes_like
from relpos_jax.typing import Array, Bool, Float, Int

FAR = 2**30  # the distance of a limit or of a band that is absent

# A letter for each axis of each array, see `over_devices`: small ones are not sharded.
AXES = dict(
  query="BtNh",
  key="BSKh",
  value="BSKh",
  band_logits="BNtr",  # one of B, N and t for all if they do not differ
  slopes="N",
  key_mask="BS",  # 1 for keys that are not hidden
  key_ends="B",  # one past the last of them
  query_segments="Bt",
  key_segments="BS",
  seeds="BN",
  query_offset="B",  # the position of the first query; by default 0
  output="BtNh",
  maximum="BNt",  # of the logits
  inverse_total="BNt",  # of exp(logit - maximum), zero where all keys are masked
  band="BNtr",  # the band's logits, and the weight of all keys right of it after dropout
  sums="BNtr",  # of the weights after dropout, by row of the table
  row_sums="BNt",  # of the weights after dropout
  d_output="BtNh",
  d_sums="BNtr",
  d_row_sums="BNt",
  right_d_row_sums="BNt",  # instead of d_row_sums right of the band
  delta="BNt",
  right_delta="BNt",
  d_query="BtNh",
  d_band_logits="BNtr",
  d_slopes="BNt",  # per query
  d_key="BSNh",  # per query head
  d_value="BSNh",
)

Arrays = dict[str, Any]


class Blocks(NamedTuple):
  """The tiles of each kernel: (queries, keys, parts), powers of 2.

  Mixed tiles are split into `parts` along the axis of the kernel's loop: they need the most
  registers, and would limit the plain tiles too.
  """

  output: tuple[int, int, int]
  d_query: tuple[int, int, int]
  d_key: tuple[int, int, int]


class GpuPlan(NamedTuple):
  """The static parameters of the kernels.

  Attributes:
    first: the distance of the band's first diagonal; `FAR` without relations.
    num_diagonals: of the band, R - 1.
    lowest, highest: visible distances j - i; -`FAR` and `FAR` without limits.
    sums: whether to return the weights' sums by row of the table.
    rate: of dropout.
    precision: of products, the default in force where the call was traced.
  """

  scale: float
  first: int
  num_diagonals: int
  lowest: int
  highest: int
  sums: bool
  rate: float
  blocks: Blocks
  num_warps: int
  interpret: bool
  shards: Shards | None  # the mesh axes that shard the query, see `over_devices`
  precision: str | None

  @property
  def left(self) -> int:
    """Returns the distance below which tiles are plain."""
    return min(self.first, self.highest + 1)

  @property
  def right(self) -> int:
    """Returns the distance from which on tiles are plain."""
    return self.first + self.num_diagonals

  @property
  def has_right(self) -> bool:
    """Returns whether any key right of the band may be visible."""
    return self.first < FAR and self.highest >= self.right


def forward(plan: GpuPlan, operands: Arrays) -> Arrays:
  """Computes attention without the value table, and the weights' sums that the table needs."""
  query = operands["query"]
  batch, length, heads, _ = query.shape
  wide = jnp.promote_types(query.dtype, jnp.float32)
  row = jax.ShapeDtypeStruct((batch, heads, length), wide)
  # Rounded after delta, whose error would enter every gradient of a query's relative terms.
  is_wide = plan.sums or operands.keys() & {"band_logits", "slopes"}
  dtype = wide if is_wide else operands["value"].dtype
  shapes = dict(output=jax.ShapeDtypeStruct(query.shape, dtype), maximum=row, inverse_total=row)
  if not plan.sums:
    return _call(_output_kernel, plan, "t", plan.blocks.output, operands, shapes)
  shapes["band"] = jax.ShapeDtypeStruct((*row.shape, plan.num_diagonals + 1), wide)
  if plan.rate:
    shapes["row_sums"] = row
  outputs = _call(_output_kernel, plan, "t", plan.blocks.output, operands, shapes)
  maximum, inverse_total = (outputs[name][..., None] for name in ("maximum", "inverse_total"))
  band = outputs.pop("band")
  band = jnp.where(_is_written(plan, operands, band), band, masks.LOWEST)
  sums = jnp.exp(band - maximum) * inverse_total
  if plan.rate:
    seeds = operands["seeds"][..., None, None]
    kept = dropout.keep(seeds, *_pairs(plan, operands, band), plan.rate)
    sums = jnp.where(kept, sums / (1 - plan.rate), 0)
  else:
    outputs["row_sums"] = (outputs["inverse_total"] > 0).astype(wide)
  return outputs | dict(sums=sums.at[..., -1].set(band[..., -1]))


def backward(plan: GpuPlan, operands: Arrays) -> Arrays:
  """Computes gradients by two kernels: of the query and the band, and of key and value."""
  query, key, band = operands["query"], operands["key"], operands.get("band_logits")
  # Gradients to which more is added are rounded later.
  wide = jnp.promote_types(query.dtype, jnp.float32)
  shapes = dict(d_query=jax.ShapeDtypeStruct(query.shape, query.dtype if band is None else wide))
  if band is not None:
    shape = *operands["delta"].shape, plan.num_diagonals + 1
    shapes["d_band_logits"] = jax.ShapeDtypeStruct(shape, wide)
  if "slopes" in operands:
    shapes["d_slopes"] = jax.ShapeDtypeStruct(operands["delta"].shape, wide)
  gradients = _call(_d_query_kernel, plan, "t", plan.blocks.d_query, operands, shapes)
  if band is not None:
    d_band = gradients["d_band_logits"]
    d_band = jnp.where(_is_written(plan, operands, d_band), d_band, 0.0)
    d_band = d_band.sum([axis for axis in range(3) if band.shape[axis] == 1], keepdims=True)
    left = -d_band.sum(-1, keepdims=True)
    gradients["d_band_logits"] = jnp.concatenate([d_band, left], -1)
  batch, _, heads, width = query.shape
  dtype = key.dtype if heads == key.shape[2] else wide
  of_keys = jax.ShapeDtypeStruct((batch, key.shape[1], heads, width), dtype)
  shapes = dict(d_key=of_keys, d_value=of_keys)
  return gradients | _call(_d_key_kernel, plan, "S", plan.blocks.d_key, operands, shapes)


def _pairs(
  plan: GpuPlan, operands: Arrays, band: Array
) -> tuple[Int[Array, "#B 1 T 1"], Int[Array, "#B 1 T R"]]:
  """Returns the positions of query and key of each entry of [T, R], the last column excepted."""
  shape = (1, 1, *band.shape[2:])
  row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (2, 3))
  if "query_offset" in operands:
    row += operands["query_offset"][:, None, None, None]
  return row[..., :1], row + plan.first + column


def _is_written(plan: GpuPlan, operands: Arrays, band: Array) -> Bool[Array, "#B 1 T R"]:
  """Returns False where a kernel leaves `band` uninitialised: hidden pairs, and no key."""
  rows, columns = _pairs(plan, operands, band)
  ends = operands["key"].shape[1]
  if "key_ends" in operands:
    ends = operands["key_ends"][:, None, None, None]
  mask = (columns >= 0) & (columns - rows >= plan.lowest) & (columns - rows <= plan.highest)
  return (mask & (columns < ends)).at[..., -1].set(True)


def _call(
  kernel: Callable, plan: GpuPlan, blocked: str, blocks: tuple, operands: Arrays, results: Arrays
) -> Arrays:
  """Runs a kernel for every block of one axis of every head; it reads all of the other axes."""
  query, key = operands["query"], operands["key"]
  batch, length, heads, _ = query.shape
  size, total = (blocks[0], length) if blocked == "t" else (blocks[1], key.shape[1])
  group = heads // key.shape[2]

  def spec(axes, x):
    axes = list(zip(axes, x.shape, strict=True))

    def size_of(axis, n):
      return {"B": None, "N": None, "K": None, blocked: min(size, n)}.get(axis, n)

    def index(i, n, b):
      at = {"B": b, "N": n, "K": lax.div(n, jnp.int32(group)), blocked: i}
      return tuple(at.get(axis, 0) if n > 1 else 0 for axis, n in axes)

    return pl.BlockSpec(tuple(size_of(*axis) for axis in axes), index)

  def specs(arrays):
    return {name: spec(AXES[name], x) for name, x in arrays.items()}

  return pl.pallas_call(
    functools.partial(kernel, plan),
    out_shape=shapes_like(operands["query"], results),
    grid=(total // size, heads, batch),
    in_specs=[specs(operands)],
    out_specs=specs(results),
    compiler_params=plgpu.CompilerParams(num_warps=plan.num_warps, num_stages=2),
    interpret=plan.interpret,
    name=kernel.__name__.strip("_"),
  )(operands)


# The output ---------------------------------------------------------------------------------------


class _State(NamedTuple):
  """The state of an online softmax: all but the maximum are relative to exp(maximum)."""

  maximum: Float[Array, " Q"]
  total: Float[Array, " Q"]
  kept: Float[Array, " Q"] | None  # the total after dropout
  right: Float[Array, " Q"] | None  # the part of the total right of the band
  output: Float[Array, "Q H"]


def _output_kernel(plan: GpuPlan, operands: Arrays, outputs: Arrays):
  block, query = plan.blocks.output[0], operands["query"][...]
  start = _position(operands, pl.program_id(0) * block)

  def visit(side: str, width: int, t: Array, state: _State) -> _State:
    keys = pl.ds(t * width, width)
    tile = _Tile(start, t * width, (block, width), pl.ds(0, block), keys, side)
    logits = _logits(plan, operands, tile, query, operands["key"][keys])
    if side == "mixed" and plan.sums:
      _scatter(plan, outputs["band"], tile, logits)
    return _attend(plan, operands, tile, state, logits, operands["value"][keys])

  runs = _key_runs(plan, operands, start, *plan.blocks.output)
  dtype = outputs["maximum"].dtype
  zeros = jnp.zeros(block, dtype)
  kept = zeros if plan.sums and plan.rate else None
  output = jnp.zeros((block, query.shape[1]), dtype)
  state = _State(jnp.full(block, masks.LOWEST, dtype), zeros, kept, None, output)
  for side, width, begin, end in runs:
    if side == "mixed" and plan.sums:
      state = state._replace(right=state.kept if plan.rate else state.total)
    if side == "left":
      right, old_maximum = state.right, state.maximum
      state = state._replace(right=None)
    state = lax.fori_loop(begin, end, functools.partial(visit, side, width), state)
  has_key = state.maximum > masks.LOWEST / 2
  inverse_total = jnp.where(has_key, 1 / jnp.where(has_key, state.total, 1), 0)
  factor = inverse_total / (1 - plan.rate)
  outputs["output"][...] = (state.output * factor[:, None]).astype(outputs["output"].dtype)
  outputs["maximum"][...] = state.maximum
  outputs["inverse_total"][...] = inverse_total
  if "row_sums" in outputs:
    outputs["row_sums"][...] = state.kept * factor
  if plan.sums:
    outputs["band"][:, plan.num_diagonals] = right * jnp.exp(old_maximum - state.maximum) * factor


def _attend(
  plan: GpuPlan, operands: Arrays, tile: "_Tile", state: _State, logits: Array, value: Array
) -> _State:
  """Returns the state after one more tile."""
  maximum = jnp.maximum(state.maximum, logits.max(1))
  correction = jnp.exp(state.maximum - maximum)
  weights = jnp.exp(logits - maximum[:, None])
  total = state.total * correction + weights.sum(1)
  kept, right = state.kept, state.right
  if plan.rate:
    weights = jnp.where(_keep(plan, operands, tile), weights, 0)
  if kept is not None:
    kept = kept * correction + weights.sum(1)
  if right is not None:
    right = right * correction + jnp.where(tile.distances >= plan.right, weights, 0).sum(1)
  output, low = state.output * correction[:, None], weights.astype(value.dtype)
  output += _dot(low, value, 1, 0)
  if "slopes" in operands and low.dtype != weights.dtype:
    # An error of delta is multiplied by the distance, which may be large for all keys of a query.
    output += _dot((weights - low.astype(weights.dtype)).astype(low.dtype), value, 1, 0)
  return _State(maximum, total, kept, right, output)


# Gradients ----------------------------------------------------------------------------------------


def _d_query_kernel(plan: GpuPlan, operands: Arrays, gradients: Arrays):
  block, query, d_output = plan.blocks.d_query[0], operands["query"][...], operands["d_output"][...]
  start = _position(operands, pl.program_id(0) * block)
  with_band, wide = "band_logits" in operands, operands["delta"].dtype

  def visit(side: str, width: int, t: Array, carry: tuple) -> tuple:
    d_query, d_right, d_slopes = carry
    keys = pl.ds(t * width, width)
    tile = _Tile(start, t * width, (block, width), pl.ds(0, block), keys, side)
    key, value = operands["key"][keys], operands["value"][keys]
    _, d_logits = _d_logits(plan, operands, tile, query, key, value, d_output)
    d_query += _dot(d_logits.astype(key.dtype), key, 1, 0)
    if side == "mixed" and with_band:
      _scatter(plan, gradients["d_band_logits"], tile, d_logits)
      d_right += jnp.where(tile.distances >= plan.right, d_logits, 0).sum(1)
    if side == "right" and with_band:
      d_right += d_logits.sum(1)
    if d_slopes is not None:
      d_slopes -= (d_logits * jnp.abs(tile.distances).astype(wide)).sum(1)
    return d_query, d_right, d_slopes

  runs = _key_runs(plan, operands, start, *plan.blocks.d_query)

  def row(exists):
    return jnp.zeros(block, wide) if exists else None

  carry = jnp.zeros(query.shape, wide), row(with_band), row("slopes" in operands)
  for side, width, begin, end in runs:
    carry = lax.fori_loop(begin, end, functools.partial(visit, side, width), carry)
  gradients["d_query"][...] = (plan.scale * carry[0]).astype(gradients["d_query"].dtype)
  if with_band:
    gradients["d_band_logits"][:, plan.num_diagonals] = carry[1]
  if "slopes" in operands:
    gradients["d_slopes"][...] = carry[2]


def _d_key_kernel(plan: GpuPlan, operands: Arrays, gradients: Arrays):
  block, key, value = plan.blocks.d_key[1], operands["key"][...], operands["value"][...]
  start = pl.program_id(0) * block

  def visit(side: str, height: int, t: Array, carry: tuple) -> tuple:
    queries = pl.ds(t * height, height)
    row = _position(operands, t * height)
    tile = _Tile(row, start, (height, block), queries, pl.ds(0, block), side)
    query, d_output = operands["query"][queries], operands["d_output"][queries]
    weights, d_logits = _d_logits(plan, operands, tile, query, key, value, d_output)
    return (
      carry[0] + _dot(d_logits.astype(query.dtype), query, 0, 0),
      carry[1] + _dot(weights.astype(d_output.dtype), d_output, 0, 0),
    )

  runs = _query_runs(plan, operands, start, *plan.blocks.d_key)
  carry = (jnp.zeros(key.shape, operands["delta"].dtype),) * 2
  for side, height, begin, end in runs:
    carry = lax.fori_loop(begin, end, functools.partial(visit, side, height), carry)
  gradients["d_key"][...] = (plan.scale * carry[0]).astype(gradients["d_key"].dtype)
  gradients["d_value"][...] = carry[1].astype(gradients["d_value"].dtype)


def _d_logits(
  plan: GpuPlan, operands: Arrays, tile: "_Tile", query, key, value, d_output
) -> tuple[Array, Array]:
  """Computes a tile's weights after dropout, and the gradient of its logits."""

  def side(name):
    return f"right_{name}" if f"right_{name}" in operands else name

  def of_queries(name):
    return operands[side(name) if tile.side == "right" else name][tile.queries]

  delta = of_queries("delta")
  maximum, inverse_total = (of_queries(name)[:, None] for name in ("maximum", "inverse_total"))
  weights = jnp.exp(_logits(plan, operands, tile, query, key) - maximum) * inverse_total
  d_weights = _dot(d_output, value, 1, 1)
  if tile.side == "mixed" and plan.sums:
    d_weights += _gather(plan, operands["d_sums"], tile)
  if not plan.rate:
    return weights, weights * (d_weights - delta[:, None])
  if plan.sums:
    d_weights += of_queries("d_row_sums")[:, None]
  factor = jnp.where(_keep(plan, operands, tile), 1 / (1 - plan.rate), 0).astype(weights.dtype)
  return weights * factor, weights * (d_weights * factor - delta[:, None])


# Tiles --------------------------------------------------------------------------------------------


class _Tile(NamedTuple):
  """A tile of queries by keys, and its slices of the kernel's references."""

  row: Array  # the position of the first query
  column: Array  # the first key
  size: tuple[int, int]
  queries: Any  # slices of references
  keys: Any
  side: str  # of the band: "left", "right", or "mixed"

  @property
  def rows(self) -> Int[Array, "Q 1"]:
    return self.row + jnp.arange(self.size[0], dtype=jnp.int32)[:, None]

  @property
  def columns(self) -> Int[Array, "1 S"]:
    return self.column + jnp.arange(self.size[1], dtype=jnp.int32)[None]

  @property
  def distances(self) -> Int[Array, "Q S"]:
    return self.columns - self.rows


def _position(operands: Arrays, query: Array) -> Array:
  """Returns the position of a query."""
  return query + operands["query_offset"][...] if "query_offset" in operands else query


def _logits(plan: GpuPlan, operands: Arrays, tile: _Tile, query: Array, key: Array) -> Array:
  """Computes a tile's logits; off the band the relative term is one number per query."""
  logits = _dot(query, key, 1, 1) * plan.scale
  if tile.side == "mixed" and "band_logits" in operands:
    logits += _gather(plan, operands["band_logits"], tile)
  elif "band_logits" in operands:
    band, column = operands["band_logits"], plan.num_diagonals + (tile.side == "left")
    logits += band[tile.queries if band.shape[0] > 1 else slice(None), column][:, None]
  if "slopes" in operands:
    logits -= operands["slopes"][...] * jnp.abs(tile.distances).astype(logits.dtype)
  conditions = []
  if plan.lowest > -FAR:
    conditions.append(tile.distances >= plan.lowest)
  if plan.highest < FAR and (tile.side == "mixed" or plan.has_right):
    conditions.append(tile.distances <= plan.highest)
  if "key_mask" in operands:
    conditions.append((operands["key_mask"][tile.keys] != 0)[None])
  if "query_segments" in operands:
    of_queries = operands["query_segments"][tile.queries]
    conditions.append(of_queries[:, None] == operands["key_segments"][tile.keys][None])
  for mask in conditions:
    logits = jnp.where(mask, logits, masks.LOWEST)
  return logits


def _keep(plan: GpuPlan, operands: Arrays, tile: _Tile) -> Bool[Array, "Q S"]:
  """Returns the dropout mask of a tile, True where a weight is kept."""
  return dropout.keep(operands["seeds"][...], tile.rows, tile.columns, plan.rate)


def _gather(plan: GpuPlan, reference: Any, tile: _Tile) -> Array:
  """Reads each pair's entry of [T, R]; left of the band that of one more column, or 0 if none."""
  rows, columns = _indices(plan, tile)
  rows = rows if reference.shape[0] > 1 else jnp.zeros_like(rows)
  return plgpu.load(reference.at[rows, columns], mask=columns < reference.shape[1], other=0.0)


def _scatter(plan: GpuPlan, reference: Any, tile: _Tile, x: Array) -> None:
  """Writes the pairs on the band to their entries of [T, R], the last column excepted."""
  if plan.num_diagonals:
    on_band = (tile.distances >= plan.first) & (tile.distances < plan.right)
    plgpu.store(reference.at[_indices(plan, tile)], x, mask=on_band)


def _indices(plan: GpuPlan, tile: _Tile) -> tuple[Int[Array, "Q S"], Int[Array, "Q S"]]:
  """Returns indices into [T, R]: column R - 1 right of the band, R left of it."""
  columns = jnp.minimum(tile.distances - plan.first, plan.num_diagonals)
  columns = jnp.where(columns < 0, plan.num_diagonals + 1, columns)
  rows = tile.queries.start + jnp.arange(tile.size[0], dtype=jnp.int32)[:, None]
  return jnp.broadcast_to(rows, tile.size), columns


def _dot(x: Array, y: Array, axis_x: int, axis_y: int) -> Array:
  """Computes the product over one axis of each, accumulated in float32 or wider."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  axes = (((axis_x,), (axis_y,)), ((), ()))
  return lax.dot_general(x, y, axes, preferred_element_type=wide)


_Runs = list[tuple[str, int, Array, Array]]  # the side of the band, and tiles: size, begin, end


def _key_runs(plan: GpuPlan, operands: Arrays, start: Array, block: int, size: int, parts) -> _Runs:
  """Returns the tiles of keys for a block of queries, from right to left."""
  num_tiles = operands["key"].shape[0] // size
  if "key_ends" in operands:
    num_tiles = lax.div(operands["key_ends"][...] + (size - 1), jnp.int32(size))
  limits = plan.lowest, plan.highest, plan.left, plan.right
  left, mixed, right = _runs(start, block, size, parts, num_tiles, *limits)
  return [("right", *right)] * plan.has_right + [("mixed", *mixed), ("left", *left)]


def _query_runs(plan: GpuPlan, operands: Arrays, start, size: int, block: int, parts) -> _Runs:
  """Returns the tiles of queries for a block of keys: those with the block to their right first."""
  num_tiles = jnp.int32(operands["query"].shape[0] // size)
  if "key_ends" in operands:
    num_tiles = jnp.where(start < operands["key_ends"][...], num_tiles, 0)
  if "query_offset" in operands:
    start -= operands["query_offset"][...]
  limits = -plan.highest, -plan.lowest, 1 - plan.right, 1 - plan.left
  right, mixed, left = _runs(start, block, size, parts, num_tiles, *limits)
  return [("right", *right)] * plan.has_right + [("mixed", *mixed), ("left", *left)]


def _runs(
  start: Array, block: int, size: int, parts: int, num_tiles: Any, lowest, highest, low, high
) -> list[tuple[int, Array, Array]]:
  """Returns the low, mixed and high tiles of one axis for a block of the other: size, begin, end.

  A tile is included if some difference to the block is from `lowest` to `highest`; it is low if all
  are less than `low`, high if all are at least `high`.
  """

  def floor(x):
    return lax.div(jnp.maximum(x, 0), jnp.int32(size))

  last = start + (block - 1)
  end = jnp.minimum(floor(last + highest + size), num_tiles)
  begin = jnp.minimum(floor(start + lowest), end)
  low_end = jnp.clip(floor(start + low), begin, end)
  high_begin = jnp.clip(floor(last + high + (size - 1)), low_end, end)
  mixed = size // parts, low_end * parts, high_begin * parts
  return [(size, begin, low_end), mixed, (size, high_begin, end)]
