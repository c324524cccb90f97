"""What the fused kernels for TPUs know of a tile: which part of it lies in the band, who sees whom.

A tile is `block` queries by `block` keys, `offset` blocks right of the diagonal, cut into sub-tiles
`lanes` wide and high. With j - i = d, a sub-tile is all left of the band (d < first: no relative
term), all right of it (d >= last: the same one for all keys), or crosses it. Only the last kind
costs anything: about (2k + block) / S of all.

The band lives in a *skewed* array `[block, period]` for a block of queries: the number of query i
(counted from its block's start) and distance d stands in column `(i + d) % period`. That is a plain
column of some sub-tile: adding it there, or collecting it from there, is a select. It is skewed and
straightened once for every block of queries, by a rotation whose shift grows with the row. What
wraps around in it wraps around in the definition.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from relpos_jax.attention import dropout, masks

# One number for each query. A weight is exp(logit - maximum) * inverse_total: in the sum of maximum
# and log(total) float32 would lose the total beside a large maximum. The "far" ones are those of
# tiles right of the diagonal's, whose logits all lack the same relative term.
ROWS = "maximum", "inverse_total", "far_maximum", "far_inverse_total", "sums", "delta"


class TpuPlan(NamedTuple):
  """The static facts of a call.

  Attributes:
    block: queries and keys of a tile.
    lanes: queries and keys of a sub-tile; divides block.
    num_blocks: of queries and of keys, in all.
    scale: of the logits.
    first: the distance of the band's first diagonal, at most 1.
    last: the distance from which on all keys are alike, at least 0.
    period: columns of a skewed band: more than last - first + 1; 0 without relations.
    key_block: the number of the first block of keys, where keys come in several calls.
    interpret: run as plain XLA, for want of a TPU.
  """

  block: int
  lanes: int
  num_blocks: tuple[int, int]
  scale: float
  is_causal: bool
  window: tuple[int, int] | None
  dropout_rate: float
  first: int
  last: int
  period: int
  key_block: int
  interpret: bool

  @property
  def last_row(self) -> int:
    """The row of a periodic table that stands for all keys right of the band."""
    return self.last % self.period

  @property
  def left_row(self) -> int:
    """The row of a periodic table that stands for every key, the value table's row 0."""
    return (self.first - 1) % self.period

  def special_offsets(self) -> list[int]:
    """The offsets of the tiles with code of their own, from the right to the left."""
    if not self.period:
      return [0] if self.is_causal else []
    right = 0 if self.is_causal else (self.last + self.block - 2) // self.block
    left = (self.block - 1 - self.first) // self.block
    queries, keys = self.num_blocks
    return list(range(min(right, keys - 1), -min(left, queries - 1) - 1, -1))

  def plain_sides(self) -> tuple[bool, bool]:
    """Whether there are tiles without code of their own, to the right and to the left."""
    special, (queries, keys) = self.special_offsets(), self.num_blocks
    if not special:
      return False, True
    return not self.is_causal and keys - 1 > special[0], 1 - queries < special[-1]

  def runs(self, offset: jax.Array | np.ndarray | int) -> jax.Array | np.ndarray | bool:
    """Whether any key of the tile may be seen, for all that causality and window say."""
    seen = offset <= 0 if self.is_causal else True
    if self.window is not None:
      left, right = self.window
      seen &= (offset + 1) * self.block > -left
      seen &= (offset - 1) * self.block < right
    return seen

  @property
  def height(self) -> int:
    """Of a sub-tile: low, because a narrow band then crosses few of them."""
    return self.lanes // 8 if self.lanes >= 64 else self.lanes // 2

  def sees_right(self) -> bool:
    """Whether any key right of the band may be seen."""
    return not self.is_causal or self.last == 0


class Piece(NamedTuple):
  """A sub-tile, `height` by `lanes`.

  Attributes:
    rows, columns: where it stands in the tile.
    queries: which of the tile's queries it has.
    where: "left" of the band, "right" of it, or "band" if it crosses it.
    distance: of its first key from its first query.
    band: where its band stands in a skewed band.
  """

  rows: slice
  columns: slice
  queries: slice
  where: str
  distance: int
  band: tuple[slice, slice]


