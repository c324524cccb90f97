"""The base classes of relations between query i and key j.

A relation checks its arrays, slices them for a block of queries, and computes its terms
of the logits and of the output. The operator and its implementations call these
methods. To add a relation, see docs/development.md.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from relpos_jax.attention import lookup, masks
from relpos_jax.attention.arrays import (
  accumulation_dtype,
  as_array,
  describe,
  shape_text,
  slice_queries,
)
from relpos_jax.typing import Array, ArrayLike, Float, Int, Leaf


class Tokens(NamedTuple):
  """Holds queries or keys, and their positions."""

  vectors: Float[Array, "B T N H"]
  positions: Int[Array, "#B T"]


class Sizes(NamedTuple):
  """Holds the sizes and the dtype of a call; relations check their arrays with them."""

  batch: tuple[int, ...]
  queries: int
  keys: int
  heads: int
  width: int
  value_width: int | None  # None allows any width
  dtype: np.dtype

  @property
  def accumulation_dtype(self) -> np.dtype:
    return accumulation_dtype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Relation:
  """Adds a term to the logits, a term to the output, or both; by default, nothing.

  A subclass is a frozen dataclass, registered as a pytree. Users make it with unchecked
  fields. The operator calls `checked` first, and all other methods on its result.
  """

  is_scaled: ClassVar[bool] = False  # whether the scale multiplies `logits`
  query_fields: ClassVar[tuple[str, ...]] = ()  # those with an axis of queries

  def checked(self, name: str, sizes: Sizes) -> "Relation":
    """Checks the fields, and returns the relation with arrays of one batch axis.

    `name` is what errors call the relation. Trained arrays are cast to the accumulation
    dtype, so that their gradients are summed in it and rounded once.
    """
    return self

  def as_program(self, position_dtype: DTypeLike) -> "Relation":
    """Returns the relation with static fields that compare equal from call to call.

    Then `jax.jit` compiles equal calls only once. `position_dtype` is the dtype of the
    call's positions.
    """
    return self

  def with_keys(self, queries: Tokens, keys: Tokens) -> "Relation":
    """Computes once what all blocks of queries share, and returns the new relation.

    For example, `KeyBias` multiplies all keys by its table.
    """
    return self

  def block(self, start: Int[Array, ""], size: int) -> "Relation":
    """Returns the relation for the block of `size` queries that begins at `start`."""
    slice_block = functools.partial(slice_queries, start=start, size=size)
    parts = {}
    for name in self.query_fields:
      parts[name] = jax.tree.map(slice_block, getattr(self, name))
    return dataclasses.replace(self, **parts)

  def logits(self, queries: Tokens, keys: Tokens) -> Float[Array, "#B #N T S"] | None:
    """Computes the relation's term of the logits, or None if it has none.

    If `is_scaled`, the caller multiplies the term by the scale.
    """
    return None

  def values(
    self, weights: Float[Array, "B N T S"], queries: Tokens, keys: Tokens
  ) -> Float[Array, "B T N V"] | None:
    """Computes the relation's term of the output, or None if it has none."""
    return None

  def gathered_logits(
    self, queries: Tokens, keys: Tokens
  ) -> Float[Array, "#B #N T S"] | None:
    """Computes the same result as `logits`, in the simplest way.

    If there are tables, it gathers the table row a_ij of every pair, and then
    multiplies. The implementations "reference" and "per_position" call it.
    """
    return self.logits(queries, keys)

  def gathered_values(
    self, weights: Float[Array, "B N T S"], queries: Tokens, keys: Tokens
  ) -> Float[Array, "B T N V"] | None:
    """Computes the same result as `values`, in the simplest way.

    See `gathered_logits`.
    """
    return self.values(weights, queries, keys)


Relations = Relation | tuple[Relation, ...]


def distances(
  query_positions: Int[Array, "*#B T"], key_positions: Int[Array, "*#B S"]
) -> Int[Array, "*#B T S"]:
  """Returns the signed distance j - i of every query i and key j."""
  return key_positions[..., None, :] - query_positions[..., :, None]


