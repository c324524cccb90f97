"""What every relation between query i and key j knows about itself.

The operator and its implementations ask a relation and never look at its kind: its
check of its arrays, its slice for a block of queries, its terms of the logits and of
the output. To add one, see docs/development.md.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from relpos_jax.attention import lookup, masks
from relpos_jax.attention.arrays import (
  accumulation_dtype,
  as_array,
  describe,
  shape_text,
)
from relpos_jax.typing import Array, ArrayLike, Float, Int


class Tokens(NamedTuple):
  """Queries or keys, and their positions."""

  vectors: Float[Array, "B T N H"]
  positions: Int[Array, "#B T"]


class Sizes(NamedTuple):
  """The sizes and the dtype of a call, against which relations check their arrays."""

  batch: tuple[int, ...]
  queries: int
  keys: int
  heads: int
  width: int
  value_width: int | None  # None for any
  dtype: np.dtype

  @property
  def accumulation_dtype(self) -> np.dtype:
    return accumulation_dtype(self.dtype)


class Relation:
  """A term of the logits, a term of the output, or both: the defaults are none.

  A subclass is a frozen dataclass, registered as a pytree. Its fields are as users give
  them until `checked` returns it anew; all other methods are called on its result.
  """

  is_scaled: ClassVar[bool] = False  # whether the scale multiplies the logits

  def checked(self, name: str, sizes: Sizes) -> "Relation":
    """Returns the relation with its arrays checked, with one batch axis.

    Trained arrays are in the accumulation dtype, so that sums in their gradients are
    rounded once.
    """
    return self

  def as_program(self, position_dtype: DTypeLike) -> "Relation":
    """Returns the relation with static fields that JAX's caches can compare."""
    return self

  def with_keys(self, queries: Tokens, keys: Tokens) -> "Relation":
    """Returns the relation with what blocks of queries share computed once."""
    return self

  def block(self, start: Int[Array, ""], size: int) -> "Relation":
    """Returns its slice for a block of queries."""
    return self

  def logits(self, queries: Tokens, keys: Tokens) -> Float[Array, "#B #N T S"] | None:
    """Computes its term of the logits, before the scale; None if it has none."""
    return None

  def values(
    self, weights: Float[Array, "B N T S"], queries: Tokens, keys: Tokens
  ) -> Float[Array, "B T N V"] | None:
    """Computes its term of the output from the weights; None if it has none."""
    return None

  def gathered_logits(
    self, queries: Tokens, keys: Tokens
  ) -> Float[Array, "#B #N T S"] | None:
    """Computes `logits` by the definition, if necessary from a vector for each pair."""
    return self.logits(queries, keys)

  def gathered_values(
    self, weights: Float[Array, "B N T S"], queries: Tokens, keys: Tokens
  ) -> Float[Array, "B T N V"] | None:
    """Computes `values` by the definition."""
    return self.values(weights, queries, keys)


Relations = Relation | tuple[Relation, ...]


def distances(
  query_positions: Int[Array, "*#B T"], key_positions: Int[Array, "*#B S"]
) -> Int[Array, "*#B T S"]:
  """Returns the signed distance j - i of every query i and key j."""
  return key_positions[..., None, :] - query_positions[..., :, None]


