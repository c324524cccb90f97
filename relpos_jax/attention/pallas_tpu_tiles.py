"""The tiles of the fused kernels for TPUs: their part of the band, their masks, specs and cost.

A tile is `block` queries by `block` keys, `offset` blocks right of the diagonal, split into
sub-tiles `height` by `lanes`. With j - i = d, a sub-tile is all left of the band (d < first: no
relative term), all right of it (d >= last: the same one for all keys), or crosses it. Only the last
kind costs anything: about (2k + block) / S of all.

The band is stored in a *skewed* array `[block, period]` per block of queries: the entry of query i
(counted from its block's start) and distance d is in column `(i + d) % period`. That is a plain
column of some sub-tile: adding it there, or collecting it from there, is a select. It is skewed and
unskewed once per block of queries, by a rotation whose shift grows with the row.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from relpos_jax.attention import dropout, masks
from relpos_jax.attention.partitioned import Shards

# A letter for each axis of each array, see `over_devices`: AXES[1] in the forward kernel, where
# queries are along axis 1 of the masks, AXES[2] in the backward kernel.
#
# A weight is exp(logit - maximum) * inverse_total: in a logsumexp float32 would lose the total
# beside a large maximum. The "far" ones are those of tiles right of the diagonal's, whose logits
# all lack the same relative term.
_AXES = dict(key_table="Nwh", value_table="Nwh", content_table="Nwp", bias_table="Now")
_AXES |= dict(slopes="Nop")
# All sequences share these, and heads may; the kernel's gradients are per sequence and head.
TABLES = tuple(_AXES)
LOGIT_TABLES = ("key_table", "content_table", "bias_table")
_AXES |= {f"d_{name}": "B" + axes for name, axes in _AXES.items()}
_AXES |= dict(content="BNTp", d_content="BNTp")
_AXES |= dict.fromkeys(("query", "d_output", "output", "output_rest", "d_query"), "BNTh")
_AXES |= dict.fromkeys(("key", "value", "d_key", "d_value"), "BKSh")
_AXES |= dict.fromkeys(("maximum", "inverse_total", "sums", "delta"), "BNoT")
_AXES |= dict(far_maximum="BNoT", far_inverse_total="BNoT", seeds="BNop", first_block="oB")
AXES = {
  1: _AXES | dict(key_visible="BoS", query_segments="BTo", key_segments="BoS"),
  2: _AXES | dict(key_visible="BSo", query_segments="BoT", key_segments="BSo"),
}

VMEM_BYTES = 56 * 2**20  # what a kernel may use, if it needs more than the default

Shapes = Mapping[str, jax.Array | jax.ShapeDtypeStruct]


class TpuPlan(NamedTuple):
  """The static parameters of a call.

  Attributes:
    block: queries and keys of a tile.
    lanes: queries and keys of a sub-tile; divides block.
    num_blocks: of queries and of keys, in the call.
    first_block: the number of the first block of queries, counted as those of keys; None if it is
      an operand.
    scale: of the logits.
    first: the distance of the band's first diagonal, at most 1.
    last: the distance from which on the relative term is the same, at least 0.
    period: columns of a skewed band: more than last - first + 1; 0 without relations.
    key_block: the number of the first block of keys, if keys are split over several calls.
    interpret: whether to run as plain XLA, without a TPU.
    shards: the mesh axes that shard the query, see `over_devices`.
  """

  block: int
  lanes: int
  num_blocks: tuple[int, int]
  first_block: int | None
  scale: float
  is_causal: bool
  window: tuple[int, int] | None
  dropout_rate: float
  first: int
  last: int
  period: int
  key_block: int
  interpret: bool
  shards: Shards | None

  @property
  def last_row(self) -> int:
    """Returns the row of a periodic table for all keys right of the band."""
    return self.last % self.period

  @property
  def left_row(self) -> int:
    """Returns the row of a periodic table for every key, the value table's row 0."""
    return (self.first - 1) % self.period

  @property
  def offsets(self) -> tuple[int, int]:
    """Returns the lowest and the highest offset of any tile, as far as is known."""
    queries, keys = self.num_blocks
    if self.first_block is None:
      return -(2**30), 2**30
    return 1 - queries - self.first_block, keys - 1 - self.first_block

  @property
  def has_earlier_queries(self) -> bool:
    """Returns whether any block of queries may be before all keys."""
    return self.offsets[1] >= self.num_blocks[1]

  @property
  def has_later_queries(self) -> bool:
    """Returns whether any block of queries may be after all keys."""
    return -self.offsets[0] >= self.num_blocks[1]

  def special_offsets(self) -> list[int]:
    """Returns the offsets of the tiles with specialised code, from right to left."""
    if not self.period:
      return [0] if self.is_causal else []
    right = 0 if self.is_causal else (self.last + self.block - 2) // self.block
    left = (self.block - 1 - self.first) // self.block
    lowest, highest = self.offsets
    return list(range(min(right, max(highest, 0)), max(-left, min(lowest, 0)) - 1, -1))

  def runs(self, offset: Any) -> Any:
    """Returns whether causality and window leave any pair of the tile visible."""
    visible = offset <= 0 if self.is_causal else True
    if self.window is not None:
      left, right = self.window
      visible &= (offset + 1) * self.block > -left
      visible &= (offset - 1) * self.block < right
    return visible

  @property
  def height(self) -> int:
    """Returns the height of a sub-tile: low, so that a narrow band crosses few of them."""
    return self.lanes // 8 if self.lanes >= 64 else self.lanes // 2

  def sees_right(self) -> bool:
    """Returns whether any key right of the band may be visible."""
    return not self.is_causal or self.last == 0


