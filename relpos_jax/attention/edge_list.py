"""Relations given by a list of edges, where all pairs attend to each other.

The terms are computed for each edge, and scattered into the pairs of a block of
queries. No [T, S] array of labels or features is ever made.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
from jax import export
from jax.typing import DTypeLike

from relpos_jax.attention import masks
from relpos_jax.attention.arrays import (
  Shape,
  accumulation_dtype,
  check_array,
  check_range,
  with_one_batch_axis,
)
from relpos_jax.attention.relation import Relation, Sizes, TableRelation, Tokens
from relpos_jax.typing import Array, ArrayLike, Bool, Float, Int, Leaf, Shaped

_NOWHERE = 2**30  # an index that no array has: scattered nowhere, read as zero


class EdgeTerms(TableRelation):
  """Defines a term for each pair, [*B, T, S, ...], or of M edges, [*B, M, ...]."""

  def checked(self, name: str, sizes: Sizes) -> "EdgeTerms":
    pairs = sizes.queries, sizes.keys
    return self.checked_as(name, sizes, (*sizes.batch, *pairs), pairs)

  def checked_as(self, name: str, sizes: Sizes, *shapes: Shape) -> "EdgeTerms":
    """Returns the relation with checked tables, and labels or features of a shape.

    The labels have one of the shapes, and features have one more axis: `[*B, T, S]` or
    `[T, S]` for pairs, `[*B, M]` for edges.
    """
    raise NotImplementedError

  def shares(
    self, senders: Int[Array, "B M"], receivers: Int[Array, "B M"], dtype: DTypeLike
  ) -> Float[Array, "B M"]:
    """Returns the number that multiplies the term of each edge.

    The pair gets the sum of its edges' terms. Labels: 1 for the first edge with this
    pair and label, 0 for later ones. Features: 1 / n, where n edges join the pair.
    """
    raise NotImplementedError

  def edge_rows(self, table: Float[Array, "R #N *H"]) -> Float[Array, "B M #N *H"]:
    """Returns the vector or number of every edge, before `shares` multiplies it.

    It is the table row of the edge's label, or its features times `table`.
    """
    raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EdgeList(Relation):
  """Adds the terms of M edges in each sequence; all other pairs have none.

  Made by `EdgeLabels.from_edges`, `EdgeFeatures.from_edges` and `LabelBias.from_edges`.

  Attributes:
    senders, receivers: integers `[B, M]`, indices of keys and of queries; -1 is
      padding.
    terms: the relation, with arrays `[B, M, ...]`.
    shares: the numbers `[B, M]` that multiply the terms, see `EdgeTerms.shares`; None
      until `checked` computes them.
  """

  senders: Leaf
  receivers: Leaf
  terms: EdgeTerms
  shares: Leaf = None

  @property
  def is_scaled(self) -> bool:
    """Returns whether the scale multiplies the edges' terms of the logits."""
    return self.terms.is_scaled

  def checked(self, name: str, sizes: Sizes) -> "EdgeList":
    with sorting_now(sizes):
      ends = self.senders, self.receivers
      senders, receivers = check_ends(*ends, sizes, prefix=f"{name}.")
      terms = self.terms.checked_as(name, sizes, (*sizes.batch, senders.shape[1]))
      shares = terms.shares(senders, receivers, sizes.accumulation_dtype)
      return EdgeList(senders, receivers, terms, shares)

  def block(self, start: Int[Array, ""], size: int) -> "EdgeList":
    is_before = self.receivers < start
    receivers = jnp.where(is_before, _NOWHERE, self.receivers - start)
    return dataclasses.replace(self, receivers=receivers)

  def logits(self, queries: Tokens, keys: Tokens) -> Float[Array, "B N T S"] | None:
    vectors, table = self.terms.content(queries, keys)
    if table is None:
      return None
    rows = self.terms.edge_rows(table)
    if vectors is None:
      # No NaN if a number is -inf, and its edge does not count.
      numbers_BMN = jnp.maximum(rows, masks.LOWEST)
    else:
      query_BMNH = jax.vmap(take)(vectors, self.receivers).astype(rows.dtype)
      numbers_BMN = jnp.sum(query_BMNH * rows, axis=-1)
    numbers_BMN *= self.shares[..., None].astype(rows.dtype)
    num_queries, num_keys = queries.vectors.shape[1], keys.vectors.shape[1]

    def scatter(numbers_MN, receivers, senders):
      shape = numbers_MN.shape[1], num_queries, num_keys
      pairs = jnp.zeros(shape, numbers_MN.dtype)
      return pairs.at[:, receivers, senders].add(numbers_MN.T, mode="drop")

    return jax.vmap(scatter)(numbers_BMN, self.receivers, self.senders)

  def values(
    self, weights: Float[Array, "B N T S"], queries: Tokens, keys: Tokens
  ) -> Float[Array, "B T N V"] | None:
    table = getattr(self.terms, "value", None)
    if table is None:
      return None
    dtype = accumulation_dtype(weights.dtype)
    rows_BMNV = self.terms.edge_rows(table).astype(dtype)

    def gather(weights_NTS, receivers, senders):
      of_edges = weights_NTS.at[:, receivers, senders]
      return of_edges.get(mode="fill", fill_value=0).T

    weights_BMN = jax.vmap(gather)(weights, self.receivers, self.senders).astype(dtype)
    weights_BMN *= self.shares[..., None].astype(dtype)
    messages = weights_BMN[..., None] * rows_BMNV
    num_queries = weights.shape[2]

    def add_up(messages_MNV, receivers):
      return jax.ops.segment_sum(messages_MNV, receivers, num_queries)

    return jax.vmap(add_up)(messages, self.receivers)