def pieces(plan: TpuPlan, offset: int, keys: int) -> list[list[Piece]]:
  """The sub-tiles of a tile, row by row; its keys are along axis `keys`."""
  rows = [slice(start, start + plan.height) for start in range(0, plan.block, plan.height)]
  columns = [slice(start, start + plan.lanes) for start in range(0, plan.block, plan.lanes)]
  return [[_piece(plan, offset, row, column, keys) for column in columns] for row in rows]


def _piece(plan: TpuPlan, offset: int, row: slice, column: slice, keys: int) -> Piece:
  of_queries, of_keys = (row, column) if keys else (column, row)
  distance = offset * plan.block + of_keys.start - of_queries.start
  where = "band"
  if distance + of_keys.stop - of_keys.start <= plan.first:
    where = "left"
  if distance - (of_queries.stop - of_queries.start) >= plan.last - 1:
    where = "right"
  start = (offset * plan.block + of_keys.start) % plan.period
  place = slice(start, start + of_keys.stop - of_keys.start)
  band = (of_queries, place) if keys else (place, of_queries)
  return Piece(row, column, of_queries, where, distance, band)


def distances(plan: TpuPlan, piece: Piece, keys: int) -> jax.Array:
  """j - i in a sub-tile whose keys are along axis `keys`."""
  iota = lambda axis: jax.lax.broadcasted_iota(jnp.int32, (plan.height, plan.lanes), axis)
  return iota(keys) - iota(1 - keys) + piece.distance


def in_band(plan: TpuPlan, distance: jax.Array) -> jax.Array:
  """True on the diagonals that have rows of their own."""
  return (distance >= plan.first) & (distance < plan.last)


def split(tile: jax.Array, size: int, axis: int) -> list[jax.Array]:
  """Slices of `size` along an axis."""
  return [
    jax.lax.slice_in_dim(tile, start, start + size, axis=axis)
    for start in range(0, tile.shape[axis], size)
  ]


def joined(strips: list[list[jax.Array]]) -> jax.Array:
  """The tile of its sub-tiles."""
  return jnp.concatenate([jnp.concatenate(strip, 1) for strip in strips], 0)


def skew(plan: TpuPlan, x: jax.Array) -> jax.Array:
  """Moves column d of row i to column (i + d) % period."""
  return pltpu.roll(x, 0, 1, stride=1, stride_axis=0)


def unskew(plan: TpuPlan, x: jax.Array) -> jax.Array:
  """Moves column (i + d) % period of row i to column d.

  A lookup along lanes reaches over one vector. Longer rows are rotated, to the left, which cannot
  grow with the row: each of eight (one vector) by 0 to 7, by rotations of 1, 2 and 4 of some rows,
  then each eight rows together.
  """
  if plan.period == plan.lanes:
    row, column = (jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (0, 1))
    return jnp.take_along_axis(x, (row + column) & (plan.period - 1), axis=1)
  eight = (min(8, x.shape[0]), x.shape[1])
  row = jax.lax.broadcasted_iota(jnp.int32, eight, 0)

  def straight(number, y):
    for shift in (1, 2, 4):
      y = jnp.where(row & shift != 0, pltpu.roll(y, plan.period - shift, 1), y)
    return pltpu.roll(y, -8 * number % plan.period, 1)

  return jnp.concatenate([straight(*pair) for pair in enumerate(split(x, eight[0], 0))], 0)


def skew_keys(plan: TpuPlan, x: jax.Array, sign: int) -> jax.Array:
  """`skew`, or with a sign of -1 `unskew`, of an array `[period, block]` with queries along lanes.

  By rotations of 1, 2, 4, ... rows, each of the columns whose number has that bit.
  """
  columns = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
  shift = 1
  while shift < x.shape[1]:
    if rows := sign * shift % plan.period:
      x = jnp.where(columns & shift != 0, pltpu.roll(x, rows, 0), x)
    shift *= 2
  return x


