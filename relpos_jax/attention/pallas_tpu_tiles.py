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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from relpos_jax.attention import dropout

# Logits of hidden keys. A maximum below half of it means that no key is seen.
LOWEST = 0.7 * float(np.finfo(np.float32).min)


class Plan(NamedTuple):
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

  def has_plain_tiles(self) -> bool:
    """Whether any tile has no code of its own."""
    special, (queries, keys) = self.special_offsets(), self.num_blocks
    right = 0 if self.is_causal else keys - 1
    return not special or right > special[0] or 1 - queries < special[-1]

  def runs(self, offset: jax.Array) -> jax.Array | bool:
    """Whether any key of the tile may be seen, for all that causality and window say."""
    seen = offset <= 0 if self.is_causal else True
    if self.window is not None:
      left, right = self.window
      seen &= (offset + 1) * self.block > -left
      seen &= (offset - 1) * self.block < right
    return seen

  def part(self, offset: int, row: int, column: int) -> str:
    """Where a sub-tile lies: "left" of the band, "right" of it, or "band" if it crosses it."""
    middle = offset * self.block + (column - row) * self.lanes
    if middle + self.lanes <= self.first:
      return "left"
    return "right" if middle - self.lanes >= self.last - 1 else "band"


def distances(plan: Plan, offset: jax.Array | int, row: int, column: int, keys: int) -> jax.Array:
  """j - i in a sub-tile whose keys are along axis `keys`."""
  shape = (plan.lanes, plan.lanes)
  iota = lambda axis: jax.lax.broadcasted_iota(jnp.int32, shape, axis)
  middle = offset * plan.block + (column - row) * plan.lanes
  return iota(keys) - iota(1 - keys) + middle


def in_band(plan: Plan, distance: jax.Array) -> jax.Array:
  """True on the diagonals that have rows of their own."""
  return (distance >= plan.first) & (distance < plan.last)


def split(tile: jax.Array, lanes: int, axis: int) -> list[jax.Array]:
  """Slices of `lanes` along an axis."""
  return [
    jax.lax.slice_in_dim(tile, start, start + lanes, axis=axis)
    for start in range(0, tile.shape[axis], lanes)
  ]


def sub_tiles(plan: Plan, tile: jax.Array, keys: int) -> dict[tuple[int, int], jax.Array]:
  """The sub-tiles by row (of queries) and column (of keys), with the keys along axis `keys`."""
  strips = [split(strip, plan.lanes, 1) for strip in split(tile, plan.lanes, 0)]
  places = [(a, b) for a in range(len(strips)) for b in range(len(strips))]
  return {(a, b): strips[a][b] if keys else strips[b][a] for a, b in places}


def tile_of(parts: dict[tuple[int, int], jax.Array], keys: int) -> jax.Array:
  """The tile of its sub-tiles: the inverse of `sub_tiles`."""
  count = 1 + max(row for row, _ in parts)
  part = lambda i, j: parts[i, j] if keys else parts[j, i]
  strips = [jnp.concatenate([part(i, j) for j in range(count)], 1) for i in range(count)]
  return jnp.concatenate(strips, 0)


def skew(plan: Plan, x: jax.Array) -> jax.Array:
  """Moves column d of row i to column (i + d) % period."""
  return pltpu.roll(x, 0, 1, stride=1, stride_axis=0)


def unskew(plan: Plan, x: jax.Array) -> jax.Array:
  """Moves column (i + d) % period of row i to column d.

  Rotations to the left cannot grow with the row. So each row of eight (one vector) by 0 to 7, by
  rotations of 1, 2 and 4 of some rows, then each eight rows together.
  """
  rows = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
  for shift in (1, 2, 4):
    x = jnp.where(rows & shift != 0, pltpu.roll(x, plan.period - shift, 1), x)
  eights = enumerate(split(x, 8, 0))
  return jnp.concatenate([pltpu.roll(y, -8 * n % plan.period, 1) for n, y in eights], 0)