class TableRelation(Relation):
  """A relation that multiplies vectors by the table rows of the pairs.

  Or adds the rows themselves, if they are numbers. After `checked` a table of vectors
  is [R, 1 or N, H], and one of numbers [R, 1 or N].
  """

  is_by_key: ClassVar[bool] = False  # whether rows multiply keys instead of queries

  @property
  def num_rows(self) -> int:
    return len(self.table)

  def rows(self, queries: Tokens, keys: Tokens) -> Int[Array, "#B T S"]:
    """Returns the table row of every pair; -1 is no relation, the zero vector."""
    raise NotImplementedError

  def content(
    self, queries: Tokens, keys: Tokens
  ) -> tuple[Float[Array, "B T N H"] | None, Float[Array, "R #N *H"] | None]:
    """Returns the vectors that table rows multiply, None for numbers, and the table.

    The table is None if the relation has no term of the logits.
    """
    return None, self.table

  def project(self, queries: Tokens, keys: Tokens) -> Float[Array, "#B #N #T R"] | None:
    """Computes the logits of each query, or of each key if `is_by_key`, by row."""
    vectors, table = self.content(queries, keys)
    if table is None:
      return None
    if vectors is None:
      finite = jnp.maximum(table, masks.LOWEST)  # `multiply` would make NaN of -inf
      return finite.T[None, :, None]
    return lookup.product("BTNH,RNH->BNTR", vectors, table)

  def look_up(
    self, numbers: Float[Array, "#B #N _ R"], queries: Tokens, keys: Tokens
  ) -> Float[Array, "#B #N T S"]:
    """Returns the number of each pair from numbers by row, those of `project`."""
    labels = self.rows(queries, keys)
    if self.is_by_key:
      return lookup.look_up(numbers, labels.swapaxes(1, 2)).swapaxes(2, 3)
    if numbers.shape[2] == 1:
      shape = (*numbers.shape[:2], labels.shape[1], numbers.shape[3])
      numbers = jnp.broadcast_to(numbers, shape)
    return lookup.look_up(numbers, labels)

  def sum_by_row(
    self, weights: Float[Array, "B N T S"], queries: Tokens, keys: Tokens
  ) -> Float[Array, "B N T R"]:
    """Sums the weights of each query by row, the transpose of `look_up`."""
    return lookup.sum_by_label(weights, self.rows(queries, keys), self.num_rows)

  def gather(
    self, table: Float[Array, "R #N *H"], queries: Tokens, keys: Tokens
  ) -> Float[Array, "#B T S #N *H"]:
    """Returns a_ij, the table row of every pair."""
    return lookup.rows_of(table, self.rows(queries, keys))

  def logits(self, queries: Tokens, keys: Tokens) -> Float[Array, "#B #N T S"] | None:
    numbers = self.project(queries, keys)
    return None if numbers is None else self.look_up(numbers, queries, keys)

  def gathered_logits(
    self, queries: Tokens, keys: Tokens
  ) -> Float[Array, "#B #N T S"] | None:
    vectors, table = self.content(queries, keys)
    if table is None:
      return None
    a_BTSN = self.gather(table, queries, keys)
    if vectors is None:
      return jnp.moveaxis(a_BTSN, -1, 1)
    of_token = "BSNH" if self.is_by_key else "BTNH"
    return lookup.product(f"{of_token},BTSNH->BNTS", vectors, a_BTSN)


class VectorRelation(TableRelation):
  """A relation with tables of vectors aK for keys, aV for values, or both."""

  is_scaled = True

  @property
  def num_rows(self) -> int:
    return len(self.value if self.key is None else self.key)

  def content(
    self, queries: Tokens, keys: Tokens
  ) -> tuple[Float[Array, "B T N H"], Float[Array, "R #N H"] | None]:
    return queries.vectors, self.key

  def values(
    self, weights: Float[Array, "B N T S"], queries: Tokens, keys: Tokens
  ) -> Float[Array, "B T N V"] | None:
    if self.value is None:
      return None
    sums_BNTR = self.sum_by_row(weights, queries, keys)
    return lookup.product("BNTR,RNH->BTNH", sums_BNTR, self.value)

  def gathered_values(
    self, weights: Float[Array, "B N T S"], queries: Tokens, keys: Tokens
  ) -> Float[Array, "B T N V"] | None:
    if self.value is None:
      return None
    a_BTSNH = self.gather(self.value, queries, keys)
    return lookup.product("BNTS,BTSNH->BTNH", weights, a_BTSNH)

  def with_checked_tables(self, name: str, sizes: Sizes):
    """Returns the relation with its tables checked and in one layout."""
    if self.key is None and self.value is None:
      raise ValueError(f"{name} has neither a key nor a value table; want one or both")
    key, value = self.key, self.value
    if key is not None:
      key = check_table(f"{name}.key", key, sizes, sizes.width)
    if value is not None:
      width = sizes.value_width
      width = jnp.shape(value)[-1] if width is None else width
      value = check_table(f"{name}.value", value, sizes, width)
    if key is not None and value is not None and len(key) != len(value):
      shapes = f"{jnp.shape(self.key)} and {jnp.shape(self.value)}"
      raise ValueError(
        f"{name}.key and {name}.value have shapes {shapes}; want as many rows"
      )
    return dataclasses.replace(self, key=key, value=value)


def check_table(
  name: str, table: ArrayLike | None, sizes: Sizes, *row: int
) -> Float[Array, "R #N *row"]:
  """Returns a checked table, one for all heads or one per head."""
  array = as_array(name, table)
  shapes = row, (sizes.heads, *row)
  has_rows = array.ndim > len(row) and len(array) > 0
  is_floating = jnp.issubdtype(array.dtype, jnp.floating)
  if not has_rows or array.shape[1:] not in shapes or not is_floating:
    shared, own = shape_text("R", *row), shape_text("R", sizes.heads, *row)
    raise ValueError(
      f"{name} is {describe(array)}; want floating numbers of shape {shared}, shared "
      f"by the heads, or {own}"
    )
  array = array.astype(sizes.accumulation_dtype)
  return array.reshape(len(array), -1, *row)
