"""The kernels for GPUs: the output, the gradient of queries and band, that of keys and
values.

For a block of queries the keys fall into three runs of tiles: all of a tile is left of
the band, or right of it, where all keys of a query have the same relative term; or the
tile is *mixed*.

What queries have for each row of a table is in an array [T, R]. A pair (i, j) has
column clip(j - i - low, 0, R - 1), gathered through a reference in a mixed tile. Every
(i, r) of the band has one j, so what is summed by rows of the table is scattered there
without atomics; the first and the last column, of all keys beside the band, are sums.

A hidden pair has a very low logit, so that nothing is ever infinite. A weight is
exp(logit - maximum) * inverse_total, forward and backward, in this order: float32 loses
a small summand beside a large logit, and rounds a large one that is multiplied with
log2(e).
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
from relpos_jax.attention.band import FAR
from relpos_jax.attention.partitioned import align_manual_axes, shapes_like
from relpos_jax.typing import Array, Int

# A letter for each axis of each array, small ones are not sharded.
AXES = dict.fromkeys(("query", "output", "d_output", "d_query"), "BtNh")
AXES |= dict(
  key="BSKh", value="BSKh", d_key="BSNh", d_value="BSNh"
)  # gradients per query head
AXES |= dict.fromkeys(
  ("band_logits", "d_band_logits"), "BNtr"
)  # of size 1 where all are the same
AXES |= dict.fromkeys(("band_weights", "d_band_weights"), "BNtr")  # after dropout
AXES |= dict(key_mask="BS", query_segments="Bt", key_segments="BS", seeds="BN")
AXES |= dict.fromkeys(("maximum", "inverse_total", "delta"), "BNt")

Arrays = dict[str, Any]


class KernelPlan(NamedTuple):
  """The static parameters of the fused kernels."""

  block: tuple[int, int]  # queries and keys of a tile; powers of 2
  low: int  # all keys up to this distance have the same relative term
  high: int  # and so have all from this one on
  scale: float
  is_causal: bool
  dropout_rate: float
  has_values: bool  # whether there is a table for values
  interpret: bool  # runs as plain XLA, without a device
  precision: str | None  # the default where the call was traced

  @property
  def num_rows(self) -> int:
    return self.high - self.low + 1


def forward(plan: KernelPlan, operands: Arrays) -> Arrays:
  """Computes attention without the value table, and the weights by its rows."""
  query = operands["query"]
  batch, length, heads, _ = query.shape
  wide = jnp.promote_types(query.dtype, jnp.float32)
  row = jax.ShapeDtypeStruct((batch, heads, length), wide)
  shapes = dict(output=row.update(shape=query.shape), maximum=row, inverse_total=row)
  in_place = {}
  if plan.has_values:
    in_place["band_weights"] = jnp.full((*row.shape, plan.num_rows), masks.LOWEST, wide)
  outputs = _call(_output_kernel, plan, "t", operands, shapes, in_place)
  if plan.has_values:  # within the band they are logits
    weights, columns = outputs["band_weights"], jnp.arange(plan.num_rows)
    is_beside = (columns == 0) | (columns == plan.num_rows - 1)
    in_band = jnp.exp(weights - outputs["maximum"][..., None])
    factor = outputs["inverse_total"][..., None] / (1 - plan.dropout_rate)
    outputs["band_weights"] = jnp.where(is_beside, weights, in_band) * factor
  return outputs


def backward(plan: KernelPlan, operands: Arrays) -> Arrays:
  """Computes gradients by two kernels: of the query and the band, wide, and of key and value."""
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
  # Those of several heads are summed before they are rounded.
  dtype = key.dtype if heads == key.shape[2] else delta.dtype
  of_keys = jax.ShapeDtypeStruct((batch, key.shape[1], heads, width), dtype)
  shapes = dict(d_key=of_keys, d_value=of_keys)
  return gradients | _call(_d_key_kernel, plan, "S", operands, shapes, {})


def _call(
  kernel,
  plan: KernelPlan,
  blocked: str,
  operands: Arrays,
  results: Arrays,
  in_place: Arrays,
) -> Arrays:
  """Runs a kernel for every block of one axis of every head; it reads all of the other
  axes.

  Its results have these shapes. It writes some entries of the arrays `in_place`,
  results, too.
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
    squeezed = dict.fromkeys("BNK")  # axes that the kernel does not see
    shape = [
      min(size, n) if axis == blocked else squeezed.get(axis, n) for axis, n in axes
    ]

    def index(i, n, b):
      at = {"B": b, "N": n, "K": lax.div(n, jnp.int32(group)), blocked: i}
      return tuple(at.get(axis, 0) if n > 1 else 0 for axis, n in axes)

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


# The kernels
# --------------------------------------------------------------------------------------


def _output_kernel(plan: KernelPlan, operands: Arrays, outputs: Arrays):
  query, dtype = operands["query"][...], outputs["maximum"].dtype
  zeros = jnp.zeros(plan.block[0], dtype)

  def visit(tile: _Tile, state: tuple) -> tuple:
    """Adds a tile to an online softmax, whose sums are relative to exp(maximum)."""
    old_maximum, total, output, beside = state
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
      beside = _add_beside(plan, tile, tuple(x * correction for x in beside), weights)
    value = operands["value"][tile.keys]
    output = output * correction[:, None] + _dot(
      weights.astype(value.dtype), value, 1, 0
    )
    return maximum, total, output, beside

  beside = (zeros, zeros) if plan.has_values else None
  state = (
    jnp.full_like(zeros, masks.LOWEST),
    zeros,
    jnp.zeros(query.shape, dtype),
    beside,
  )
  maximum, total, output, beside = _over_tiles(plan, operands, "t", visit, state)
  has_key = maximum > masks.LOWEST / 2
  inverse_total = jnp.where(has_key, 1 / jnp.where(has_key, total, 1), 0)
  outputs["output"][...] = output * (inverse_total / (1 - plan.dropout_rate))[:, None]
  outputs["maximum"][...] = maximum
  outputs["inverse_total"][...] = inverse_total
  if plan.has_values:
    band = outputs["band_weights"]
    band[:, 0], band[:, plan.num_rows - 1] = beside