class TableRelation(Relation):
  """Looks up a table row for each pair of query and key.

  If rows are vectors, it multiplies the query or the key by them. If rows are numbers,
  it adds them. After `checked`, tables of vectors have shape [R, 1 or N, H], and tables
  of numbers [R, 1 or N].
  """

  table: Leaf

  is_by_key: ClassVar[bool] = False  # whether rows multiply keys instead of queries

  @property
  def tables(self) -> tuple[Array, ...]:
    """Returns the tables that there are, all with the same number of rows."""
    return (self.table,)

  @property
  def num_rows(self) -> int:
    return len(self.tables[0])

  def row_shape(self, sizes: Sizes) -> tuple[int, ...]:
    """Returns the shape of a row of `table`: () for a number."""
    return ()

  def map_tables(self, function: Callable[[Array], Array]):
    """Returns the relation with `function` applied to each table."""
    return dataclasses.replace(self, table=function(self.table))

  def with_checked_tables(self, name: str, sizes: Sizes):
    """Returns the relation with its table checked, [R, 1 or N, *row]."""
    row = self.row_shape(sizes)
    table = check_table(f"{name}.table", self.table, sizes, *row)
    return dataclasses.replace(self, table=table)

  def rows(self, queries: Tokens, keys: Tokens) -> Int[Array, "#B T S"]:
    """Returns the index of each pair's table row; -1 stands for the zero vector."""
    raise NotImplementedError

  def content(
    self, queries: Tokens, keys: Tokens
  ) -> tuple[Float[Array, "B T N H"] | None, Float[Array, "R #N *H"] | None]:
    """Returns the vectors to multiply by table rows, and the table.

    The vectors are None if rows are numbers. The table is None if the relation has no
    term of the logits.
    """
    return None, self.table

  def project(self, queries: Tokens, keys: Tokens) -> Float[Array, "#B #N #T R"] | None:
    """Computes a logit for each query and table row: the product of the two.

    If `is_by_key`, it multiplies keys instead of queries. If rows are numbers, they are
    the logits of every query. Returns None if the relation has no term of the logits.
    """
    vectors, table = self.content(queries, keys)
    if table is None:
      return None
    if vectors is None:
      # Products with one-hot labels in `lookup` would make NaN of -inf.
      finite = jnp.maximum(table, masks.LOWEST)
      return finite.T[None, :, None]
    return lookup.product("BTNH,RNH->BNTR", vectors, table)

  def look_up(
    self, numbers: Float[Array, "#B #N _ R"], queries: Tokens, keys: Tokens
  ) -> Float[Array, "#B #N T S"]:
    """Looks up the logit of each pair in `numbers`, the result of `project`."""
    labels = self.rows(queries, keys)
    if self.is_by_key:
      return lookup.look_up(numbers, labels.swapaxes(1, 2)).swapaxes(2, 3)
    shape = (*numbers.shape[:2], labels.shape[1], numbers.shape[3])
    return lookup.look_up(jnp.broadcast_to(numbers, shape), labels)

  def sum_by_row(
    self, weights: Float[Array, "B N T S"], queries: Tokens, keys: Tokens
  ) -> Float[Array, "B N T R"]:
    """Sums each query's weights by table row: the transpose of `look_up`."""
    return lookup.sum_by_label(weights, self.rows(queries, keys), self.num_rows)

  def gather(
    self, table: Float[Array, "R #N *H"], queries: Tokens, keys: Tokens
  ) -> Float[Array, "#B T S #N *H"]:
    """Gathers a_ij, the table row of every pair."""
    return lookup.take_rows(table, self.rows(queries, keys))

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
    axes = "BSNH" if self.is_by_key else "BTNH"
    return lookup.product(f"{axes},BTSNH->BNTS", vectors, a_BTSN)


class VectorRelation(TableRelation):
  """Adds vectors aK to keys, aV to values, or both, from tables."""

  key: Leaf
  value: Leaf

  is_scaled = True

  @property
  def tables(self) -> tuple[Array, ...]:
    return tuple(jax.tree.leaves((self.key, self.value)))

  def map_tables(self, function: Callable[[Array], Array]):
    key, value = jax.tree.map(function, (self.key, self.value))
    return dataclasses.replace(self, key=key, value=value)

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
    """Returns the relation with checked tables, [R, 1 or N, H] and [R, 1 or N, V]."""
    if self.key is None and self.value is None:
      raise ValueError(f"{name} has neither a key nor a value table; want one or both")
    key, value = self.key, self.value
    if key is not None:
      key = check_table(f"{name}.key", key, sizes, sizes.width)
    if value is not None:
      any_width = jnp.shape(value)[-1:]
      width = any_width if sizes.value_width is None else (sizes.value_width,)
      value = check_table(f"{name}.value", value, sizes, *width)
    if key is not None and value is not None and len(key) != len(value):
      rows = f"{len(key)} and {len(value)} rows"
      raise ValueError(f"{name}.key and {name}.value have {rows}; want as many")
    return dataclasses.replace(self, key=key, value=value)


def check_table(
  name: str, table: ArrayLike, sizes: Sizes, *row: int
) -> Float[Array, "R #N *row"]:
  """Returns a checked table [R, 1 or N, *row], shared by the heads or one per head.

  `row` is the shape of a row of one head: `width` for vectors, empty for numbers.
  """
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
