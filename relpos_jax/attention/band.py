"""The band of relations by distance: the diagonals whose pairs look up a row.

A relation with clipped distances adds a number t_i(r) to a logit of query i, by the row
r of its pair. Only the diagonals within the table need a lookup: the *band*. Left of it
all logits of a query get the same number t_i(0), right of it t_i(-1). Such a number may
be as low as -inf, which masks its side. So it is never subtracted from the logits of
other pairs, where float32 would lose their digits.

Values: a query's output adds sum_r P_ir w_r, with P_ir its weight on row r.

Several relations share one band, from the leftmost of their rows to the rightmost. Rows
are in the order of distances: the left side, a row for each diagonal, the right side.
`KeyBias` has numbers of each key instead, and `LinearBias` no rows.
"""

import functools

import jax
import jax.numpy as jnp

from relpos_jax.attention.by_distance import ByDistance, LinearBias
from relpos_jax.attention.inputs import Inputs, is_symbolic
from relpos_jax.typing import Array, Bool, Float, Int

FAR = 2**30  # a distance beyond all keys


def unsupported(inputs: Inputs) -> str | None:
  """Returns why this call has no band, or None if it has one."""
  for relation in inputs.relations:
    if not isinstance(relation, ByDistance | LinearBias):
      return f"it takes no {type(relation).__name__}"
  if not inputs.linear_positions:
    return "positions are given; if they are consecutive, give query_offset instead"
  if is_symbolic(inputs.query, inputs.key):
    return "a dimension is symbolic; it needs numbers"
  return None


def distances(inputs: Inputs) -> tuple[int, int]:
  """Returns the distances of the left side's row and of the right side's."""
  low, high = 0, 0
  for relation in _by_distance(inputs):
    # The distances beyond which all pairs to the left, and to the right, share a row.
    beyond = relation.beyond == "zero"
    left, right = relation.reach
    low, high = min(low, -left - beyond), max(high, right + beyond)
  offset = inputs.query_offset
  if isinstance(offset, int):  # the distances that occur; distance 0 stays
    low = max(low, min(-inputs.query.shape[1] - offset, 0))
    high = min(high, max(inputs.key.shape[1] - offset, 0))
  if inputs.window is not None:  # a side that the window masks needs no row of its own
    left, right = inputs.window
    low = -left - 1 if low <= -left else low
    high = right + 1 if high >= right else high
  if inputs.is_causal:  # distance 0 is on the band, and all right of it is masked
    high = 1
  return low, max(high, low + 1)


def logits_by_row(
  inputs: Inputs, of_keys: bool = False
) -> Float[Array, "#B #N #T R"] | None:
  """Returns the logits that relations add, by row, for each query or for each key.

  None if they add none.
  """
  terms = []
  for relation in _by_distance(inputs):
    if relation.is_by_key != of_keys:
      continue
    numbers = _on_rows(inputs, relation).project(inputs.queries, inputs.keys)
    if numbers is not None and relation.is_scaled:
      numbers *= jnp.asarray(inputs.scale, numbers.dtype)
    if numbers is not None:
      terms.append(numbers)
  return functools.reduce(jnp.add, terms) if terms else None


def slopes(inputs: Inputs) -> Float[Array, "1 1 N"] | None:
  """Returns the slopes of all linear biases; None if there are none."""
  terms = [x.slopes for x in inputs.relations if isinstance(x, LinearBias)]
  return functools.reduce(jnp.add, terms)[None, None] if terms else None


def value_table(inputs: Inputs) -> Float[Array, "R #N V"] | None:
  """Returns the sum of the tables for values, by row; None if there are none."""
  terms = []
  for relation in _by_distance(inputs):
    table = getattr(_on_rows(inputs, relation), "value", None)
    if table is not None:
      terms.append(table)
  return functools.reduce(jnp.add, terms) if terms else None


def _by_distance(inputs: Inputs) -> list[ByDistance]:
  return [x for x in inputs.relations if isinstance(x, ByDistance)]


def _on_rows(inputs: Inputs, relation: ByDistance) -> ByDistance:
  """Returns a relation whose tables have the rows of the band."""
  low, high = distances(inputs)
  labels = relation.labels(jnp.zeros(1, jnp.int32), jnp.arange(low, high + 1))
  return relation.with_rows(labels[0], left=-low)


# A head's block: pairs [S, T], and the distance `place` from its first key to its first
# query. A pair's distance is s - t - place, and `first` is that of the first diagonal.


