"""The operands of the kernels for GPUs, and their tiles of queries by keys.

For a block of queries the keys fall into three runs of tiles. The distance j - i is right of the
band in all of a tile, or left of it in all, or the tile is *mixed*. The far field is plain.

In a mixed tile the pair (i, j) has column j - i - first of [T, R], gathered through a reference.
Every (i, r) of the band has one j, so gradients by rows of the table are scattered there without
atomics; the last row, all keys further right, is summed.

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
from relpos_jax.typing import Array, Bool, Float, Int

_FAR = 2**30


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
    first: the distance of the band's first diagonal; None without relations.
    num_diagonals: of the band, R - 1.
    lowest, highest: the limits of visible distances j - i; None without a limit.
    sums: whether to return the weights' sums by row of the table.
    rate: of dropout.
  """

  scale: float
  first: int | None
  num_diagonals: int
  lowest: int | None
  highest: int | None
  sums: bool
  rate: float
  blocks: Blocks
  num_warps: int
  interpret: bool

  @property
  def left(self) -> int:
    """Returns the distance below which tiles are plain."""
    ends = (self.first, None if self.highest is None else self.highest + 1)
    return min((end for end in ends if end is not None), default=_FAR)

  @property
  def right(self) -> int:
    """Returns the distance from which on tiles are plain."""
    return _FAR if self.first is None else self.first + self.num_diagonals

  @property
  def limits(self) -> tuple[int, int]:
    """Returns the lowest and the highest visible distance."""
    return (
      -_FAR if self.lowest is None else self.lowest,
      _FAR if self.highest is None else self.highest,
    )

  @property
  def has_right(self) -> bool:
    """Returns whether any key right of the band may be visible."""
    return self.first is not None and self.limits[1] >= self.right


class Arrays(NamedTuple):
  """The operands: lengths padded to blocks, the head width to a power of 2."""

  query: Float[Array, "B T N H"]
  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K H"]
  band_logits: Float[Array, "B N T R"] | None
  visible: Int[Array, "B S"] | None
  key_ends: Int[Array, " B"] | None  # one past the last visible key
  query_segments: Int[Array, "B T"] | None
  key_segments: Int[Array, "B S"] | None
  seeds: Int[Array, "B N"] | None


class Outputs(NamedTuple):
  """The results of the forward kernel."""

  output: Float[Array, "B T N H"]
  maximum: Float[Array, "B N T"]  # of the logits
  inverse_total: Float[Array, "B N T"]  # of exp(logit - maximum), zero where all keys are masked
  row_sums: Float[Array, "B N T"] | None  # of the weights after dropout
  # The band's logits, and the weight of all keys right of it after dropout. Uninitialised where
  # there is no key: `pallas_gpu` overwrites those entries.
  band: Float[Array, "B N T R"] | None


class Side(NamedTuple):
  """Numbers per query for the gradients in plain tiles left, or right, of the band."""

  delta: Float[Array, "B N T"]
  d_weights: Float[Array, "B N T"] | None  # added to dO_i . v_j, with dropout


class Cotangents(NamedTuple):
  """The operands of the gradient kernels besides `Arrays`. Mixed tiles use the left side."""

  output: Float[Array, "B T N H"]
  sums: Float[Array, "B N T R"] | None
  maximum: Float[Array, "B N T"]
  inverse_total: Float[Array, "B N T"]
  left: Side
  right: Side | None


class Gradients(NamedTuple):
  """The gradients of the operands; those of keys and values per query head."""

  d_query: Float[Array, "B T N H"]
  d_band_logits: Float[Array, "B N T R"] | None  # uninitialised where there is no key
  d_key: Float[Array, "B S N H"]
  d_value: Float[Array, "B S N H"]


# The axes of every field.
_SIDE = Side("BNT", "BNT")
ARRAYS = Arrays("BTNH", "BSKH", "BSKH", "BNTR", "BS", "B", "BT", "BS", "BN")
OUTPUTS = Outputs("BTNH", "BNT", "BNT", "BNT", "BNTR")
COTANGENTS = Cotangents("BTNH", "BNTR", "BNT", "BNT", _SIDE, _SIDE)
GRADIENTS = Gradients("BTNH", "BNTR", "BSNH", "BSNH")


