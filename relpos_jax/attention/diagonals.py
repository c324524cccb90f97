"""The diagonals of a tile of pairs, [S, T] of one head, that look up a row of a band.

`place` is the distance from the tile's first key to its first query: a pair's distance
is s - t - place. The numbers of a band are those of each query, or `of_keys`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.typing import Array, Bool, Float, Int


class Band(NamedTuple):
  """Rows in the order of distances: the left side, a row a diagonal, the right side."""

  first: int  # the distance j - i of the first diagonal
  num_diagonals: int
  has_right: bool  # whether queries may attend to keys right of the band

  @property
  def num_rows(self) -> int:
    return self.num_diagonals + 2

  @property
  def end(self) -> int:
    """Returns the distance past the last diagonal, the first of the right side."""
    return self.first + self.num_diagonals


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _add_rows(
  x: Float[Array, "S T"],
  rows: Float[Array, "_ R"],
  place: Int[Array, ""],
  band: Band,
  of_keys: bool,
) -> Float[Array, "S T"]:
  """Adds to each pair the number of its row, those of its query or those of its key.

  JAX's derivative would add the gradients of numbers one by one, which is slow.
  """
  left, *_, right = jnp.expand_dims(rows.T, 2 if of_keys else 1)

  def on_band(x: Array) -> Array:
    if band.num_diagonals:
      x = _add_diagonals(x, rows[:, 1:-1], place, band, of_keys)
    distances = _distances(x, place)
    sides = jnp.where(distances < band.first, left, 0)
    if band.has_right:
      sides = jnp.where(distances >= band.end, right, sides)
    return x + sides

  def beside(x: Array) -> Array:
    return x + jnp.where(is_left, left, right)

  is_left, is_right = _is_beside(x, place, band)
  return jax.lax.cond(is_left | is_right, beside, on_band, x)


def _sum_by_row(
  x: Float[Array, "S T"], place: Int[Array, ""], band: Band, of_keys: bool
) -> Float[Array, "_ R"]:
  """Sums x by row, for each query or for each key."""
  axis = 1 if of_keys else 0
  total = x.sum(axis)

  def on_band(x: Array) -> Array:
    diagonals = _diagonals(x, place, band, of_keys)
    right = jnp.zeros_like(total)
    if band.has_right:
      right = jnp.where(_distances(x, place) >= band.end, x, 0).sum(axis)
    left = total - diagonals.sum(1) - right
    return jnp.concatenate([left[:, None], diagonals, right[:, None]], axis=1)

  def beside(x: Array) -> Array:
    rows = jnp.zeros((len(total), band.num_rows), x.dtype)
    return rows.at[:, jnp.where(is_left, 0, -1)].set(total)

  is_left, is_right = _is_beside(x, place, band)
  return jax.lax.cond(is_left | is_right, beside, on_band, x)


def _add_rows_forward(
  x: Array, rows: Array, place: Array, band: Band, of_keys: bool
) -> tuple[Array, Array]:
  return _add_rows(x, rows, place, band, of_keys), place


def _add_rows_backward(
  band: Band, of_keys: bool, place: Array, d_x: Array
) -> tuple[Array, Array, None]:
  return d_x, _sum_by_row(d_x, place, band, of_keys), None


_add_rows.defvjp(_add_rows_forward, _add_rows_backward)

# For all heads and sequences. Where these are at one place, `cond` stays one.
add_rows = jnp.vectorize(_add_rows, excluded={3, 4}, signature="(s,t),(q,r),()->(s,t)")
sum_by_row = jnp.vectorize(_sum_by_row, excluded={2, 3}, signature="(s,t),()->(q,r)")


def _is_beside(
  x: Float[Array, "S T"], place: Int[Array, ""], band: Band
) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
  """Returns whether all pairs are left of the band, and whether all are right of it."""
  num_keys, num_queries = x.shape
  return num_keys - 1 - place < band.first, 1 - num_queries - place >= band.end


def _distances(x: Float[Array, "S T"], place: Int[Array, ""]) -> Int[Array, "S T"]:
  num_keys, num_queries = x.shape
  return jnp.arange(num_keys)[:, None] - jnp.arange(num_queries)[None] - place


def _add_diagonals(
  x: Float[Array, "S T"],
  numbers: Float[Array, "_ D"],
  place: Int[Array, ""],
  band: Band,
  of_keys: bool,
) -> Float[Array, "S T"]:
  """Adds the numbers of each diagonal.

  The queries on the band of a key follow one another. Their numbers are added at once,
  which on a CPU takes a tenth of the time of adding them one by one.
  """
  (num_keys, num_queries), num_diagonals = x.shape, band.num_diagonals
  num_near = min(num_queries + num_diagonals - 1, num_keys)
  width = min(num_diagonals, num_queries)
  key = jnp.clip(place + band.first, 0, num_keys - num_near) + jnp.arange(num_near)
  first_query = jnp.clip(key - place - band.end + 1, 0, num_queries - width)
  start = key * num_queries + first_query
  key, query = key[:, None], first_query[:, None] + jnp.arange(width)[None]
  diagonal = key - query - place - band.first
  is_near = (diagonal >= 0) & (diagonal < num_diagonals)
  token = key if of_keys else query
  added = numbers[token, jnp.clip(diagonal, 0, num_diagonals - 1)]
  added = jnp.where(is_near, added, 0)
  one_window_a_key = jax.lax.ScatterDimensionNumbers((1,), (), (0,))
  flat = jax.lax.scatter_add(
    x.reshape(-1), start[:, None], added, one_window_a_key, mode="promise_in_bounds"
  )
  return flat.reshape(x.shape)


def _diagonals(
  x: Float[Array, "S T"], place: Int[Array, ""], band: Band, of_keys: bool
) -> Float[Array, "_ D"]:
  """Returns x on each diagonal, of each query or of each key; 0 if there is no pair."""
  num_keys, num_queries = x.shape
  steps = (
    place + band.first + jnp.arange(band.num_diagonals)[None]
  )  # from a query to its key
  if of_keys:
    key = jnp.arange(num_keys)[:, None]
    other = query = key - steps
  else:
    query = jnp.arange(num_queries)[:, None]
    other = key = query + steps
  is_pair = (other >= 0) & (other < (num_queries if of_keys else num_keys))
  index = jnp.where(is_pair, key * num_queries + query, x.size)
  return x.reshape(-1).at[index].get(mode="fill", fill_value=0)
