"""Attention of a block of queries to its keys, and its gradients.

It is plain attention but for the terms by distance. Keys left of the band (band.py) all
have one number per query, and so do keys right of it. That of the left is added pair by
pair.

A block has a few groups of queries. Keys that are right of the band for a whole group
get their numbers in the product with the queries: every key has one more element for
each group, 1 if it is right of the group's band and 0 otherwise, and every query has
its number in the element of its own group. The other keys with a number are *near*
keys: those on the band, and right of it up to the last key of the group. Their numbers
are added to the product, one row of queries per key. With more groups there are fewer
near keys, and longer products. What a `KeyBias` adds on the right, and a `LinearBias`
to all pairs, is added pair by pair.

Weights are [N, S, T], queries last: sums over keys then vectorise, and no product needs
a transposed copy of them.

Letters: N heads, T queries of the block, S keys that it reads, W their width H + G, G
groups, D diagonals of the band, R its rows: one more, for the right. Tables of logits
have one row more, the first, for the left; a value table a last one, which is weighted
by the sum of all weights of a query. There is one table per head, or one [1, R, H]
shared by all. P is the width of the queries of a `ContentBias`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.attention import dropout, masks
from relpos_jax.attention.partitioned import Arrays, Shards
from relpos_jax.attention.skew import skew
from relpos_jax.typing import Array, ArrayLike, Bool, Float, Int, Shaped

Region = dict[
  str, tuple[ArrayLike, int]
]  # by axis letter: start and size; other axes are full

# A letter for each axis, of size 1 if it broadcasts. First the arrays that have
# gradients.
FLOATS = dict(
  query="BTNH",
  key="BSKH",
  value="BSKV",
  bias="ANTS",  # one of them is that of B / A sequences that follow one another
  content="BTNP",
  slopes="BN",
  bias_table="BNR",
  content_table="BNRP",
  key_table="BNRH",
  by_key_table="BNRH",
  value_table="BNRV",
)
AXES = dict(
  FLOATS,
  query_segments="BT",
  key_segments="BS",
  seeds="BN",
  query_offset="B",
  first_key="B",  # the place of the keys in a sequence that a ring of devices shares
  output="BTNV",
  d_output="BTNV",
  **dict.fromkeys(("mask", "query_mask", "key_mask"), "BNTS"),
  **dict.fromkeys(
    ("maximum", "inverse_total", "right_sums", "row_sums", "delta"), "BNT"
  ),
  **{f"d_{name}": letters for name, letters in FLOATS.items()},
)

# The tables whose products with queries are logits by row of the band, and these
# queries.
_PRODUCTS = dict(key_table="query", content_table="content")


def starts_and_sizes(
  name: str, x: Array, region: Region
) -> tuple[list[Int[Array, ""]], list[int]]:
  """Returns where the slice of an array in a region starts, and its size, along each axis."""
  axes = zip(AXES[name], x.shape, strict=True)
  slices = [region.get(letter, (0, n)) if n > 1 else (0, n) for letter, n in axes]
  return [jnp.int32(start) for start, _ in slices], [size for _, size in slices]


def read(arrays: Arrays, region: Region) -> Arrays:
  """Returns the slice of each array in a region."""
  part_of = jax.lax.dynamic_slice
  return {
    name: part_of(x, *starts_and_sizes(name, x, region)) for name, x in arrays.items()
  }


def write(arrays: Arrays, parts: Arrays, region: Region) -> Arrays:
  """Overwrites a region of the arrays."""
  starts = {name: starts_and_sizes(name, arrays[name], region)[0] for name in parts}
  put = jax.lax.dynamic_update_slice
  return arrays | {
    name: put(arrays[name], x, starts[name]) for name, x in parts.items()
  }


class ChunkPlan(NamedTuple):
  """The static parameters of a call."""

  block: int  # the number of queries in a block
  group: int  # the least in a group of them, unless the block has fewer
  num_keys: int  # the number of keys that any of them may attend to
  offset: int  # the position of the first query, unless it is an operand
  first: int  # the distance j - i of the band's first diagonal
  num_diagonals: int
  has_band: bool  # whether there are relations
  soft_cap: float | None
  is_causal: bool
  window: tuple[int, int] | None
  dropout_rate: float
  has_residual: bool  # whether the logsumexp has a gradient
  ring: tuple[str, ...]  # the mesh axes that shard keys, which go round
  shards: Shards | None  # of the query, over a mesh
  precision: str | None  # of products, the default in force where the call was traced

  @property
  def right(self) -> int:
    """Returns the lowest distance j - i right of the band."""
    return self.first + self.num_diagonals

  @property
  def num_groups(self) -> int:
    """Returns the number of groups, of equal sizes; 0 if no key right of the band is visible."""
    if (
      not self.has_band
      or self.is_causal
      or (self.window and self.window[1] < self.right)
    ):
      return 0
    at_most = max(self.block // self.group, 1)
    return max(n for n in range(1, at_most + 1) if self.block % n == 0)

  @property
  def group_size(self) -> int:
    return self.block // self.num_groups if self.num_groups else 1

  @property
  def num_read(self) -> int:
    """Returns the number of keys that a block reads; those that a window hides are not."""
    if self.window is None:
      return self.num_keys
    left, right = self.window
    return min(self.block + left + (0 if self.is_causal else right), self.num_keys)


class Pairs(NamedTuple):
  """The pairs of a block: its queries, and the keys that they read."""

  plan: ChunkPlan
  start: Int[Array, ""]  # of the keys among all
  rows: Int[Array, " T"]  # the positions of the queries in the sequence
  columns: Int[Array, " S"]  # and of the keys

  @property
  def distances(self) -> Int[Array, "S T"]:
    return self.columns[:, None] - self.rows[None]

  @property
  def is_right(self) -> Bool[Array, "S G"]:
    """Returns whether a key is right of the band for a whole group."""
    last_rows = self.rows[self.plan.group_size - 1 :: self.plan.group_size]
    # Columns are small: the sum of a row and `right` might not fit in 32 bits.
    return self.columns[:, None] - self.plan.right >= last_rows[None]


def pairs_at(plan: ChunkPlan, row: Int[Array, ""]) -> Pairs:
  """Returns the pairs of the block that begins at a position."""
  start = 0 if plan.window is None else row - plan.window[0]
  start = jnp.clip(start, 0, plan.num_keys - plan.num_read)
  return Pairs(
    plan, start, row + jnp.arange(plan.block), start + jnp.arange(plan.num_read)
  )


def _read(pairs: Pairs, keys: Arrays) -> list[Float[Array, "N S W"]]:
  """Returns the block's keys and values, with 1 in the last elements if right of each group."""
  plan, found = pairs.plan, []
  for name in ("key", "value"):
    x = jax.lax.dynamic_slice_in_dim(keys[name], pairs.start, plan.num_read, axis=1)
    if plan.num_groups:
      x = x.at[:, :, -plan.num_groups :].set(pairs.is_right.astype(x.dtype))
    found.append(x)
  return found


