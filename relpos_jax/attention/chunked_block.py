"""Attention of a block of queries to all of its keys, and its gradients.

A block has two tiles. In the tile of *near* keys the relative term or the mask differs from
diagonal to diagonal, and is looked up. All keys right of the near ones are alike, and so are all
keys left of them (band.py): the tile of *far* keys is plain attention, but for one number per query
on the right, which is the logit of the band's last row, or minus infinity in causal attention.

Every block has the same number of near and of far keys. For this the keys are stored twice in a
row: the near ones are read from the first copy, and the far ones behind them, first those on the
right and then, in the second copy, those on the left. The number on the right is one more element
of the query, which the keys of the first copy multiply by 1 and those of the second by 0. What a
`KeyBias` adds to keys on the right, and a `LinearBias` to all, is added in every tile.

Weights are [N, S, T], queries last: sums over keys then vectorise, and no product needs a
transposed copy of them.

Letters: N heads, T queries of the block, S keys of a tile, C stored keys, W their width, H or
H + 1, D diagonals of the band, R its rows: one more, for the right. A value table has one more row,
which is weighted by the sum of all weights of a query. There is one table per head, or one
[1, R, H] shared by all. P is the width of the queries of a `ContentBias`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.attention import dropout, masks
from relpos_jax.attention.partitioned import Shards
from relpos_jax.typing import Array, Bool, Float, Int, Shaped

Arrays = dict[str, Array]

# The tables whose products with queries are logits by row of the band, and these queries.
_PRODUCTS = dict(key_table="query", content_table="content")


class ChunkPlan(NamedTuple):
  """The static parameters of a call."""

  block: int  # the number of queries in a block
  num_keys: int  # the number of keys that any of them may attend to
  offset: int  # the position of the first query, unless it is an operand
  first: int  # the distance j - i of the band's first diagonal
  num_diagonals: int
  has_band: bool  # whether there are relations
  soft_cap: float | None
  is_causal: bool
  window: tuple[int, int] | None
  dropout_rate: float
  shards: Shards | None  # of the query, over a mesh
  precision: str | None  # of products, the default in force where the call was traced

  @property
  def near(self) -> tuple[int, int]:
    """Returns the lowest and the highest distance j - i of near keys."""
    low, high = self.first, self.first + self.num_diagonals - 1
    if self.window is not None:
      low, high = -self.window[0], self.window[1]
    return low, 0 if self.is_causal else high

  @property
  def num_near(self) -> int:
    """Returns the number of near keys, the same for every block."""
    if not self.has_right and self.window is None:
      return 0
    low, high = self.near
    return min(max(self.block + high - low, 0), self.num_keys)

  @property
  def num_far(self) -> int:
    """Returns the number of far keys; a window hides them."""
    return self.num_keys - self.num_near if self.window is None else 0

  @property
  def has_right(self) -> bool:
    """Returns whether far keys on the right differ from those on the left."""
    return self.has_band or self.is_causal

  @property
  def has_two_copies(self) -> bool:
    """Returns whether keys are stored twice, with one more element than H."""
    return self.has_right and self.num_far > 0


class Tile(NamedTuple):
  """A block of queries and its near or its far keys."""

  plan: ChunkPlan
  is_near: bool
  start: Int[Array, ""]  # of the first key among the stored ones
  key: Float[Array, "N S W"]  # W is H if they are near, else as stored
  value: Float[Array, "N S W"]
  rows: Int[Array, " T"]  # the positions of the queries in the sequence
  columns: Int[Array, " S"]  # and of the keys

  @property
  def distances(self) -> Int[Array, "S T"]:
    return self.columns[:, None] - self.rows[None]

  @property
  def is_right(self) -> Bool[Array, "S T"]:
    """Returns True for the pairs right of the band."""
    return self.distances >= self.plan.first + self.plan.num_diagonals


def store_keys(plan: ChunkPlan, x: Float[Array, "N S H"]) -> Float[Array, "N C W"]:
  """Returns keys or values, twice if the plan needs it: with a 1 appended, and with a 0."""
  if not plan.has_two_copies:
    return x
  heads, size, width = x.shape
  # Written slice by slice: on a CPU a concatenation takes four times as long.
  both = jnp.zeros((heads, 2 * size, width + 1), x.dtype).at[:, :size, :width].set(x)
  both = both.at[:, size:, :width].set(x)
  return both.at[:, :size, width:].set(1)


def _tiles(plan: ChunkPlan, keys: Arrays, row: Int[Array, ""]) -> list[Tile]:
  """Returns the non-empty tiles of the block that begins at a position, near keys first."""
  last_start = keys["key"].shape[1] - plan.num_near - plan.num_far
  start = jnp.clip(row + plan.near[0], 0, last_start)
  rows = row + jnp.arange(plan.block)

  def tile(is_near, start, size):
    indices = start + jnp.arange(size)
    columns = jnp.where(indices < plan.num_keys, indices, indices - plan.num_keys)
    end = -1 if is_near and plan.has_two_copies else None
    part = lambda x: jax.lax.dynamic_slice_in_dim(x[..., :end], start, size, axis=1)
    return Tile(plan, is_near, start, part(keys["key"]), part(keys["value"]), rows, columns)

  near = [tile(True, start, plan.num_near)] if plan.num_near else []
  far = [tile(False, start + plan.num_near, plan.num_far)] if plan.num_far else []
  return near + far


def attend(plan: ChunkPlan, block: Arrays, keys: Arrays, row: Int[Array, ""]) -> Arrays:
  """Returns a block's output, and what `differentiate` needs to compute the weights again.

  A weight is exp(logit - maximum) * inverse_total. The two are stored separately: in a logsumexp
  float32 would lose the total beside a large maximum. The sums are of exp(logit - maximum).
  Output and inverse_total are zero for a query whose keys are all masked.
  """
  tiles = _tiles(plan, keys, row)
  terms = _terms(block)
  logits = [_logits(block, tile, terms) for tile in tiles]
  maximum = functools.reduce(jnp.maximum, (x.max(1) for x in logits), masks.LOWEST)
  weights = [jnp.exp(x - maximum[:, None]) for x in logits]
  total = sum(x.sum(1) for x in weights)
  has_visible_key = maximum > 0.5 * masks.LOWEST
  inverse_total = jnp.where(has_visible_key, 1 / jnp.where(has_visible_key, total, 1), 0)
  kept = [_drop(block, tile, x) for tile, x in zip(tiles, weights, strict=True)]
  width = block["query"].shape[-1]
  sums = [_sum_over_keys(tile.value, x, width) for tile, x in zip(tiles, kept, strict=True)]
  output, rights = (sum(x for x, _ in sums)), [right for _, right in sums]
  outputs = dict(maximum=maximum, inverse_total=inverse_total)
  if "value_table" in block:
    by_row = sum(map(_sum_by_row, tiles, kept, rights))
    row_sums = sum(x.sum(1) for x in kept) if "seeds" in block else total
    by_row = jnp.concatenate([by_row, row_sums[:, None]], axis=1)
    output += jnp.einsum("NRT,NRH->NTH", by_row, block["value_table"])
    outputs |= dict(right_sums=by_row[:, -2], row_sums=row_sums)
  return outputs | dict(output=output * inverse_total[..., None])


def differentiate(
  plan: ChunkPlan, block: Arrays, keys: Arrays, row: Int[Array, ""], of_keys: Arrays
) -> tuple[Arrays, Arrays]:
  """Returns the gradients of a block's own arrays, and adds those of its keys to `of_keys`.

  The cotangents `d_output` and `delta` are already divided by the total, so weights need not be.
  """
  of_block, terms = {}, _terms(block)
  for tile in _tiles(plan, keys, row):
    of_own, of_tile = _differentiate_tile(block, tile, terms)
    of_block = {name: x + of_block.get(name, 0) for name, x in of_own.items()}
    for name, dx in of_tile.items():
      old = jax.lax.dynamic_slice_in_dim(of_keys[name], tile.start, dx.shape[1], axis=1)
      new = jax.lax.dynamic_update_slice_in_dim(of_keys[name], old + dx, tile.start, axis=1)
      of_keys = of_keys | {name: new}
  d_terms = of_block.pop("d_terms", None)
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
    sums = jnp.concatenate([of_block.pop("diagonal_sums"), *of_all], axis=1)
    of_block["d_value_table"] = jnp.einsum("NRT,NTH->NRH", sums, block["d_output"])
  return of_block, of_keys


def _differentiate_tile(
  block: Arrays, tile: Tile, terms: Float[Array, "#N R #T"] | None
) -> tuple[Arrays, Arrays]:
  """Returns a tile's terms of the gradients of the block's own arrays, and of its keys.

  In place of the tables' gradients it returns "d_terms", by row, and the weights' "diagonal_sums".
  """
  query, d_output = block["query"], block["d_output"]
  d_sums = _project(block, "value_table", "d_output")
  logits = _logits(block, tile, terms)
  weights = jnp.exp(logits - block["maximum"][:, None])
  kept = _drop(block, tile, weights)
  if d_sums is None:
    d_kept = _scores(tile.value, d_output)
  else:
    d_kept = _scores(tile.value, d_output, d_sums[:, -2])
    d_kept = _add_by_row(tile, d_kept, d_sums[:, :-1]) + d_sums[:, -1:]
  d_logits = weights * (_drop(block, tile, d_kept) - block["delta"][:, None])
  if (soft_cap := tile.plan.soft_cap) is not None:
    d_logits *= jnp.maximum(1 - (logits / soft_cap) ** 2, 0)  # 0 also for hidden pairs
  d_query, right = _sum_over_keys(tile.key, d_logits, query.shape[-1])
  of_own = dict(d_query=d_query)
  if terms is not None:
    of_own["d_terms"] = _sum_by_row(tile, d_logits, right)
  if d_sums is not None:
    of_own["diagonal_sums"] = _sum_by_diagonal(tile, kept)
  for name in _added(block, tile):
    pairs = lambda x, name=name: jnp.broadcast_to(_added({name: x}, tile)[name], d_logits.shape)
    (of_own[f"d_{name}"],) = jax.linear_transpose(pairs, block[name])(d_logits)
  return of_own, dict(
    d_key=jnp.einsum("NST,NTH->NSH", d_logits, query),
    d_value=jnp.einsum("NST,NTH->NSH", kept, d_output),
  )


# Terms and sums by row of the band.


def _project(block: Arrays, table: str, queries: str) -> Float[Array, "N R T"] | None:
  """Computes the products of a table's rows and the block's queries; None without that table."""
  if table not in block:
    return None
  return jnp.einsum("NRH,NTH->NRT", block[table], block[queries])


def _terms(block: Arrays) -> Float[Array, "#N R #T"] | None:
  """Returns the logits of the block's queries by row of the band; None if no relation has any."""
  terms = [_project(block, *pair) for pair in _PRODUCTS.items() if pair[0] in block]
  if "bias_table" in block:
    terms.append(block["bias_table"][..., None])
  if "row_logits" in block:
    terms.append(block["row_logits"])
  return functools.reduce(jnp.add, terms) if terms else None


