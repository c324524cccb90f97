"""Attention by blocks of queries and tiles of their keys: never a [T, S] tensor.

Logits by row of the band (band.py) come in, and weights by row go out. The products with
tables are outside, where JAX differentiates them. The derivative of a block is written
by hand, since it computes the weights again.

On one CPU a few heads of a sequence are computed at a time, so that a block stays in the
cache. Elsewhere all heads and sequences are one product, which XLA partitions itself.

Weights are [S, T], queries last: sums over keys then vectorise on a CPU, and no product
needs a transposed copy of them.
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

UNLIMITED = 2**31 - 1  # a distance that masks nothing


class Queries(NamedTuple):
  """Arrays of the queries that have gradients; axes of size 1 broadcast."""

  vectors: Float[Array, "B T N H"]  # multiplied by the scale
  rows: Float[Array, "#B #T #N R"] | None  # logits of queries by row of the band
  slopes: Float[Array, "1 1 N"] | None


class Keys(NamedTuple):
  """Arrays of the keys that have gradients."""

  vectors: Float[Array, "B S K H"]
  values: Float[Array, "B S K V"]
  rows: Float[Array, "B S N R"] | None  # logits of keys by row of the band


class Marks(NamedTuple):
  """Arrays of the queries, or of the keys, without gradients.

  Positions are consecutive within a block, and within a tile.
  """

  positions: Int[Array, "#B T 1"]
  segments: Int[Array, "#B T 1"] | None
  seeds: Int[Array, "B 1 N"] | None = None  # of dropout; the keys have none
  valid: Bool[Array, "#B T #N"] | None = None  # the queries have none


class Sides(NamedTuple):
  """Arrays of the queries [B, T, N, ...], of the keys [B, S, N, ...], of pairs [A, N, T, S].

  An axis may have size 1, and broadcasts. Within this file two axes are in place of B
  and A: each of A biases belongs to as many consecutive sequences. Parts of a block have
  heads before tokens, but those of pairs are [T, N, S].
  """

  queries: Any
  keys: Any = ()
  pairs: Any = ()


class Results(NamedTuple):
  """The results of a call."""

  output: Float[Array, "B T N V"]
  weights: Float[Array, "B T N R"]  # by row of the band; no rows if they are not wanted
  log_total: Float[Array, "B T N"]  # logsumexp of the logits, -inf if all are masked


class Sums(NamedTuple):
  """Sums over keys of exp(logit - maximum), and of what it multiplies."""

  maximum: Float[Array, "*B T"]
  total: Float[Array, "*B T"]
  output: Float[Array, "*B T V"]
  weights: Float[Array, "*B T R"]


class Cotangents(NamedTuple):
  """What makes the gradients of a query's logits.

  A weight is exp(logit - maximum) * inverse_total. These are two numbers: beside a large
  maximum their logsumexp would lose the total.
  """

  maximum: Float[Array, "*B T"]
  inverse_total: Float[Array, "*B T"]  # 0 if all keys are masked
  d_output: Float[Array, "*B T V"]
  d_weights: Float[Array, "*B T R"]
  delta: Float[Array, "*B T"]  # the sum of weights times their gradients


class Plan(NamedTuple):
  """The static parameters of a call."""

  block: int  # queries in a block
  tile: int  # keys that it attends to at once
  heads: int | None  # how many of a sequence at a time; None for all sequences at once
  band: Band
  has_values: bool  # whether weights by row are wanted
  soft_cap: float | None
  reach: tuple[int, int]  # distances to the left and right beyond which keys are masked
  dropout_rate: float
  precision: str | None  # of products, the default in force where the call was traced


def attend(plan: Plan, floats: Sides, marks: Sides, attend_to=None) -> Results:
  """Computes attention by `attend_to`, by default to the keys given.

  It pads queries and keys to blocks and tiles of even sizes.
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
  # An axis of size 1 comes first: XLA would copy arrays to put it second.
  num_groups = num_biases if num_biases < batch else 1

  def in_groups(x: Array) -> Array:
    return x.reshape(min(len(x), num_groups), -1, *x.shape[1:])

  floats, marks = jax.tree.map(in_groups, (floats, marks))
  floats = _pad(floats, more_queries, more_keys)
  marks = _pad(marks, more_queries, more_keys)
  plan = plan._replace(block=block, tile=tile)
  results = (attend_to or _attend)(plan, floats, marks)
  return jax.tree.map(
    lambda x: x.reshape(batch, *x.shape[2:])[:, :num_queries], results
  )