def sorting_now(sizes: Sizes) -> contextlib.AbstractContextManager:
  """Returns the context in which edges are sorted: at once if they are concrete.

  XLA would take minutes to fold a sort of constants. With symbolic sizes, as in
  `jax.export`, no edges are concrete.
  """
  if any(map(export.is_symbolic_dim, (*sizes.batch, sizes.queries, sizes.keys))):
    return contextlib.nullcontext()
  return jax.ensure_compile_time_eval()


def is_edge(
  senders: Array, receivers: Array, num_queries: int, num_keys: int
) -> Bool[Array, "*B M"]:
  """Returns which edges are not padding: both indices are in range."""
  is_sender = (senders >= 0) & (senders < num_keys)
  is_receiver = (receivers >= 0) & (receivers < num_queries)
  return is_sender & is_receiver


def check_ends(
  senders: ArrayLike, receivers: ArrayLike, sizes: Sizes, prefix: str = ""
) -> tuple[Int[Array, "B M"], Int[Array, "B M"]]:
  """Returns checked indices of keys and of queries; padding becomes `_NOWHERE`.

  In errors, their names begin with the prefix, such as "relations.".
  """
  shape = *sizes.batch, *jnp.shape(senders)[-1:]
  senders = check_array(f"{prefix}senders", senders, jnp.integer, shape)
  receivers = check_array(f"{prefix}receivers", receivers, jnp.integer, shape)
  check_range(f"{prefix}senders", senders, sizes.keys)
  check_range(f"{prefix}receivers", receivers, sizes.queries)
  is_pair = is_edge(senders, receivers, sizes.queries, sizes.keys)
  senders = jnp.where(is_pair, senders, _NOWHERE).astype(jnp.int32)
  receivers = jnp.where(is_pair, receivers, _NOWHERE).astype(jnp.int32)
  return with_one_batch_axis(senders, 1), with_one_batch_axis(receivers, 1)


# Rows and groups of edges, of one sequence.


def take(x: Shaped[Array, "X *rest"], rows: Int[Array, " M"]) -> Shaped[Array, "M ..."]:
  """Returns rows of x by index; an index out of range (padding) gives any row."""
  return jnp.take(x, rows, axis=0, mode="clip")


def sum_groups(
  x: Float[Array, "M *rest"], groups: Int[Array, " M"]
) -> Float[Array, "M *rest"]:
  """Returns, for every edge, the sum of x over all edges of its group."""
  return take(jax.ops.segment_sum(x, groups, x.shape[0]), groups)


def group_edges(
  *kinds: Int[Array, "B M"],
) -> tuple[Int[Array, "B M"], Bool[Array, "B M"]]:
  """Groups edges that agree in every array of `kinds`, such as senders and receivers.

  Returns the index of each edge's group in its sequence, and whether the edge is the
  first of its group.
  """
  return jax.vmap(_group_edges)(*kinds)


def _group_edges(
  *kinds: Int[Array, " M"],
) -> tuple[Int[Array, " M"], Bool[Array, " M"]]:
  order = jnp.lexsort(kinds)
  is_new = jnp.arange(order.shape[0]) == 0
  for kind in kinds:
    values = kind[order]
    is_new |= values != jnp.roll(values, 1)
  group = jnp.cumsum(is_new) - 1
  return jnp.zeros_like(group).at[order].set(group), is_new.at[order].set(is_new)