def skew_keys(plan: Plan, x: jax.Array, sign: int) -> jax.Array:
  """`skew`, or with a sign of -1 `unskew`, of an array `[period, block]` with queries along lanes.

  By rotations of 1, 2, 4, ... rows, each of the columns whose number has that bit.
  """
  columns = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
  shift = 1
  while shift < x.shape[1]:
    if rows := sign * shift % plan.period:
      x = jnp.where(columns & shift != 0, _rotate(x, rows), x)
    shift *= 2
  return x


def _rotate(x: jax.Array, rows: int) -> jax.Array:
  return jnp.concatenate([x[-rows:], x[:-rows]], 0)


def add_band(plan: Plan, tile, offset: int, band, right, keys: int) -> jax.Array:
  """Adds a skewed band `[block, period]`, and what all keys right of it have in common.

  Right of the diagonal's tile that last summand is left out everywhere, for the caller to add.
  With keys along axis 0 the band is transposed.
  """
  parts = sub_tiles(plan, tile, keys)
  for (row, column), part in parts.items():
    where = plan.part(offset, row, column)
    rows = slice(row * plan.lanes, (row + 1) * plan.lanes)
    if where == "left" or (where == "right" and offset > 0):
      continue
    of_right = right[rows] if keys else right[:, rows]
    if where == "right":
      parts[row, column] = part + of_right
      continue
    distance = distances(plan, offset, row, column, keys)
    of_band = _sub_band(plan, offset, row, column, keys)
    inside = in_band(plan, distance)
    if offset > 0:
      added = jnp.where(inside, band[of_band] - of_right, 0)
    else:
      added = jnp.where(inside, band[of_band], jnp.where(distance >= plan.last, of_right, 0))
    parts[row, column] = part + added
  return tile_of(parts, keys)


def collect_band(plan: Plan, tile, offset: int, sums, keys: int) -> None:
  """Adds what lies in the band to the skewed `sums`: the transpose of `add_band`."""
  for (row, column), part in sub_tiles(plan, tile, keys).items():
    if plan.part(offset, row, column) == "band":
      inside = in_band(plan, distances(plan, offset, row, column, keys))
      sums[_sub_band(plan, offset, row, column, keys)] += jnp.where(inside, part, 0)


def right_of_band(plan: Plan, tile, offset: int, keys: int) -> list[tuple[slice, jax.Array]]:
  """What lies right of the band: rows (of queries), and a sub-tile that is zero elsewhere."""
  found = []
  for (row, column), part in sub_tiles(plan, tile, keys).items():
    where = plan.part(offset, row, column)
    if where == "band":
      part = jnp.where(distances(plan, offset, row, column, keys) >= plan.last, part, 0)
    if where != "left":
      found.append((slice(row * plan.lanes, (row + 1) * plan.lanes), part))
  return found


def _sub_band(plan: Plan, offset: int, row: int, column: int, keys: int) -> tuple[slice, slice]:
  """Where a sub-tile's band stands in a skewed band."""
  start = (offset * plan.block + column * plan.lanes) % plan.period
  rows = slice(row * plan.lanes, (row + 1) * plan.lanes)
  columns = slice(start, start + plan.lanes)
  return (rows, columns) if keys else (columns, rows)


def hide(plan: Plan, logits, offset, operands, keys: int) -> jax.Array:
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
    logits = jnp.where(mask, jnp.asarray(LOWEST, logits.dtype), logits)
  return logits


def keep(plan: Plan, seed: jax.Array, query_block, key_block, keys: int) -> jax.Array:
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
  """The same for arrays wider than `dtype`: each its rounding to it, and what that leaves.

  For tables: rounded, they would err the same way for every query.
  """

  def parts(z):
    high = z.astype(dtype)
    return [high] if z.dtype == dtype else [high, (z - high.astype(z.dtype)).astype(dtype)]

  return sum(product(a, b, contract) for a in parts(x) for b in parts(y))


def dispatch(plan: Plan, offset, tile) -> None:
  """Runs `tile(offset)`: with a static offset where the tile has code of its own."""
  special = plan.special_offsets()
  runs = plan.runs(offset)
  for static in special:
    pl.when(runs & (offset == static))(functools.partial(tile, static))
  plain = runs
  if special:
    plain &= (offset > special[0]) | (offset < special[-1])
  if plan.has_plain_tiles():
    pl.when(plain)(functools.partial(tile, offset))