def _scores(
  keys: Float[Array, "N S W"],
  queries: Float[Array, "N T H"],
  right: Float[Array, "#N #T"] | float = 0.0,
) -> Float[Array, "N S T"]:
  """Computes k_j . q_i, plus `right` for keys of the first of two copies."""
  if keys.shape[2] > queries.shape[2]:
    right = jnp.broadcast_to(jnp.asarray(right, queries.dtype), queries.shape[:2])
    queries = jnp.concatenate([queries, right[..., None]], axis=-1)
  return jnp.einsum("NSW,NTW->NST", keys, queries)


def _sum_over_keys(
  keys: Float[Array, "N S W"], weights: Float[Array, "N S T"], width: int
) -> tuple[Float[Array, "N T H"], Float[Array, "N T"]]:
  """Computes sum_j w_ij k_j, and the sum of the w_ij over the first of two copies."""
  sums_NWT = jnp.einsum("NSW,NST->NWT", keys, weights)
  return sums_NWT[:, :width].swapaxes(1, 2), sums_NWT[:, width:].sum(1)


def _add_by_row(
  tile: Tile, x: Float[Array, "N S T"], rows: Float[Array, "#N R #T"]
) -> Float[Array, "N S T"]:
  """Adds to each near pair the number of its row of the band."""
  if not tile.is_near:
    return x
  if rows.shape[2] == 1:
    # The same for all queries: numbers so few that a look-up for every pair costs two sums.
    with_left = jnp.pad(rows[..., 0], [(0, 0), (1, 0)])
    row = jnp.clip(tile.distances - tile.plan.first, -1, tile.plan.num_diagonals)
    return x + with_left.at[:, row + 1].get(mode="promise_in_bounds")
  # Only the diagonals are looked up: on a CPU a look-up costs as much as ten sums.
  indices = _diagonal_indices(tile, x.shape)
  x = x.reshape(-1).at[indices].add(rows[:, :-1], mode="drop").reshape(x.shape)
  return x + jnp.where(tile.is_right, rows[:, -1:], 0)


