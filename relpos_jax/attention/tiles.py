"""Attention by blocks of queries and tiles of keys, without a [T, S] tensor.

It takes the logits of each table row from band.py, and returns each query's weights
summed by row. band.py multiplies by the tables, and JAX differentiates these products.
Only wide tables (`Tables`) are multiplied here. The derivative of a block is written by
hand, since it recomputes the weights.

On one CPU, a block has a few heads of one sequence, so that it stays in the cache. On
other devices it has all heads and sequences, and XLA partitions the products.

Weights are [S, T], with queries last. So sums over keys vectorise on a CPU, and no
product needs a transposed copy.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from relpos_jax.attention import diagonals, dropout, masks
from relpos_jax.attention.diagonals import Band
from relpos_jax.attention.partitioned import (
  align_manual_axes,
  first_derivatives_only,
  zeros,
)
from relpos_jax.typing import Array, Bool, Float, Int


class Queries(NamedTuple):
  """Holds the arrays of queries that get gradients; axes of size 1 broadcast."""

  vectors: Float[Array, "B T N H"]  # multiplied by the scale
  rows: Float[Array, "#B #T #N R"] | None  # logits of queries by row of the band
  slopes: Float[Array, "1 1 N"] | None
  others: tuple[Float[Array, "B T N _"], ...] = ()  # more vectors, for `Tables.others`


class Keys(NamedTuple):
  """Holds the arrays of keys that get gradients."""

  vectors: Float[Array, "B S K H"]
  values: Float[Array, "B S K V"]
  rows: Float[Array, "B S N R"] | None  # logits of keys by row of the band


class Tables(NamedTuple):
  """Holds tables with more rows than a tile has distances.

  Each tile multiplies its queries or keys by only the rows for its own distances. So
  the logits by row, which might take more memory than the weights, are never stored.
  """

  queries: Float[Array, "1 R #N H"] | None = None  # rows multiply `Queries.vectors`
  keys: Float[Array, "1 R #N H"] | None = None  # rows multiply `Keys.vectors`
  others: tuple[Float[Array, "1 R #N _"], ...] = ()  # rows multiply `Queries.others`
  values: Float[Array, "1 R #N V"] | None = None  # rows are summed, times weights


class Marks(NamedTuple):
  """Holds the positions, segments and masks of queries, or of keys.

  Positions are consecutive within a block of queries and within a tile of keys.
  """

  positions: Int[Array, "#B T 1"]
  segments: Int[Array, "#B T 1"] | None
  seeds: Int[Array, "B 1 N"] | None = None  # for dropout; None for keys
  valid: Bool[Array, "#B T #N"] | None = None  # False if masked; None for queries


class Sides(NamedTuple):
  """Holds arrays of queries, of keys and of pairs, and tables.

  Queries are [B, T, N, ...], keys [B, S, N, ...], pairs [A, N, T, S], tables
  [1, R, N, ...]. Axes of size 1 broadcast.

  B / A consecutive sequences share each of A biases. If 1 < A < B, this file splits
  axis B into [A, B / A], and axis A into [A, 1]. Otherwise it splits them into [1, B]
  and [1, A]. In slices of a block, heads
  come before tokens, except that slices of pairs are [T, N, S].
  """

  queries: Any
  keys: Any = ()
  pairs: Any = ()
  tables: Any = ()


class Results(NamedTuple):
  """Holds the results of a call."""

  output: Float[Array, "B T N V"]
  weights: Float[Array, "B T N R"]  # by row of the band; R = 0 unless asked for
  log_total: Float[Array, "B T N"]  # logsumexp of the logits, -inf if all are masked


class Sums(NamedTuple):
  """Holds each query's sums over keys, as in an online softmax.

  A pair has w = exp(logit - maximum). Its weight is w / total.
  """

  maximum: Float[Array, "*B T"]  # the largest logit so far
  total: Float[Array, "*B T"]  # sums of w
  output: Float[Array, "*B T V"]  # sums of w times the values
  weights: Float[Array, "*B T R"]  # sums of w by row of the band


class Cotangents(NamedTuple):
  """Holds the numbers of each query from which the gradients of its logits follow.

  A weight is exp(logit - maximum) * inverse_total. Maximum and total are not merged
  into one log-sum-exp: in float32, log(total) would be lost next to a large maximum.
  """

  maximum: Float[Array, "*B T"]
  inverse_total: Float[Array, "*B T"]  # 0 if all keys are masked
  d_output: Float[Array, "*B T V"]
  d_weights: Float[Array, "*B T R"]
  delta: Float[Array, "*B T"]  # the sum of weights times their gradients


class Plan(NamedTuple):
  """Holds the static parameters of a call."""

  block: int  # queries in a block
  tile: int  # keys in a tile
  heads: int | None  # heads of one sequence in a block; None: all of all sequences
  band: Band
  first_distance: int | None  # of the first row of `Tables`; None without tables
  needs_weights: bool  # whether `Results` has the weights by row
  soft_cap: float | None
  window: tuple[int, int]  # keys farther to the left or right are masked
  dropout_rate: float
  precision: str | None  # JAX's matmul precision when the call was traced


def attend(plan: Plan, floats: Sides, marks: Sides, attend_to=None) -> Results:
  """Pads to whole blocks and tiles, and computes attention by `attend_to`.

  By default `attend_to` attends to the given keys; ring.py passes its own.
  """
  floats, marks = align_manual_axes((floats, marks))
  batch, num_queries, _, _ = floats.queries.vectors.shape
  num_keys = floats.keys.vectors.shape[1]
  block, more_queries = even_parts(num_queries, plan.block)
  tile, more_keys = even_parts(num_keys, plan.tile)
  if more_keys:
    valid = masks.combine(jnp.ones((1, num_keys, 1), bool), marks.keys.valid)
    marks = marks._replace(keys=marks.keys._replace(valid=valid))
  num_biases = 1 if floats.pairs is None else len(floats.pairs)
  # With a bias per sequence, the first axis has size 1. If it were the second axis, XLA
  # would copy arrays.
  num_groups = num_biases if num_biases < batch else 1

  def split_batch(x: Array) -> Array:
    size = min(len(x), num_groups)
    return x.reshape(size, len(x) // size, *x.shape[1:])

  floats, marks = jax.tree.map(split_batch, (floats, marks))
  floats = _pad(floats, more_queries, more_keys)
  marks = _pad(marks, more_queries, more_keys)
  plan = plan._replace(block=block, tile=tile)
  results = (attend_to or _attend)(plan, floats, marks)
  return jax.tree.map(
    lambda x: x.reshape(batch, *x.shape[2:])[:, :num_queries], results
  )


def default_block(pairs_of_a_query: int, most: int) -> int:
  """Returns the number of queries in a block: a power of two, at least 16.

  A block has at most `most` pairs, unless 16 queries already have more.
  """
  number = max(16, most // pairs_of_a_query)
  return 1 << (number.bit_length() - 1)


def even_parts(size: int, at_most: int) -> tuple[int, int]:
  """Divides `size` elements into equal parts of at most `at_most` elements.

  Returns the size of a part, and the number of elements of padding in the last one.
  """
  number = -(-size // at_most)
  part = -(-size // number)
  return part, number * part - size


def _pad(sides: Sides, queries: int, keys: int) -> Sides:
  """Appends zeros for this many more queries and keys, except to axes of size 1."""
  return Sides(
    _pad_axis(sides.queries, 2, queries),
    _pad_axis(sides.keys, 2, keys),
    _pad_axis(_pad_axis(sides.pairs, 3, queries), 4, keys),
    sides.tables,
  )


def _pad_axis(tree: Any, axis: int, number: int) -> Any:
  def pad(x: Array) -> Array:
    if x.shape[axis] == 1:
      return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, number
    return jnp.pad(x, widths)

  return jax.tree.map(pad, tree) if number else tree


# The call and its derivative.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, floats: Sides, marks: Sides) -> Results:
  return _forward(plan, floats, marks)[0]


def _forward(plan: Plan, floats: Sides, marks: Sides) -> tuple[Results, tuple]:
  sums = sum_over_keys(plan, floats, marks)
  return normalize(sums), (floats, marks, sums)


def _backward(plan: Plan, saved: tuple, d_results: Results) -> tuple[Sides, None]:
  floats, marks, sums = saved
  cotangents = compute_cotangents(sums, d_results)
  return differentiate(plan, floats, marks, cotangents), None


_attend.defvjp(_forward, _backward)


def normalize(sums: Sums) -> Results:
  """Computes the results of a call from its sums over all keys."""
  inverse = _inverse_total(sums)
  weights = sums.weights * inverse[..., None]
  log_total = jnp.where(inverse > 0, sums.maximum + jnp.log(sums.total), -jnp.inf)
  return Results(sums.output * inverse[..., None], weights, log_total)


def compute_cotangents(sums: Sums, d_results: Results) -> Sides:
  """Computes the `Cotangents` of the queries, and returns them as `Sides`."""
  d_output, d_weights, d_log_total = d_results
  results = normalize(sums)
  inverse = _inverse_total(sums)
  # The log total of a fully masked query is a constant, whatever its cotangent.
  d_log_total = jnp.where(inverse > 0, d_log_total, 0)
  delta = (results.output * d_output).sum(-1) - d_log_total
  delta += (results.weights * d_weights).sum(-1)
  return Sides(Cotangents(sums.maximum, inverse, d_output, d_weights, delta))


def _inverse_total(sums: Sums) -> Float[Array, "*B T"]:
  has_key = sums.maximum > masks.LOWEST / 2
  return jnp.where(has_key, 1 / jnp.where(has_key, sums.total, 1), 0)


# The outer loop is over blocks of queries and heads, the inner one over tiles of keys.
# With a third loop, over heads, XLA's CPU runtime would use one core less.

Slices = dict[int, tuple[Any, int]]  # the start and the size of a slice, by axis


def sum_over_keys(plan: Plan, floats: Sides, marks: Sides) -> Sums:
  """Computes the `Sums` of all queries over the given keys."""
  keys = _for_query_heads(floats.keys, floats.queries.vectors)
  floats = floats._replace(keys=keys)
  # A second derivative meets this pass before the backward one.
  return first_derivatives_only(_in_context(plan, _sum_over_keys))(floats, marks)


def differentiate(plan: Plan, floats: Sides, marks: Sides, cotangents: Sides) -> Sides:
  """Computes the gradients of all arrays in `floats`."""
  repeat = functools.partial(_for_query_heads, queries=floats.queries.vectors)
  keys, pull_back = jax.vjp(repeat, floats.keys)
  floats = floats._replace(keys=keys)
  compute = first_derivatives_only(_in_context(plan, _differentiate))
  gradients = compute(floats, marks, cotangents)
  (d_keys,) = pull_back(gradients.keys)
  return gradients._replace(keys=d_keys)


def _for_query_heads(keys: Keys, queries: Array) -> Keys:
  """Repeats key heads for the query heads that share them, in the query's dtype."""
  group = queries.shape[3] // keys.vectors.shape[3]

  def repeat_heads(x: Array) -> Array:
    return x.astype(queries.dtype).repeat(group, axis=3)

  return keys._replace(
    vectors=repeat_heads(keys.vectors), values=repeat_heads(keys.values)
  )