def named(tree: Any) -> dict[str, Any]:
  """Returns the leaves of one of the tuples above by the names of their fields."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator=" "): leaf for path, leaf in leaves}


AXES: dict[str, str] = {
  name: axes
  for tree in (ARRAYS, OUTPUTS, COTANGENTS, GRADIENTS)
  for name, axes in named(tree).items()
}


def call(
  kernel: Callable,
  plan: GpuPlan,
  blocked: str,
  blocks: tuple[int, int, int],
  operands: tuple,
  axes: tuple,
  results: Any,
  results_axes: Any,
) -> Any:
  """Runs a kernel for every block of one axis of every head; it reads all of the other axes."""
  query, key = operands[0].query, operands[0].key
  batch, length, heads, _ = query.shape
  size, total = (blocks[0], length) if blocked == "T" else (blocks[1], key.shape[1])
  group = heads // key.shape[2]

  def spec(x, axes):
    if x is None:
      return None
    one = {"B": None, "N": None, "K": None, blocked: size}
    shape = tuple(one.get(axis, n) for axis, n in zip(axes, x.shape, strict=True))
    index = lambda i, n, b: {"B": b, "N": n, "K": lax.div(n, jnp.int32(group)), blocked: i}
    return pl.BlockSpec(shape, lambda *at: tuple(index(*at).get(axis, 0) for axis in axes))

  specs = functools.partial(jax.tree.map, spec, is_leaf=lambda x: x is None)
  call = pl.pallas_call(
    functools.partial(kernel, plan),
    out_shape=(results,),
    grid=(total // size, heads, batch),
    in_specs=specs(operands, axes),
    out_specs=(specs(results, results_axes),),
    compiler_params=plgpu.CompilerParams(num_warps=plan.num_warps, num_stages=2),
    interpret=plan.interpret,
    name=kernel.__name__.strip("_"),
  )
  return call(*operands)[0]


class Tile(NamedTuple):
  """A tile of queries by keys, and its slices of the kernel's references."""

  row: Array  # the first query
  column: Array  # the first key
  size: tuple[int, int]
  queries: Any  # slices of references
  keys: Any
  side: str  # of the band: "left", "right", or "mixed"

  @property
  def mixed(self) -> bool:
    return self.side == "mixed"

  @property
  def rows(self) -> Int[Array, "Q 1"]:
    return self.row + _range(self.size[0])[:, None]

  @property
  def columns(self) -> Int[Array, "1 S"]:
    return self.column + _range(self.size[1])[None]

  @property
  def distances(self) -> Int[Array, "Q S"]:
    return self.columns - self.rows


def _range(size: int) -> Int[Array, " {size}"]:
  return jnp.arange(size, dtype=jnp.int32)


def logits(plan: GpuPlan, arrays: Arrays, tile: Tile, query: Array, key: Array) -> Array:
  """Computes a tile's logits; right of the band the relative term is one number per query."""
  logits = dot(query, key, 1, 1) * plan.scale
  if tile.mixed and arrays.band_logits is not None:
    logits += gather(plan, arrays.band_logits, tile)
  if tile.side == "right" and arrays.band_logits is not None:
    logits += arrays.band_logits[tile.queries, plan.num_diagonals][:, None]
  for visible in _conditions(plan, arrays, tile):
    logits = jnp.where(visible, logits, masks.LOWEST)
  return logits


def _conditions(plan: GpuPlan, arrays: Arrays, tile: Tile) -> list[Bool[Array, "#Q S"]]:
  """Returns masks of visible pairs, none for a side that is known to have no hidden ones."""
  conditions = []
  if plan.lowest is not None:
    conditions.append(tile.distances >= plan.lowest)
  if plan.highest is not None and (tile.mixed or plan.has_right):
    conditions.append(tile.distances <= plan.highest)
  if arrays.visible is not None:
    conditions.append((arrays.visible[tile.keys] != 0)[None])
  if arrays.query_segments is not None:
    of_queries, of_keys = arrays.query_segments[tile.queries], arrays.key_segments[tile.keys]
    conditions.append(of_queries[:, None] == of_keys[None])
  return conditions