def attend(
  pairs: Pairs, block: Arrays, keys: Arrays, of_keys: Arrays
) -> tuple[Arrays, Arrays]:
  """Returns a block's output, and what `differentiate` needs to compute the weights
  again.

  A weight is exp(logit - maximum) * inverse_total. The two are stored separately: in a
  logsumexp float32 would lose the total beside a large maximum. The sums are of
  exp(logit - maximum). Output and inverse_total are zero for a query whose keys are all
  masked.
  """
  key, value = _read(pairs, keys)
  if "by_key_table" in block:
    own_key = key[..., : block["query"].shape[-1]]
    block |= _key_bias(pairs, block["by_key_table"], own_key)
  logits = _logits(pairs, block, key, _terms(block))
  maximum = jnp.maximum(logits.max(1), masks.LOWEST)  # a bias may be -inf
  weights = jnp.exp(logits - maximum[:, None])
  total = weights.sum(1)
  has_key = maximum > 0.5 * masks.LOWEST
  inverse_total = jnp.where(has_key, 1 / jnp.where(has_key, total, 1), 0)
  kept = _drop(block, pairs, weights)
  output, right = _sum_over_keys(value, kept, value.shape[2] - pairs.plan.num_groups)
  outputs = dict(maximum=maximum, inverse_total=inverse_total)
  if "value_table" in block:
    by_row = _sum_by_row(pairs, kept, right)
    row_sums = kept.sum(1) if "seeds" in block else total
    by_row = jnp.concatenate([by_row, row_sums[:, None]], axis=1)
    output += jnp.einsum("NRT,NRV->NTV", by_row, block["value_table"])
    outputs |= dict(right_sums=by_row[:, -2], row_sums=row_sums)
  return outputs | dict(output=output * inverse_total[..., None]), of_keys


