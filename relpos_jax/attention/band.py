"""The band of relations by distance: the diagonals whose pairs look up a row.

A relation with clipped distances adds a number t_i(r) to a logit of query i, by the row
r of its pair. Only the diagonals within the table need a lookup: the *band*. Left of it
all logits of a query get the same number t_i(0), right of it t_i(-1). Such a number may
be as low as -inf, which masks its side. So it is never subtracted from the logits of
other pairs, where float32 would lose their digits.

Values: a query's output adds sum_r P_ir w_r, with P_ir its weight on row r.

Several relations share one band, from the leftmost of their rows to the rightmost. Rows
are in the order of distances: the left side, a row for each diagonal, the right side.
`KeyBias` has numbers of each key, and `LinearBias` no rows.
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


def logits_by_row(inputs: Inputs) -> Float[Array, "#B #N #T R"] | None:
  """Returns the logits that relations add, by row; None if they add none."""
  terms = []
  for relation in _by_distance(inputs):
    numbers = _numbers(inputs, relation)
    if relation.is_by_key:
      numbers = _by_query(inputs, numbers)
    if numbers is not None:
      terms.append(numbers)
  return functools.reduce(jnp.add, terms) if terms else None


def terms_of_keys(inputs: Inputs) -> tuple[Array | None, Array | None]:
  """Returns what each key [B, N, S] adds to its logits left and right of the band."""
  terms = []
  for relation in _by_distance(inputs):
    if relation.is_by_key:
      terms.append(_numbers(inputs, relation))
  if not terms:
    return None, None
  total = functools.reduce(jnp.add, terms)
  return total[..., 0], total[..., -1]


def slopes(inputs: Inputs) -> Float[Array, "1 N 1"] | None:
  """Returns the slopes of all linear biases; None if there are none."""
  terms = [x.slopes for x in inputs.relations if isinstance(x, LinearBias)]
  return functools.reduce(jnp.add, terms)[None, :, None] if terms else None


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


def _numbers(inputs: Inputs, relation: ByDistance) -> Float[Array, "#B #N #T R"] | None:
  """Returns a relation's numbers by row, of each query, or of each key by a `KeyBias`."""
  numbers = _on_rows(inputs, relation).project(inputs.queries, inputs.keys)
  if numbers is not None and relation.is_scaled:
    numbers *= jnp.asarray(inputs.scale, numbers.dtype)
  return numbers


def _by_query(inputs: Inputs, numbers: Float[Array, "B N S R"]) -> Array:
  """Returns numbers by query [B, N, T, R], each of the key on the row's diagonal.

  The sides are 0: there each query has many keys.
  """
  low, high = distances(inputs)
  rows = jnp.arange(low, high + 1)
  first_key = inputs.key_positions[:, :1, None]
  keys_BTR = inputs.query_positions[..., None] + rows - first_key
  is_on_diagonal = (rows > low) & (rows < high)
  num_keys = numbers.shape[2]
  has_key = is_on_diagonal & (keys_BTR >= 0) & (keys_BTR < num_keys)
  keys_BTR = jnp.where(has_key, keys_BTR, num_keys)

  def of_sequence(numbers_NSR: Array, keys_TR: Array) -> Array:
    columns = jnp.arange(len(rows))
    return numbers_NSR.at[:, keys_TR, columns].get(mode="fill", fill_value=0)

  if len(keys_BTR) == 1:
    return jax.vmap(of_sequence, (0, None))(numbers, keys_BTR[0])
  return jax.vmap(of_sequence)(numbers, keys_BTR)


# A head's block: pairs [S, T], and the distance `place` from its first key to its first
# query. A pair's distance is s - t - place, and `first` is that of the first diagonal.


def add_rows(
  x: Float[Array, "S T"],
  rows: Float[Array, "T R"],
  place: Int[Array, ""],
  first: int,
  has_right: bool,
) -> Float[Array, "S T"]:
  """Adds to each pair the number of its row."""
  num_diagonals = rows.shape[1] - 2
  is_left, is_right = _is_beside(x, num_diagonals, place, first)

  def on_band(x: Array) -> Array:
    if num_diagonals:
      x = _add_diagonals(x, rows[:, 1:-1], place, first)
    distances = _distances_of(x, place)
    sides = jnp.where(distances < first, rows[:, 0], 0)
    if has_right:
      # The difference: the sum of `first` and the number might be beyond 32 bits.
      sides = jnp.where(distances - first >= num_diagonals, rows[:, -1], sides)
    return x + sides

  def beside(x: Array) -> Array:
    return x + jnp.where(is_left, rows[:, 0], rows[:, -1])

  return jax.lax.cond(is_left | is_right, beside, on_band, x)


def sum_by_row(
  x: Float[Array, "S T"],
  total: Float[Array, " T"],
  place: Int[Array, ""],
  num_rows: int,
  first: int,
  has_right: bool,
) -> Float[Array, "T R"]:
  """Sums x over the keys of each row; `total` is its sum over all keys."""
  num_diagonals = num_rows - 2
  is_left, is_right = _is_beside(x, num_diagonals, place, first)

  def on_band(x: Array) -> Array:
    diagonals = _diagonals(x, num_diagonals, place, first)
    right = jnp.zeros_like(total)
    if has_right:
      is_right = _distances_of(x, place) - first >= num_diagonals
      right = jnp.where(is_right, x, 0).sum(0)
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
  return nearest < first, farthest - first >= num_diagonals


def _distances_of(x: Float[Array, "S T"], place: Int[Array, ""]) -> Int[Array, "S T"]:
  num_keys, num_queries = x.shape
  return jnp.arange(num_keys)[:, None] - jnp.arange(num_queries)[None] - place


def _add_diagonals(
  x: Float[Array, "S T"], numbers: Float[Array, "T D"], place: Array, first: int
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
  query = first_query[:, None] + jnp.arange(width)
  diagonal = key[:, None] - query - place - first
  is_near = (diagonal >= 0) & (diagonal < num_diagonals)
  added = numbers[query, jnp.clip(diagonal, 0, num_diagonals - 1)]
  added = jnp.where(is_near, added, 0)
  start = key * num_queries + first_query
  one_window_a_key = jax.lax.ScatterDimensionNumbers((1,), (), (0,))
  flat = jax.lax.scatter_add(
    x.reshape(-1), start[:, None], added, one_window_a_key, mode="promise_in_bounds"
  )
  return flat.reshape(x.shape)


def _diagonals(
  x: Float[Array, "S T"], num_diagonals: int, place: Array, first: int
) -> Float[Array, "T D"]:
  """Returns x of each query's key on each diagonal, 0 if there is none."""
  num_keys, num_queries = x.shape
  query = jnp.arange(num_queries)[:, None]
  key = query + place + first + jnp.arange(num_diagonals)
  is_key = (key >= 0) & (key < num_keys)
  index = jnp.where(is_key, key * num_queries + query, x.size)
  return x.reshape(-1).at[index].get(mode="fill", fill_value=0)