def default_block(pairs_of_a_query: int, most: int) -> int:
  """Returns a number of queries with at most so many pairs, but at least 16 queries.

  It is a power of two.
  """
  number = max(16, most // pairs_of_a_query)
  return 1 << (number.bit_length() - 1)


def even_parts(size: int, at_most: int) -> tuple[int, int]:
  """Returns the size of even parts, and how many more elements they have in all."""
  number = -(-size // at_most)
  part = -(-size // number)
  return part, number * part - size


def _pad(sides: Sides, queries: int, keys: int) -> Sides:
  """Appends zeros for queries and keys, but where an array broadcasts."""
  return Sides(
    _pad_axis(sides.queries, 2, queries),
    _pad_axis(sides.keys, 2, keys),
    _pad_axis(_pad_axis(sides.pairs, 3, queries), 4, keys),
  )


def _pad_axis(tree: Any, axis: int, number: int) -> Any:
  def padded(x: Array) -> Array:
    if x.shape[axis] == 1:
      return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, number
    return jnp.pad(x, widths)

  return jax.tree.map(padded, tree) if number else tree


# The call and its derivative.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, floats: Sides, marks: Sides) -> Results:
  return _forward(plan, floats, marks)[0]


def _forward(plan: Plan, floats: Sides, marks: Sides) -> tuple[Results, tuple]:
  sums = sum_over_keys(plan, floats, marks)
  return normalize(sums), (floats, marks, sums)


def _backward(plan: Plan, saved: tuple, d_results: Results) -> tuple[Sides, None]:
  floats, marks, sums = saved
  cotangents = cotangents_of(sums, d_results)
  return differentiate(plan, floats, marks, cotangents), None


_attend.defvjp(_forward, _backward)


def normalize(sums: Sums) -> Results:
  """Returns the results of sums over all keys."""
  inverse = _inverse_total(sums)
  weights = sums.weights * inverse[..., None]
  log_total = jnp.where(inverse > 0, sums.maximum + jnp.log(sums.total), -jnp.inf)
  return Results(sums.output * inverse[..., None], weights, log_total)


def cotangents_of(sums: Sums, d_results: Results) -> Sides:
  """Returns what the gradients of logits need of the queries."""
  d_output, d_weights, d_log_total = d_results
  results = normalize(sums)
  delta = (results.output * d_output).sum(-1) - d_log_total
  delta += (results.weights * d_weights).sum(-1)
  inverse = _inverse_total(sums)
  return Sides(Cotangents(sums.maximum, inverse, d_output, d_weights, delta))


def _inverse_total(sums: Sums) -> Float[Array, "*B T"]:
  has_key = sums.maximum > masks.LOWEST / 2
  return jnp.where(has_key, 1 / jnp.where(has_key, sums.total, 1), 0)


# One loop goes over blocks of queries, and within it one over tiles of their keys. A loop
# of its own over heads would be a third: XLA's CPU runtime then uses one core less.

Region = tuple[tuple[int, Any, int], ...]  # axis, start and size


def sum_over_keys(plan: Plan, floats: Sides, marks: Sides) -> Sums:
  """Returns the sums of the queries over the keys given."""
  keys = _for_query_heads(floats.keys, floats.queries.vectors)
  floats = floats._replace(keys=keys)
  return _in_context(plan, _sum_over_keys)(floats, marks)


def differentiate(plan: Plan, floats: Sides, marks: Sides, cotangents: Sides) -> Sides:
  """Returns the gradients of arrays of the queries and of some keys."""
  repeat = functools.partial(_for_query_heads, queries=floats.queries.vectors)
  keys, of_keys = jax.vjp(repeat, floats.keys)
  floats = floats._replace(keys=keys)
  compute = first_derivatives_only(_in_context(plan, _differentiate))
  gradients = compute(floats, marks, cotangents)
  (d_keys,) = of_keys(gradients.keys)
  return gradients._replace(keys=d_keys)


def _for_query_heads(keys: Keys, queries: Array) -> Keys:
  """Returns keys in the accumulation dtype, repeated for query heads that share them."""
  group = queries.shape[3] // keys.vectors.shape[3]

  def repeated(x: Array) -> Array:
    return x.astype(queries.dtype).repeat(group, axis=3)

  return keys._replace(vectors=repeated(keys.vectors), values=repeated(keys.values))


def _in_context(plan: Plan, function: Callable) -> Callable:
  """Returns a pass of this plan, at the precision in force where the call was traced.

  Under `jax.vmap` it takes one example after the other, as it takes heads.
  """

  def compute(*operands: Any) -> Any:
    with jax.default_matmul_precision(plan.precision):
      return function(plan, *operands)

  return sequential_vmap(compute) if plan.heads else compute


def _sum_over_keys(plan: Plan, floats: Sides, marks: Sides) -> Sums:
  def run_block(index: Int[Array, ""], sums: Sides) -> Sides:
    region = _region(plan, floats, index)
    block = [_take(plan, x, Sides(region)) for x in (floats, marks)]

    def run_tile(tile: Int[Array, ""], part: Sums) -> Sums:
      regions = _of_tile(plan, region, tile)
      of_tile = [_take(plan, x, regions) for x in block]
      return _attend_tile(plan, *of_tile, part)

    part = no_sums(plan, *block[0][:2])
    part = jax.lax.fori_loop(*_needed_tiles(plan, block[1]), run_tile, part)
    return _put(plan, sums, Sides(part), Sides(region))

  empty = Sides(no_sums(plan, floats.queries, floats.keys))
  sums = jax.lax.fori_loop(0, _num_blocks(plan, floats), run_block, empty)
  return sums.queries


def _differentiate(plan: Plan, floats: Sides, marks: Sides, cotangents: Sides) -> Sides:
  def run_block(index: Int[Array, ""], totals: Sides) -> Sides:
    region = _region(plan, floats, index)
    block = [_take(plan, x, Sides(region)) for x in (floats, marks, cotangents)]

    def run_tile(tile: Int[Array, ""], part: Sides) -> Sides:
      regions = _of_tile(plan, region, tile)
      of_tile = [_take(plan, x, regions) for x in block]
      gradients = _differentiate_tile(plan, *of_tile)
      total = jax.tree.map(jnp.add, _take(plan, part, regions), gradients)
      return _put(plan, part, total, regions)

    part = _take(plan, totals, Sides(region))
    part = jax.lax.fori_loop(*_needed_tiles(plan, block[1]), run_tile, part)
    return _put(plan, totals, part, Sides(region))

  empty = jax.tree.map(lambda x: zeros(x.shape, x), floats)
  return jax.lax.fori_loop(0, _num_blocks(plan, floats), run_block, empty)


def _parts(plan: Plan, floats: Sides) -> list[tuple[int, int, int]]:
  """Returns the axes along which blocks differ, with their number and their size."""
  groups, members, num_queries, heads, _ = floats.queries.vectors.shape
  parts = [(2, num_queries // plan.block, plan.block)]
  if plan.heads:
    parts += (3, heads // plan.heads, plan.heads), (1, members, 1), (0, groups, 1)
  return parts


def _num_blocks(plan: Plan, floats: Sides) -> int:
  return math.prod(number for _, number, _ in _parts(plan, floats))


def _region(plan: Plan, floats: Sides, index: Int[Array, ""]) -> Region:
  """Returns the slices of queries, first, and of heads and sequences that a block has."""
  region = []
  for axis, number, size in _parts(plan, floats):
    region.append((axis, jax.lax.rem(index, number) * size, size))
    index = jax.lax.div(index, number)
  return tuple(region)


def _of_tile(plan: Plan, region: Region, tile: Int[Array, ""]) -> Sides:
  """Returns the slices of keys, and of pairs, that a tile has for a block's queries."""
  (_, *of_queries), *others = region
  keys = tile * plan.tile, plan.tile
  pairs = [(3, *of_queries), (4, *keys)]  # heads come before tokens
  for axis, *part in others:
    pairs.append((2 if axis == 3 else axis, *part))
  return Sides((), ((2, *keys), *others), tuple(pairs))


def _take(plan: Plan, sides: Sides, regions: Sides) -> Sides:
  """Slices the sides that have a region, and gives them the layout of a block.

  A few heads of a sequence have no axes of sequences: XLA's CPU compiler splits outer
  axes among its threads.
  """

  def part(x: Array, region: Region) -> Array:
    starts, sizes = _bounds(x, region)
    x = jax.lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)
    x = x.swapaxes(2, 3)
    return x[0, 0] if plan.heads else x

  parts = []
  for side, region in zip(sides, regions, strict=True):
    take = functools.partial(part, region=region)
    parts.append(jax.tree.map(take, side) if region else side)
  return Sides(*parts)


def _put(plan: Plan, sides: Sides, parts: Sides, regions: Sides) -> Sides:
  """Sets what `_take` returns."""
  axis = 0 if plan.heads else 2

  def put(x: Array, part: Array, region: Region) -> Array:
    starts, sizes = _bounds(x, region)
    part = part.swapaxes(axis, axis + 1).reshape(sizes)
    return jax.lax.dynamic_update_slice(x, part, starts, allow_negative_indices=False)

  totals = []
  for side, part, region in zip(sides, parts, regions, strict=True):
    put_part = functools.partial(put, region=region)
    totals.append(jax.tree.map(put_part, side, part) if region else part)
  return Sides(*totals)


def _bounds(x: Array, region: Region) -> tuple[list, list[int]]:
  """Returns starts and sizes of a slice: all of an axis where the array broadcasts."""
  starts, sizes = [0] * x.ndim, list(x.shape)
  for axis, start, size in region:
    if x.shape[axis] > 1:
      starts[axis], sizes[axis] = start, size
  return starts, sizes


def _needed_tiles(plan: Plan, marks: Sides) -> tuple[Any, Any]:
  """Returns the first tile that a block may attend to, and the one past the last."""
  # Keys are at the same positions in all sequences.
  starts = marks.keys.positions[0, 0, :: plan.tile, 0]
  left, right = plan.reach
  if left == right == UNLIMITED:
    return 0, len(starts)
  # Clipped, so that no sum is beyond 32 bits.
  places = marks.queries.positions[..., 0].reshape(-1, 1) - starts[None]
  places = jnp.clip(places, -(2**30), 2**30)
  lowest, highest = 1 - plan.block - places.max(0), plan.tile - 1 - places.min(0)
  is_needed = (lowest <= right) & (highest >= -left)
  tile = jnp.arange(len(starts))
  first = jnp.where(is_needed, tile, len(starts)).min()
  return first, jnp.where(is_needed, tile + 1, 0).max()


# The arithmetic of a block of queries and a tile of keys.


def no_sums(plan: Plan, queries: Queries, keys: Keys) -> Sums:
  """Returns the sums of queries over no keys."""
  vectors, shape = queries.vectors, queries.vectors.shape[:-1]
  number = zeros(shape, vectors)
  output = zeros((*shape, keys.values.shape[-1]), vectors)
  num_rows = plan.band.num_rows if plan.has_values else 0
  weights = zeros((*shape, num_rows), vectors)
  return Sums(number + masks.LOWEST, number, output, weights)


def relative_to(maximum: Float[Array, "*B T"], sums: Sums) -> Sums:
  """Returns sums relative to another maximum."""
  share = jnp.exp(sums.maximum - maximum)
  output, weights = sums.output * share[..., None], sums.weights * share[..., None]
  return Sums(maximum, sums.total * share, output, weights)


def _attend_tile(plan: Plan, floats: Sides, marks: Sides, sums: Sums) -> Sums:
  """Adds the keys of a tile to a block's sums."""
  logits = _add_terms(plan, marks, _content(floats), floats)
  logits = _masked(plan, marks, logits)
  maximum = jnp.maximum(sums.maximum, logits.max(-2))
  weights = jnp.exp(logits - maximum[..., None, :])
  sums = relative_to(maximum, sums)
  total = sums.total + weights.sum(-2)
  weights = _drop(plan, marks, weights)
  # The width before the queries: on a CPU the product takes half the time.
  output_VT = jnp.einsum("...SV,...ST->...VT", floats.keys.values, weights)
  output = sums.output + output_VT.swapaxes(-1, -2)
  by_row = sums.weights
  if plan.has_values:
    by_row += diagonals.sum_by_row(weights, _places(marks), plan.band, False)
  return Sums(maximum, total, output, by_row)


def _differentiate_tile(
  plan: Plan, floats: Sides, marks: Sides, cotangents: Sides
) -> Sides:
  """Returns the gradients of the arrays of a block's queries and a tile's keys."""
  maximum, inverse_total, d_output, d_by_row, delta = cotangents.queries
  vectors, values = floats.keys.vectors, floats.keys.values
  add_terms = functools.partial(_add_terms, plan, marks)
  logits, of_logits = jax.vjp(add_terms, _content(floats), floats)
  logits = _masked(plan, marks, logits)
  powers = jnp.exp(logits - maximum[..., None, :])
  weights = powers * inverse_total[..., None, :]
  d_weights = jnp.einsum("...SV,...TV->...ST", values, d_output)
  if plan.has_values:
    d_weights = _add_rows(plan, marks, d_weights, d_by_row)
  d_weights = _drop(plan, marks, d_weights)
  d_logits = weights * (d_weights - delta[..., None, :])
  d_values = jnp.einsum("...TV,...ST->...SV", d_output, _drop(plan, marks, weights))
  d_content, gradients = of_logits(d_logits)
  d_query_HT = jnp.einsum("...SH,...ST->...HT", vectors, d_content)
  d_key = jnp.einsum("...TH,...ST->...SH", floats.queries.vectors, d_content)
  d_query = d_query_HT.swapaxes(-1, -2)
  return Sides(
    gradients.queries._replace(vectors=d_query),
    gradients.keys._replace(vectors=d_key, values=d_values),
    gradients.pairs,
  )


def _content(floats: Sides) -> Float[Array, "*B S T"]:
  """Computes the products of a tile's keys and a block's queries."""
  vectors = floats.keys.vectors, floats.queries.vectors
  return jnp.einsum("...SH,...TH->...ST", *vectors)


def _add_terms(
  plan: Plan, marks: Sides, logits: Float[Array, "*B S T"], floats: Sides
) -> Float[Array, "*B S T"]:
  """Adds all other terms to the products, and caps the logits."""
  queries, keys, bias = floats
  if queries.rows is not None:
    logits = _add_rows(plan, marks, logits, queries.rows)
  if keys.rows is not None:
    logits = _add_rows(plan, marks, logits, keys.rows, of_keys=True)
  if queries.slopes is not None:
    logits -= queries.slopes[..., None] * jnp.abs(_distances(marks))
  if bias is not None:
    logits += jnp.moveaxis(bias, -3, -1)
  return masks.cap(logits, plan.soft_cap)


def _add_rows(
  plan: Plan, marks: Sides, x: Array, rows: Array, of_keys: bool = False
) -> Float[Array, "*B S T"]:
  """Adds to pairs the numbers of their rows, [..., T, R] or of keys [..., S, R]."""
  tokens = x.shape[-2] if of_keys else x.shape[-1]
  rows = jnp.broadcast_to(rows, (*rows.shape[:-2], tokens, plan.band.num_rows))
  return diagonals.add_rows(x, rows, _places(marks), plan.band, of_keys)


def _places(marks: Sides) -> Int[Array, "*#B 1"]:
  """Returns the distances from a tile's first key to a block's first query."""
  return marks.queries.positions[..., 0] - marks.keys.positions[..., 0]


def _distances(marks: Sides) -> Int[Array, "*#B 1 S T"]:
  return marks.keys.positions[..., None] - marks.queries.positions[..., None, :]


def _masked(plan: Plan, marks: Sides, logits: Array) -> Float[Array, "*B S T"]:
  """Makes the logits of masked pairs very low."""
  queries, keys, mask = marks
  left, right = plan.reach
  found = [None if mask is None else jnp.moveaxis(mask, -3, -1)]
  if keys.valid is not None:
    found.append(keys.valid[..., None])
  if queries.segments is not None:
    found.append(keys.segments[..., None] == queries.segments[..., None, :])
  if left < UNLIMITED:
    found.append(-left <= _distances(marks))
  if right < UNLIMITED:
    found.append(_distances(marks) <= right)
  mask = masks.combine(*found)
  return logits if mask is None else jnp.where(mask, logits, masks.LOWEST)


def _drop(plan: Plan, marks: Sides, x: Float[Array, "*B S T"]) -> Array:
  """Applies dropout: zero where a weight is dropped, elsewhere divided by 1 - rate."""
  seeds = marks.queries.seeds
  if seeds is None:
    return x
  rows, columns = marks.queries.positions[..., None, :], marks.keys.positions[..., None]
  is_kept = dropout.keep(seeds[..., None], rows, columns, plan.dropout_rate)
  return jnp.where(is_kept, x / (1 - plan.dropout_rate), 0)
