"""Lookups by table row within a tile of pairs, [S, T], of one head.

A band of diagonals has a table row per diagonal; see band.py. The numbers to look up
are [T, R], one for each query and row, or [S, R] if `by_key`, one for each key and row.
`offset` is the position of the tile's first query minus the position of its first key.
So key s and query t have distance s - t - offset.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.typing import Array, ArrayLike, Bool, Float, Int


class Band(NamedTuple):
  """Describes a band of diagonals.

  Its first table row is for pairs left of the band, the last row for pairs right of it.
  The rows in between have one diagonal each.
  """

  first: int  # the distance j - i of the first diagonal
  num_diagonals: int
  has_right: bool  # whether queries may attend to keys right of the band

  @property
  def num_rows(self) -> int:
    return self.num_diagonals + 2

  @property
  def end(self) -> int:
    """Returns the first distance right of the band."""
    return self.first + self.num_diagonals


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _add_rows(
  x: Float[Array, "S T"],
  rows: Float[Array, "_ R"],
  offset: Int[Array, ""],
  band: Band,
  by_key: bool,
) -> Float[Array, "S T"]:
  """Adds rows[t, r], or rows[s, r] if `by_key`, to x[s, t]; r is the pair's table row.

  The derivative is written by hand, since JAX's would add gradients one by one, slowly.
  """
  axis = 1 if by_key else 0
  left = jnp.expand_dims(rows[:, 0], axis)
  right = jnp.expand_dims(rows[:, -1], axis)

  def add_all(x: Array) -> Array:
    if band.num_diagonals:
      x = _add_diagonals(x, rows[:, 1:-1], offset, band, by_key)
    distances = _distances(x, offset)
    sides = jnp.where(distances < band.first, left, 0)
    if band.has_right:
      sides = jnp.where(distances >= band.end, right, sides)
    return x + sides

  def add_side(x: Array) -> Array:
    return x + jnp.where(is_left, left, right)

  is_left, is_right = find_side(x.shape, offset, band)
  return jax.lax.cond(is_left | is_right, add_side, add_all, x)


def _sum_by_row(
  x: Float[Array, "S T"], offset: Int[Array, ""], band: Band, by_key: bool
) -> Float[Array, "_ R"]:
  """Sums x by table row, for each query, or for each key if `by_key`."""
  axis = 1 if by_key else 0
  total = x.sum(axis)

  def sum_all(x: Array) -> Array:
    diagonals = _diagonals(x, offset, band, by_key)
    right = jnp.zeros_like(total)
    if band.has_right:
      right = jnp.where(_distances(x, offset) >= band.end, x, 0).sum(axis)
    # Not the rest of the total, which might not be 0 where no pair is on the left.
    left = jnp.where(_distances(x, offset) < band.first, x, 0).sum(axis)
    return jnp.concatenate([left[:, None], diagonals, right[:, None]], axis=1)

  def set_side(x: Array) -> Array:
    rows = jnp.zeros((len(total), band.num_rows), x.dtype)
    return rows.at[:, jnp.where(is_left, 0, -1)].set(total)

  is_left, is_right = find_side(x.shape, offset, band)
  return jax.lax.cond(is_left | is_right, set_side, sum_all, x)


def _add_rows_forward(
  x: Array, rows: Array, offset: Array, band: Band, by_key: bool
) -> tuple[Array, Array]:
  return _add_rows(x, rows, offset, band, by_key), offset


def _add_rows_backward(
  band: Band, by_key: bool, offset: ArrayLike, d_x: Array
) -> tuple[Array, Array, None]:
  # JAX makes a NumPy array of a constant offset.
  return d_x, _sum_by_row(d_x, jnp.asarray(offset), band, by_key), None


_add_rows.defvjp(_add_rows_forward, _add_rows_backward)

# Over all heads and sequences. If all have one offset, `cond` runs one branch only.
add_rows = jnp.vectorize(_add_rows, excluded={3, 4}, signature="(s,t),(q,r),()->(s,t)")
sum_by_row = jnp.vectorize(_sum_by_row, excluded={2, 3}, signature="(s,t),()->(q,r)")


def find_side(
  tile: tuple[int, ...], offset: Int[Array, ""], band: Band
) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
  """Returns whether a tile is entirely left of the band, and whether entirely right."""
  num_keys, num_queries = tile
  # Distances of padding may not fit in 32 bits, so offsets are compared.
  return offset > num_keys - 1 - band.first, offset <= 1 - num_queries - band.end


def _distances(x: Float[Array, "S T"], offset: Int[Array, ""]) -> Int[Array, "S T"]:
  num_keys, num_queries = x.shape
  return jnp.arange(num_keys)[:, None] - jnp.arange(num_queries)[None] - offset


def _add_diagonals(
  x: Float[Array, "S T"],
  numbers: Float[Array, "_ D"],
  offset: Int[Array, ""],
  band: Band,
  by_key: bool,
) -> Float[Array, "S T"]:
  """Adds the numbers of all D diagonals to x, key by key.

  For each key, the queries on the band are consecutive, so their numbers are added as
  one window. On a CPU this takes a tenth of the time of adding them one by one.
  """
  (num_keys, num_queries), num_diagonals = x.shape, band.num_diagonals
  num_on_band = min(num_queries + num_diagonals - 1, num_keys)
  width = min(num_diagonals, num_queries)
  first_key = jnp.clip(offset + band.first, 0, num_keys - num_on_band)
  key = first_key + jnp.arange(num_on_band)
  first_query = jnp.clip(key - offset - band.end + 1, 0, num_queries - width)
  start = key * num_queries + first_query
  key, query = key[:, None], first_query[:, None] + jnp.arange(width)[None]
  diagonal = key - query - offset - band.first
  is_on_band = (diagonal >= 0) & (diagonal < num_diagonals)
  token = key if by_key else query
  terms = numbers[token, jnp.clip(diagonal, 0, num_diagonals - 1)]
  terms = jnp.where(is_on_band, terms, 0)
  one_window_per_key = jax.lax.ScatterDimensionNumbers((1,), (), (0,))
  flat = jax.lax.scatter_add(
    x.reshape(-1), start[:, None], terms, one_window_per_key, mode="promise_in_bounds"
  )
  return flat.reshape(x.shape)


def _diagonals(
  x: Float[Array, "S T"], offset: Int[Array, ""], band: Band, by_key: bool
) -> Float[Array, "_ D"]:
  """Returns the entry of x on each of D diagonals, for each query, or key if `by_key`.

  It is 0 where the tile has no such pair.
  """
  num_keys, num_queries = x.shape
  # From the index of a query to the index of its key on each diagonal.
  steps = offset + band.first + jnp.arange(band.num_diagonals)[None]
  if by_key:
    key = jnp.arange(num_keys)[:, None]
    other = query = key - steps
  else:
    query = jnp.arange(num_queries)[:, None]
    other = key = query + steps
  is_pair = (other >= 0) & (other < (num_queries if by_key else num_keys))
  index = jnp.where(is_pair, key * num_queries + query, x.size)
  return x.reshape(-1).at[index].get(mode="fill", fill_value=0)
