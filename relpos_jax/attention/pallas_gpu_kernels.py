"""The three kernels of `pallas_gpu`: output; gradient of queries and band; of keys and values.

For a block of queries the keys fall into three runs of tiles. The distance j - i is right of the
band in all of a tile, or left of it in all, or the tile is *mixed*. The far field is plain:

  output    plain right tiles; m_i += c_i, once; mixed tiles, with the band's logits; left tiles
  gradient  plain right tiles with lse_i - c_i and delta_i - dSums_i; mixed tiles; left tiles

In a mixed tile column j - i - first of [T, R] is that of the pair (i, j): it is gathered through a
reference. Every (i, r) of the band is of one j, so what is given back by rows of the table is
scattered there, without atomics; its last row, all keys further right, is summed.

Logits are in base 2 in here. A hidden pair has a very low one, so that nothing is ever infinite
but the log-sum-exp of a query that sees no key.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from relpos_jax.attention import dropout
from relpos_jax.typing import Array, Bool, Float, Int

LOG2_E = math.log2(math.e)
_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)
_FAR = 2**30


class Blocks(NamedTuple):
  """The tiles of each kernel: sizes (of queries, of keys), and parts; powers of 2.

  Mixed tiles are cut into so many parts along the axis that the kernel walks: they would need the
  most registers, and plain tiles would pay for that.
  """

  output: tuple[int, int, int]
  d_query: tuple[int, int, int]
  d_key: tuple[int, int, int]


class Plan(NamedTuple):
  """What the kernels are compiled for.

  Attributes:
    first: the distance of the band's first diagonal; None without relations.
    num_diagonals: those with a row of their own, R - 1.
    lowest, highest: the distances j - i a query sees; None without a limit.
    sums: whether the weights on each row of the table are asked for.
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
    """Tiles whose distances are all below it are plain."""
    ends = (self.first, None if self.highest is None else self.highest + 1)
    return min((end for end in ends if end is not None), default=_FAR)

  @property
  def right(self) -> int:
    """Tiles whose distances are all at least this are plain."""
    return _FAR if self.first is None else self.first + self.num_diagonals

  @property
  def limits(self) -> tuple[int, int]:
    """The distances a query sees."""
    return (
      -_FAR if self.lowest is None else self.lowest,
      _FAR if self.highest is None else self.highest,
    )

  @property
  def has_right(self) -> bool:
    """Whether there is something to see right of the band."""
    return self.first is not None and self.limits[1] >= self.right


class Arrays(NamedTuple):
  """Operands: queries and keys in whole blocks, the head width a power of 2."""

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
  """Of the first kernel."""

  output: Float[Array, "B T N H"]
  log_sums: Float[Array, "B N T"]  # log2 sum_j 2^logit_ij, infinite where no key is seen
  row_sums: Float[Array, "B N T"] | None  # of the weights that dropout leaves
  # The logits of the band, and log2 of the sum right of it, dropout applied. Anything where no
  # key is: there nothing is written.
  band: Float[Array, "B N T R"] | None


class Side(NamedTuple):
  """What the gradient in a plain tile needs to know of its queries: left or right of the band."""

  log_sums: Float[Array, "B N T"]
  delta: Float[Array, "B N T"]
  d_weights: Float[Array, "B N T"] | None  # added to dO_i . v_j, where something is dropped


class Cotangents(NamedTuple):
  """What the gradient kernels need besides `Arrays`. Mixed tiles take the left side's numbers."""

  output: Float[Array, "B T N H"]
  sums: Float[Array, "B N T R"] | None
  left: Side
  right: Side | None


class Gradients(NamedTuple):
  """Of the operands; those of keys and values still one for every query head."""

  d_query: Float[Array, "B T N H"]
  d_band_logits: Float[Array, "B N T R"] | None  # anything where no key is
  d_key: Float[Array, "B S N H"]
  d_value: Float[Array, "B S N H"]