def _sum_by_row(
  tile: Tile, x: Float[Array, "N S T"], right: Float[Array, "N T"]
) -> Float[Array, "N R T"]:
  """Returns the sums of x over the keys of each row of the band, `right` those over far keys."""
  if tile.is_near:
    right = jnp.where(tile.is_right, x, 0).sum(1)
  return jnp.concatenate([_sum_by_diagonal(tile, x), right[:, None]], axis=1)


def _sum_by_diagonal(tile: Tile, x: Float[Array, "N S T"]) -> Float[Array, "N D T"]:
  if not tile.is_near:
    return jnp.zeros((len(x), tile.plan.num_diagonals, tile.plan.block), x.dtype)
  return x.reshape(-1).at[_diagonal_indices(tile, x.shape)].get(mode="fill", fill_value=0)


def _diagonal_indices(tile: Tile, shape: tuple[int, ...]) -> Int[Array, "N D T"]:
  """Returns the flat index in [N, S, T] of each diagonal's key, out of bounds if there is none."""
  plan, (heads, size, block) = tile.plan, shape
  columns = tile.rows[None] + plan.first + jnp.arange(plan.num_diagonals)[:, None]
  keys = (columns - tile.columns[0]) % plan.num_keys
  in_tile = (columns >= 0) & (columns < plan.num_keys) & (keys < size)
  # Heads are part of the index: a look-up batched over them is slower on a CPU.
  head_N11, query_11T = jnp.ogrid[:heads, :1, :block][::2]
  indices_NDT = (size * head_N11 + keys[None]) * block + query_11T
  return jnp.where(in_tile[None], indices_NDT, heads * size * block)


