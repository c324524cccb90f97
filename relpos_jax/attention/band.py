"""The band: the diagonals of the pairs whose distance is within the table.

A relation with clipped distances adds a number t_i(r) to a logit of query i, where r is
the table row of the pair. As in a band matrix, only the diagonals of the *band* need a
lookup. Left of it, all logits of a query get the same number t_i(0), and right of it
t_i(-1). These numbers may be as low as -inf, which masks the side. So they are never
subtracted from the logits of other pairs, where float32 would lose digits.

The output of query i gets sum_r P_ir w_r. Here w_r is row r of the value table, and
P_ir is the sum of the query's weights over the pairs of row r.

If the band has more rows than a tile of pairs has distances, numbers for all queries
and rows would take too much memory. Then tiles.py multiplies each tile by only the rows
that the tile needs.

Several relations share one band, from their leftmost row to their rightmost. Rows are
in the order of distances: the left side, one row per diagonal, the right side.
`KeyBias` has numbers per key instead of per query, and `LinearBias` has no rows.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from relpos_jax.attention import dropout, masks
from relpos_jax.attention.arrays import accumulation_dtype
from relpos_jax.attention.by_distance import ByDistance, LinearBias
from relpos_jax.attention.diagonals import Band
from relpos_jax.attention.inputs import Inputs, is_symbolic
from relpos_jax.attention.partitioned import (
  axes_of_heads,
  is_one_device,
  on_shards,
  target_platform,
)
from relpos_jax.attention.relation import Relation
from relpos_jax.attention.tiles import (
  Keys,
  Marks,
  Plan,
  Queries,
  Results,
  Sides,
  Tables,
  default_block,
)
from relpos_jax.typing import Array, Float

FAR = 2**30  # larger than the distance of any two tokens

# The largest number of pairs in a block and a tile, over all their heads. On two cores,
# four times as many take 15% more time.
_PAIRS_ON_CPU = 2**18
# On several CPU devices, a block has all heads and sequences.
_PAIRS_ON_CPUS = 2**19
# On other devices. The weights of 2**25 pairs take 128 MiB in float32.
_PAIRS = 2**25


def unsupported(inputs: Inputs) -> str | None:
  """Returns the reason why this call has no band, or None if it has one."""
  if inputs.silu_divisor is not None:
    return "weights are silu; it needs a softmax"
  for relation in inputs.relations:
    if not isinstance(relation, ByDistance | LinearBias):
      return f"it takes no {type(relation).__name__}"
  if not inputs.linear_positions:
    return "positions are given; if they are consecutive, give query_offset instead"
  if is_symbolic(inputs.query, inputs.key):
    return "a dimension is symbolic; it needs numbers"
  return None


def ends(inputs: Inputs) -> tuple[int, int]:
  """Returns the last distance left of the band, and the first right of it."""
  low, high = 0, 0
  for relation in _by_distance(inputs):
    # With "zero", the row of zeros beyond the table is one farther.
    beyond = relation.beyond == "zero"
    left, right = relation.reach
    low, high = min(low, -left - beyond), max(high, right + beyond)
  offset = inputs.query_offset
  if isinstance(offset, int):  # drops distances that do not occur, except 0
    low = max(low, min(-inputs.query.shape[1] - offset, 0))
    high = min(high, max(inputs.key.shape[1] - offset, 0))
  if inputs.window is not None:  # drops distances that the window masks
    left, right = inputs.window
    low, high = max(low, -left - 1), min(high, right + 1)
  if inputs.is_causal:  # distance 0 is on the band; later keys are masked
    high = 1
  return low, max(high, low + 1)


def logits_by_row(
  inputs: Inputs, by_key: bool = False, with_vectors: bool = True
) -> Float[Array, "#B #N #T R"] | None:
  """Computes the logits by table row, for each query, or for each key if `by_key`.

  Without `with_vectors`, it leaves out tables of vectors. Returns None if no relation
  has such logits.
  """
  terms = []
  for relation in _by_distance(inputs):
    if relation.is_by_key != by_key:
      continue
    if not with_vectors and _has_vectors(inputs, relation):
      continue
    numbers = _align_rows(inputs, relation).project(inputs.queries, inputs.keys)
    if numbers is not None and relation.is_scaled:
      numbers *= jnp.asarray(inputs.scale, numbers.dtype)
    terms.append(numbers)
  return _sum(terms)


def _has_wide_tables(inputs: Inputs, distances_of_tile: int) -> bool:
  """Returns whether tables of vectors have more rows than a tile has distances.

  If so, each tile multiplies only the rows that it needs. This is faster than computing
  the logits of all rows first. If there were a row for every distance, the logits of
  all rows would also take more memory than the weights.
  """
  low, high = ends(inputs)
  if high - low < distances_of_tile:
    return False
  return any(_has_vectors(inputs, relation) for relation in _by_distance(inputs))


def _has_vectors(inputs: Inputs, relation: ByDistance) -> bool:
  """Returns whether the rows of a relation are vectors, not numbers."""
  vectors, _ = relation.content(inputs.queries, inputs.keys)
  return vectors is not None


def _wide_tables(inputs: Inputs, plan: Plan) -> tuple[Tables, tuple[Array, ...]]:
  """Returns the `Tables` that each tile multiplies, and the vectors `Queries.others`.

  Tiles multiply tables only if these have more rows than a tile has distances: see
  `_has_wide_tables`. Otherwise both results are empty.
  """
  if plan.first_distance is None:
    return Tables(), ()
  low, _ = ends(inputs)
  margin = low - plan.first_distance
  of_queries, of_keys, of_others, others = [], [], [], []
  for relation in _by_distance(inputs):
    aligned = _align_rows(inputs, relation, margin)
    vectors, table = aligned.content(inputs.queries, inputs.keys)
    if vectors is None or table is None:
      continue
    scale = jnp.asarray(inputs.scale if relation.is_scaled else 1, table.dtype)
    if relation.is_by_key:
      of_keys.append(table[None] * scale)
    elif vectors is inputs.query and relation.is_scaled:
      of_queries.append(table[None])  # `Queries.vectors` are scaled
    else:
      of_others.append(table[None])
      others.append(vectors.astype(table.dtype) * scale)
  values = value_table(inputs, margin)
  if values is not None:
    values = values[None]
  tables = Tables(_sum(of_queries), _sum(of_keys), tuple(of_others), values)
  return tables, tuple(others)


def slopes(inputs: Inputs) -> Float[Array, "1 1 N"] | None:
  """Sums the slopes of all linear biases; None if there are none."""
  biases = [x for x in inputs.relations if isinstance(x, LinearBias)]
  return _sum([x.slopes[None, None] for x in biases])


def value_table(inputs: Inputs, margin: int = 0) -> Float[Array, "R #N V"] | None:
  """Sums the value tables of all relations; None if there are none.

  The rows are those of `_align_rows` with this margin.
  """
  relations = [_align_rows(inputs, x, margin) for x in _by_distance(inputs)]
  return _sum([getattr(x, "value", None) for x in relations])


def _sum(terms: list[Array | None]) -> Array | None:
  """Adds the terms that are not None; None if all are."""
  present = [term for term in terms if term is not None]
  return functools.reduce(jnp.add, present) if present else None


def _by_distance(inputs: Inputs) -> list[ByDistance]:
  return [x for x in inputs.relations if isinstance(x, ByDistance)]


def _align_rows(inputs: Inputs, relation: ByDistance, margin: int = 0) -> ByDistance:
  """Gives a relation's tables one row for each row of the band.

  With a margin, they get this many more rows at each end, for the next distances.
  """
  low, high = ends(inputs)
  row_distances = jnp.arange(low - margin, high + margin + 1)
  labels = relation.labels(jnp.zeros(1, jnp.int32), row_distances)
  return relation.with_rows(labels[0], left=margin - low)


def without_unused_rows(inputs: Inputs) -> Inputs:
  """Leaves out the rows of wide tables that no pair has, if the call has a band."""
  if unsupported(inputs):
    return inputs
  low, high = ends(inputs)

  def narrow(relation: Relation) -> Relation:
    if isinstance(relation, ByDistance) and relation.num_rows > high - low + 1:
      return _align_rows(inputs, relation)
    return relation

  return inputs._replace(relations=tuple(map(narrow, inputs.relations)))


# From the inputs of a call to the arrays of tiles.py, and back.


def prepare(inputs: Inputs) -> tuple[Plan, Sides, Sides]:
  """Returns the plan of a call, its arrays that get gradients, and its other arrays."""
  dtype = accumulation_dtype(inputs.query.dtype)
  plan = _make_plan(inputs)
  tables, others = _wide_tables(inputs, plan)
  is_wide = plan.first_distance is not None
  query = inputs.query.astype(dtype) * jnp.asarray(inputs.scale, dtype)
  query_rows = logits_by_row(inputs, with_vectors=not is_wide)
  key_rows = logits_by_row(inputs, by_key=True, with_vectors=not is_wide)
  queries = Queries(query, _swap_heads(query_rows), slopes(inputs), others)
  keys = Keys(inputs.key, inputs.value, _swap_heads(key_rows))
  bias = None if inputs.bias is None else inputs.bias.astype(dtype)
  return plan, Sides(queries, keys, bias, tables), _marks(inputs)


def _make_plan(inputs: Inputs) -> Plan:
  low, high = ends(inputs)
  left, right = inputs.window or (masks.UNLIMITED, masks.UNLIMITED)
  if inputs.is_causal:
    right = 0
  block, tile, heads = choose_sizes(inputs)
  has_one_offset = heads or len(inputs.query_positions) == 1
  is_wide = has_one_offset and _has_wide_tables(inputs, block + tile)
  if is_wide and not heads:
    # A tile needs a row per distance: for the same area, square tiles need the fewest.
    log_size = math.isqrt(block * tile).bit_length() - 1
    block = tile = 2**log_size
  return Plan(
    block=block,
    tile=tile,
    heads=heads,
    band=Band(low + 1, high - low - 1, has_right=high <= right),
    first_distance=low - block - tile - 1 if is_wide else None,
    needs_weights=not is_wide and value_table(inputs) is not None,
    soft_cap=inputs.soft_cap,
    window=(left, right),
    dropout_rate=inputs.dropout_rate,
    precision=jax.config.jax_default_matmul_precision,  # pyright: ignore
  )


def _swap_heads(x: Array | None) -> Array | None:
  """Exchanges the axes of heads and tokens."""
  return None if x is None else x.swapaxes(1, 2)


def _marks(inputs: Inputs) -> Sides:
  """Returns the arrays of a call that have no gradients."""
  valid, pairs = inputs.key_mask, inputs.mask
  if pairs is not None and pairs.shape[2] == 1:  # a mask of keys, combined here
    valid = masks.combine(valid, pairs)
  if pairs is not None and 1 in pairs.shape[2:]:  # a mask of queries is for `finish`
    pairs = None
  if valid is not None:
    # The masks of whole sequences have one entry for all keys.
    valid = jnp.broadcast_to(valid, (*valid.shape[:3], inputs.key.shape[1]))
    valid = valid[:, :, 0].swapaxes(1, 2)
  # Dropout counts rows from the first query of the call.
  seeds = dropout.from_row(inputs.dropout_seeds, inputs.query_offset)
  if seeds is not None:
    seeds = seeds[:, None]
  queries = inputs.query_positions, inputs.query_segment_ids
  keys = inputs.key_positions, inputs.key_segment_ids
  queries, keys = jax.tree.map(lambda x: x[..., None], (queries, keys))
  queries, keys = Marks(*queries, seeds=seeds), Marks(*keys, valid=valid)
  return Sides(queries, keys, pairs)


def finish(inputs: Inputs, results: Results) -> Any:
  """Returns the output [B, T, N, V], and the residual [B, T, N] if asked for it."""
  output, weights, log_total = results
  table = value_table(inputs)
  if table is not None and weights.shape[-1]:
    output += jnp.einsum("BTNR,RNV->BTNV", weights, table)
  query_mask = inputs.query_mask
  if inputs.mask is not None and inputs.mask.shape[3] == 1:
    query_mask = masks.combine(query_mask, inputs.mask)
  if query_mask is not None:
    is_valid = query_mask.swapaxes(1, 2)
    output = jnp.where(is_valid, output, 0)
    log_total = jnp.where(is_valid[..., 0], log_total, -jnp.inf)
  if inputs.sinks is not None:  # merged like one more key, with a value of zero
    sinks = inputs.sinks[None, None]
    has_key = ~jnp.isneginf(log_total)
    finite = jnp.where(has_key, log_total, 0)
    output *= jax.nn.sigmoid(finite - sinks)[..., None]
    log_total = jnp.where(has_key, jnp.logaddexp(finite, sinks), -jnp.inf)
  output = output.astype(inputs.value.dtype)
  return (output, log_total) if inputs.return_residual else output


def attend_on_devices(
  attend: Callable, inputs: Inputs, names: tuple[str, ...], names_of_keys: tuple
) -> Any:
  """Computes attention with the queries of a sequence sharded over devices.

  Calls `attend(plan, floats, marks)` on each device. `floats` and `marks` are the
  device's shards of the arrays from `prepare`, and `attend` returns the `Results` for
  the device's queries.

  `names` are the mesh axes that shard the queries along their sequence, and
  `names_of_keys` those that shard the keys. If `names_of_keys` is empty, every device
  has all keys.
  """
  plan, floats, marks = prepare(inputs)
  batch_axes, head_axes = axes_of_heads(inputs.explicit, inputs.key.shape)

  def specs(tree: Any, *axes: tuple[str, ...]) -> Any:
    def spec(x: Array) -> PartitionSpec:
      sizes = x.shape[: len(axes)]
      pairs = zip(axes, sizes, strict=True)
      return PartitionSpec(*(axis if size > 1 else None for axis, size in pairs))

    return jax.tree.map(spec, tree)

  in_specs = []
  for queries, keys, pairs, tables in (floats, marks):
    query_specs = specs(queries, batch_axes, names, head_axes)
    key_specs = specs(keys, batch_axes, names_of_keys, head_axes)
    pair_specs = specs(pairs, batch_axes, head_axes, names)
    table_specs = specs(tables, (), (), head_axes)
    in_specs.append(Sides(query_specs, key_specs, pair_specs, table_specs))
  attend = functools.partial(attend, plan)
  out_specs = PartitionSpec(batch_axes, names, head_axes)
  axes = batch_axes, head_axes, names
  results = on_shards(attend, axes, tuple(in_specs), out_specs)(floats, marks)
  return finish(inputs, results)


def choose_sizes(inputs: Inputs) -> tuple[int, int, int | None]:
  """Chooses the numbers of queries in a block, keys in a tile, and heads in a block.

  The number of heads is None if a block has all heads of all sequences.
  """
  batch, num_queries, heads, _ = inputs.query.shape
  num_keys = inputs.key.shape[1]
  is_on_cpu = target_platform() == "cpu"
  if not is_on_cpu or not is_one_device():
    tile = min(2048, num_keys)
    most = _PAIRS_ON_CPUS if is_on_cpu else _PAIRS
    block = default_block(batch * heads * tile, most)
    return min(block, num_queries), tile, None
  # Small tiles skip more masked pairs, and large tiles have faster products.
  is_short = inputs.is_causal and num_keys < 2048
  size = 256 if is_short or inputs.window is not None else 512
  block, tile = min(size, num_queries), min(size, num_keys)
  most = max(1, _PAIRS_ON_CPU // (block * tile))
  return block, tile, max(n for n in range(1, most + 1) if heads % n == 0)
