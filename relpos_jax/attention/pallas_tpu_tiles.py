"""The tiles of the fused kernels for TPUs: their part of the band, their masks and specs.

A tile is `block` queries by `block` keys, `offset` blocks right of the diagonal, split into
sub-tiles `height` keys by `lanes` queries. With j - i = d, a sub-tile is all left of the band
(d < first: no relative term), all right of it (d >= last: the same one for all keys), or crosses
it. Only the last kind costs anything: about (2k + block) / S of all.

Keys are along sublanes and queries along lanes, of tiles and of arrays in memory: heads narrower
than a vector waste none of it, and one number per query is a row.

The band is stored in a *skewed* array `[period, block]` per block of queries: the entry of query i
(counted from its block's start) and distance d is in row `(i + d) % period`. That is a plain row of
some sub-tile: adding it there, or collecting it from there, is a select. It is skewed and unskewed
once per block of queries, by a rotation whose shift grows with the column.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from relpos_jax.attention import dropout, masks
from relpos_jax.attention.partitioned import Shards, shapes_like

# A letter for each axis of each array, see `over_devices`.
#
# A weight is exp(logit - maximum) * inverse_total: in a logsumexp float32 would lose the total
# beside a large maximum.
AXES = dict(key_table="Nwh", value_table="Nwh", content_table="Nwp", bias_table="Nwo")
AXES |= dict(slopes="Nop")
# All sequences share these, and heads may; the kernel's gradients are per sequence and head.
TABLES = tuple(AXES)
LOGIT_TABLES = ("key_table", "content_table", "bias_table")
AXES |= {f"d_{name}": "B" + axes for name, axes in AXES.items()}
AXES |= dict(content="BNpT", d_content="BNpT")
AXES |= dict.fromkeys(("query", "d_output", "output", "output_rest", "d_query"), "BNhT")
AXES |= dict.fromkeys(("key", "value", "d_key", "d_value"), "BKhS")
AXES |= dict.fromkeys(("maximum", "inverse_total", "left_shift", "right_shift"), "BNoT")
AXES |= dict.fromkeys(("sums", "right_sums", "delta"), "BNoT")
AXES |= dict(seeds="BNop", first_block="oB")
AXES |= dict(key_mask="BSo", query_segments="BoT", key_segments="BSo")

VMEM_BYTES = 56 * 2**20  # what a kernel may use; the default is too little
STEP_BYTES = 2**19  # of the keys of several tiles that are one step of the grid

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
    period: rows of a skewed band: more than last - first + 1; 0 without relations.
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
    """Returns the row of a periodic table for all keys left of the band."""
    return (self.first - 1) % self.period

  @property
  def offsets(self) -> tuple[int, int]:
    """Returns the lowest and the highest offset of any tile, as far as is known."""
    queries, keys = self.num_blocks
    if self.first_block is None:
      return -(2**30), 2**30
    return 1 - queries - self.first_block, keys - 1 - self.first_block

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
    runs = offset <= 0 if self.is_causal else True
    if self.window is not None:
      left, right = self.window
      runs &= (offset + 1) * self.block > -left
      runs &= (offset - 1) * self.block < right
    return runs

  @property
  def height(self) -> int:
    """Returns the keys of a sub-tile."""
    return height(self.lanes)

  def sees_right(self) -> bool:
    """Returns whether any key right of the band may be visible."""
    return not self.is_causal or self.last == 0


def height(lanes: int) -> int:
  """Returns the keys of a sub-tile: few, so that a narrow band crosses few of them."""
  return lanes // 16 if lanes >= 64 else lanes // 2


class Piece(NamedTuple):
  """A sub-tile, `height` keys by `lanes` queries.

  Attributes:
    keys, queries: its slices of the tile.
    where: "left" of the band, "right" of it, or "band" if it crosses it.
    distance: of its first key from its first query.
    band: its slices of a skewed band.
  """

  keys: slice
  queries: slice
  where: str
  distance: int
  band: tuple[slice, slice]


def pieces(plan: TpuPlan, offset: int) -> list[list[Piece]]:
  """Returns the sub-tiles of a tile, row by row."""

  def piece(keys: slice, queries: slice) -> Piece:
    start, stop = (offset * plan.block + x for x in (keys.start, keys.stop))
    where = "band"
    if stop - queries.start <= plan.first:
      where = "left"
    if start - queries.stop >= plan.last - 1:
      where = "right"
    rows = slice(start % plan.period, start % plan.period + plan.height)
    return Piece(keys, queries, where, start - queries.start, (rows, queries))

  keys, queries = (
    [slice(start, start + size) for start in range(0, plan.block, size)]
    for size in (plan.height, plan.lanes)
  )
  return [[piece(row, column) for column in queries] for row in keys]


def distances(plan: TpuPlan, piece: Piece) -> jax.Array:
  """Returns j - i in a sub-tile."""
  iota = functools.partial(jax.lax.broadcasted_iota, jnp.int32, (plan.height, plan.lanes))
  return iota(0) - iota(1) + piece.distance


def skew(plan: TpuPlan, x: jax.Array, sign: int = 1) -> jax.Array:
  """Moves row d of column i to row (i + d) % period, or the other way if `sign` is -1.

  Rotates by 1, 2, 4, ... rows the columns of a vector whose number has that bit.
  """
  columns, vectors = jax.lax.broadcasted_iota(jnp.int32, (plan.period, plan.lanes), 1), []
  for start in range(0, plan.block, plan.lanes):
    y = pltpu.roll(x[:, start : start + plan.lanes], sign * start % plan.period, 0)
    for shift in [2**bit for bit in range((plan.lanes - 1).bit_length())]:
      y = jnp.where(columns & shift != 0, pltpu.roll(y, sign * shift % plan.period, 0), y)
    vectors.append(y)
  return jnp.concatenate(vectors, 1)


def all_distances(plan: TpuPlan, offset) -> jax.Array:
  """Returns j - i in a tile."""
  iota = functools.partial(jax.lax.broadcasted_iota, jnp.int32, (plan.block, plan.block))
  return offset * plan.block + iota(0) - iota(1)


def has_logits(operands: Mapping) -> bool:
  """Returns whether any table has a term of the logits."""
  return any(name in operands for name in LOGIT_TABLES)


def fill(arrays, names: Iterable[str], number: float = 0) -> None:
  """Fills those of the named arrays that there are with a number."""
  for name in names:
    if name in arrays:
      arrays[name][...] = jnp.full(arrays[name].shape, number, arrays[name].dtype)


def store_band(plan: TpuPlan, scratch, name: str, rows: jax.Array) -> None:
  """Stores the terms of a block's queries, `[period, block]`: beside the band, and on it skewed."""
  scratch[f"{name}_left"][...] = rows[plan.left_row, None]
  scratch[f"{name}_right"][...] = rows[plan.last_row, None]
  scratch[f"{name}_band"][...] = skew(plan, rows)