class Piece(NamedTuple):
  """A sub-tile, `height` by `lanes`.

  Attributes:
    rows, columns: its slices of the tile.
    queries: its slice of the tile's queries.
    where: "left" of the band, "right" of it, or "band" if it crosses it.
    distance: of its first key from its first query.
    band: its slices of a skewed band.
  """

  rows: slice
  columns: slice
  queries: slice
  where: str
  distance: int
  band: tuple[slice, slice]


def pieces(plan: TpuPlan, offset: int, keys: int) -> list[list[Piece]]:
  """Returns the sub-tiles of a tile, row by row; its keys are along axis `keys`."""

  def piece(row: slice, column: slice) -> Piece:
    of_queries, of_keys = (row, column) if keys else (column, row)
    start, stop = (offset * plan.block + x for x in (of_keys.start, of_keys.stop))
    where = "band"
    if stop - of_queries.start <= plan.first:
      where = "left"
    if start - of_queries.stop >= plan.last - 1:
      where = "right"
    of_band = slice(start % plan.period, start % plan.period + stop - start)
    band = (of_queries, of_band) if keys else (of_band, of_queries)
    return Piece(row, column, of_queries, where, start - of_queries.start, band)

  rows, columns = (
    [slice(start, start + size) for start in range(0, plan.block, size)]
    for size in (plan.height, plan.lanes)
  )
  return [[piece(row, column) for column in columns] for row in rows]


def distances(plan: TpuPlan, piece: Piece, keys: int) -> jax.Array:
  """Returns j - i in a sub-tile whose keys are along axis `keys`."""
  iota = lambda axis: jax.lax.broadcasted_iota(jnp.int32, (plan.height, plan.lanes), axis)
  return iota(keys) - iota(1 - keys) + piece.distance


def in_band(plan: TpuPlan, distance: jax.Array) -> jax.Array:
  """Returns True on the diagonals of the band."""
  return (distance >= plan.first) & (distance < plan.last)


def split(tile: jax.Array, size: int, axis: int) -> list[jax.Array]:
  """Returns the slices of `size` along an axis."""
  starts = range(0, tile.shape[axis], size)
  return [jax.lax.slice_in_dim(tile, start, start + size, axis=axis) for start in starts]