# Logits, masks and dropout.


def _logits(
  block: Arrays, tile: Tile, terms: Float[Array, "#N R #T"] | None
) -> Float[Array, "N S T"]:
  """Computes logits with the relative terms by row of the band; very low ones for hidden pairs."""
  right = 0.0 if terms is None else terms[:, -1]
  # In causal attention LOWEST on the right hides far keys; `_visible` hides near ones.
  logits = _scores(tile.key, block["query"], masks.LOWEST if tile.plan.is_causal else right)
  if terms is not None:
    logits = _add_by_row(tile, logits, terms)
  for term in _added(block, tile).values():
    logits += term
  logits = masks.cap(logits, tile.plan.soft_cap)
  visible = _visible(block, tile)
  return logits if visible is None else jnp.where(visible, logits, masks.LOWEST)


def _added(arrays: Arrays, tile: Tile) -> dict[str, Float[Array, "#N #S #T"]]:
  """Returns the terms of a tile's logits that are linear in one array and have no row, by name."""
  terms = dict(
    left_logits=lambda x: x[:, None],
    right_logits=lambda x: jnp.where(tile.is_right, x[:, tile.columns, None], 0),
    slopes=lambda x: -x[:, None, None] * jnp.abs(tile.distances),
    bias=lambda x: _slice_keys(x, tile),
  )
  return {name: term(arrays[name]) for name, term in terms.items() if name in arrays}


def _visible(block: Arrays, tile: Tile) -> Bool[Array, "... #S #T"] | None:
  """Returns the mask of a tile, None if all are visible; not of causal far keys on the right."""
  names = "mask", "real_queries", "real_keys"
  visible = [_slice_keys(block[name], tile) for name in names if name in block]
  if "query_segments" in block:
    visible.append(block["key_segments"][tile.columns, None] == block["query_segments"][None])
  if tile.plan.is_causal and tile.is_near:
    visible.append(tile.distances <= 0)
  if tile.plan.window is not None:
    left, right = tile.plan.window
    visible += [tile.distances >= -left, tile.distances <= right]
  return masks.combine(*visible)


def _slice_keys(x: Shaped[Array, "#N #T #C"], tile: Tile) -> Shaped[Array, "#N #S #T"]:
  """Returns the tile's slice of an array over all pairs, queries last."""
  x_NCT = x.swapaxes(1, 2)
  return x_NCT if x_NCT.shape[1] == 1 else x_NCT[:, tile.columns]


def _drop(block: Arrays, tile: Tile, x: Float[Array, "N S T"]) -> Float[Array, "N S T"]:
  """Applies dropout: zero where a weight is dropped, elsewhere divided by 1 - rate."""
  if "seeds" not in block:
    return x
  rate, seeds = tile.plan.dropout_rate, block["seeds"][:, None, None]
  kept = dropout.keep(seeds, tile.rows[None, None], tile.columns[None, :, None], rate)
  return jnp.where(kept, x / (1 - rate), 0)