def _in_context(plan: Plan, function: Callable) -> Callable:
  """Binds a function to a plan, and to the matmul precision that the plan stores.

  If a block has a few heads of one sequence, `jax.vmap` runs the function for one
  example after another, as the loop over blocks does with heads and sequences.
  """

  def compute(*operands: Any) -> Any:
    with jax.default_matmul_precision(plan.precision):
      return function(plan, *operands)

  return sequential_vmap(compute) if plan.heads else compute


def _sum_over_keys(plan: Plan, floats: Sides, marks: Sides) -> Sums:
  def run_block(index: Int[Array, ""], sums: Sides) -> Sides:
    block_slices = _slice_block(plan, floats, index)
    block_floats = _take(plan, floats, Sides(block_slices))
    block_marks = _take(plan, marks, Sides(block_slices))

    def run_tile(tile: Int[Array, ""], part: Sums) -> Sums:
      tile_slices = _slice_tile(plan, block_marks, block_slices, tile)
      tile_floats = _take(plan, block_floats, tile_slices)
      tile_marks = _take(plan, block_marks, tile_slices)
      return _attend_tile(plan, tile_floats, tile_marks, part)

    part = no_sums(plan, block_floats.queries, block_floats.keys)
    part = jax.lax.fori_loop(*_needed_tiles(plan, block_marks), run_tile, part)
    return _put(plan, sums, Sides(part), Sides(block_slices))

  empty = Sides(no_sums(plan, floats.queries, floats.keys))
  sums = jax.lax.fori_loop(0, _num_blocks(plan, floats), run_block, empty)
  return sums.queries