# The axes of every field.
_SIDE = Side("BNT", "BNT", "BNT")
_ARRAYS = Arrays("BTNH", "BSKH", "BSKH", "BNTR", "BS", "B", "BT", "BS", "BN")
_OUTPUTS = Outputs("BTNH", "BNT", "BNT", "BNTR")
_COTANGENTS = Cotangents("BTNH", "BNTR", _SIDE, _SIDE)
_GRADIENTS = Gradients("BTNH", "BNTR", "BSNH", "BSNH")


def named(tree: Any) -> dict[str, Any]:
  """The leaves of one of the tuples above by the names of their fields."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator=" "): leaf for path, leaf in leaves}


AXES: dict[str, str] = {
  name: axes
  for tree in (_ARRAYS, _OUTPUTS, _COTANGENTS, _GRADIENTS)
  for name, axes in named(tree).items()
}


def outputs(plan: Plan, arrays: Arrays) -> Outputs:
  """Attention without the value table, and what makes the sums of its weights."""
  wide = jnp.promote_types(arrays.query.dtype, jnp.float32)
  dtype = wide if plan.sums else arrays.value.dtype  # rounded once, after the table's term
  batch, length, heads, _ = arrays.query.shape
  of_rows = jax.ShapeDtypeStruct((batch, heads, length), wide)
  of_band = jax.ShapeDtypeStruct((*of_rows.shape, plan.num_diagonals + 1), wide)
  shapes = Outputs(
    jax.ShapeDtypeStruct(arrays.query.shape, dtype),
    of_rows,
    of_rows if plan.sums and arrays.seeds is not None else None,
    of_band if plan.sums else None,
  )
  blocks = plan.blocks.output
  return _call(_output_kernel, plan, "T", blocks, (arrays,), (_ARRAYS,), shapes, _OUTPUTS)


def gradients(plan: Plan, arrays: Arrays, cotangents: Cotangents) -> Gradients:
  """Those of the query and the band by one kernel, of key and value by another."""
  operands, axes = (arrays, cotangents), (_ARRAYS, _COTANGENTS)
  like = lambda x, dtype: None if x is None else jax.ShapeDtypeStruct(x.shape, dtype)
  batch, _, heads, width = arrays.query.shape
  # What more is added to is rounded later.
  wide = jnp.promote_types(arrays.query.dtype, jnp.float32)
  dtype = arrays.key.dtype if heads == arrays.key.shape[2] else wide
  of_query = like(arrays.query, arrays.query.dtype if arrays.band_logits is None else wide)
  of_keys = jax.ShapeDtypeStruct((batch, arrays.key.shape[1], heads, width), dtype)
  first = Gradients(of_query, like(arrays.band_logits, wide), None, None)
  second = Gradients(None, None, of_keys, of_keys)
  blocks = plan.blocks.d_query, plan.blocks.d_key
  first = _call(_d_query_kernel, plan, "T", blocks[0], operands, axes, first, _GRADIENTS)
  second = _call(_d_key_kernel, plan, "S", blocks[1], operands, axes, second, _GRADIENTS)
  return Gradients(*first[:2], *second[2:])


def _call(
  kernel: Callable,
  plan: Plan,
  blocked: str,
  blocks: tuple[int, int, int],
  operands: tuple,
  axes: tuple,
  results: Any,
  results_axes: Any,
) -> Any:
  """Runs a kernel for every block of one axis of every head, with the others whole."""
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


class _Tile(NamedTuple):
  """Pairs of some queries and some keys, and where they are in the references at hand."""

  row: Array  # the first query
  column: Array  # the first key
  size: tuple[int, int]
  queries: Any  # slices of references
  keys: Any
  mixed: bool

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


class _State(NamedTuple):
  """An online softmax: all but the maximum are to be multiplied by 2^maximum."""

  maximum: Float[Array, " Q"]
  total: Float[Array, " Q"]
  kept: Float[Array, " Q"] | None  # the total of what dropout leaves
  right: Float[Array, " Q"] | None  # the part of it right of the band
  output: Float[Array, "Q H"]


def _output_kernel(plan: Plan, arrays: Arrays, outputs: Outputs):
  block, size, parts = plan.blocks.output
  query = arrays.query[...]
  start = pl.program_id(0) * block

  def visit(mixed: bool, t: Array, state: _State) -> _State:
    width = size // parts if mixed else size
    keys = pl.ds(t * width, width)
    tile = _Tile(start, t * width, (block, width), pl.ds(0, block), keys, mixed)
    logits = _logits(plan, arrays, tile, query, arrays.key[keys])
    if mixed and plan.sums:
      _scatter(plan, outputs.band, tile, logits)
    return _attend(plan, arrays, tile, state, logits, arrays.value[keys])

  begin, left_end, right_begin, end = _key_tiles(plan, arrays, start, (block, size))
  state = _empty(plan, arrays, block, outputs.log_sums.dtype)
  if plan.has_right:
    state = lax.fori_loop(right_begin, end, functools.partial(visit, False), state)
  state = _turn_to_the_band(plan, arrays, state)
  mixed = left_end * parts, right_begin * parts
  state = lax.fori_loop(*mixed, functools.partial(visit, True), state)
  if plan.sums:
    outputs.band[:, plan.num_diagonals] = jnp.log2(state.right) + state.maximum
    state = state._replace(right=None)
  state = lax.fori_loop(begin, left_end, functools.partial(visit, False), state)
  _finish(plan, state, outputs)


def _empty(plan: Plan, arrays: Arrays, block: int, dtype: Any) -> _State:
  zeros = jnp.zeros(block, dtype)
  kept = zeros if plan.sums and plan.rate else None
  output = jnp.zeros((block, arrays.query.shape[1]), dtype)
  return _State(jnp.full(block, _HIDDEN, dtype), zeros, kept, None, output)


def _attend(
  plan: Plan, arrays: Arrays, tile: _Tile, state: _State, logits: Array, value: Array
) -> _State:
  """The state after one more tile."""
  maximum = jnp.maximum(state.maximum, logits.max(1))
  shrink = jnp.exp2(state.maximum - maximum)
  weights = jnp.exp2(logits - maximum[:, None])
  total = state.total * shrink + weights.sum(1)
  kept, right = state.kept, state.right
  if plan.rate:
    weights = jnp.where(_keep(plan, arrays, tile), weights, 0)
  if kept is not None:
    kept = kept * shrink + weights.sum(1)
  if right is not None:
    right = right * shrink + jnp.where(tile.distances >= plan.right, weights, 0).sum(1)
  output = state.output * shrink[:, None] + _dot(weights.astype(value.dtype), value, 1, 0)
  return _State(maximum, total, kept, right, output)


def _turn_to_the_band(plan: Plan, arrays: Arrays, state: _State) -> _State:
  """From right of the band on logits are not c_i too low any more."""
  if plan.sums:
    state = state._replace(right=state.kept if plan.rate else state.total)
  if arrays.band_logits is None:
    return state
  return state._replace(maximum=state.maximum + LOG2_E * arrays.band_logits[:, plan.num_diagonals])


def _finish(plan: Plan, state: _State, outputs: Outputs) -> None:
  """Divides; a query that sees no key has weights of zero."""
  sees = state.maximum > _HIDDEN / 2
  total = jnp.where(sees, state.total, 1)
  of_output, of_row = (
    jnp.where(sees, 1 / (total * (1 - plan.rate)), 0),
    jnp.where(sees, jnp.log2(total) + state.maximum, math.inf),
  )
  outputs.output[...] = (state.output * of_output[:, None]).astype(outputs.output.dtype)
  outputs.log_sums[...] = of_row
  if outputs.row_sums is not None:
    outputs.row_sums[...] = state.kept * of_output


def _d_query_kernel(plan: Plan, arrays: Arrays, cotangents: Cotangents, gradients: Gradients):
  block, size, parts = plan.blocks.d_query
  query, d_output = arrays.query[...], cotangents.output[...]
  start = pl.program_id(0) * block
  with_band = arrays.band_logits is not None

  def visit(side: str, t: Array, carry: tuple) -> tuple:
    d_query, d_right = carry
    width = size // parts if side == "mixed" else size
    keys = pl.ds(t * width, width)
    tile = _Tile(start, t * width, (block, width), pl.ds(0, block), keys, side == "mixed")
    key, value = arrays.key[keys], arrays.value[keys]
    _, d_logits = _d_logits(plan, arrays, cotangents, tile, side, query, key, value, d_output)
    d_query += _dot(d_logits.astype(key.dtype), key, 1, 0)
    if tile.mixed and with_band:
      _scatter(plan, gradients.d_band_logits, tile, d_logits)
      d_right += jnp.where(tile.distances >= plan.right, d_logits, 0).sum(1)
    if side == "right" and with_band:
      d_right += d_logits.sum(1)
    return d_query, d_right

  begin, left_end, right_begin, end = _key_tiles(plan, arrays, start, (block, size))
  wide = cotangents.left.delta.dtype
  carry = jnp.zeros(query.shape, wide), jnp.zeros(block, wide) if with_band else None
  if plan.has_right:
    carry = lax.fori_loop(right_begin, end, functools.partial(visit, "right"), carry)
  mixed = left_end * parts, right_begin * parts
  carry = lax.fori_loop(*mixed, functools.partial(visit, "mixed"), carry)
  carry = lax.fori_loop(begin, left_end, functools.partial(visit, "left"), carry)
  gradients.d_query[...] = (plan.scale * carry[0]).astype(gradients.d_query.dtype)
  if with_band:
    gradients.d_band_logits[:, plan.num_diagonals] = carry[1]


def _d_key_kernel(plan: Plan, arrays: Arrays, cotangents: Cotangents, gradients: Gradients):
  size, block, parts = plan.blocks.d_key
  key, value = arrays.key[...], arrays.value[...]
  start = pl.program_id(0) * block

  def visit(side: str, t: Array, carry: tuple) -> tuple:
    height = size // parts if side == "mixed" else size
    queries = pl.ds(t * height, height)
    tile = _Tile(t * height, start, (height, block), queries, pl.ds(0, block), side == "mixed")
    query, d_output = arrays.query[queries], cotangents.output[queries]
    weights, d_logits = _d_logits(plan, arrays, cotangents, tile, side, query, key, value, d_output)
    return (
      carry[0] + _dot(d_logits.astype(query.dtype), query, 0, 0),
      carry[1] + _dot(weights.astype(d_output.dtype), d_output, 0, 0),
    )

  begin, right_end, left_begin, end = _query_tiles(plan, arrays, start, (size, block))
  carry = (jnp.zeros(key.shape, cotangents.left.delta.dtype),) * 2
  if plan.has_right:
    carry = lax.fori_loop(begin, right_end, functools.partial(visit, "right"), carry)
  mixed = right_end * parts, left_begin * parts
  carry = lax.fori_loop(*mixed, functools.partial(visit, "mixed"), carry)
  carry = lax.fori_loop(left_begin, end, functools.partial(visit, "left"), carry)
  gradients.d_key[...] = (plan.scale * carry[0]).astype(gradients.d_key.dtype)
  gradients.d_value[...] = carry[1].astype(gradients.d_value.dtype)


def _d_logits(
  plan: Plan,
  arrays: Arrays,
  cotangents: Cotangents,
  tile: _Tile,
  side: str,
  query: Array,
  key: Array,
  value: Array,
  d_output: Array,
) -> tuple[Array, Array]:
  """The tile's weights, those dropped left out, and the gradient of its logits."""
  of = cotangents.right if side == "right" else cotangents.left
  log_sums, delta = of.log_sums[tile.queries], of.delta[tile.queries]
  weights = jnp.exp2(_logits(plan, arrays, tile, query, key) - log_sums[:, None])
  d_weights = _dot(d_output, value, 1, 1)
  if tile.mixed and plan.sums:
    d_weights += _gather(plan, cotangents.sums, tile)
  if not plan.rate:
    return weights, weights * (d_weights - delta[:, None])
  if of.d_weights is not None:
    d_weights += of.d_weights[tile.queries][:, None]
  share = jnp.where(_keep(plan, arrays, tile), 1 / (1 - plan.rate), 0).astype(weights.dtype)
  return weights * share, weights * (d_weights * share - delta[:, None])


