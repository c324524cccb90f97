"""Attention by blocks of queries in plain XLA: never a [T, S] tensor.

It computes calls whose relations go by distance, and calls without relations. Logits by
row of the band (band.py) come in, and weights by row go out. The products with tables
are outside, where JAX differentiates them. The derivative of a block is written by hand,
since it computes the weights again.

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
from jax.sharding import PartitionSpec

from relpos_jax.attention import band, dropout, masks
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.partitioned import (
  Shards,
  align_manual_axes,
  axes_of_heads,
  axes_of_tokens,
  first_derivatives_only,
  is_one_device,
  on_shards,
  target_platform,
  zeros,
)
from relpos_jax.typing import Array, Bool, Float, Int, Shaped

# The most pairs of a block and a tile, over all their heads. Measured on two cores: four
# times as many take 15% more time.
_PAIRS_ON_CPU = 2**18
# On several of its devices all heads and sequences are in a block.
_PAIRS_ON_CPUS = 2**19
# Elsewhere their weights take 128 MiB in float32.
_PAIRS = 2**25


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
  """Arrays of the queries, or of the keys, without gradients."""

  positions: Int[Array, "#B T 1"]
  valid: Bool[Array, "#B T #N"] | None
  segments: Int[Array, "#B T 1"] | None
  seeds: Int[Array, "B 1 N"] | None = None  # of dropout; the keys have none


class Sides(NamedTuple):
  """Arrays of the queries [B, T, N, ...], of the keys [B, S, N, ...], of pairs [B, N, T, S].

  An axis may have size 1, and broadcasts. Parts of a block have heads before tokens, and
  those of a few heads no axis of sequences: XLA's CPU compiler splits outer axes.
  """

  queries: Any
  keys: Any = ()
  pairs: Any = ()


class Results(NamedTuple):
  """The results of a call."""

  output: Float[Array, "B T N V"]
  weights: Float[Array, "B T N R"] | None  # by row of the band
  log_total: Float[Array, "B T N"]  # logsumexp of the logits, -inf if all are masked


class Normalizers(NamedTuple):
  """What makes weights of logits: exp(logit - maximum) * inverse_total.

  They are two numbers: beside a large maximum their logsumexp would lose the total.
  """

  maximum: Float[Array, "*B T"]
  inverse_total: Float[Array, "*B T"]  # 0 if all keys are masked


class Sums(NamedTuple):
  """Sums over keys of exp(logit - maximum), and of what it multiplies."""

  maximum: Float[Array, "*B T"]
  total: Float[Array, "*B T"]
  output: Float[Array, "*B T V"]
  weights: Float[Array, "*B T R"] | None


class Plan(NamedTuple):
  """The static parameters of a call."""

  block: int  # queries in a block
  tile: int  # keys that it attends to at once
  heads: int | None  # how many of a sequence at a time; None for all sequences at once
  first: int  # the distance j - i of the band's first diagonal
  num_rows: int  # of the band: one per diagonal, and one for each side
  has_values: bool  # whether weights by row are wanted
  soft_cap: float | None
  is_causal: bool
  window: tuple[int, int] | None
  dropout_rate: float
  precision: str | None  # of products, the default in force where the call was traced

  @property
  def has_right(self) -> bool:
    """Returns whether queries may attend to keys right of the band."""
    right = self.first + self.num_rows - 2
    is_in_window = self.window is None or right <= self.window[1]
    return is_in_window and not self.is_causal


def attention(inputs: Inputs, block: int | None = None, tile: int | None = None) -> Any:
  """Computes attention, and its residual if the inputs ask for it.

  A block has `block` queries, which attend to `tile` keys at once; by default numbers
  for the call.
  """
  plan, floats, marks = prepare(inputs, block, tile)
  results = _over_queries(plan, floats, marks, inputs.explicit)
  return finish(inputs, results)


def _over_queries(plan: Plan, floats: Sides, marks: Sides, explicit: Shards) -> Results:
  """Has each device along a sequence compute its own queries, if the mesh shards them.

  It gathers the keys. The gradients of its shard of them come back summed.
  """
  axes = axes_of_heads(explicit, floats.keys.vectors.shape)
  names = axes_of_tokens(explicit)
  mesh = jax.sharding.get_abstract_mesh()
  num_devices = math.prod(mesh.shape[name] for name in names)
  num_queries, num_keys = (side.vectors.shape[1] for side in floats[:2])
  if num_devices == 1 or num_queries % num_devices:
    return attend(plan, floats, marks)
  names_of_keys = names if num_keys % num_devices == 0 else ()
  batch = len(floats.queries.vectors)
  if floats.pairs is not None and len(floats.pairs) > 1:  # one for each sequence
    floats = floats._replace(pairs=floats.pairs.repeat(batch // len(floats.pairs), 0))

  def compute(floats: Sides, marks: Sides) -> Results:
    keys = floats.keys
    if names_of_keys:
      gather = functools.partial(
        jax.lax.all_gather, axis_name=names, axis=1, tiled=True
      )
      keys = jax.tree.map(gather, keys)
    return attend(plan, floats._replace(keys=keys), marks)

  specs = specs_of(axes, floats, names, names_of_keys), specs_of(axes, marks, names)
  of_batch, of_heads = axes
  results = PartitionSpec(of_batch, names, of_heads)
  return on_shards(compute, (*axes, names), specs, results)(floats, marks)


def specs_of(
  axes: tuple[tuple[str, ...], tuple[str, ...]],
  sides: Sides,
  of_queries: tuple[str, ...],
  of_keys: tuple[str, ...] = (),
) -> Sides:
  """Returns which mesh axes shard sequences and heads, the queries and the keys."""
  of_batch, of_heads = axes

  def spec(x: Array, *names: tuple[str, ...]) -> PartitionSpec:
    sizes = x.shape[: len(names)]
    return PartitionSpec(
      *(name if size > 1 else None for name, size in zip(names, sizes, strict=True))
    )

  return Sides(
    jax.tree.map(lambda x: spec(x, of_batch, of_queries, of_heads), sides.queries),
    jax.tree.map(lambda x: spec(x, of_batch, of_keys, of_heads), sides.keys),
    jax.tree.map(lambda x: spec(x, of_batch, of_heads, of_queries), sides.pairs),
  )


def prepare(
  inputs: Inputs, block: int | None = None, tile: int | None = None
) -> tuple[Plan, Sides, Sides]:
  """Returns the static parameters of a call, and its arrays with and without gradients."""
  wide = jnp.promote_types(inputs.query.dtype, jnp.float32)
  low, high = band.distances(inputs)
  block, tile, heads = _sizes(inputs, block, tile)
  plan = Plan(
    block=block,
    tile=tile,
    heads=heads,
    first=low + 1,
    num_rows=high - low + 1,
    has_values=band.value_table(inputs) is not None,
    soft_cap=inputs.soft_cap,
    is_causal=inputs.is_causal,
    window=inputs.window,
    dropout_rate=inputs.dropout_rate,
    precision=jax.config.jax_default_matmul_precision,
  )
  query = inputs.query.astype(wide) * jnp.asarray(inputs.scale, wide)
  of_queries, of_keys = (band.logits_by_row(inputs, of_keys=x) for x in (False, True))
  queries = Queries(query, _heads_last(of_queries), band.slopes(inputs))
  keys = Keys(inputs.key, inputs.value, _heads_last(of_keys))
  bias = None if inputs.bias is None else inputs.bias.astype(wide)
  return plan, Sides(queries, keys, bias), _marks(inputs)


def _heads_last(x: Shaped[Array, "#B #N #T ..."] | None) -> Array | None:
  return None if x is None else x.swapaxes(1, 2)


def _marks(inputs: Inputs) -> Sides:
  query_valid, key_valid, pairs = None, None, inputs.mask
  if inputs.query_mask is not None:
    query_valid = inputs.query_mask[:, 0]
  if inputs.key_mask is not None:
    key_valid = inputs.key_mask[:, 0, 0, :, None]
  if pairs is not None and pairs.shape[2] == 1:  # the same for all queries
    key_valid, pairs = masks.combine(key_valid, _heads_last(pairs[:, :, 0])), None
  elif pairs is not None and pairs.shape[3] == 1:
    query_valid, pairs = masks.combine(query_valid, _heads_last(pairs[..., 0])), None
  query_segments, key_segments = inputs.query_segment_ids, inputs.key_segment_ids
  if query_segments is not None:
    query_segments, key_segments = query_segments[..., None], key_segments[..., None]
  seeds = None
  if inputs.dropout_seeds is not None:  # rows of weights count from the first query
    seeds = dropout.from_row(inputs.dropout_seeds, inputs.query_offset)[:, None]
  query_positions = inputs.query_positions[..., None]
  queries = Marks(query_positions, query_valid, query_segments, seeds)
  keys = Marks(inputs.key_positions[..., None], key_valid, key_segments)
  return Sides(queries, keys, pairs)


def finish(inputs: Inputs, results: Results) -> Any:
  """Returns the output [B, T, N, V], and the residual [B, T, N] if the call asks for it."""
  output, weights, log_total = results
  if weights is not None:
    output += jnp.einsum("BTNR,RNV->BTNV", weights, band.value_table(inputs))
  if inputs.sinks is not None:  # a part of the keys whose value is zero
    sinks = inputs.sinks[None, None]
    has_key = ~jnp.isneginf(log_total)
    finite = jnp.where(has_key, log_total, 0)
    output *= jax.nn.sigmoid(finite - sinks)[..., None]
    log_total = jnp.where(has_key, jnp.logaddexp(finite, sinks), -jnp.inf)
  output = output.astype(inputs.value.dtype)
  return (output, log_total) if inputs.return_residual else output


def _sizes(
  inputs: Inputs, block: int | None, tile: int | None
) -> tuple[int, int, int | None]:
  """Returns the queries in a block, the keys in a tile, and the heads at a time."""
  is_on_cpu = target_platform() == "cpu"
  if is_on_cpu and is_one_device():
    return _sizes_on_one_cpu(inputs, block, tile)
  batch, _, heads, _ = inputs.query.shape
  tile = min(tile or 2048, inputs.key.shape[1])
  most = (_PAIRS_ON_CPUS if is_on_cpu else _PAIRS) // (batch * heads * tile)
  return block or max(16, _power_of_2(most)), tile, None


def _sizes_on_one_cpu(
  inputs: Inputs, block: int | None, tile: int | None
) -> tuple[int, int, int]:
  _, num_queries, heads, _ = inputs.query.shape
  num_keys = inputs.key.shape[1]
  # Small tiles skip more masked pairs; products of large ones are faster.
  is_short = inputs.is_causal and num_keys < 2048
  size = 256 if is_short or inputs.window is not None else 512
  block, tile = min(block or size, num_queries), min(tile or size, num_keys)
  most = max(1, _PAIRS_ON_CPU // (block * tile))
  return block, tile, _largest_divisor(heads, most)


def _largest_divisor(number: int, at_most: int) -> int:
  divisors = [n for n in range(1, number + 1) if number % n == 0]
  return max(n for n in divisors if n <= at_most)


def _power_of_2(number: int) -> int:
  """Rounds down to a power of 2, at least 1."""
  return 1 << (max(number, 1).bit_length() - 1)


# The call and its derivative.


def attend(plan: Plan, floats: Sides, marks: Sides) -> Results:
  """Computes attention to the keys given; its derivative computes the weights again."""
  floats = floats._replace(keys=_for_query_heads(floats))
  floats, marks = align_manual_axes((floats, marks))
  num_queries, num_keys = (side.vectors.shape[1] for side in floats[:2])
  block, more_queries = _even_parts(num_queries, plan.block)
  tile, more_keys = _even_parts(num_keys, plan.tile)
  if more_keys and marks.keys.valid is None:
    valid = jnp.ones((1, num_keys, 1), bool)
    marks = marks._replace(keys=marks.keys._replace(valid=valid))
  plan = plan._replace(block=block, tile=tile)
  floats = _pad(floats, more_queries, more_keys)
  marks = _pad(marks, more_queries, more_keys)
  results = _attend(plan, floats, marks)
  return jax.tree.map(lambda x: x[:, :num_queries], results)


def _for_query_heads(floats: Sides) -> Keys:
  """Returns keys in the accumulation dtype, repeated for query heads that share them."""
  queries, keys, _ = floats
  vectors = keys.vectors.astype(queries.vectors.dtype)
  values = keys.values.astype(queries.vectors.dtype)
  group = queries.vectors.shape[2] // vectors.shape[2]
  if group > 1:
    vectors, values = vectors.repeat(group, 2), values.repeat(group, 2)
  return keys._replace(vectors=vectors, values=values)


def _even_parts(size: int, at_most: int) -> tuple[int, int]:
  """Returns the size of even parts, and how many more elements they have in all."""
  number = -(-size // at_most)
  part = -(-size // number)
  return part, number * part - size


def _pad(sides: Sides, queries: int, keys: int) -> Sides:
  """Appends zeros for queries and keys, but where an array broadcasts."""

  def padded(x: Array, *more: tuple[int, int]) -> Array:
    widths = [(0, 0)] * x.ndim
    for axis, number in more:
      if x.shape[axis] > 1:
        widths[axis] = 0, number
    return jnp.pad(x, widths) if any(map(sum, widths)) else x

  return Sides(
    jax.tree.map(lambda x: padded(x, (1, queries)), sides.queries),
    jax.tree.map(lambda x: padded(x, (1, keys)), sides.keys),
    jax.tree.map(lambda x: padded(x, (2, queries), (3, keys)), sides.pairs),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, floats: Sides, marks: Sides) -> Results:
  return _forward(plan, floats, marks)[0]


def _forward(plan: Plan, floats: Sides, marks: Sides) -> tuple[Results, tuple]:
  sums = _in_context(plan, _forward_of_call)(floats, marks)
  has_key = sums.maximum > masks.LOWEST / 2
  total = jnp.where(has_key, sums.total, 1)
  inverse = jnp.where(has_key, 1 / total, 0)
  weights = None if sums.weights is None else sums.weights * inverse[..., None]
  log_total = jnp.where(has_key, sums.maximum + jnp.log(total), -jnp.inf)
  results = Results(sums.output * inverse[..., None], weights, log_total)
  return results, (floats, marks, results, Normalizers(sums.maximum, inverse))


def _backward(plan: Plan, saved: tuple, d_results: Results) -> tuple[Sides, None]:
  floats, marks, results, normalizers = saved
  delta = (results.output * d_results.output).sum(3) - d_results.log_total
  if plan.has_values:
    delta += (results.weights * d_results.weights).sum(3)
  of_queries = Sides((normalizers, d_results.output, d_results.weights, delta))
  compute = first_derivatives_only(_in_context(plan, _backward_of_call))
  return compute(floats, marks, of_queries), None


_attend.defvjp(_forward, _backward)


def _in_context(plan: Plan, function: Callable) -> Callable:
  """Returns a pass of this plan, at the precision in force where the call was traced.

  Under `jax.vmap` it takes one example after the other, as it takes heads.
  """

  def compute(*operands: Sides) -> Any:
    with jax.default_matmul_precision(plan.precision):
      return function(plan, *operands)

  return sequential_vmap(compute) if plan.heads else compute


# One loop goes over blocks of queries, and within it one over tiles of their keys. A loop
# of its own over heads would be a third: XLA's CPU runtime then uses one core less.

Region = tuple[tuple[int, Any, int], ...]  # axis, start and size


def _forward_of_call(plan: Plan, floats: Sides, marks: Sides) -> Sums:
  vectors = floats.queries.vectors

  def run_block(index: Int[Array, ""], sums: Sums) -> Sums:
    region = _block_region(plan, vectors.shape, index)
    block = _attend_block(plan, region, floats, marks)
    return _add(plan, sums, block, region)

  empty = empty_sums(plan, vectors, floats.keys.values)
  return jax.lax.fori_loop(0, _num_blocks(plan, vectors.shape), run_block, empty)


def _backward_of_call(plan: Plan, *operands: Sides) -> Sides:
  floats = operands[0]
  shape = floats.queries.vectors.shape

  def run_block(index: Int[Array, ""], totals: Sides) -> Sides:
    region = _block_region(plan, shape, index)
    block = _differentiate_block(plan, region, operands, totals)
    return Sides(
      _add(plan, totals.queries, block.queries, region),
      block.keys,
      _add_pairs(plan, totals.pairs, block.pairs, region, len(floats.queries.vectors)),
    )

  empty = jax.tree.map(lambda x: zeros(x.shape, x), floats)
  return jax.lax.fori_loop(0, _num_blocks(plan, shape), run_block, empty)


def _num_blocks(plan: Plan, shape: tuple[int, ...]) -> int:
  batch, num_queries, heads, _ = shape
  num_parts = batch * heads // plan.heads if plan.heads else 1
  return num_parts * (num_queries // plan.block)


def _block_region(plan: Plan, shape: tuple[int, ...], index: Int[Array, ""]) -> Region:
  """Returns the slices of queries, sequences and heads that a block has."""
  _, num_queries, heads, _ = shape
  num_blocks = num_queries // plan.block
  queries = 1, index % num_blocks * plan.block, plan.block
  if not plan.heads:
    return (queries,)
  part, num_parts = index // num_blocks, heads // plan.heads
  first_head = part % num_parts * plan.heads
  return queries, (0, part // num_parts, 1), (2, first_head, plan.heads)


def _tile_region(plan: Plan, region: Region, start: Array) -> Region:
  """Returns the slices of a tile's keys, and of a block's sequences and heads."""
  return ((1, start, plan.tile), *region[1:])


def _take_queries(
  plan: Plan, operands: tuple[Sides, ...], region: Region
) -> list[Sides]:
  """Slices the arrays of queries and pairs."""
  batch = len(operands[0].queries.vectors)
  parts = []
  for sides in operands:
    queries = _take(plan, sides.queries, region)
    pairs = jax.tree.map(
      lambda x: _slice(x, _of_pairs(region, len(x), batch)), sides.pairs
    )
    if plan.heads:
      pairs = jax.tree.map(lambda x: x[0], pairs)
    parts.append(Sides(queries, sides.keys, pairs))
  return parts


def _add_pairs(plan: Plan, tree: Any, parts: Any, region: Region, batch: int) -> Any:
  """Adds parts to slices of arrays of pairs."""
  if plan.heads:
    parts = jax.tree.map(lambda x: x[None], parts)

  def total(x: Array, part: Array) -> Array:
    return _add_slice(x, part, _of_pairs(region, len(x), batch))

  return jax.tree.map(total, tree, parts)


def _of_pairs(region: Region, number: int, batch: int) -> Region:
  """Returns a region of an array of pairs, which has heads before queries.

  Each of the number of arrays belongs to sequences that follow one another.
  """
  (queries, *others), slices = region, []
  for axis, start, size in others:
    if axis == 0:
      slices.append((0, start * number // batch, size))
    else:
      slices.append((1, start, size))
  return ((2, *queries[1:]), *slices)


def _take_keys(
  plan: Plan, blocks: list[Sides], region: Region, start: Array
) -> list[Sides]:
  """Slices the arrays of keys and pairs, for a tile of a block's keys."""
  parts = []
  for sides in blocks:
    keys = _take(plan, sides.keys, _tile_region(plan, region, start))
    pairs = jax.tree.map(lambda x: _slice(x, ((-1, start, plan.tile),)), sides.pairs)
    parts.append(Sides(sides.queries, keys, pairs))
  return parts