def _differentiate(plan: Plan, floats: Sides, marks: Sides, cotangents: Sides) -> Sides:
  def run_block(index: Int[Array, ""], totals: Sides) -> Sides:
    block_slices = _slice_block(plan, floats, index)
    block = [_take(plan, x, Sides(block_slices)) for x in (floats, marks, cotangents)]

    def run_tile(tile: Int[Array, ""], part: Sides) -> Sides:
      tile_slices = _slice_tile(plan, block[1], block_slices, tile)
      operands = [_take(plan, x, tile_slices) for x in block]
      gradients = _differentiate_tile(plan, *operands)
      total = jax.tree.map(jnp.add, _take(plan, part, tile_slices), gradients)
      return _put(plan, part, total, tile_slices)

    part = _take(plan, totals, Sides(block_slices))
    part = jax.lax.fori_loop(*_needed_tiles(plan, block[1]), run_tile, part)
    return _put(plan, totals, part, Sides(block_slices))

  empty = jax.tree.map(lambda x: zeros(x.shape, x), floats)
  return jax.lax.fori_loop(0, _num_blocks(plan, floats), run_block, empty)


def _parts(plan: Plan, floats: Sides) -> list[tuple[int, int, int]]:
  """Returns, for each axis that is cut: its index, and the number and size of parts."""
  groups, members, num_queries, heads, _ = floats.queries.vectors.shape
  parts = [(2, num_queries // plan.block, plan.block)]
  if plan.heads:
    parts += (3, heads // plan.heads, plan.heads), (1, members, 1), (0, groups, 1)
  return parts


def _num_blocks(plan: Plan, floats: Sides) -> int:
  return math.prod(number for _, number, _ in _parts(plan, floats))


def _slice_block(plan: Plan, floats: Sides, index: Int[Array, ""]) -> Slices:
  """Returns the slices of a block of queries, of heads and of sequences."""
  slices = {}
  for axis, number, size in _parts(plan, floats):
    slices[axis] = jax.lax.rem(index, number) * size, size
    index = jax.lax.div(index, number)
  return slices


def _slice_tile(
  plan: Plan, block_marks: Sides, block_slices: Slices, tile: Int[Array, ""]
) -> Sides:
  """Returns the slices of keys, of pairs and of tables for a tile of a block."""
  keys = tile * plan.tile, plan.tile
  others = {axis: part for axis, part in block_slices.items() if axis != 2}
  pairs = {3: block_slices[2], 4: keys}
  for axis, part in others.items():
    pairs[2 if axis == 3 else axis] = part  # in pairs, heads come before tokens
  tables = {}
  if plan.first_distance is not None:
    rows = _slice_rows(plan, block_marks, tile, plan.first_distance)
    tables = {2: rows} | others
  return Sides({}, {2: keys} | others, pairs, tables)


def _slice_rows(
  plan: Plan, block_marks: Sides, tile: Int[Array, ""], first_distance: int
) -> tuple[Array, int]:
  """Returns the start and the size of a tile's rows in `Tables`.

  A tile needs a row for each of its distances, and one more at each end. All sequences
  of a block have the same positions, so they need the same rows.

  A start too far left or right is clamped, so the tile gets rows of other distances.
  This is safe because at either end of the table all rows are equal, or their pairs
  are masked or do not occur.
  """
  first_query = block_marks.queries.positions.reshape(-1)[0]
  first_key = block_marks.keys.positions[0, 0, tile * plan.tile, 0]
  offset = _clip_offsets(first_query - first_key)
  row = jnp.maximum(-offset - plan.block - first_distance, 0)
  return row.astype(tile.dtype), _band_of_tile(plan).num_rows


def _band_of_tile(plan: Plan) -> Band:
  """Returns a band of all diagonals of a tile at offset 0."""
  return Band(1 - plan.block, plan.block + plan.tile - 1, has_right=False)


def _take(plan: Plan, sides: Sides, slices: Sides) -> Sides:
  """Slices the arrays of each side that has an entry in `slices`.

  Other sides are returned as they are. In slices, the head axis comes before the token
  axis; see `Sides` for pairs. If the heads of a block all belong to one sequence, its
  two batch axes of size 1 are dropped, because XLA's CPU compiler splits outer axes
  among its threads.
  """

  def take(x: Array, side_slices: Slices) -> Array:
    starts, sizes = _bounds(x, side_slices)
    x = jax.lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)
    x = x.swapaxes(2, 3)
    return x[0, 0] if plan.heads else x

  parts = []
  for side, side_slices in zip(sides, slices, strict=True):
    take_side = functools.partial(take, side_slices=side_slices)
    parts.append(jax.tree.map(take_side, side) if side_slices else side)
  return Sides(*parts)


def _put(plan: Plan, sides: Sides, parts: Sides, slices: Sides) -> Sides:
  """Writes parts, as `_take` returns them, to their slices of the sides.

  A side without an entry in `slices` is replaced by its part.
  """
  axis = 0 if plan.heads else 2

  def put(x: Array, part: Array, side_slices: Slices) -> Array:
    starts, sizes = _bounds(x, side_slices)
    part = part.swapaxes(axis, axis + 1).reshape(sizes)
    return jax.lax.dynamic_update_slice(x, part, starts, allow_negative_indices=False)

  totals = []
  for side, part, side_slices in zip(sides, parts, slices, strict=True):
    put_side = functools.partial(put, side_slices=side_slices)
    totals.append(jax.tree.map(put_side, side, part) if side_slices else part)
  return Sides(*totals)


def _bounds(x: Array, slices: Slices) -> tuple[list, list[int]]:
  """Returns the start and the size of a slice on every axis of x.

  Axes without a slice, and axes of size 1, are taken whole.
  """
  starts, sizes = [0] * x.ndim, list(x.shape)
  for axis, (start, size) in slices.items():
    if x.shape[axis] > 1:
      starts[axis], sizes[axis] = start, size
  return starts, sizes


def _needed_tiles(plan: Plan, marks: Sides) -> tuple[Any, Any]:
  """Returns the first tile that a block may attend to, and one past the last."""
  # All sequences have the same key positions.
  starts = marks.keys.positions[0, 0, :: plan.tile, 0]
  left, right = plan.window
  if left == right == masks.UNLIMITED:
    return 0, len(starts)
  offsets = marks.queries.positions[..., 0].reshape(-1, 1) - starts[None]
  offsets = _clip_offsets(offsets)
  lowest, highest = 1 - plan.block - offsets.max(0), plan.tile - 1 - offsets.min(0)
  is_needed = (lowest <= right) & (highest >= -left)
  tile = jnp.arange(len(starts))
  first = jnp.where(is_needed, tile, len(starts)).min()
  return first, jnp.where(is_needed, tile + 1, 0).max()


def _clip_offsets(offsets: Int[Array, "..."]) -> Int[Array, "..."]:
  """Clips offsets, so that sums fit in 32 bits."""
  return jnp.clip(offsets, -(2**30), 2**30)


# The arithmetic of a block of queries and a tile of keys.


def no_sums(plan: Plan, queries: Queries, keys: Keys) -> Sums:
  """Returns the sums over no keys: the values with which a loop starts."""
  vectors, shape = queries.vectors, queries.vectors.shape[:-1]
  number = zeros(shape, vectors)
  output = zeros((*shape, keys.values.shape[-1]), vectors)
  num_rows = plan.band.num_rows if plan.needs_weights else 0
  weights = zeros((*shape, num_rows), vectors)
  return Sums(number + masks.LOWEST, number, output, weights)


def relative_to(maximum: Float[Array, "*B T"], sums: Sums) -> Sums:
  """Converts sums of exp(logit - sums.maximum) to sums of exp(logit - maximum)."""
  share = jnp.exp(sums.maximum - maximum)
  output, weights = sums.output * share[..., None], sums.weights * share[..., None]
  return Sums(maximum, sums.total * share, output, weights)


def _attend_tile(plan: Plan, floats: Sides, marks: Sides, sums: Sums) -> Sums:
  """Adds the keys of a tile to the sums of a block."""
  logits = _add_terms(plan, marks, _content(floats), floats)
  logits = _mask(plan, marks, logits)
  maximum = jnp.maximum(sums.maximum, logits.max(-2))
  weights = jnp.exp(logits - maximum[..., None, :])
  sums = relative_to(maximum, sums)
  total = sums.total + weights.sum(-2)
  weights = _drop(plan, marks, weights)
  # With the width before the queries, this product takes half the time on a CPU.
  output_VT = jnp.einsum("...SV,...ST->...VT", floats.keys.values, weights)
  output = sums.output + output_VT.swapaxes(-1, -2)
  if floats.tables.values is not None:
    output += _sum_rows(plan, weights, floats.tables.values)
  by_row = sums.weights
  if plan.needs_weights:
    by_row += diagonals.sum_by_row(weights, _offsets(marks), plan.band, False)
  return Sums(maximum, total, output, by_row)


def _differentiate_tile(
  plan: Plan, floats: Sides, marks: Sides, cotangents: Sides
) -> Sides:
  """Computes a tile's part of the gradients of queries, keys, bias and tables."""
  maximum, inverse_total, d_output, d_by_row, delta = cotangents.queries
  vectors, values = floats.keys.vectors, floats.keys.values
  add_terms = functools.partial(_add_terms, plan, marks)
  logits, pull_back = jax.vjp(add_terms, _content(floats), floats)
  logits = _mask(plan, marks, logits)
  powers = jnp.exp(logits - maximum[..., None, :])
  weights = powers * inverse_total[..., None, :]
  d_weights = jnp.einsum("...SV,...TV->...ST", values, d_output)
  if plan.needs_weights:
    d_weights = _add_rows(plan, marks, d_weights, d_by_row)
  value_rows = floats.tables.values
  if value_rows is not None:
    d_rows = _project([(d_output, value_rows)])
    band = _band_of_tile(plan)
    d_weights = diagonals.add_rows(d_weights, d_rows, _no_offset(), band, False)
  d_weights = _drop(plan, marks, d_weights)
  d_logits = weights * (d_weights - delta[..., None, :])
  weights = _drop(plan, marks, weights)
  d_values = jnp.einsum("...TV,...ST->...SV", d_output, weights)
  d_content, gradients = pull_back(d_logits)
  d_query_HT = jnp.einsum("...SH,...ST->...HT", vectors, d_content)
  d_query = gradients.queries.vectors + d_query_HT.swapaxes(-1, -2)
  d_queries = gradients.queries._replace(vectors=d_query)
  d_key = jnp.einsum("...TH,...ST->...SH", floats.queries.vectors, d_content)
  d_key += gradients.keys.vectors
  d_keys = gradients.keys._replace(vectors=d_key, values=d_values)
  d_tables = gradients.tables
  if value_rows is not None:
    sum_rows = functools.partial(_sum_rows, plan, weights)
    (d_value_rows,) = jax.vjp(sum_rows, value_rows)[1](d_output)
    d_tables = d_tables._replace(values=d_value_rows)
  return Sides(d_queries, d_keys, gradients.pairs, d_tables)


def _content(floats: Sides) -> Float[Array, "*B S T"]:
  """Computes the products of keys and queries, k_s . q_t."""
  vectors = floats.keys.vectors, floats.queries.vectors
  return jnp.einsum("...SH,...TH->...ST", *vectors)


def _add_terms(
  plan: Plan, marks: Sides, logits: Float[Array, "*B S T"], floats: Sides
) -> Float[Array, "*B S T"]:
  """Adds the relations and the bias to the products, then caps the logits."""
  queries, keys, bias, tables = floats
  by_query = list(zip(queries.others, tables.others, strict=True))
  if tables.queries is not None:
    by_query.append((queries.vectors, tables.queries))
  if by_query:
    logits = _add_products(plan, marks, logits, by_query)
  if tables.keys is not None:
    by_key = [(keys.vectors, tables.keys)]
    logits = _add_products(plan, marks, logits, by_key, by_key=True)
  if queries.rows is not None:
    logits = _add_rows(plan, marks, logits, queries.rows)
  if keys.rows is not None:
    logits = _add_rows(plan, marks, logits, keys.rows, by_key=True)
  if queries.slopes is not None:
    logits -= queries.slopes[..., None] * jnp.abs(_distances(marks))
  if bias is not None:
    logits += jnp.moveaxis(bias, -3, -1)
  return masks.cap(logits, plan.soft_cap)


def _add_rows(
  plan: Plan, marks: Sides, x: Array, rows: Array, by_key: bool = False
) -> Float[Array, "*B S T"]:
  """Adds rows[..., t, r], or rows[..., s, r] if `by_key`, to x[s, t].

  Here r is the table row of the pair.
  """
  tokens = x.shape[-2] if by_key else x.shape[-1]
  rows = jnp.broadcast_to(rows, (*rows.shape[:-2], tokens, plan.band.num_rows))
  return diagonals.add_rows(x, rows, _offsets(marks), plan.band, by_key)


def _add_products(
  plan: Plan,
  marks: Sides,
  x: Float[Array, "*B S T"],
  factors: list[tuple[Array, Array]],
  by_key: bool = False,
) -> Float[Array, "*B S T"]:
  """Adds to x[s, t] the products of a token's vectors and the pair's table rows.

  `factors` are pairs of vectors and the table that multiplies them. The vectors belong
  to queries, or to keys if `by_key`. If the whole tile is on one side of the band, all
  of its pairs have the same row.
  """

  def add_rows(x: Array) -> Array:
    rows = _project(factors)
    return diagonals.add_rows(x, rows, _no_offset(), _band_of_tile(plan), by_key)

  def add_one_row(x: Array) -> Array:
    row = _project([(vectors, table[..., 1:2, :]) for vectors, table in factors])
    return x + (row if by_key else row.swapaxes(-1, -2))

  offset = _offsets(marks).reshape(-1)[0]
  is_left, is_right = diagonals.find_side(x.shape[-2:], offset, plan.band)
  return jax.lax.cond(is_left | is_right, add_one_row, add_rows, x)


def _project(factors: list[tuple[Array, Array]]) -> Float[Array, "*B _ R"]:
  """Sums the products of vectors [..., T, P] and tables [..., R, P]."""
  products = [jnp.einsum("...TP,...RP->...TR", *pair) for pair in factors]
  return functools.reduce(jnp.add, products)


def _sum_rows(
  plan: Plan, weights: Float[Array, "*B S T"], table: Float[Array, "*#B R V"]
) -> Float[Array, "*B T V"]:
  """Returns, for each query, the sum of its pairs' table rows times their weights."""
  by_row = diagonals.sum_by_row(weights, _no_offset(), _band_of_tile(plan), False)
  return jnp.einsum("...TR,...RV->...TV", by_row, table)


def _no_offset() -> Int[Array, ""]:
  return jnp.zeros((), jnp.int32)


def _offsets(marks: Sides) -> Int[Array, "*#B 1"]:
  """Returns the position of the block's first query minus that of the first key."""
  return marks.queries.positions[..., 0] - marks.keys.positions[..., 0]


def _distances(marks: Sides) -> Int[Array, "*#B 1 S T"]:
  return marks.keys.positions[..., None] - marks.queries.positions[..., None, :]


def _mask(plan: Plan, marks: Sides, logits: Array) -> Float[Array, "*B S T"]:
  """Sets the logits of masked pairs to `masks.LOWEST`."""
  queries, keys, mask, _ = marks
  left, right = plan.window
  parts = [None if mask is None else jnp.moveaxis(mask, -3, -1)]
  if keys.valid is not None:
    parts.append(keys.valid[..., None])
  if queries.segments is not None:
    parts.append(keys.segments[..., None] == queries.segments[..., None, :])
  if left < masks.UNLIMITED:
    parts.append(-left <= _distances(marks))
  if right < masks.UNLIMITED:
    parts.append(_distances(marks) <= right)
  mask = masks.combine(*parts)
  return logits if mask is None else jnp.where(mask, logits, masks.LOWEST)


def _drop(plan: Plan, marks: Sides, x: Float[Array, "*B S T"]) -> Array:
  """Applies dropout: zeroes dropped weights, and divides the others by 1 - rate."""
  seeds = marks.queries.seeds
  if seeds is None:
    return x
  rows, columns = marks.queries.positions[..., None, :], marks.keys.positions[..., None]
  is_kept = dropout.keep(seeds[..., None], rows, columns, plan.dropout_rate)
  return jnp.where(is_kept, x / (1 - plan.dropout_rate), 0)