def store_logits(plan: TpuPlan, operands, scratch) -> None:
  """Computes and stores the tables' terms of a block's logits, if any."""
  terms = []
  for factor, name in (("query", "key_table"), ("content", "content_table")):
    if name in operands:
      x = operands[factor][0, 0]
      term = precise_product(operands[name][0], x, (1, 0), x.dtype)
      terms.append(term * plan.scale if factor == "query" else term)
  if "bias_table" in operands:
    terms.append(jnp.broadcast_to(operands["bias_table"][0], (plan.period, plan.block)))
  if terms:
    store_band(plan, scratch, "key", sum(terms[1:], terms[0]))


def logits_of(plan: TpuPlan, operands, scratch, offset, side: str | None) -> jax.Array:
  """Computes a tile's logits, LOWEST for hidden pairs; those of a side lack the tables' term."""
  logits = product(operands["key"][0, 0], operands["query"][0, 0], (0, 0)) * plan.scale
  distance = all_distances(plan, offset)
  if "slopes" in operands:
    logits -= operands["slopes"][0] * jnp.abs(distance).astype(logits.dtype)
  if not side and "key_band" in scratch:
    terms = (scratch[f"key_{name}"] for name in ("band", "right", "left"))
    logits = add_band(plan, logits, offset, *terms)
  hidden = []
  if plan.is_causal and isinstance(offset, int) and offset == 0:
    hidden.append(distance > 0)
  if plan.window is not None:
    hidden.append((distance < -plan.window[0]) | (distance > plan.window[1]))
  if "key_mask" in operands:
    hidden.append(operands["key_mask"][0] == 0)
  if "query_segments" in operands:
    hidden.append(operands["query_segments"][0] != operands["key_segments"][0])
  for mask in hidden:
    logits = jnp.where(mask, jnp.asarray(masks.LOWEST, logits.dtype), logits)
  return logits