def _d_query_kernel(plan: KernelPlan, operands: Arrays, gradients: Arrays):
  query, d_output = operands["query"][...], operands["d_output"][...]
  d_band = gradients.get("d_band_logits")

  def visit(tile: _Tile, carry: tuple) -> tuple:
    d_query, beside = carry
    key, value = operands["key"][tile.keys], operands["value"][tile.keys]
    _, d_logits = _d_logits(plan, operands, tile, query, key, value, d_output)
    if d_band is not None:
      _scatter(plan, d_band, tile, d_logits)
      beside = _add_beside(plan, tile, beside, d_logits)
    return d_query + _dot(d_logits.astype(key.dtype), key, 1, 0), beside

  zeros = jnp.zeros(query.shape, gradients["d_query"].dtype)
  beside = None if d_band is None else (jnp.zeros(plan.block[0], zeros.dtype),) * 2
  d_query, beside = _over_tiles(plan, operands, "t", visit, (zeros, beside))
  gradients["d_query"][...] = plan.scale * d_query
  if d_band is not None:
    d_band[:, 0], d_band[:, plan.num_rows - 1] = beside


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
  """Computes a tile's weights after dropout, and the gradient of its logits."""
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


# Tiles
# --------------------------------------------------------------------------------------------


class _Tile(NamedTuple):
  """A tile of queries by keys."""

  row: Array  # its first query
  column: Array  # and its first key
  queries: Any  # its slices of the kernel's references
  keys: Any
  side: str  # of the band: "left", "right", or "mixed"
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
  """Calls `visit(tile, carry)` for all tiles with visible pairs of a block of one axis.

  Those right of the band are first, unless they are hidden, and those left of it last.
  """
  block, size = plan.block if blocked == "t" else plan.block[::-1]
  low, high = (plan.low, plan.high) if blocked == "t" else (-plan.high, -plan.low)
  start = pl.program_id(0) * block
  num_tiles = operands["key" if blocked == "t" else "query"].shape[0] // size

  def floor(x):
    return lax.div(jnp.clip(x, 0, num_tiles * size), jnp.int32(size))

  # Differences from the block are at most `low` in the first tiles, at least `high` in
  # the last.
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
  """Computes a tile's logits."""
  logits = _dot(query, key, 1, 1) * plan.scale
  if "band_logits" in operands:
    logits += _terms(plan, operands["band_logits"], tile)
  visible = []
  if plan.is_causal and tile.side == "mixed":
    visible.append(tile.distances <= 0)
  if "key_mask" in operands:
    visible.append((operands["key_mask"][tile.keys] != 0)[None])
  if "query_segments" in operands:
    of_queries, of_keys = operands["query_segments"], operands["key_segments"]
    visible.append(of_queries[tile.queries][:, None] == of_keys[tile.keys][None])
  for mask in visible:
    logits = jnp.where(mask, logits, masks.LOWEST)
  return logits


def _terms(plan: KernelPlan, reference: Any, tile: _Tile) -> Array:
  """Reads each pair's entry of [T, R]; off the band it is one number per query."""
  if tile.side == "mixed":
    rows, columns = _indices(plan, tile)
    return plgpu.load(
      reference.at[rows if reference.shape[0] > 1 else 0 * rows, columns]
    )
  queries = tile.queries if reference.shape[0] > 1 else slice(None)
  return reference[queries, 0 if tile.side == "left" else plan.num_rows - 1][:, None]


def _scatter(plan: KernelPlan, reference: Any, tile: _Tile, x: Array) -> None:
  """Writes the pairs on the band to their entries of [T, R]."""
  if tile.side == "mixed":
    on_band = (tile.distances > plan.low) & (tile.distances < plan.high)
    plgpu.store(reference.at[_indices(plan, tile)], x, mask=on_band)


def _add_beside(
  plan: KernelPlan, tile: _Tile, sides: tuple, x: Array
) -> tuple[Array, Array]:
  """Adds a tile to the sums left and right of the band."""
  left, right = sides
  if tile.side == "mixed":
    left += jnp.where(tile.distances <= plan.low, x, 0).sum(1)
    right += jnp.where(tile.distances >= plan.high, x, 0).sum(1)
    return left, right
  return (left + x.sum(1), right) if tile.side == "left" else (left, right + x.sum(1))


def _indices(
  plan: KernelPlan, tile: _Tile
) -> tuple[Int[Array, "Q S"], Int[Array, "Q S"]]:
  """Returns the indices of a tile's pairs in [T, R]."""
  rows = tile.queries.start + jnp.arange(tile.size[0], dtype=jnp.int32)[:, None]
  columns = jnp.clip(tile.distances - plan.low, 0, plan.num_rows - 1)
  return jnp.broadcast_to(rows, tile.size), columns


def _dot(x: Array, y: Array, axis_x: int, axis_y: int) -> Array:
  """Computes the product over one axis of each, accumulated in float32 or wider."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  axes = (((axis_x,), (axis_y,)), ((), ()))
  return lax.dot_general(x, y, axes, preferred_element_type=wide)