def keep(plan: GpuPlan, arrays: Arrays, tile: Tile) -> Bool[Array, "Q S"]:
  """Returns the dropout mask of a tile, True where a weight is kept."""
  return dropout.keep(arrays.seeds[...], tile.rows, tile.columns, plan.rate)


def gather(plan: GpuPlan, reference: Any, tile: Tile) -> Array:
  """Reads each pair's entry of [T, R]; 0 left of the band."""
  in_table = tile.distances >= plan.first
  return plgpu.load(reference.at[_indices(plan, tile)], mask=in_table, other=0.0)


def scatter(plan: GpuPlan, reference: Any, tile: Tile, x: Array) -> None:
  """Writes the pairs on the band to their entries of [T, R], the last column excepted."""
  if plan.num_diagonals:
    on_band = (tile.distances >= plan.first) & (tile.distances < plan.right)
    plgpu.store(reference.at[_indices(plan, tile)], x, mask=on_band)


def _indices(plan: GpuPlan, tile: Tile) -> tuple[Int[Array, "Q S"], Int[Array, "Q S"]]:
  """Returns indices into [T, R]: off the band the last column, to which nothing is scattered."""
  columns = jnp.minimum(tile.distances - plan.first, plan.num_diagonals)
  columns = jnp.where(columns < 0, plan.num_diagonals, columns)
  rows = tile.queries.start + _range(tile.size[0])[:, None]
  return jnp.broadcast_to(rows, tile.size), columns


def dot(x: Array, y: Array, axis_x: int, axis_y: int) -> Array:
  """Computes the product over one axis of each, accumulated in float32 or wider."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  axes = (((axis_x,), (axis_y,)), ((), ()))
  return lax.dot_general(x, y, axes, preferred_element_type=wide)


def key_tiles(plan: GpuPlan, arrays: Arrays, start: Array, size: tuple[int, int]) -> tuple:
  """Returns the tiles of keys for a block of queries: begin, first mixed, first right, end."""
  num_tiles = arrays.key.shape[0] // size[1]
  if arrays.key_ends is not None:
    num_tiles = lax.div(arrays.key_ends[...] + (size[1] - 1), jnp.int32(size[1]))
  return _runs(start, size[0], size[1], num_tiles, *plan.limits, plan.left, plan.right)


def query_tiles(plan: GpuPlan, arrays: Arrays, start: Array, size: tuple[int, int]) -> tuple:
  """Returns the tiles of queries for a block of keys: begin, first mixed, first left, end."""
  num_tiles = jnp.int32(arrays.query.shape[0] // size[0])
  if arrays.key_ends is not None:
    num_tiles = jnp.where(start < arrays.key_ends[...], num_tiles, 0)
  lowest, highest = plan.limits
  return _runs(start, size[1], size[0], num_tiles, -highest, -lowest, 1 - plan.right, 1 - plan.left)


def _runs(
  start: Array,
  block: int,
  size: int,
  num_tiles: Any,
  lowest: int,
  highest: int,
  low: int,
  high: int,
) -> tuple[Array, Array, Array, Array]:
  """Returns the tiles of one axis for a block of the other: begin, low end, high begin, end.

  A tile is included if some difference to the block is from `lowest` to `highest`; it is low if all
  are less than `low`, high if all are at least `high`.
  """
  floor = lambda x: lax.div(jnp.maximum(x, 0), jnp.int32(size))
  last = start + (block - 1)
  end = jnp.minimum(floor(last + highest + size), num_tiles)
  begin = jnp.minimum(floor(start + lowest), end)
  low_end = jnp.clip(floor(start + low), begin, end)
  high_begin = jnp.clip(floor(last + high + (size - 1)), low_end, end)
  return begin, low_end, high_begin, end