def hide(plan: TpuPlan, logits, offset, operands, keys: int) -> jax.Array:
  """Logits `[block, block]` with those of hidden keys made LOWEST; keys along axis `keys`."""
  hidden = []
  positions = functools.partial(jax.lax.broadcasted_iota, jnp.int32, logits.shape)
  distance = offset * plan.block + positions(keys) - positions(1 - keys)
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


def add_band(plan: TpuPlan, tile, offset: int, band, right, keys: int):
  """Adds a skewed band `[block, period]`, and what all keys right of it have in common.

  In tiles right of the diagonal's that last summand is left out everywhere, for the caller to add.
  With keys along axis 0 band and `right` are transposed.
  """

  def added(piece: Piece):
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

  return joined([[added(piece) for piece in strip] for strip in pieces(plan, offset, keys)])


def crossing(plan: TpuPlan, offset: int, keys: int) -> list[tuple[Piece, jax.Array]]:
  """The sub-tiles that cross the band, and where they do."""
  return [
    (piece, in_band(plan, distances(plan, piece, keys)))
    for strip in pieces(plan, offset, keys)
    for piece in strip
    if piece.where == "band"
  ]


def right_of_band(plan: TpuPlan, tile, offset: int, keys: int) -> list[tuple[slice, jax.Array]]:
  """What lies right of the band: queries, and a sub-tile that is zero elsewhere."""
  found = []
  for piece in itertools.chain(*pieces(plan, offset, keys)):
    part = tile[piece.rows, piece.columns]
    if piece.where == "band":
      part = jnp.where(distances(plan, piece, keys) >= plan.last, part, 0)
    if piece.where != "left":
      found.append((piece.queries, part))
  return found


def first_block(operands: dict) -> jax.Array | int:
  """The number of a device's first block of queries."""
  return operands["first_block"][0, 0] if "first_block" in operands else 0


def keep(plan: TpuPlan, seed: jax.Array, query_block, key_block, keys: int) -> jax.Array:
  """Which weights of a tile are not dropped."""
  count = functools.partial(jax.lax.broadcasted_iota, jnp.int32)
  shape = lambda axis: tuple(plan.block if axis == n else 1 for n in range(2))
  rows = query_block * plan.block + count(shape(1 - keys), 1 - keys)
  columns = key_block * plan.block + count(shape(keys), keys)
  return dropout.keep(seed, rows, columns, plan.dropout_rate)


def product(x: jax.Array, y: jax.Array, contract: tuple[int, int]) -> jax.Array:
  """The matrix product over an axis of each, in float32 or wider, on the matrix unit."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  precision = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
  dimensions = ((contract[:1], contract[1:]), ((), ()))
  return jax.lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=wide)


def precise_product(
  x: jax.Array, y: jax.Array, contract: tuple[int, int], dtype: jax.typing.DTypeLike
) -> jax.Array:
  """The same for arrays wider than `dtype`: their rounding to it, and what that leaves.

  For tables: rounded, they would err the same way for every query. Narrow ones leave half of the
  matrix unit empty, and as the left factor get both at the price of one. (As the right one they
  would too, but joining them takes longer than the product.)
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
  """Runs `tile(offset, is_right)`, with a static offset where the tile has code of its own.

  `is_right` is static too: that the tile lies right of the diagonal's. Of a tile without code of
  its own it says so only `by_side`.
  """
  special, runs = plan.special_offsets(), plan.runs(offset)
  for static in special:
    pl.when(runs & (offset == static))(functools.partial(tile, static, static > 0))
  right, left = (offset > special[0], offset < special[-1]) if special else (False, True)
  has_right, has_left = plan.plain_sides()
  if by_side and has_right:
    pl.when(runs & right)(functools.partial(tile, offset, True))
  elif has_right:
    left |= right
  if has_left or (has_right and not by_side):
    pl.when(runs & left)(functools.partial(tile, offset, False))