def skew(plan: TpuPlan, x: jax.Array) -> jax.Array:
  """Moves column d of row i to column (i + d) % period."""
  return pltpu.roll(x, 0, 1, stride=1, stride_axis=0)


def unskew(plan: TpuPlan, x: jax.Array) -> jax.Array:
  """Moves column (i + d) % period of row i to column d.

  A lookup along lanes covers one vector only. In longer rows no rotation to the left can grow with
  the row: the eight rows of a vector are rotated by 0 to 7, in steps of 1, 2 and 4, then together.
  """
  if plan.period == plan.lanes:
    row, column = (jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (0, 1))
    return jnp.take_along_axis(x, (row + column) & (plan.period - 1), axis=1)
  eight = (min(8, x.shape[0]), x.shape[1])
  row = jax.lax.broadcasted_iota(jnp.int32, eight, 0)

  def rotate(number, y):
    for shift in (1, 2, 4):
      y = jnp.where(row & shift != 0, pltpu.roll(y, plan.period - shift, 1), y)
    return pltpu.roll(y, -8 * number % plan.period, 1)

  return jnp.concatenate([rotate(*pair) for pair in enumerate(split(x, eight[0], 0))], 0)


def skew_keys(plan: TpuPlan, x: jax.Array, sign: int) -> jax.Array:
  """Applies `skew`, or `unskew` if `sign` is -1, to a `[period, block]` array, queries along lanes.

  Rotates by 1, 2, 4, ... rows the columns whose number has that bit.
  """
  columns = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
  shift = 1
  while shift < x.shape[1]:
    if rows := sign * shift % plan.period:
      x = jnp.where(columns & shift != 0, pltpu.roll(x, rows, 0), x)
    shift *= 2
  return x


def all_distances(plan: TpuPlan, offset, keys: int) -> jax.Array:
  """Returns j - i in a tile whose keys are along axis `keys`."""
  positions = functools.partial(jax.lax.broadcasted_iota, jnp.int32, (plan.block, plan.block))
  return offset * plan.block + positions(keys) - positions(1 - keys)


def hide(plan: TpuPlan, logits, offset, operands, keys: int) -> jax.Array:
  """Sets the logits `[block, block]` of hidden pairs to LOWEST; keys along axis `keys`."""
  hidden, distance = [], all_distances(plan, offset, keys)
  if plan.is_causal and isinstance(offset, int) and offset == 0:
    hidden.append(distance > 0)
  if plan.window is not None:
    hidden.append((distance < -plan.window[0]) | (distance > plan.window[1]))
  if "key_visible" in operands:
    hidden.append(operands["key_visible"][0] == 0)
  if "query_segments" in operands:
    hidden.append(operands["query_segments"][0] != operands["key_segments"][0])
  for mask in hidden:
    logits = jnp.where(mask, jnp.asarray(masks.LOWEST, logits.dtype), logits)
  return logits


def has_logits(operands: Mapping) -> bool:
  """Returns whether any table has a term of the logits."""
  return any(name in operands for name in LOGIT_TABLES)


def band_logits(plan: TpuPlan, operands, keys: int) -> jax.Array:
  """Returns the relative term of a block's queries by table row, the rows along axis `keys`."""
  terms = []
  for factor, name in (("query", "key_table"), ("content", "content_table")):
    if name in operands:
      x, table = operands[factor][0, 0], operands[name][0]
      pair = (x, table) if keys else (table, x)
      term = precise_product(*pair, (1, 1), x.dtype)
      terms.append(term * plan.scale if factor == "query" else term)
  if "bias_table" in operands:
    bias = jnp.broadcast_to(operands["bias_table"][0], (plan.block, plan.period))
    terms.append(bias if keys else bias.T)
  return sum(terms[1:], terms[0])


