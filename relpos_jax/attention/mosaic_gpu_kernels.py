"""The GPU kernels in Mosaic, for Hopper: one for the output, two for the gradients.

They have been run only in interpret mode on a CPU, with race detection; never on a GPU.
Race detection finds a missing wait for a copy. It finds neither a missing `commit_smem`
nor a warp that overtakes another.

A tile is a block of 64 queries and a block of 64 keys. It is *mixed* if it touches the
band (band.py), where the relative term depends on the distance. All other tiles are
left or right of the band: there a query has the same relative term for all keys.

Each query has a logit for every table row. From these logits, `to_tiles` makes an array
with one number for each pair in a mixed tile. For a tile, a kernel reads one slice of
this array, and writes gradients to the same slice of another array. So it needs neither
gathers nor scatters.

A masked pair has a very low, finite logit. A weight is exp(logit - maximum) *
inverse_total, in the forward and in the backward pass. Maximum and total are not merged
into one log-sum-exp: in float32, log(total) would be lost next to a large maximum.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from relpos_jax.attention import dropout, masks
from relpos_jax.attention.band import FAR
from relpos_jax.attention.pallas_calls import Arrays
from relpos_jax.attention.partitioned import align_manual_axes, shapes_like
from relpos_jax.typing import Array, Bool, Float

TILE = 64  # queries and keys in a tile: the rows of a product of one warpgroup
WIDTH = 64  # head widths are multiples of it: the 128 bytes of a swizzled row

# The axes of each array. Axes with lower-case letters are not sharded. `I` is the axis
# of blocks of queries, `q` of the queries in a block, and `c` of columns in tiles.
AXES = dict.fromkeys(("query", "d_query", "output", "d_output"), "BTNh")
AXES |= dict(key="BSKh", value="BSKh")
AXES |= dict(d_key="BSNh", d_value="BSNh")  # one gradient per query head
AXES |= dict.fromkeys(("logit_tiles", "d_logit_tiles"), "BNIqc")  # may have size 1
AXES |= dict.fromkeys(("weight_tiles", "d_weight_tiles"), "BNIqc")  # after dropout
for _side in ("left", "right"):
  for _name in ("logit", "d_logit", "weight", "d_weight"):
    AXES[f"{_name}_{_side}"] = "BNT"
AXES |= dict.fromkeys(("maximum", "inverse_total", "delta"), "BNT")
AXES |= dict(key_mask="BS", query_segments="BT", key_segments="BS", seeds="BN")


class KernelPlan(NamedTuple):
  """Holds the static parameters of the kernels."""

  low: int  # keys at this distance or less have the same relative term
  high: int  # keys at this distance or more have the same relative term
  scale: float
  is_causal: bool
  dropout_rate: float
  has_values: bool  # whether there is a value table
  # Whether to interpret the kernels on a CPU, with race detection. The interpreter
  # takes weights in shared memory only. A GPU multiplies them from registers.
  interpret: bool

  @property
  def mixed(self) -> range:
    """Returns the offsets of a block's mixed tiles, relative to the block's index."""
    return range((self.low + 1) // TILE, -(-(self.high + TILE - 1) // TILE))

  @property
  def num_rows(self) -> int:
    return self.high - self.low + 1


# Tiles of the band, in XLA.


def to_tiles(
  plan: KernelPlan, rows: Float[Array, "B N T R"]
) -> Float[Array, "B N I Q C"]:
  """Returns a number for each pair in a mixed tile, from each query's numbers by row.

  The result has I blocks of Q queries. Element [i, q, c] is for query q of block i and
  for column c of its mixed tiles. The columns are consecutive keys. Column 0 of block i
  is key TILE * (i + plan.mixed.start), which may be out of range.

  In each block, the numbers of query q are ordered by distance and shifted by q, as in
  the skew of Huang et al. 2018, section 3.4.1. This copies, and computes nothing. If
  all queries have the same numbers (T = 1), so have all blocks, and I is 1.
  """
  batch, heads, length, num_rows = rows.shape
  if length == 1:
    rows = jnp.broadcast_to(rows, (batch, heads, TILE, num_rows))
  columns = TILE * len(plan.mixed)
  first = TILE * plan.mixed.start - (TILE - 1)  # the distance of the leftmost pair
  before = plan.low - first
  after = columns + TILE - before - num_rows
  by_distance = jnp.pad(rows, [(0, 0)] * 3 + [(before, after)], mode="edge")
  flat = by_distance.reshape(batch, heads, -1, TILE * (columns + TILE))
  pitch = columns + TILE - 1
  start = TILE - 1
  skewed = flat[..., start : start + TILE * pitch]
  return skewed.reshape(*flat.shape[:3], TILE, pitch)[..., :columns]


def _is_visited(plan: KernelPlan, tiles: Array, num_keys: int) -> Bool[Array, "I 1 C"]:
  """Returns whether a column of mixed tiles has a key. Kernels skip the others."""
  *_, blocks, _, columns = tiles.shape
  block = jnp.arange(blocks)[:, None, None] + plan.mixed.start
  column = TILE * block + jnp.arange(columns)
  return (column >= 0) & (column < num_keys)


# The calls.


def forward(plan: KernelPlan, operands: Arrays) -> Arrays:
  """Computes the output without the term of the value table, and weights for that term.

  The weights are in three arrays. `weight_tiles` has a weight for each pair in a mixed
  tile. `weight_left` and `weight_right` have each query's sum of weights over the tiles
  left and right of the band.
  """
  query, value = operands["query"], operands["value"]
  batch, length, heads, _ = query.shape
  row = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
  output = row.update(shape=(batch, length, heads, value.shape[3]))
  results = dict(output=output, maximum=row, inverse_total=row)
  if plan.has_values:
    results |= _by_row(plan, "weight", row)
  outputs = _call(_output_kernel, plan, operands, results, length)
  if plan.has_values:  # in mixed tiles, the kernel returns logits
    tiles = outputs["weight_tiles"]
    maximum, factor = (
      outputs[name].reshape(*tiles.shape[:-1], 1)
      for name in ("maximum", "inverse_total")
    )
    weights = jnp.exp(tiles - maximum) * (factor / (1 - plan.dropout_rate))
    is_visited = _is_visited(plan, tiles, value.shape[1])
    outputs["weight_tiles"] = jnp.where(is_visited, weights, 0)
  return outputs


def backward(plan: KernelPlan, operands: Arrays) -> Arrays:
  """Computes the gradients by two kernels.

  For each block of queries, the first kernel adds up `d_query` and the gradients of
  logits over keys. For each block of keys, the second kernel adds up `d_key` and
  `d_value` over queries.
  """
  query, key, value = (operands[name] for name in ("query", "key", "value"))
  delta, tiles = operands["delta"], operands.get("logit_tiles")
  row = jax.ShapeDtypeStruct(delta.shape, delta.dtype)
  results = dict(d_query=row.update(shape=query.shape))
  if tiles is not None:
    results |= _by_row(plan, "d_logit", row)
  gradients = _call(_d_query_kernel, plan, operands, results, query.shape[1])
  if tiles is not None:
    d_tiles = gradients["d_logit_tiles"]
    d_tiles = jnp.where(_is_visited(plan, d_tiles, key.shape[1]), d_tiles, 0)
    shared = [axis for axis in range(3) if tiles.shape[axis] == 1]
    gradients["d_logit_tiles"] = d_tiles.sum(shared, keepdims=True)
  # If query heads share a key head, their gradients are summed, and then rounded.
  heads, key_heads = query.shape[2], key.shape[2]
  dtype = key.dtype if heads == key_heads else delta.dtype
  results = {}
  for name, x in dict(d_key=key, d_value=value).items():
    batch, num_keys, _, width = x.shape
    results[name] = jax.ShapeDtypeStruct((batch, num_keys, heads, width), dtype)
  return gradients | _call(_d_key_kernel, plan, operands, results, key.shape[1])


def _by_row(plan: KernelPlan, name: str, row: jax.ShapeDtypeStruct) -> Arrays:
  """Returns the shapes of the three arrays that hold weights, or gradients of logits.

  `{name}_tiles` has a number for each pair in a mixed tile. `{name}_left` and
  `{name}_right` have a number for each query: the sum over the keys of the tiles left
  and right of the band.
  """
  *heads, length = row.shape
  tiles = *heads, length // TILE, TILE, TILE * len(plan.mixed)
  return {
    f"{name}_tiles": row.update(shape=tiles),
    f"{name}_left": row,
    f"{name}_right": row,
  }


def _call(
  kernel: Callable, plan: KernelPlan, operands: Arrays, results: Arrays, length: int
) -> Arrays:
  """Runs a kernel for every block of `length` tokens, in every head."""
  query, value = operands["query"], operands["value"]
  batch, _, heads, width = query.shape

  def matrix(columns: int):
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM((TILE, columns), value.dtype, transforms=transforms)

  buffers = dict(
    query=matrix(width),
    key=matrix(width),
    value=matrix(value.shape[3]),
    d_output=matrix(value.shape[3]),
    weights=matrix(TILE),
    d_logits=matrix(TILE),
    barriers=plgpu.Barrier(num_barriers=4),
  )
  if kernel is _output_kernel:
    del buffers["d_output"], buffers["d_logits"]
  call = plgpu.kernel(
    functools.partial(kernel, plan),
    out_type=shapes_like(query, results),
    scratch_types=buffers,
    grid=(length // TILE, heads, batch),
    grid_names=("block", "head", "sequence"),
    interpret=plgpu.InterpretGPUParams(detect_races=True) if plan.interpret else None,
    kernel_name=kernel.__name__.strip("_"),
  )
  return call(align_manual_axes(operands))


# The kernels.


def _output_kernel(plan: KernelPlan, operands: Arrays, outputs: Arrays, **buffers):
  block = lax.axis_index("block")
  here = _Tile(plan, block, block, "mixed")
  _fetch(operands, buffers, here, ("query",))

  def visit(tile: _Tile, state: tuple) -> tuple:
    """Adds a tile to the sums of an online softmax, and rescales them.

    They are sums of exp(logit - maximum), where `maximum` is the largest logit so far.
    """
    old_maximum, total, output, sides = state
    _fetch(operands, buffers, tile, ("key", "value"))
    logits = _logits(operands, buffers, tile)
    maximum = jnp.maximum(old_maximum, logits.max(1))
    correction = jnp.exp(old_maximum - maximum)
    weights = jnp.exp(logits - _column(maximum))
    total = total * correction + weights.sum(1)
    if plan.dropout_rate:
      is_kept = _is_kept(operands, tile)
      weights = jnp.where(is_kept, weights, 0.0)
      logits = jnp.where(is_kept, logits, masks.LOWEST)
    if plan.has_values:
      sides = {side: x * correction for side, x in sides.items()}
      _add_by_row(outputs, "weight", tile, sides, weights, in_tile=logits)
    output = output * _column(correction, output.shape[1])
    output = _add_product(plan, output, weights, buffers["value"], buffers["weights"])
    return maximum, total, output, sides

  sides = _zero_sides() if plan.has_values else {}
  width = buffers["value"].shape[1]
  state = _row(masks.LOWEST), _row(0.0), _zeros(width), sides
  maximum, total, output, sides = _over_tiles(plan, operands, "S", visit, state)
  has_key = maximum > masks.LOWEST / 2
  inverse_total = jnp.where(has_key, 1 / jnp.where(has_key, total, 1.0), 0.0)
  factor = inverse_total * (1 / (1 - plan.dropout_rate))
  here.store(outputs, "output", output * _column(factor, width))
  here.store(outputs, "maximum", maximum)
  here.store(outputs, "inverse_total", inverse_total)
  for side, x in sides.items():
    here.store(outputs, f"weight_{side}", x * factor)


def _d_query_kernel(plan: KernelPlan, operands: Arrays, gradients: Arrays, **buffers):
  block = lax.axis_index("block")
  here = _Tile(plan, block, block, "mixed")
  _fetch(operands, buffers, here, ("query", "d_output"))
  has_terms = "d_logit_tiles" in gradients

  def visit(tile: _Tile, state: tuple) -> tuple:
    d_query, sides = state
    _fetch(operands, buffers, tile, ("key", "value"))
    _, d_logits = _weights_and_d_logits(operands, buffers, tile)
    sides = dict(sides)
    if has_terms:
      _add_by_row(gradients, "d_logit", tile, sides, d_logits, in_tile=d_logits)
    d_query = _add_product(plan, d_query, d_logits, buffers["key"], buffers["d_logits"])
    return d_query, sides

  sides = _zero_sides() if has_terms else {}
  state = _zeros(buffers["key"].shape[1]), sides
  d_query, sides = _over_tiles(plan, operands, "S", visit, state)
  here.store(gradients, "d_query", d_query * plan.scale)
  for side, x in sides.items():
    here.store(gradients, f"d_logit_{side}", x)


def _d_key_kernel(plan: KernelPlan, operands: Arrays, gradients: Arrays, **buffers):
  block = lax.axis_index("block")
  here = _Tile(plan, block, block, "mixed")
  _fetch(operands, buffers, here, ("key", "value"))

  def visit(tile: _Tile, state: tuple) -> tuple:
    d_key, d_value = state
    _fetch(operands, buffers, tile, ("query", "d_output"))
    weights, d_logits = _weights_and_d_logits(operands, buffers, tile)
    _put(buffers["weights"], weights)
    _put(buffers["d_logits"], d_logits)
    d_key += _product(buffers["d_logits"].T, buffers["query"])
    d_value += _product(buffers["weights"].T, buffers["d_output"])
    return d_key, d_value

  state = tuple(_zeros(buffers[name].shape[1]) for name in ("key", "value"))
  d_key, d_value = _over_tiles(plan, operands, "T", visit, state)
  here.store(gradients, "d_key", d_key * plan.scale)
  here.store(gradients, "d_value", d_value)


def _weights_and_d_logits(
  operands: Arrays, buffers: Arrays, tile: "_Tile"
) -> tuple[Array, Array]:
  """Computes the weights of a tile after dropout, and the gradient of its logits."""
  plan = tile.plan
  maximum, inverse_total, delta = (
    _column(tile.load(operands, name)) for name in ("maximum", "inverse_total", "delta")
  )
  weights = jnp.exp(_logits(operands, buffers, tile) - maximum) * inverse_total
  d_weights = _product(buffers["d_output"], buffers["value"].T)
  if plan.has_values:
    d_weights += _terms(operands, "d_weight", tile)
  if not plan.dropout_rate:
    return weights, weights * (d_weights - delta)
  factor = jnp.where(_is_kept(operands, tile), 1 / (1 - plan.dropout_rate), 0.0)
  return weights * factor, weights * (d_weights * factor - delta)


# Tiles.


class _Tile(NamedTuple):
  """Describes a tile: a block of queries and a block of keys.

  The sequence and the head are those for which the kernel runs.
  """

  plan: KernelPlan
  block: Array  # the index of the block of queries
  tile: Array  # the index of the block of keys
  side: str  # "left" or "right" of the band, or "mixed"

  def at(self, arrays: Arrays, name: str) -> Any:
    """Returns the reference to the part of an array that belongs to the tile."""
    reference = arrays[name]
    head = lax.axis_index("head")
    indices = dict(B=lax.axis_index("sequence"), N=head, I=self.block)
    indices |= dict(T=pl.ds(self.block * TILE, TILE), S=pl.ds(self.tile * TILE, TILE))
    if "K" in AXES[name]:
      group = arrays["query"].shape[2] // reference.shape[2]
      indices["K"] = lax.div(head, jnp.int32(group))
    column = self.tile - self.block - self.plan.mixed.start
    indices["c"] = pl.ds(column * TILE, TILE)
    sizes = zip(AXES[name], reference.shape, strict=True)
    index = [indices.get(axis, slice(None)) if n > 1 else 0 for axis, n in sizes]
    return reference.at[tuple(index)]

  def load(self, arrays: Arrays, name: str) -> Array:
    """Loads the tile's part of an array into registers.

    The array has a number for each query, key or pair.
    """
    reference = self.at(arrays, name)
    layout = plgpu.Layout.WGMMA
    if reference.ndim == 1:
      layout = layout.reduce(0 if AXES[name].endswith("S") else 1)
    return plgpu.load(reference, layout=layout, optimized=False)

  def store(self, arrays: Arrays, name: str, x: Array) -> None:
    reference = self.at(arrays, name)
    x = x.astype(reference.dtype)
    if hasattr(plgpu, "store"):
      plgpu.store(reference, x, optimized=False)
    else:  # before jax 0.12 every store may be slow
      reference[...] = x

  @property
  def rows(self) -> Array:
    return self.block * TILE + _iota(0)

  @property
  def columns(self) -> Array:
    return self.tile * TILE + _iota(1)


def _over_tiles(
  plan: KernelPlan, operands: Arrays, along: str, visit: Callable, state: tuple
) -> tuple:
  """Calls `state = visit(tile, state)` for each tile, and returns the last state.

  A kernel runs for one block. If `along` is "S", it is a block of queries, and the
  tiles have all blocks of keys. If `along` is "T", it is a block of keys, and the tiles
  have all blocks of queries. Tiles that causality masks are left out.
  """
  block = lax.axis_index("block")
  num_tiles = operands["key" if along == "S" else "query"].shape[1] // TILE
  first, end = plan.mixed.start, plan.mixed.stop
  if along == "T":
    first, end = 1 - end, 1 - first
  begin = jnp.clip(block + jnp.int32(first), 0, num_tiles)
  end = jnp.clip(block + jnp.int32(end), 0, num_tiles)
  runs = dict(left=(0, begin), mixed=(begin, end), right=(end, num_tiles))
  if along == "T":
    runs |= dict(left=runs["right"], right=runs["left"])
  if plan.is_causal or plan.high == FAR:
    del runs["right"]

  def visit_tile(side, t, state):
    pair = (block, t) if along == "S" else (t, block)
    return visit(_Tile(plan, *pair, side), state)

  for side, (begin, end) in runs.items():
    state = lax.fori_loop(begin, end, functools.partial(visit_tile, side), state)
  return state


def _logits(operands: Arrays, buffers: Arrays, tile: _Tile) -> Float[Array, "Q S"]:
  """Computes the logits of a tile, and masks them."""
  plan = tile.plan
  logits = _product(buffers["query"], buffers["key"].T) * plan.scale
  if "logit_tiles" in operands:
    logits += _terms(operands, "logit", tile)
  if plan.is_causal and tile.side == "mixed":
    logits = jnp.where(tile.columns <= tile.rows, logits, masks.LOWEST)
  if "key_mask" in operands:
    mask = _line(tile.load(operands, "key_mask"))
    logits = jnp.where(mask != 0, logits, masks.LOWEST)
  if "query_segments" in operands:
    query_segments = _column(tile.load(operands, "query_segments"))
    key_segments = _line(tile.load(operands, "key_segments"))
    logits = jnp.where(query_segments == key_segments, logits, masks.LOWEST)
  return logits


def _terms(operands: Arrays, name: str, tile: _Tile) -> Float[Array, "Q S"]:
  """Loads the terms of a tile, one for each pair; `name` is "logit" or "d_weight".

  A mixed tile has a different term for each pair. In any other tile, a query has one
  term for all keys.
  """
  if tile.side == "mixed":
    return tile.load(operands, f"{name}_tiles")
  return _column(tile.load(operands, f"{name}_{tile.side}"))


def _add_by_row(
  arrays: Arrays, name: str, tile: _Tile, sides: Arrays, x: Array, in_tile: Array
) -> None:
  """Adds a tile's numbers to the three results that `_by_row` describes.

  If the tile is mixed, it stores `in_tile`, a number for each pair, in `arrays`. If
  not, it sums x over the keys, and adds the sum to `sides`.
  """
  if tile.side == "mixed":
    tile.store(arrays, f"{name}_tiles", in_tile)
  else:
    sides[tile.side] += x.sum(1)


def _is_kept(operands: Arrays, tile: _Tile) -> Bool[Array, "Q S"]:
  """Returns which weights dropout keeps."""
  seed = tile.at(operands, "seeds")[...]
  return dropout.keep(seed, tile.rows, tile.columns, tile.plan.dropout_rate)


# Registers and shared memory.


def _fetch(
  operands: Arrays, buffers: Arrays, tile: _Tile, names: tuple[str, ...]
) -> None:
  """Copies matrices of the tile to shared memory, by TMA, and waits for them."""
  # A warp may get here while another one still reads the buffers for a product.
  plgpu.commit_smem()
  barriers = [buffers["barriers"].at[i] for i in range(len(names))]
  for name, barrier in zip(names, barriers, strict=True):
    plgpu.copy_gmem_to_smem(tile.at(operands, name), buffers[name], barrier)
  for barrier in barriers:
    plgpu.barrier_wait(barrier)


def _put(buffer: Any, x: Array) -> None:
  """Writes a tile to shared memory, for the next product."""
  buffer[...] = x.astype(buffer.dtype)
  plgpu.commit_smem()


def _product(x: Any, y: Any) -> Array:
  """Multiplies matrices in shared memory, and accumulates in float32."""

  def multiply(accumulator):
    plgpu.wgmma(accumulator, x, y)
    return accumulator[...]

  return pl.run_scoped(multiply, plgpu.ACC((x.shape[0], y.shape[1]), jnp.float32))


def _add_product(plan: KernelPlan, total: Array, x: Array, y: Any, buffer: Any):
  """Returns total + x @ y, for x in registers and y in shared memory."""
  if plan.interpret:
    _put(buffer, x)
    return total + _product(buffer, y)

  def multiply(accumulator):
    plgpu.wgmma(accumulator, x.astype(y.dtype), y)

  return pl.run_state(multiply)(plgpu.ACC.init(total))


def _iota(axis: int) -> Array:
  layout = plgpu.Layout.WGMMA
  return plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), axis, layout=layout)


def _zeros(width: int) -> Array:
  zeros = jnp.zeros((TILE, width), jnp.float32)
  return plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)


def _row(x: float) -> Array:
  """Returns x for each query of a block, [TILE]."""
  row = jnp.full((TILE,), x, jnp.float32)
  return plgpu.layout_cast(row, plgpu.Layout.WGMMA.reduce(1))


def _zero_sides() -> Arrays:
  return dict(left=_row(0.0), right=_row(0.0))


def _column(x: Array, width: int = TILE) -> Array:
  """Broadcasts a number for each query [TILE] to all columns, [TILE, width]."""
  return lax.broadcast_in_dim(x, (TILE, width), [0])


def _line(x: Array) -> Array:
  """Broadcasts a number for each key [TILE] to all queries, [TILE, TILE]."""
  return lax.broadcast_in_dim(x, (TILE, TILE), [1])