def _logits(plan: Plan, arrays: Arrays, tile: _Tile, query: Array, key: Array) -> Array:
  """In base 2, less c_i right of the band."""
  logits = _dot(query, key, 1, 1) * (plan.scale * LOG2_E)
  if tile.mixed and arrays.band_logits is not None:
    logits += LOG2_E * _gather(plan, arrays.band_logits, tile)
  for shown in _conditions(plan, arrays, tile):
    logits = jnp.where(shown, logits, _HIDDEN)
  return logits


def _conditions(plan: Plan, arrays: Arrays, tile: _Tile) -> list[Bool[Array, "#Q S"]]:
  """Which pairs are to be seen; tiles without a hidden one are not asked where that is known."""
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


def _keep(plan: Plan, arrays: Arrays, tile: _Tile) -> Bool[Array, "Q S"]:
  return dropout.keep(arrays.seeds[...], tile.rows, tile.columns, plan.rate)


def _gather(plan: Plan, reference: Any, tile: _Tile) -> Array:
  """Each pair's number in [T, R]; 0 left of the band."""
  in_table = tile.distances >= plan.first
  return plgpu.load(reference.at[_places(plan, tile)], mask=in_table, other=0.0)


def _scatter(plan: Plan, reference: Any, tile: _Tile, x: Array) -> None:
  """Puts the pairs' numbers into [T, R], but for the last column's, which have no place each."""
  if plan.num_diagonals:
    on_band = (tile.distances >= plan.first) & (tile.distances < plan.right)
    plgpu.store(reference.at[_places(plan, tile)], x, mask=on_band)