def add_band(plan: TpuPlan, tile, offset: int, band, right, left=None):
  """Adds a skewed band, `right` to all keys right of it, and `left` to those left of it."""

  def add(piece: Piece):
    part, of_right = tile[piece.keys, piece.queries], right[:, piece.queries]
    of_left = 0 if left is None else left[:, piece.queries]
    if piece.where != "band":
      return part + (of_left if piece.where == "left" else of_right)
    distance = distances(plan, piece)
    x = jnp.where(distance < plan.first, part + of_left, part + band[piece.band])
    return jnp.where(distance >= plan.last, part + of_right, x)

  strips = [[add(piece) for piece in strip] for strip in pieces(plan, offset)]
  return jnp.concatenate([jnp.concatenate(strip, 1) for strip in strips], 0)


def crossing(plan: TpuPlan, offset: int) -> list[tuple[Piece, jax.Array]]:
  """Returns the sub-tiles that cross the band, with True on the band."""

  def inside(piece):
    distance = distances(plan, piece)
    return (distance >= plan.first) & (distance < plan.last)

  found = itertools.chain(*pieces(plan, offset))
  return [(piece, inside(piece)) for piece in found if piece.where == "band"]


def sum_right(plan: TpuPlan, tile, offset: int) -> jax.Array:
  """Returns each query's sum of a tile over the keys right of the band, `[1, block]`."""

  def part(piece: Piece):
    x = tile[piece.keys, piece.queries]
    return x if piece.where == "right" else jnp.where(distances(plan, piece) >= plan.last, x, 0)

  sums = []
  for strip in zip(*pieces(plan, offset), strict=True):
    parts = [part(piece) for piece in strip if piece.where != "left"]
    zeros = jnp.zeros((plan.height, plan.lanes), tile.dtype)
    sums.append(sum(parts, zeros).sum(0, keepdims=True))
  return jnp.concatenate(sums, 1)


def place_sums(plan: TpuPlan, band, left, right):
  """Places the sums of weights by row of the value table in the band's, unskewed."""
  row = jax.lax.broadcasted_iota(jnp.int32, band.shape, 0)
  band = jnp.where(row == plan.last_row, right, band)
  return jnp.where(row == plan.left_row, left, band)