def differentiate(pairs: Pairs, block: Arrays, keys: Arrays, of_keys: Arrays) -> tuple:
  """Returns the gradients of a block's own arrays, and adds those of its keys to
  `of_keys`.

  The cotangents `d_output` and `delta` are already divided by the total, so weights
  need not be.
  """
  query, d_output = block["query"], block["d_output"]
  key, value = _read(pairs, keys)
  by_key = {}
  if "by_key_table" in block:
    key_bias, own_key = functools.partial(_key_bias, pairs), key[..., : query.shape[-1]]
    by_key, of_key_bias = jax.vjp(key_bias, block["by_key_table"], own_key)
  terms = _terms(block := block | by_key)
  logits = _logits(pairs, block, key, terms)
  weights = jnp.exp(logits - block["maximum"][:, None])
  kept = _drop(block, pairs, weights)
  d_kept = _drop(block, pairs, _d_kept(pairs, block, value))
  d_logits = weights * (d_kept - block["delta"][:, None])
  if (soft_cap := pairs.plan.soft_cap) is not None:
    d_logits *= jnp.maximum(1 - (logits / soft_cap) ** 2, 0)  # 0 also for hidden pairs
  d_query, right = _sum_over_keys(key, d_logits, query.shape[-1])
  of_block = dict(d_query=d_query)
  for name in _added(block, pairs):

    def term(x, name=name):
      return jnp.broadcast_to(_added({name: x}, pairs)[name], d_logits.shape)

    (of_block[f"d_{name}"],) = jax.linear_transpose(term, block[name])(d_logits)
  if terms is not None:
    by_row = _sum_by_row(pairs, d_logits, right)
    # Of all keys: zero, as the weights sum to one, unless a soft cap or the residual
    # changes it.
    is_zero = pairs.plan.soft_cap is None and not pairs.plan.has_residual
    total = 0 if is_zero else d_logits.sum(1, keepdims=True)
    d_terms = jnp.concatenate([total - by_row.sum(1, keepdims=True), by_row], axis=1)
    for table, queries in _PRODUCTS.items():
      if table in block:
        d_queries = jnp.einsum("NRT,NRH->NTH", d_terms, block[table])
        of_block[f"d_{queries}"] = of_block.get(f"d_{queries}", 0) + d_queries
        of_block[f"d_{table}"] = jnp.einsum("NRT,NTH->NRH", d_terms, block[queries])
    if "bias_table" in block:
      of_block["d_bias_table"] = d_terms.sum(2)
    if "row_logits" in block:
      of_block["d_row_logits"] = d_terms
  if "value_table" in block:
    of_all = (block[name][:, None] for name in ("right_sums", "row_sums"))
    sums = jnp.concatenate([_sum_by_diagonal(pairs, kept), *of_all], axis=1)
    of_block["d_value_table"] = jnp.einsum("NRT,NTV->NRV", sums, d_output)
  d_key = jnp.einsum("NST,NTH->NSH", d_logits, query)
  if by_key:
    d_by_key = {name: of_block.pop(f"d_{name}") for name in by_key}
    of_block["d_by_key_table"], d_near = of_key_bias(d_by_key)
    d_key += d_near
  d_value = jnp.einsum("NST,NTV->NSV", kept, d_output)

  def add(x, dx):
    dx += jax.lax.dynamic_slice_in_dim(x, pairs.start, dx.shape[1], axis=1)
    return jax.lax.dynamic_update_slice_in_dim(x, dx, pairs.start, axis=1)

  added = dict(d_key=d_key, d_value=d_value)
  return of_block, {name: add(of_keys[name], dx) for name, dx in added.items()}