def _places(plan: Plan, tile: _Tile) -> tuple[Int[Array, "Q S"], Int[Array, "Q S"]]:
  """Indices into [T, R] references: the last column off the band, where none is scattered to."""
  columns = jnp.minimum(tile.distances - plan.first, plan.num_diagonals)
  columns = jnp.where(columns < 0, plan.num_diagonals, columns)
  rows = tile.queries.start + _range(tile.size[0])[:, None]
  return jnp.broadcast_to(rows, tile.size), columns


def _dot(x: Array, y: Array, axis_x: int, axis_y: int) -> Array:
  """The product over one axis of each, accumulated in float32 or wider."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  axes = (((axis_x,), (axis_y,)), ((), ()))
  return lax.dot_general(x, y, axes, preferred_element_type=wide)


def _key_tiles(plan: Plan, arrays: Arrays, start: Array, size: tuple[int, int]) -> tuple:
  """Where the tiles of keys for a block of queries begin, are mixed, are right, and end."""
  num_tiles = arrays.key.shape[0] // size[1]
  if arrays.key_ends is not None:
    num_tiles = lax.div(arrays.key_ends[...] + (size[1] - 1), jnp.int32(size[1]))
  return _runs(start, size[0], size[1], num_tiles, *plan.limits, plan.left, plan.right)


def _query_tiles(plan: Plan, arrays: Arrays, start: Array, size: tuple[int, int]) -> tuple:
  """Where the tiles of queries for a block of keys begin, are mixed, are left, and end."""
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
  """Tiles of an axis for a block of the other: begin, end of the low, begin of the high, end.

  A tile counts where some difference to the block is from `lowest` to `highest`; it is low where
  all are less than `low`, high where all are at least `high`.
  """
  floor = lambda x: lax.div(jnp.maximum(x, 0), jnp.int32(size))
  last = start + (block - 1)
  end = jnp.minimum(floor(last + highest + size), num_tiles)
  begin = jnp.minimum(floor(start + lowest), end)
  low_end = jnp.clip(floor(start + low), begin, end)
  high_begin = jnp.clip(floor(last + high + (size - 1)), low_end, end)
  return begin, low_end, high_begin, end
