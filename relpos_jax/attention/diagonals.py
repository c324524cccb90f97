"""The lookup by table row within a tile of pairs, [S, T] of one head.

A band of diagonals has a table row per diagonal; see band.py. Numbers to look up are
[T, R], one per query and row, or [S, R] if `by_key`. `offset` is the position of the
tile's first query less the position of its first key. So key s and query t have
distance s - t - offset.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.typing import Array, Bool, Float, Int


class Band(NamedTuple):
  """Describes a band. Its rows: the left side, one per diagonal, the right side."""

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
  """Adds to x[s, t] the entry for its row r: rows[t, r], or rows[s, r] if `by_key`.

  It has a derivative of its own, since JAX would add the gradients one by one, slowly.
  """
  left, *_, right = jnp.expand_dims(rows.T, 2 if by_key else 1)
  is_left, is_right = _find_sides(x, offset, band)
  x += jnp.where(is_left, left, jnp.where(is_right, right, 0))

  def add_diagonals(x: Array) -> Array:
    return _add_diagonals(x, rows[:, 1:-1], offset, band, by_key)

  return jax.lax.cond(_is_beside(x, offset, band), lambda x: x, add_diagonals, x)


def _sum_by_row(
  x: Float[Array, "S T"], offset: Int[Array, ""], band: Band, by_key: bool
) -> Float[Array, "_ R"]:
  """Sums x by row, for each query or for each key."""
  axis = 1 if by_key else 0
  is_left, is_right = _find_sides(x, offset, band)
  left = jnp.where(is_left, x, 0).sum(axis)
  right = jnp.where(is_right, x, 0).sum(axis)

  def no_diagonals(x: Array) -> Array:
    return jnp.zeros((len(left), band.num_diagonals), x.dtype)

  def read_diagonals(x: Array) -> Array:
    return _diagonals(x, offset, band, by_key)

  is_beside = _is_beside(x, offset, band)
  diagonals = jax.lax.cond(is_beside, no_diagonals, read_diagonals, x)
  return jnp.concatenate([left[:, None], diagonals, right[:, None]], axis=1)


def _add_rows_forward(
  x: Array, rows: Array, offset: Array, band: Band, by_key: bool
) -> tuple[Array, Array]:
  return _add_rows(x, rows, offset, band, by_key), offset


def _add_rows_backward(
  band: Band, by_key: bool, offset: Array, d_x: Array
) -> tuple[Array, Array, None]:
  return d_x, _sum_by_row(d_x, offset, band, by_key), None


_add_rows.defvjp(_add_rows_forward, _add_rows_backward)

# Over all heads and sequences. If all have one offset, `cond` runs one branch only.
add_rows = jnp.vectorize(_add_rows, excluded={3, 4}, signature="(s,t),(q,r),()->(s,t)")
sum_by_row = jnp.vectorize(_sum_by_row, excluded={2, 3}, signature="(s,t),()->(q,r)")


def _is_beside(
  x: Float[Array, "S T"], offset: Int[Array, ""], band: Band
) -> Bool[Array, ""]:
  """Returns whether all pairs are left of the band, or all are right of it."""
  num_keys, num_queries = x.shape
  last, first = num_keys - 1 - offset, 1 - num_queries - offset
  return (last < band.first) | (first >= band.end)


def _find_sides(
  x: Float[Array, "S T"], offset: Int[Array, ""], band: Band
) -> tuple[Bool[Array, "S T"], Bool[Array, "S T"]]:
  """Returns which pairs are left of the band, and which are right of it."""
  num_keys, num_queries = x.shape
  distances = jnp.arange(num_keys)[:, None] - jnp.arange(num_queries)[None] - offset
  return distances < band.first, distances >= band.end


def _add_diagonals(
  x: Float[Array, "S T"],
  numbers: Float[Array, "_ D"],
  offset: Int[Array, ""],
  band: Band,
  by_key: bool,
) -> Float[Array, "S T"]:
  """Adds the entries of the diagonals, key by key.

  The queries whose pair with a key is on the band are consecutive. On a CPU, adding
  their entries as one window takes a tenth of the time of adding them one by one.
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
  """Returns x on each diagonal, per query or per key; 0 where there is no pair."""
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