def _d_kept(
  pairs: Pairs, block: Arrays, value: Float[Array, "N S W"]
) -> Float[Array, "N S T"]:
  """Returns the gradients of a block's weights."""
  d_output = block["d_output"]
  if "value_table" not in block:
    return _scores(value, d_output)
  d_sums = jnp.einsum("NRV,NTV->NRT", block["value_table"], d_output)
  # Computed apart from the others: read from a row of theirs, it would be strided.
  d_row_sums = jnp.einsum("NV,NTV->NT", block["value_table"][:, -1], d_output)
  d_kept = _scores(value, d_output, d_sums[:, -2])
  return _add_near(pairs, d_kept, d_sums[:, :-1]) + d_row_sums[:, None]


# Terms and sums by row of the band.


def _terms(block: Arrays) -> Float[Array, "#N R #T"] | None:
  """Returns the logits of the block's queries, by row, the left's first; None if there are none."""
  products = [
    (block[table], block[x]) for table, x in _PRODUCTS.items() if table in block
  ]
  terms = [jnp.einsum("NRH,NTH->NRT", *pair) for pair in products]
  if "bias_table" in block:
    terms.append(block["bias_table"][..., None])
  if "row_logits" in block:
    terms.append(block["row_logits"])
  return functools.reduce(jnp.add, terms) if terms else None