def tiles_a_step(plan: TpuPlan, operands: Shapes) -> int:
  """Returns how many tiles beside each other are a step of the grid, which reads all their keys."""
  key = operands["key"]
  num_tiles = key.shape[3] // plan.block
  # A mask is as large as keys of a vector's width.
  per_key = max(key.shape[2] * key.dtype.itemsize, plan.lanes)
  most = max(1, STEP_BYTES // (plan.block * per_key))
  return max(x for x in range(1, min(most, num_tiles) + 1) if num_tiles % x == 0)


def first_block(plan: TpuPlan, operands: dict) -> jax.Array | int:
  """Returns the number of the first block of queries, of a sequence and a device."""
  if "first_block" not in operands:
    return plan.first_block
  numbers = operands["first_block"]
  return numbers[0, pl.program_id(0) if numbers.shape[1] > 1 else 0]


def keep(plan: TpuPlan, seed: jax.Array, query_block, key_block) -> jax.Array:
  """Returns the dropout mask of a tile, True where a weight is kept."""
  shapes = (plan.block, 1), (1, plan.block)
  keys, queries = (
    block * plan.block + jax.lax.broadcasted_iota(jnp.int32, shapes[axis], axis)
    for axis, block in enumerate((key_block, query_block))
  )
  return dropout.keep(seed, queries, keys, plan.dropout_rate)


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

  For tables: their rounding errors would be the same for every query. All parts that fit the matrix
  unit cost one product.
  """

  def parts(z):
    high = z.astype(dtype)
    return [high] if z.dtype == dtype else [high, (z - high.astype(z.dtype)).astype(dtype)]

  xs, ys = parts(x), parts(y)
  pairs = [(a, b) for i, a in enumerate(xs) for j, b in enumerate(ys) if i + j < 2]
  if len(pairs) * x.shape[contract[0]] <= 128:
    sides = zip(zip(*pairs, strict=True), contract, strict=True)
    return product(*(jnp.concatenate(parts, axis) for parts, axis in sides), contract)
  return sum(product(a, b, contract) for a, b in pairs)


def for_tiles(plan: TpuPlan, operands: dict, first, num_tiles: int, tile: Callable) -> None:
  """Runs `tile(operands, number, offset, side)` for the tiles of a step, from right to left.

  `first` is the offset of tile 0. A plain tile is on a `side` of the band, "left" or "right"; of
  the others it is None, and the offset is static.
  """
  special, (lowest, highest), stop = plan.special_offsets(), plan.offsets, first + num_tiles
  left_stop, right_start = (special[-1], special[0] + 1) if special else (stop, highest + 1)

  def run(offset, side: str | None = None):
    number = offset - first
    keys = pl.ds(pl.multiple_of(number * plan.block, plan.block), plan.block)
    views = {
      name: x.at[tuple(keys if letter == "S" else slice(None) for letter in AXES[name])]
      for name, x in operands.items()
      if "S" in AXES[name]
    }
    tile(operands | views, number, offset, side)

  def run_plain(start, stop, side: str):
    def run_if_seen(offset, _):
      return pl.when(plan.runs(offset))(lambda: run(offset, side))

    jax.lax.fori_loop(start, stop, run_if_seen, None)

  if right_start <= highest and not plan.is_causal:
    run_plain(jnp.maximum(first, right_start), stop, "right")
  for offset in special:
    is_here = plan.runs(offset) & (first <= offset) & (offset < stop)
    pl.when(is_here)(functools.partial(run, offset))
  if not special or lowest < left_stop:
    run_plain(first, jnp.minimum(stop, left_stop), "left")


def call(
  plan: TpuPlan,
  name: str,
  kernel: Callable[..., None],
  operands: dict[str, jax.Array],
  outputs: Shapes,
  scratch: Mapping[str, tuple[int, int]],
  *,
  num_parallel: int,
  num_products: int,
) -> dict[str, jax.Array]:
  """Runs `kernel(plan, num_tiles, operands, outputs, scratch)` over all tiles.

  The grid is of the batch, key heads, query heads of a key head, blocks of queries, and steps of
  `num_tiles` blocks of keys from right to left; the first `num_parallel` of these are parallel.
  `scratch` has shapes; a tile takes `num_products` products of [block, H] by [block, block].
  """
  query, key = operands["query"], operands["key"]
  batch, heads, _, length = query.shape
  key_heads, num_keys = key.shape[1], key.shape[3]
  num_tiles = tiles_a_step(plan, operands)
  num_steps = num_keys // (plan.block * num_tiles)
  grid = batch, key_heads, heads // key_heads, length // plan.block, num_steps
  sizes = dict(B=1, N=1, K=1, T=plan.block, S=plan.block * num_tiles)
  # The gradients of all keys stay on the chip.
  axes = AXES | dict.fromkeys(("d_key", "d_value"), "BKhs")
  # A device with a part of the queries does not know their numbers here, nor a traced offset.
  known = plan.is_causal and "first_block" not in operands

  def spec(name, x):
    if name == "first_block":
      return pl.BlockSpec(memory_space=pltpu.SMEM)
    pairs = list(zip(axes[name], x.shape, strict=True))

    def index(b, m, g, i, step):
      keys = num_steps - 1 - step
      if known:  # a hidden step reads no new keys
        last = i - (plan.key_block - plan.first_block)
        keys = jnp.clip(jax.lax.div(last, np.int32(num_tiles)), 0, keys)
      by_letter = dict(B=b, N=m * grid[2] + g, K=m, T=i, S=keys)
      return tuple(by_letter.get(letter, 0) if size > 1 else 0 for letter, size in pairs)

    return pl.BlockSpec([min(sizes.get(letter, size), size) for letter, size in pairs], index)

  def specs(arrays):
    return {name: spec(name, x) for name, x in arrays.items()}

  wide = jnp.promote_types(query.dtype, jnp.float32)
  num_pairs = batch * heads * length * num_keys // (2 if plan.is_causal else 1)
  cost = pl.CostEstimate(
    flops=2 * num_products * num_pairs * query.shape[2],
    transcendentals=num_pairs,
    bytes_accessed=sum(
      math.prod(x.shape) * x.dtype.itemsize for x in (operands | outputs).values()
    ),
  )
  return pl.pallas_call(
    functools.partial(kernel, plan, num_tiles),
    grid=grid,
    in_specs=[specs(operands)],
    out_specs=specs(outputs),
    out_shape=shapes_like(query, outputs),
    scratch_shapes=[{name: pltpu.VMEM(shape, wide) for name, shape in scratch.items()}],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=["parallel"] * num_parallel + ["arbitrary"] * (len(grid) - num_parallel),
      vmem_limit_bytes=VMEM_BYTES,
    ),
    cost_estimate=cost,
    interpret=plan.interpret,
    name=f"relative_attention_{name}",
  )(operands)
