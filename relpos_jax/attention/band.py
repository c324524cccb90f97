"""The band of a distance table, for implementations without [T, S] weights.

With clipping only the diagonals within the table need a lookup: the *band*. The far field costs
nothing. Let w'_r = w_r - w_0 for a table's rows w, whose row 0 is "everything further left".

Keys: a softmax ignores a constant per query, so subtracting q_i . w_0 changes nothing. The relative
term is then zero left of the band, and the same q_i . w'_-1 for every key right of it. (A soft cap
does not ignore it, so q_i . w_0 is then added to all logits of query i before the cap.)
Values: the weights of a query sum to one, so z_i = w_0 + sum_j p_ij v_j + sum_r P_ir w'_r, with
P_ir the weight of query i on row r. (With dropout w_0 is multiplied by the sum of the weights.)
"""

from typing import NamedTuple

import jax.numpy as jnp

from relpos_jax.attention.inputs import Inputs, is_symbolic
from relpos_jax.attention.relations import RelativePositions
from relpos_jax.typing import Array, Float


class Band(NamedTuple):
  """Tables minus row 0. Row r < R - 1 is distance `first + r`, row R - 1 all further right."""

  key: Float[Array, "R #N H"] | None  # rows 1 and up, minus row 0; R is at least 1
  value: Float[Array, "R #N H"] | None
  left_key: Float[Array, "#N H"] | None  # row 0 of the key table, with a soft cap
  left_value: Float[Array, "#N H"] | None  # row 0 of the value table
  first: int  # the distance j - i of the first diagonal
  num_diagonals: int  # R - 1


def unsupported(inputs: Inputs) -> str | None:
  """Returns why this call has no band, or None if it has one."""
  kinds = [type(relation) for relation in inputs.relations]
  if kinds not in ([], [RelativePositions]):
    names = " + ".join(kind.__name__ for kind in kinds)
    return f"relations is {names}; it needs one RelativePositions"
  if not inputs.linear_positions:
    return "positions are given; if they are consecutive, give query_offset instead"
  if is_symbolic(inputs.query, inputs.key):
    return "a dimension is symbolic; it needs numbers"
  return None


def distances(inputs: Inputs) -> tuple[int, int]:
  """Returns the first and the last distance j - i whose table rows a call needs."""
  (relations,) = inputs.relations
  # The distances beyond which all pairs to the left, and to the right, share a row.
  beyond = relations.beyond == "zero"
  low, high = -relations.reach[0] - beyond, relations.reach[1] + beyond
  offset = inputs.query_offset
  if isinstance(offset, int):  # the distances that occur; distance 0 stays
    low = max(low, min(-inputs.query.shape[1] - offset, 0))
    high = min(high, max(inputs.key.shape[1] - offset, 0))
  high = min(high, 1) if inputs.is_causal else high
  return low, max(high, low + 1)


def band_of(inputs: Inputs) -> Band | None:
  """Returns the band of a call with `RelativePositions`, or None without relations."""
  if not inputs.relations:
    return None
  (relations,) = inputs.relations
  low, high = distances(inputs)
  rows = relations.labels(jnp.zeros(1, int), jnp.arange(low, high + 1))[0]
  key, value = (
    None if table is None else jnp.where(rows[:, None, None] >= 0, table[rows], 0)
    for table in (relations.key, relations.value)
  )
  shifted = lambda table: None if table is None else table[1:] - table[:1]
  left_key = None if key is None or inputs.soft_cap is None else key[0]
  left_value = None if value is None else value[0]
  return Band(shifted(key), shifted(value), left_key, left_value, low + 1, high - low - 1)