def _take(plan: Plan, tree: Any, region: Region) -> Any:
  """Slices arrays of queries or keys, and gives them the layout of a block."""

  def part(x: Array) -> Array:
    x = _slice(x, region).swapaxes(1, 2)
    return x[0] if plan.heads else x

  return jax.tree.map(part, tree)


def _add(plan: Plan, tree: Any, parts: Any, region: Region) -> Any:
  """Adds parts in the layout of a block to slices of arrays of queries or keys."""

  def total(x: Array, part: Array) -> Array:
    if plan.heads:
      part = part[None]
    return _add_slice(x, part.swapaxes(1, 2), region)

  return jax.tree.map(total, tree, parts)


def _slice(x: Array, region: Region) -> Array:
  """Slices an array, but along axes where it broadcasts."""
  for axis, start, size in region:
    if x.shape[axis] > 1:
      x = jax.lax.dynamic_slice_in_dim(x, start, size, axis)
  return x


def _add_slice(x: Array, part: Array, region: Region) -> Array:
  """Adds to a slice of an array, but to all along axes where it broadcasts."""
  starts = [jnp.int32(0)] * x.ndim
  for axis, start, _ in region:
    if x.shape[axis] > 1:
      starts[axis] = jnp.int32(start)
  old = jax.lax.dynamic_slice(x, starts, part.shape)
  return jax.lax.dynamic_update_slice(x, old + part, starts)