def add_slopes(plan: TpuPlan, logits, offset, operands, keys: int) -> jax.Array:
  """Subtracts slope * abs(j - i), if there are slopes."""
  if "slopes" not in operands:
    return logits
  steps = jnp.abs(all_distances(plan, offset, keys))
  return logits - operands["slopes"][0] * steps.astype(logits.dtype)


def add_band(plan: TpuPlan, tile, offset: int, band, right, keys: int):
  """Adds a skewed band `[block, period]`, and `right` to all keys right of it.

  In tiles right of the diagonal's `right` is subtracted everywhere, and the caller adds it.
  With keys along axis 0 band and `right` are transposed.
  """

  def add(piece: Piece):
    part = tile[piece.rows, piece.columns]
    of_right = right[piece.queries] if keys else right[:, piece.queries]
    if piece.where == "right" and offset <= 0:
      return part + of_right
    if piece.where != "band":
      return part
    distance = distances(plan, piece, keys)
    outside = 0 if offset > 0 else jnp.where(distance >= plan.last, of_right, 0)
    inside = band[piece.band] - of_right if offset > 0 else band[piece.band]
    return part + jnp.where(in_band(plan, distance), inside, outside)

  strips = [[add(piece) for piece in strip] for strip in pieces(plan, offset, keys)]
  return jnp.concatenate([jnp.concatenate(strip, 1) for strip in strips], 0)


def crossing(plan: TpuPlan, offset: int, keys: int) -> list[tuple[Piece, jax.Array]]:
  """Returns the sub-tiles that cross the band, with True on the band."""
  found = itertools.chain(*pieces(plan, offset, keys))
  inside = lambda piece: in_band(plan, distances(plan, piece, keys))
  return [(piece, inside(piece)) for piece in found if piece.where == "band"]


def right_of_band(plan: TpuPlan, tile, offset: int, keys: int) -> list[tuple[slice, jax.Array]]:
  """Returns slices of queries, each with a sub-tile that is zero except right of the band."""
  parts = []
  for piece in itertools.chain(*pieces(plan, offset, keys)):
    part = tile[piece.rows, piece.columns]
    if piece.where == "band":
      part = jnp.where(distances(plan, piece, keys) >= plan.last, part, 0)
    if piece.where != "left":
      parts.append((piece.queries, part))
  return parts


def first_block(plan: TpuPlan, operands: dict) -> jax.Array | int:
  """Returns the number of the first block of queries, of a sequence and a device."""
  if "first_block" not in operands:
    return plan.first_block
  numbers = operands["first_block"]
  return numbers[0, pl.program_id(0) if numbers.shape[1] > 1 else 0]


def keep(plan: TpuPlan, seed: jax.Array, query_block, key_block, keys: int) -> jax.Array:
  """Returns the dropout mask of a tile, True where a weight is kept."""
  shapes = (plan.block, 1), (1, plan.block)
  count = lambda axis: jax.lax.broadcasted_iota(jnp.int32, shapes[axis], axis)
  rows, columns = query_block * plan.block + count(1 - keys), key_block * plan.block + count(keys)
  return dropout.keep(seed, rows, columns, plan.dropout_rate)