def add_rows(
  x: Float[Array, "S T"],
  rows: Float[Array, "_ R"],
  place: Int[Array, ""],
  of_keys: bool,
  first: int,
  has_right: bool,
) -> Float[Array, "S T"]:
  """Adds to each pair the number of its row, those of its query or those of its key."""
  num_diagonals = rows.shape[1] - 2
  is_left, is_right = _is_beside(x, num_diagonals, place, first)
  left, *_, right = jnp.expand_dims(rows.T, 2 if of_keys else 1)

  def on_band(x: Array) -> Array:
    if num_diagonals:
      x = _add_diagonals(x, rows[:, 1:-1], place, of_keys, first)
    distances = _distances_of(x, place)
    sides = jnp.where(distances < first, left, 0)
    if has_right:
      sides = jnp.where(distances >= first + num_diagonals, right, sides)
    return x + sides

  def beside(x: Array) -> Array:
    return x + jnp.where(is_left, left, right)

  return jax.lax.cond(is_left | is_right, beside, on_band, x)


def sum_by_row(
  x: Float[Array, "S T"],
  place: Int[Array, ""],
  of_keys: bool,
  num_rows: int,
  first: int,
  has_right: bool,
) -> Float[Array, "_ R"]:
  """Sums x by row, for each query or for each key."""
  num_diagonals, axis = num_rows - 2, 1 if of_keys else 0
  is_left, is_right = _is_beside(x, num_diagonals, place, first)
  total = x.sum(axis)

  def on_band(x: Array) -> Array:
    diagonals = _diagonals(x, num_diagonals, place, of_keys, first)
    right = jnp.zeros_like(total)
    if has_right:
      is_right = _distances_of(x, place) >= first + num_diagonals
      right = jnp.where(is_right, x, 0).sum(axis)
    left = total - diagonals.sum(1) - right
    return jnp.concatenate([left[:, None], diagonals, right[:, None]], axis=1)

  def beside(x: Array) -> Array:
    rows = jnp.zeros((len(total), num_rows), x.dtype)
    return rows.at[:, jnp.where(is_left, 0, -1)].set(total)

  return jax.lax.cond(is_left | is_right, beside, on_band, x)


def _is_beside(
  x: Float[Array, "S T"], num_diagonals: int, place: Int[Array, ""], first: int
) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
  """Returns whether all pairs are left of the band, and whether all are right of it."""
  num_keys, num_queries = x.shape
  nearest, farthest = num_keys - 1 - place, 1 - num_queries - place
  return nearest < first, farthest >= first + num_diagonals


def _distances_of(x: Float[Array, "S T"], place: Int[Array, ""]) -> Int[Array, "S T"]:
  num_keys, num_queries = x.shape
  return jnp.arange(num_keys)[:, None] - jnp.arange(num_queries)[None] - place


def _add_diagonals(
  x: Float[Array, "S T"],
  numbers: Float[Array, "_ D"],
  place: Int[Array, ""],
  of_keys: bool,
  first: int,
) -> Float[Array, "S T"]:
  """Adds the numbers of each diagonal.

  The queries on the band of a key follow one another. Their numbers are added at once,
  which on a CPU takes a tenth of the time of adding them one by one.
  """
  (num_keys, num_queries), num_diagonals = x.shape, numbers.shape[1]
  num_near = min(num_queries + num_diagonals - 1, num_keys)
  width = min(num_diagonals, num_queries)
  key = jnp.clip(place + first, 0, num_keys - num_near) + jnp.arange(num_near)
  first_query = key - place - first - num_diagonals + 1
  first_query = jnp.clip(first_query, 0, num_queries - width)
  start = key * num_queries + first_query
  key, query = key[:, None], first_query[:, None] + jnp.arange(width)[None]
  diagonal = key - query - place - first
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
  x: Float[Array, "S T"],
  num_diagonals: int,
  place: Int[Array, ""],
  of_keys: bool,
  first: int,
) -> Float[Array, "_ D"]:
  """Returns x on each diagonal, of each query or of each key; 0 if there is no pair."""
  num_keys, num_queries = x.shape
  steps = place + first + jnp.arange(num_diagonals)[None]  # from a query to its key
  if of_keys:
    key = jnp.arange(num_keys)[:, None]
    query = key - steps
    is_pair = (query >= 0) & (query < num_queries)
  else:
    query = jnp.arange(num_queries)[:, None]
    key = query + steps
    is_pair = (key >= 0) & (key < num_keys)
  index = jnp.where(is_pair, key * num_queries + query, x.size)
  return x.reshape(-1).at[index].get(mode="fill", fill_value=0)
