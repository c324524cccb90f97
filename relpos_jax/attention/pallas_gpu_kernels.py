"""The GPU kernels: one for the output, two for the gradients.

A tile is a block of queries and a block of keys. It is *mixed* if it touches the band
(band.py), where the relative term depends on the distance. All other tiles are left or
right of the band: there a query has the same relative term for all keys.

An array [T, R] has a number for each query and table row, such as a logit, a sum of
weights or a gradient. The number for query i and key j is in row i and column
clip(j - i - low, 0, R - 1), where low is the last distance left of the band. For a
mixed tile, the kernels gather these numbers from the array. In a column of the band,
each query has only one key. So weights and gradients are written there without atomics.
The first and the last column get the sums over all keys left and right of the band.

A masked pair has a very low, finite logit. A weight is exp(logit - maximum) *
inverse_total, in the forward and in the backward pass. Maximum and total are not merged
into one log-sum-exp: in float32, log(total) would be lost next to a large maximum. The
kernels use exp, not exp2. For exp2, logits must be multiplied by log2(e), and float32
would round the products of large logits.
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
from relpos_jax.attention.arrays import accumulation_dtype
from relpos_jax.attention.band import FAR
from relpos_jax.attention.pallas_calls import Arrays
from relpos_jax.attention.partitioned import align_manual_axes, shapes_like
from relpos_jax.typing import Array, Int

# The axes of each array. Axes with lower-case letters are not sharded.
AXES = dict.fromkeys(("query", "output", "d_output", "d_query"), "BtNh")
AXES |= dict(key="BSKh", value="BSKh")
AXES |= dict(d_key="BSNh", d_value="BSNh")  # one gradient per query head
AXES |= dict.fromkeys(("band_logits", "d_band_logits"), "BNtr")  # may have size 1
AXES |= dict.fromkeys(("band_weights", "d_band_weights"), "BNtr")  # after dropout
AXES |= dict(key_mask="BS", query_segments="Bt", key_segments="BS", seeds="BN")
AXES |= dict.fromkeys(("maximum", "inverse_total", "delta"), "BNt")


class KernelPlan(NamedTuple):
  """Holds the static parameters of the kernels."""

  block: tuple[int, int]  # queries and keys in a tile; powers of 2
  low: int  # keys at this distance or less have the same relative term
  high: int  # keys at this distance or more have the same relative term
  scale: float
  is_causal: bool
  dropout_rate: float
  has_values: bool  # whether there is a value table
  interpret: bool  # whether to run as plain XLA, without a GPU
  precision: str | None  # JAX's matmul precision when the call was traced

  @property
  def num_rows(self) -> int:
    return self.high - self.low + 1


def forward(plan: KernelPlan, operands: Arrays) -> Arrays:
  """Computes the output without the term of the value table, and weights for that term.

  Returns `output`, `maximum` and `inverse_total`. If there is a value table, it also
  returns `band_weights` [B, N, T, R]: each query's sum of weights for every table row.
  """
  query = operands["query"]
  batch, length, heads, _ = query.shape
  dtype = accumulation_dtype(query.dtype)
  row = jax.ShapeDtypeStruct((batch, heads, length), dtype)
  shapes = dict(output=row.update(shape=query.shape), maximum=row, inverse_total=row)
  in_place = {}
  if plan.has_values:
    in_place["band_weights"] = jnp.full(
      (*row.shape, plan.num_rows), masks.LOWEST, dtype
    )
  outputs = _call(_output_kernel, plan, "t", operands, shapes, in_place)
  if plan.has_values:  # on the band, the kernel returns logits
    weights, columns = outputs["band_weights"], jnp.arange(plan.num_rows)
    is_side = (columns == 0) | (columns == plan.num_rows - 1)
    on_band = jnp.exp(weights - outputs["maximum"][..., None])
    factor = outputs["inverse_total"][..., None] / (1 - plan.dropout_rate)
    outputs["band_weights"] = jnp.where(is_side, weights, on_band) * factor
  return outputs


def backward(plan: KernelPlan, operands: Arrays) -> Arrays:
  """Computes the gradients by two kernels.

  The first kernel returns `d_query` and, if there are `band_logits`, `d_band_logits`.
  Both are in the accumulation dtype. The second kernel returns `d_key` and `d_value`.
  """
  query, key, delta = operands["query"], operands["key"], operands["delta"]
  band, in_place = operands.get("band_logits"), {}
  if band is not None:
    in_place["d_band_logits"] = jnp.zeros((*delta.shape, plan.num_rows), delta.dtype)
  shapes = dict(d_query=jax.ShapeDtypeStruct(query.shape, delta.dtype))
  gradients = _call(_d_query_kernel, plan, "t", operands, shapes, in_place)
  if band is not None:
    shared = [axis for axis in range(3) if band.shape[axis] == 1]
    gradients["d_band_logits"] = gradients["d_band_logits"].sum(shared, keepdims=True)
  batch, _, heads, width = query.shape
  # If query heads share a key head, their gradients are summed, and then rounded.
  dtype = key.dtype if heads == key.shape[2] else delta.dtype
  key_shape = jax.ShapeDtypeStruct((batch, key.shape[1], heads, width), dtype)
  shapes = dict(d_key=key_shape, d_value=key_shape)
  return gradients | _call(_d_key_kernel, plan, "S", operands, shapes, {})


def _call(
  kernel,
  plan: KernelPlan,
  blocked: str,
  operands: Arrays,
  results: Arrays,
  in_place: Arrays,
) -> Arrays:
  """Runs a kernel for every block of one axis, in every head.

  Each run reads one block of the axis `blocked`, and everything along the other axes.
  The results have the shapes `results`. The arrays `in_place` are results, too: the
  kernel overwrites some of their entries.
  """
  query, key = operands["query"], operands["key"]
  batch, length, heads, width = query.shape
  size, total = (
    (plan.block[0], length) if blocked == "t" else (plan.block[1], key.shape[1])
  )
  group = heads // key.shape[2]
  operands = align_manual_axes(operands | in_place)
  results |= {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in in_place.items()
  }

  def spec(name, x):
    axes = list(zip(AXES[name], x.shape, strict=True))
    squeezed = dict.fromkeys("BNK")  # axes that a kernel's reference lacks
    shape = [
      min(size, n) if axis == blocked else squeezed.get(axis, n) for axis, n in axes
    ]

    def index(i, n, b):
      indices = {"B": b, "N": n, "K": lax.div(n, jnp.int32(group)), blocked: i}
      return tuple(indices.get(axis, 0) if n > 1 else 0 for axis, n in axes)

    return pl.BlockSpec(shape, index)

  return pl.pallas_call(
    functools.partial(kernel, plan),
    out_shape=shapes_like(query, results),
    grid=(total // size, heads, batch),
    in_specs=[{name: spec(name, x) for name, x in operands.items()}],
    out_specs={name: spec(name, x) for name, x in results.items()},
    input_output_aliases={
      sorted(operands).index(name): sorted(results).index(name) for name in in_place
    },
    compiler_params=plgpu.CompilerParams(
      num_warps=8 if width > 64 else 4, num_stages=2
    ),
    interpret=plan.interpret,
    name=kernel.__name__.strip("_"),
  )(operands)


# The kernels.


def _output_kernel(plan: KernelPlan, operands: Arrays, outputs: Arrays):
  query, dtype = operands["query"][...], outputs["maximum"].dtype
  zeros = jnp.zeros(plan.block[0], dtype)

  def visit(tile: _Tile, state: tuple) -> tuple:
    """Adds a tile to the sums of an online softmax, and rescales them.

    They are sums of exp(logit - maximum), where `maximum` is the largest logit so far.
    """
    old_maximum, total, output, sides = state
    logits = _logits(plan, operands, tile, query, operands["key"][tile.keys])
    maximum = jnp.maximum(old_maximum, logits.max(1))
    correction = jnp.exp(old_maximum - maximum)
    weights = jnp.exp(logits - maximum[:, None])
    total = total * correction + weights.sum(1)
    if plan.dropout_rate:
      is_kept = dropout.keep(
        operands["seeds"][...], tile.rows, tile.columns, plan.dropout_rate
      )
      weights, logits = (
        jnp.where(is_kept, weights, 0),
        jnp.where(is_kept, logits, masks.LOWEST),
      )
    if plan.has_values:
      _scatter(plan, outputs["band_weights"], tile, logits)
      sides = _add_sides(plan, tile, tuple(x * correction for x in sides), weights)
    value = operands["value"][tile.keys]
    output = output * correction[:, None] + _dot(
      weights.astype(value.dtype), value, 1, 0
    )
    return maximum, total, output, sides

  sides = (zeros, zeros) if plan.has_values else None
  state = (
    jnp.full_like(zeros, masks.LOWEST),
    zeros,
    jnp.zeros(query.shape, dtype),
    sides,
  )
  maximum, total, output, sides = _over_tiles(plan, operands, "t", visit, state)
  has_key = maximum > masks.LOWEST / 2
  inverse_total = jnp.where(has_key, 1 / jnp.where(has_key, total, 1), 0)
  outputs["output"][...] = output * (inverse_total / (1 - plan.dropout_rate))[:, None]
  outputs["maximum"][...] = maximum
  outputs["inverse_total"][...] = inverse_total
  if plan.has_values:
    band = outputs["band_weights"]
    band[:, 0], band[:, plan.num_rows - 1] = sides


def _d_query_kernel(plan: KernelPlan, operands: Arrays, gradients: Arrays):
  query, d_output = operands["query"][...], operands["d_output"][...]
  d_band = gradients.get("d_band_logits")

  def visit(tile: _Tile, carry: tuple) -> tuple:
    d_query, sides = carry
    key, value = operands["key"][tile.keys], operands["value"][tile.keys]
    _, d_logits = _d_logits(plan, operands, tile, query, key, value, d_output)
    if d_band is not None:
      _scatter(plan, d_band, tile, d_logits)
      sides = _add_sides(plan, tile, sides, d_logits)
    return d_query + _dot(d_logits.astype(key.dtype), key, 1, 0), sides

  zeros = jnp.zeros(query.shape, gradients["d_query"].dtype)
  sides = None if d_band is None else (jnp.zeros(plan.block[0], zeros.dtype),) * 2
  d_query, sides = _over_tiles(plan, operands, "t", visit, (zeros, sides))
  gradients["d_query"][...] = plan.scale * d_query
  if d_band is not None:
    d_band[:, 0], d_band[:, plan.num_rows - 1] = sides


def _d_key_kernel(plan: KernelPlan, operands: Arrays, gradients: Arrays):
  key, value = operands["key"][...], operands["value"][...]

  def visit(tile: _Tile, carry: tuple) -> tuple:
    query, d_output = (
      operands["query"][tile.queries],
      operands["d_output"][tile.queries],
    )
    weights, d_logits = _d_logits(plan, operands, tile, query, key, value, d_output)
    return (
      carry[0] + _dot(d_logits.astype(query.dtype), query, 0, 0),
      carry[1] + _dot(weights.astype(d_output.dtype), d_output, 0, 0),
    )

  zeros = jnp.zeros(key.shape, operands["delta"].dtype)
  d_key, d_value = _over_tiles(plan, operands, "S", visit, (zeros, zeros))
  gradients["d_key"][...] = (plan.scale * d_key).astype(gradients["d_key"].dtype)
  gradients["d_value"][...] = d_value.astype(gradients["d_value"].dtype)


def _d_logits(
  plan: KernelPlan, operands: Arrays, tile: "_Tile", query, key, value, d_output
):
  """Computes the weights of a tile after dropout, and the gradient of its logits."""
  names = "maximum", "inverse_total", "delta"
  maximum, inverse_total, delta = (
    operands[name][tile.queries][:, None] for name in names
  )
  weights = jnp.exp(_logits(plan, operands, tile, query, key) - maximum) * inverse_total
  d_weights = _dot(d_output, value, 1, 1)
  if plan.has_values:
    d_weights += _terms(plan, operands["d_band_weights"], tile)
  if not plan.dropout_rate:
    return weights, weights * (d_weights - delta)
  is_kept = dropout.keep(
    operands["seeds"][...], tile.rows, tile.columns, plan.dropout_rate
  )
  factor = jnp.where(is_kept, 1 / (1 - plan.dropout_rate), 0).astype(weights.dtype)
  return weights * factor, weights * (d_weights * factor - delta)


# Tiles.


class _Tile(NamedTuple):
  """Describes a tile: some consecutive queries and keys."""

  row: Array  # the index of its first query
  column: Array  # the index of its first key
  queries: Any  # the slice of its queries in the kernel's references
  keys: Any  # the slice of its keys
  side: str  # "left" or "right" of the band, or "mixed"
  size: tuple[int, int]

  @property
  def rows(self) -> Int[Array, "Q 1"]:
    return self.row + jnp.arange(self.size[0], dtype=jnp.int32)[:, None]

  @property
  def columns(self) -> Int[Array, "1 S"]:
    return self.column + jnp.arange(self.size[1], dtype=jnp.int32)[None]

  @property
  def distances(self) -> Int[Array, "Q S"]:
    return self.columns - self.rows


def _over_tiles(
  plan: KernelPlan, operands: Arrays, blocked: str, visit: Callable, carry: tuple
) -> tuple:
  """Calls `carry = visit(tile, carry)` for each tile, and returns the last carry.

  A kernel runs for one block: of queries if `blocked` is "t", or of keys if it is "S".
  The tiles combine this block with all blocks along the other axis. First come the
  tiles right of the band, unless causality masks them. Then come mixed tiles, and then
  tiles left of the band.
  """
  block, size = plan.block if blocked == "t" else plan.block[::-1]
  low, high = (plan.low, plan.high) if blocked == "t" else (-plan.high, -plan.low)
  start = pl.program_id(0) * block
  num_tiles = operands["key" if blocked == "t" else "query"].shape[0] // size

  def floor(x):
    return lax.div(jnp.clip(x, 0, num_tiles * size), jnp.int32(size))

  # From the block, tiles before low_end are at distance `low` or less, and tiles from
  # high_begin on are at distance `high` or more.
  low_end = floor(start + (low + 1))
  high_begin = jnp.maximum(floor(start + (block + high + size - 2)), low_end)
  runs = (0, low_end), (low_end, high_begin), (high_begin, num_tiles)
  left, mixed, right = runs if blocked == "t" else runs[::-1]
  by_side = dict(right=right, mixed=mixed, left=left)
  if plan.is_causal or plan.high == FAR:
    del by_side["right"]

  def visit_tile(side, t, carry):
    row, column = (start, t * size) if blocked == "t" else (t * size, start)
    queries = pl.ds(0 if blocked == "t" else row, plan.block[0])
    keys = pl.ds(column if blocked == "t" else 0, plan.block[1])
    return visit(_Tile(row, column, queries, keys, side, plan.block), carry)

  for side, (begin, end) in by_side.items():
    carry = lax.fori_loop(begin, end, functools.partial(visit_tile, side), carry)
  return carry


def _logits(
  plan: KernelPlan, operands: Arrays, tile: _Tile, query: Array, key: Array
) -> Array:
  """Computes the logits of a tile, and masks them."""
  logits = _dot(query, key, 1, 1) * plan.scale
  if "band_logits" in operands:
    logits += _terms(plan, operands["band_logits"], tile)
  parts = []
  if plan.is_causal and tile.side == "mixed":
    parts.append(tile.distances <= 0)
  if "key_mask" in operands:
    parts.append((operands["key_mask"][tile.keys] != 0)[None])
  if "query_segments" in operands:
    query_segments = operands["query_segments"][tile.queries]
    key_segments = operands["key_segments"][tile.keys]
    parts.append(query_segments[:, None] == key_segments[None])
  for mask in parts:
    logits = jnp.where(mask, logits, masks.LOWEST)
  return logits


def _terms(plan: KernelPlan, reference: Any, tile: _Tile) -> Array:
  """Reads the numbers of a tile from an array [T, R].

  For a mixed tile, it returns a number for each pair. For another tile, all pairs of a
  query have the same number, so it returns one for each query. The array is [1, R] if
  all queries have the same numbers.
  """
  if tile.side == "mixed":
    rows, columns = _indices(plan, tile)
    return plgpu.load(
      reference.at[rows if reference.shape[0] > 1 else 0 * rows, columns]
    )
  queries = tile.queries if reference.shape[0] > 1 else slice(None)
  return reference[queries, 0 if tile.side == "left" else plan.num_rows - 1][:, None]


def _scatter(plan: KernelPlan, reference: Any, tile: _Tile, x: Array) -> None:
  """Writes x, a number for each pair of a tile, to an array [T, R].

  It writes only the numbers of pairs on the band. Only mixed tiles have such pairs.
  """
  if tile.side == "mixed":
    on_band = (tile.distances > plan.low) & (tile.distances < plan.high)
    plgpu.store(reference.at[_indices(plan, tile)], x, mask=on_band)


def _add_sides(
  plan: KernelPlan, tile: _Tile, sides: tuple, x: Array
) -> tuple[Array, Array]:
  """Adds x to each query's sums over keys left of the band, and right of it.

  `sides` are the two sums over earlier tiles.
  """
  left, right = sides
  if tile.side == "mixed":
    left += jnp.where(tile.distances <= plan.low, x, 0).sum(1)
    right += jnp.where(tile.distances >= plan.high, x, 0).sum(1)
    return left, right
  return (left + x.sum(1), right) if tile.side == "left" else (left, right + x.sum(1))


def _indices(
  plan: KernelPlan, tile: _Tile
) -> tuple[Int[Array, "Q S"], Int[Array, "Q S"]]:
  """Returns the row and the column of each pair of a tile in an array [T, R]."""
  rows = tile.queries.start + jnp.arange(tile.size[0], dtype=jnp.int32)[:, None]
  columns = jnp.clip(tile.distances - plan.low, 0, plan.num_rows - 1)
  return jnp.broadcast_to(rows, tile.size), columns


def _dot(x: Array, y: Array, axis_x: int, axis_y: int) -> Array:
  """Computes the product over one axis of each, in the accumulation dtype."""
  axes = (((axis_x,), (axis_y,)), ((), ()))
  return lax.dot_general(x, y, axes, preferred_element_type=accumulation_dtype(x.dtype))