def _tiles(plan: Plan, marks: Sides) -> tuple[Any, Any]:
  """Returns the first tile that a block may attend to, and the one past the last."""
  first, end = 0, marks.keys.positions.shape[1] // plan.tile
  left, right = plan.window or (band.FAR, band.FAR)
  if plan.is_causal:
    right = 0
  # Keys are at the same positions in all sequences. The distance is clipped, and wider
  # windows are none, so that no sum is beyond 32 bits.
  places = marks.queries.positions[..., 0] - marks.keys.positions[0, 0, 0]
  places = jnp.clip(places, -band.FAR, band.FAR)
  bounds = first, end
  if left < band.FAR // 2:
    first = jnp.clip((places.min() - left) // plan.tile, *bounds)
  if right < band.FAR // 2:
    last = (places.max() + plan.block - 1 + right) // plan.tile
    end = jnp.clip(last + 1, *bounds)
  return first, end


# The arithmetic of a block of queries and a tile of keys.


def empty_sums(plan: Plan, vectors: Array, values: Array) -> Sums:
  """Returns zeros, of the queries of these vectors and as wide as these values."""
  shape = vectors.shape[:-1]
  number = zeros(shape, vectors)
  weights = zeros((*shape, plan.num_rows), vectors) if plan.has_values else None
  return Sums(number, number, zeros((*shape, values.shape[-1]), vectors), weights)


def _attend_block(plan: Plan, region: Region, floats: Sides, marks: Sides) -> Sums:
  """Returns the sums of a block's queries over all tiles, relative to their maximum."""
  block = _take_queries(plan, (floats, marks), region)

  def run_tile(index: Int[Array, ""], sums: Sums) -> Sums:
    tile = _take_keys(plan, block, region, index * plan.tile)
    return _attend_tile(plan, *tile, sums)

  empty = empty_sums(plan, block[0].queries.vectors, floats.keys.values)
  empty = empty._replace(maximum=empty.maximum + masks.LOWEST)
  return jax.lax.fori_loop(*_tiles(plan, block[1]), run_tile, empty)


def _attend_tile(plan: Plan, floats: Sides, marks: Sides, sums: Sums) -> Sums:
  """Adds the keys of a tile to a block's sums."""
  logits = _logits(plan, floats, marks)
  maximum = jnp.maximum(sums.maximum, logits.max(-2))
  weights = jnp.exp(logits - maximum[..., None, :])
  shrunk = jnp.exp(sums.maximum - maximum)
  total = sums.total * shrunk + weights.sum(-2)
  weights = _drop(plan, marks, weights)
  # The width before the queries: on a CPU the product takes half the time.
  output_VT = jnp.einsum("...SV,...ST->...VT", floats.keys.values, weights)
  output = sums.output * shrunk[..., None] + output_VT.swapaxes(-1, -2)
  by_row = None
  if plan.has_values:
    by_row = sums.weights * shrunk[..., None] + _sum_by_row(plan, marks, weights)
  return Sums(maximum, total, output, by_row)


def _differentiate_block(
  plan: Plan, region: Region, operands: tuple[Sides, ...], totals: Sides
) -> Sides:
  """Returns the gradients of a block's arrays, and adds those of its keys to the totals."""
  block = _take_queries(plan, operands, region)
  floats, marks, _ = block

  def run_tile(index: Int[Array, ""], totals: Sides) -> Sides:
    start = index * plan.tile
    tile = _differentiate_tile(plan, *_take_keys(plan, block, region, start))
    of_tile = ((-1, start, plan.tile),)
    return Sides(
      jax.tree.map(jnp.add, totals.queries, tile.queries),
      _add(plan, totals.keys, tile.keys, _tile_region(plan, region, start)),
      jax.tree.map(
        lambda x, part: _add_slice(x, part, of_tile), totals.pairs, tile.pairs
      ),
    )

  empty = jax.tree.map(jnp.zeros_like, (floats.queries, floats.pairs))
  totals = Sides(empty[0], totals.keys, empty[1])
  return jax.lax.fori_loop(*_tiles(plan, marks), run_tile, totals)


def _differentiate_tile(
  plan: Plan, floats: Sides, marks: Sides, of_queries: Sides
) -> Sides:
  """Returns the gradients of the arrays of a block's queries and a tile's keys."""
  queries, keys, _ = floats
  normalizers, d_output, d_by_row, delta = of_queries.queries
  logits = _logits(plan, floats, marks)
  powers = jnp.exp(logits - normalizers.maximum[..., None, :])
  weights = powers * normalizers.inverse_total[..., None, :]
  d_weights = jnp.einsum("...SV,...TV->...ST", keys.values, d_output)
  if plan.has_values:
    d_weights = _add_rows(plan, marks, d_weights, d_by_row)
  d_weights = _drop(plan, marks, d_weights)
  d_logits = weights * (d_weights - delta[..., None, :])
  d_values = jnp.einsum("...TV,...ST->...SV", d_output, _drop(plan, marks, weights))
  if plan.soft_cap is not None:
    slope = 1 - (logits / plan.soft_cap) ** 2
    d_logits *= jnp.maximum(slope, 0)  # 0 also for masked pairs
  d_rows = d_rows_of_keys = None
  if queries.rows is not None:
    d_rows = _sum_to(_sum_by_row(plan, marks, d_logits), queries.rows)
  if keys.rows is not None:
    d_rows_of_keys = _sum_by_row(plan, marks, d_logits, of_keys=True)
  d_query_HT = jnp.einsum("...SH,...ST->...HT", keys.vectors, d_logits)
  d_key = jnp.einsum("...TH,...ST->...SH", queries.vectors, d_logits)
  terms = queries.slopes, floats.pairs
  _, of_terms = jax.vjp(lambda x: _add_terms(marks, d_logits, x), terms)
  ((d_slopes, d_bias),) = of_terms(d_logits)
  d_queries = Queries(d_query_HT.swapaxes(-1, -2), d_rows, d_slopes)
  return Sides(d_queries, Keys(d_key, d_values, d_rows_of_keys), d_bias)


def _logits(plan: Plan, floats: Sides, marks: Sides) -> Float[Array, "*B N S T"]:
  """Computes the logits of a block; very low ones for masked pairs."""
  queries, keys, bias = floats
  logits = jnp.einsum("...SH,...TH->...ST", keys.vectors, queries.vectors)
  if queries.rows is not None:
    logits = _add_rows(plan, marks, logits, queries.rows)
  if keys.rows is not None:
    logits = _add_rows(plan, marks, logits, keys.rows, of_keys=True)
  logits = _add_terms(marks, logits, (queries.slopes, bias))
  logits = masks.cap(logits, plan.soft_cap)
  mask = _mask(plan, marks)
  return logits if mask is None else jnp.where(mask, logits, masks.LOWEST)


def _add_terms(
  marks: Sides, logits: Float[Array, "*B N S T"], terms: tuple
) -> Float[Array, "*B N S T"]:
  """Adds the terms of the logits that have no row: linear biases and the bias."""
  slopes, bias = terms
  if slopes is not None:
    logits -= slopes[..., None] * jnp.abs(_distances(marks))
  if bias is None:
    return logits
  bias = bias.swapaxes(-1, -2)
  if bias.ndim == 3 or len(bias) in (1, len(logits)):
    return logits + bias
  # Each bias is that of several sequences, which follow one another.
  grouped = logits.reshape(len(bias), -1, *logits.shape[1:])
  return (grouped + bias[:, None]).reshape(logits.shape)


def _distances(marks: Sides) -> Int[Array, "*#B 1 S T"]:
  return marks.keys.positions[..., None] - marks.queries.positions[..., None, :]


def _mask(plan: Plan, marks: Sides) -> Bool[Array, "*#B #N #S #T"] | None:
  queries, keys, mask = marks
  distances = _distances(marks)
  found = [None if mask is None else mask.swapaxes(-1, -2)]
  if queries.valid is not None:
    found.append(queries.valid[..., None, :])
  if keys.valid is not None:
    found.append(keys.valid[..., None])
  if queries.segments is not None:
    found.append(keys.segments[..., None] == queries.segments[..., None, :])
  if plan.is_causal:
    found.append(distances <= 0)
  if plan.window is not None:
    left, right = plan.window
    found.append((-left <= distances) & (distances <= right))
  return masks.combine(*found)


def _drop(plan: Plan, marks: Sides, x: Float[Array, "*B N S T"]) -> Array:
  """Applies dropout: zero where a weight is dropped, elsewhere divided by 1 - rate."""
  seeds = marks.queries.seeds
  if seeds is None:
    return x
  rows, columns = marks.queries.positions[..., None, :], marks.keys.positions[..., None]
  is_kept = dropout.keep(seeds[..., None], rows, columns, plan.dropout_rate)
  return jnp.where(is_kept, x / (1 - plan.dropout_rate), 0)


def _sum_to(x: Array, like: Array) -> Array:
  """Sums x along the axes where `like` has size 1."""
  axes = [axis for axis, size in enumerate(like.shape) if size == 1]
  return x.sum(axes, keepdims=True)


# Rows of the band, for all heads.


def _add_rows(
  plan: Plan, marks: Sides, x: Array, rows: Array, of_keys: bool = False
) -> Float[Array, "*B N S T"]:
  """Adds to pairs the numbers of their rows, [#B, #N, #T, R] or of keys [B, N, S, R]."""
  tokens = x.shape[-2] if of_keys else x.shape[-1]
  rows = jnp.broadcast_to(rows, (*x.shape[:-2], tokens, plan.num_rows))
  first, has_right = plan.first, plan.has_right
  add = functools.partial(
    band.add_rows, of_keys=of_keys, first=first, has_right=has_right
  )
  return _of_heads(add, marks)(x, rows)


def _sum_by_row(
  plan: Plan, marks: Sides, x: Array, of_keys: bool = False
) -> Float[Array, "*B N _ R"]:
  """Sums pairs by row, for each query or for each key."""
  sum_by_row = functools.partial(
    band.sum_by_row,
    of_keys=of_keys,
    num_rows=plan.num_rows,
    first=plan.first,
    has_right=plan.has_right,
  )
  return _of_heads(sum_by_row, marks)(x)


def _of_heads(function: Callable, marks: Sides) -> Callable:
  """Maps a function of a head's arrays, whose last argument is the place of its block."""
  places = marks.queries.positions[..., 0] - marks.keys.positions[..., 0]

  def mapped(*arrays: Array) -> Array:
    axes = (0,) * len(arrays)
    of_heads = jax.vmap(function, (*axes, None))
    if places.size == 1:
      if arrays[0].ndim == 4:
        of_heads = jax.vmap(of_heads, (*axes, None))
      return of_heads(*arrays, places.reshape(()))
    return jax.vmap(of_heads)(*arrays, places[:, 0])

  return mapped