def product(x: jax.Array, y: jax.Array, contract: tuple[int, int]) -> jax.Array:
  """Computes the matrix product over an axis of each, in float32 or wider."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  # Not None, the default in force: the compiler refuses a higher one for bfloat16, which is exact.
  precision = jax.lax.Precision.DEFAULT if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
  dimensions = ((contract[:1], contract[1:]), ((), ()))
  return jax.lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=wide)


def precise_product(
  x: jax.Array, y: jax.Array, contract: tuple[int, int], dtype: jax.typing.DTypeLike
) -> jax.Array:
  """Computes the product of arrays wider than `dtype` from their rounding to it and the rest.

  For tables: their rounding errors would be the same for every query. A narrow table leaves half of
  the matrix unit empty, so as the left factor both parts cost one product.
  """

  def parts(z):
    high = z.astype(dtype)
    return [high] if z.dtype == dtype else [high, (z - high.astype(z.dtype)).astype(dtype)]

  xs, ys = parts(x), parts(y)
  if len(xs) > len(ys) and contract == (1, 1) and x.shape[1] <= 64:
    return product(jnp.concatenate(xs, 1), jnp.concatenate(ys * 2, 1), contract)
  pairs = [(a, b) for i, a in enumerate(xs) for j, b in enumerate(ys) if i + j < 2]
  return sum(product(a, b, contract) for a, b in pairs)


def dispatch(plan: TpuPlan, offset, tile, *, by_side: bool = False) -> None:
  """Runs `tile(offset, is_right)`, with a static offset if the tile has specialised code.

  `is_right` is static; for plain tiles it is False unless `by_side`.
  """
  special, runs = plan.special_offsets(), plan.runs(offset)
  for static in special:
    pl.when(runs & (offset == static))(functools.partial(tile, static, static > 0))
  (lowest, highest), right, left, has_right, has_left = plan.offsets, False, True, False, True
  if special:
    right, left = offset > special[0], offset < special[-1]
    has_right = not plan.is_causal and highest > special[0]
    has_left = lowest < special[-1]
  if by_side and has_right:
    pl.when(runs & right)(functools.partial(tile, offset, True))
  elif has_right:
    left |= right
  if has_left or (has_right and not by_side):
    pl.when(runs & left)(functools.partial(tile, offset, False))


def block_specs(
  axes: Mapping[str, str], arrays: Shapes, block: int, index: Callable[..., dict[str, jax.Array]]
) -> dict[str, pl.BlockSpec]:
  """Returns the block of each array that a step of the grid reads or writes.

  A block has one of the batch (B) and of heads (N, K), `block` queries (T) or keys (S), and all of
  the other axes. `index` maps a step's indices in the grid to those of the blocks by letter.
  """
  sizes = dict(B=1, N=1, K=1, T=block, S=block)

  def spec(name):
    if name == "first_block":
      return pl.BlockSpec(memory_space=pltpu.SMEM)
    pairs = list(zip(axes[name], arrays[name].shape, strict=True))

    def block_index(*step):
      by_letter = index(*step)
      return tuple(by_letter.get(letter, 0) if size > 1 else 0 for letter, size in pairs)

    shape = tuple(min(sizes.get(letter, size), size) for letter, size in pairs)
    return pl.BlockSpec(shape, block_index)

  return {name: spec(name) for name in arrays}


def cost(plan: TpuPlan, operands: Shapes, outputs: Shapes, num_products: int) -> pl.CostEstimate:
  """Estimates a call's cost from `num_products` products of [block, H] by [block, block] per tile.

  Keys and values are read for every block of queries, all other arrays once. If devices share the
  queries it is the cost of the last one, which in a causal call has the most visible keys. With a
  traced offset, it is that of the last queries.
  """
  batch, heads, length, width = operands["query"].shape
  num_keys = operands["key"].shape[2]
  first = plan.first_block
  if first is None:
    first = plan.num_blocks[1] - plan.num_blocks[0]
  first += plan.num_blocks[0] - length // plan.block  # if a device has a part of the queries
  queries = np.arange(first, first + length // plan.block)[:, None]
  offsets = plan.key_block + np.arange(num_keys // plan.block) - queries
  count = lambda condition: int(np.broadcast_to(condition, offsets.shape).sum())
  num_pairs = batch * heads * count(plan.runs(offsets)) * plan.block**2
  # As in the kernels' block specs.
  known = plan.is_causal and "first_block" not in operands
  fetched = batch * heads * count(offsets <= 0 if known else True) * plan.block
  once = [x for name, x in (operands | outputs).items() if name not in ("key", "value")]
  per_key = 2 * width * operands["key"].dtype.itemsize
  return pl.CostEstimate(
    flops=2 * num_products * num_pairs * width,
    transcendentals=num_pairs,
    bytes_accessed=fetched * per_key + sum(math.prod(x.shape) * x.dtype.itemsize for x in once),
  )