def _key_bias(
  pairs: Pairs, table: Float[Array, "#N R H"], key: Float[Array, "N S H"]
) -> Arrays:
  """Returns what a `KeyBias` adds: to near pairs by row and query, by key to those
  beside them.

  A few rows at a time are multiplied by the keys that they have in the block, and
  skewed.
  """
  block, num_diagonals = pairs.plan.block, pairs.plan.num_diagonals
  step = max(1, min(num_diagonals, -(-block // 4)))
  num_steps, num_parts = max(1, -(-num_diagonals // step)), -(-block // step)
  first = pairs.rows[0] + pairs.plan.first - pairs.columns[0]
  near = _keys_from(key, first, (num_steps + num_parts) * step)
  if num_steps > 1:  # the keys of a step overlap those of the next
    parts = near.reshape(len(near), -1, step, near.shape[2])
    parts = [parts[:, i : i + num_steps] for i in range(num_parts + 1)]
    near = jnp.concatenate(parts, axis=2)
  else:
    near = near[:, None]
  rows = jnp.pad(
    table[:, 1:-1], [(0, 0), (0, num_steps * step - num_diagonals), (0, 0)]
  )
  rows = rows.reshape(len(rows), num_steps, step, -1)
  products = jnp.einsum("NXRH,NXSH->NXRS", rows, near)
  by_query = skew(products[:, :, ::-1], block)[:, :, ::-1]
  by_query = by_query.reshape(len(key), -1, block)[:, :num_diagonals]
  return dict(
    left_logits=jnp.einsum("NH,NSH->NS", table[:, 0], key),
    right_logits=jnp.einsum("NH,NSH->NS", table[:, -1], key),
    row_logits=jnp.pad(by_query, [(0, 0), (1, 1), (0, 0)]),
  )


def _keys_from(key: Array, start: Array, size: int) -> Float[Array, "N {size} H"]:
  """Returns keys from an index on that may be out of range, where there are zeros."""
  num_read = min(size, key.shape[1])
  first = jnp.clip(start, 0, key.shape[1] - num_read)
  read = jax.lax.dynamic_slice_in_dim(key, first, num_read, axis=1)
  padded = jnp.pad(read, [(0, 0), (size, size), (0, 0)])
  return jax.lax.dynamic_slice_in_dim(padded, size + start - first, size, axis=1)


def _scores(
  keys: Array, queries: Array, right: Array | float = 0.0
) -> Float[Array, "N S T"]:
  """Computes k_j . q_i, plus `right` [#N, #T] for keys right of the query's group."""
  if groups := keys.shape[2] - queries.shape[2]:
    right = jnp.broadcast_to(jnp.asarray(right, queries.dtype), queries.shape[:2])
    of_groups = jnp.where(
      _is_of_group(queries.shape[1], groups)[None], right[..., None], 0
    )
    queries = jnp.concatenate([queries, of_groups], axis=-1)
  return jnp.einsum("NSW,NTW->NST", keys, queries)


def _is_of_group(num_queries: int, groups: int) -> Bool[Array, "T G"]:
  return (
    jnp.arange(num_queries)[:, None] // (num_queries // groups)
    == jnp.arange(groups)[None]
  )


def _sum_over_keys(keys: Array, weights: Array, width: int) -> tuple[Array, Array]:
  """Computes sum_j w_ij k_j [N, T, H], and sum_j w_ij [N, T] of keys right of the query's group."""
  sums_NWT = jnp.einsum("NSW,NST->NWT", keys, weights)
  right = sums_NWT[:, width:]
  if groups := right.shape[1]:
    right = jnp.where(_is_of_group(right.shape[2], groups).T[None], right, 0)
  return sums_NWT[:, :width].swapaxes(1, 2), right.sum(1)


def _add_near(
  pairs: Pairs, x: Array, rows: Float[Array, "#N R #T"]
) -> Float[Array, "N S T"]:
  """Adds to near pairs the numbers of their rows.

  The queries near a key follow one another: their numbers are added at once, `width`
  for each key, which on a CPU costs a tenth of adding them one by one.
  """
  plan, (heads, num_keys, block) = pairs.plan, x.shape
  num_near = min(block + plan.num_diagonals - 1, num_keys)
  width = min(plan.group_size + plan.num_diagonals - 1, block)
  if not num_near * width:
    return x
  row, column = pairs.rows[0], pairs.columns[0]
  key = jnp.clip(row + plan.first - column, 0, num_keys - num_near) + jnp.arange(
    num_near
  )
  first_query = jnp.clip(
    column + key - row - plan.right - plan.group_size + 2, 0, block - width
  )
  query = first_query[:, None] + jnp.arange(width)[None]
  distance = (column + key - row)[:, None] - query
  diagonal = jnp.clip(distance - plan.first, 0, plan.num_diagonals)
  numbers = rows[:, diagonal, jnp.minimum(query, rows.shape[2] - 1)]
  last_of_group = query - query % plan.group_size + plan.group_size - 1
  is_near = (distance >= plan.first) & (distance + query < last_of_group + plan.right)
  added = jnp.where(is_near[None], numbers, 0)
  added = jnp.broadcast_to(added, (heads, num_near, width))
  start = (num_keys * jnp.arange(heads)[:, None] + key[None]) * block + first_query[
    None
  ]
  by_key = jax.lax.ScatterDimensionNumbers((1,), (), (0,))
  flat = x.reshape(-1), start.reshape(-1, 1), added.reshape(-1, width)
  return jax.lax.scatter_add(*flat, by_key, mode="promise_in_bounds").reshape(x.shape)


def _sum_by_row(pairs: Pairs, x: Array, right: Array) -> Float[Array, "N R T"]:
  """Returns the sums of x over the keys of each row; `right` is over those right of the group."""
  plan, (heads, num_keys, _) = pairs.plan, x.shape
  size = min(plan.group_size - 1, num_keys)
  if size:
    near = []
    for group in range(plan.num_groups):
      row = group * plan.group_size
      rows = pairs.rows[row : row + plan.group_size]
      first = jnp.clip(rows[0] + plan.right - pairs.columns[0], 0, num_keys - size)
      part = jax.lax.dynamic_slice(x, (0, first, row), (heads, size, plan.group_size))
      column = pairs.columns[0] + first + jnp.arange(size)[:, None]
      is_near = column - rows[-1] < plan.right
      is_counted = (column - rows[None] >= plan.right) & is_near
      near.append(jnp.where(is_counted[None], part, 0).sum(1))
    right += jnp.concatenate(near, axis=1)
  return jnp.concatenate([_sum_by_diagonal(pairs, x), right[:, None]], axis=1)


def _sum_by_diagonal(pairs: Pairs, x: Float[Array, "N S T"]) -> Float[Array, "N D T"]:
  """Returns x of each query's key on each diagonal of the band, 0 if there is none."""
  plan, (heads, size, block) = pairs.plan, x.shape
  columns = pairs.rows[None] + plan.first + jnp.arange(plan.num_diagonals)[:, None]
  keys = columns - pairs.columns[0]
  in_tile = (keys >= 0) & (keys < size)
  # Heads are part of the index: a look-up batched over them is slower on a CPU.
  head_N11, query_11T = jnp.ogrid[:heads, :1, :block][::2]
  indices_NDT = (size * head_N11 + keys[None]) * block + query_11T
  indices_NDT = jnp.where(in_tile[None], indices_NDT, x.size)
  return x.reshape(-1).at[indices_NDT].get(mode="fill", fill_value=0)


# Logits, masks and dropout.


def _logits(
  pairs: Pairs, block: Arrays, key: Array, terms: Array | None
) -> Float[Array, "N S T"]:
  """Computes logits with the relative terms by row; very low ones for hidden pairs."""
  if terms is None:
    logits = _scores(key, block["query"])
  else:
    right = jnp.maximum(terms[:, -1], masks.LOWEST)  # 0 times -inf would be NaN
    logits = _add_near(pairs, _scores(key, block["query"], right), terms[:, 1:])
    if pairs.plan.window is None or -pairs.plan.window[0] < pairs.plan.first:
      is_left = pairs.columns[:, None] - pairs.plan.first < pairs.rows[None]
      logits += jnp.where(is_left, terms[:, :1], 0)
  for term in _added(block, pairs).values():
    logits += term
  logits = masks.cap(logits, pairs.plan.soft_cap)
  mask = _mask(block, pairs)
  return logits if mask is None else jnp.where(mask, logits, masks.LOWEST)


def _added(arrays: Arrays, pairs: Pairs) -> dict[str, Float[Array, "#N #S #T"]]:
  """Returns the terms of a block's logits that are linear in one array and have no row, by name."""
  terms = dict(
    left_logits=lambda x: jnp.where(
      pairs.distances < pairs.plan.first, x[..., None], 0
    ),
    right_logits=lambda x: jnp.where(
      pairs.distances >= pairs.plan.right, x[..., None], 0
    ),
    slopes=lambda x: -x[:, None, None] * jnp.abs(pairs.distances)[None],
    bias=lambda x: _slice_keys(x, pairs),
  )
  return {name: term(arrays[name]) for name, term in terms.items() if name in arrays}


def _mask(block: Arrays, pairs: Pairs) -> Bool[Array, "#N #S #T"] | None:
  """Returns the mask of a block's pairs, None if all are visible."""
  names = "mask", "query_mask", "key_mask"
  found = [_slice_keys(block[name], pairs) for name in names if name in block]
  if "query_segments" in block:
    key_segments = block["key_segments"][pairs.columns, None]
    found.append((key_segments == block["query_segments"][None])[None])
  if pairs.plan.is_causal:
    found.append((pairs.columns[:, None] <= pairs.rows[None])[None])
  if pairs.plan.window is not None:
    left, right = pairs.plan.window
    found += [(pairs.distances >= -left)[None], (pairs.distances <= right)[None]]
  return masks.combine(*found)


def _slice_keys(
  x: Shaped[Array, "#N #T #C"], pairs: Pairs
) -> Shaped[Array, "#N #S #T"]:
  """Returns the block's slice of an array over all pairs, queries last."""
  x_NCT = x.swapaxes(1, 2)
  return x_NCT if x_NCT.shape[1] == 1 else x_NCT[:, pairs.columns]


def _drop(
  block: Arrays, pairs: Pairs, x: Float[Array, "N S T"]
) -> Float[Array, "N S T"]:
  """Applies dropout: zero where a weight is dropped, elsewhere divided by 1 - rate."""
  if "seeds" not in block:
    return x
  rate, seeds = pairs.plan.dropout_rate, block["seeds"][:, None, None]
  first = block.get("first_key", 0)
  rows, columns = first + pairs.rows, first + pairs.columns
  kept = dropout.keep(seeds, rows[None, None], columns[None, :, None], rate)
  return jnp.where(kept, x / (1 - rate), 0)
