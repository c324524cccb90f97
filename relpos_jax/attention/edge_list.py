"""Relations of a list of edges, while all pairs of nodes attend to each other.

Their terms are computed for each edge, and scattered into the pairs of a block of
queries: no [T, S] array of labels or features is ever made.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from relpos_jax.attention.arrays import (
  accumulation_dtype,
  check_array,
  check_range,
  with_one_batch_axis,
)
from relpos_jax.attention.relation import Relation, Sizes, TableRelation, Tokens
from relpos_jax.typing import Array, Bool, Float, Int, Leaf

_NOWHERE = 2**30  # an index that no array has: scattered nowhere, read as zero


class EdgeTerms(TableRelation):
  """A relation with a term for each edge of a list, and arrays [*B, M, ...]."""

  def checked_edges(self, name: str, sizes: Sizes, num_edges: int) -> "EdgeTerms":
    """Returns the relation with its tables and arrays of edges checked."""
    raise NotImplementedError

  def shares(
    self, senders: Int[Array, "B M"], receivers: Int[Array, "B M"], dtype: DTypeLike
  ) -> Float[Array, "B M"]:
    """Returns the factor of each edge in the sum over the edges of its pair."""
    raise NotImplementedError

  def edge_rows(self, table: Float[Array, "R #N *H"]) -> Float[Array, "B M #N *H"]:
    """Returns the table row of every edge."""
    raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EdgeList(Relation):
  """The terms of M edges of each sequence; all other pairs have none.

  Made by `EdgeLabels.from_edges`, `EdgeFeatures.from_edges` and `LabelBias.from_edges`.

  Attributes:
    senders, receivers: integers `[B, M]`, rows of the keys and of the queries; -1 is
      padding.
    terms: the relation, with arrays `[B, M, ...]`.
    shares: the factor of each edge, known once the edges are checked.
  """

  senders: Leaf
  receivers: Leaf
  terms: EdgeTerms
  shares: Leaf = None

  @property
  def is_scaled(self) -> bool:
    """Returns whether the scale multiplies the logits."""
    return self.terms.is_scaled

  def checked(self, name: str, sizes: Sizes) -> "EdgeList":
    # Concrete edges are sorted now: XLA would take minutes to fold the sort.
    with jax.ensure_compile_time_eval():
      return self._checked(name, sizes)

  def _checked(self, name: str, sizes: Sizes) -> "EdgeList":
    num_edges = jnp.shape(self.senders)[-1] if jnp.ndim(self.senders) else 0
    shape = (*sizes.batch, num_edges)
    senders = check_array(f"{name}.senders", self.senders, jnp.integer, shape)
    receivers = check_array(f"{name}.receivers", self.receivers, jnp.integer, shape)
    check_range(f"{name}.senders", senders, sizes.keys)
    check_range(f"{name}.receivers", receivers, sizes.queries)
    senders = with_one_batch_axis(senders, 1)
    receivers = with_one_batch_axis(receivers, 1)
    is_pair = is_edge(senders, receivers, sizes.queries, sizes.keys)
    senders = jnp.where(is_pair, senders, _NOWHERE).astype(jnp.int32)
    receivers = jnp.where(is_pair, receivers, _NOWHERE).astype(jnp.int32)
    terms = self.terms.checked_edges(name, sizes, num_edges)
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
      numbers_BMN = rows
    else:
      query_BMNH = _rows_at(vectors, self.receivers).astype(rows.dtype)
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
      sums = jnp.zeros((num_queries, *messages_MNV.shape[1:]), dtype)
      return sums.at[receivers].add(messages_MNV, mode="drop")

    return jax.vmap(add_up)(messages, self.receivers)


def _rows_at(
  x: Float[Array, "B T N H"], indices: Int[Array, "B M"]
) -> Float[Array, "B M N H"]:
  """Returns the rows of x at indices, and zeros for indices that x has not."""

  def take(x_TNH, indices_M):
    return x_TNH.at[indices_M].get(mode="fill", fill_value=0)

  return jax.vmap(take)(x, indices)


def is_edge(
  senders: Array, receivers: Array, num_queries: int, num_keys: int
) -> Bool[Array, "*B M"]:
  """Returns False for padding."""
  is_sender = (senders >= 0) & (senders < num_keys)
  is_receiver = (receivers >= 0) & (receivers < num_queries)
  return is_sender & is_receiver


def is_first_of_kind(*kinds: Int[Array, "B M"]) -> Array:
  """Returns whether each edge is the first of those equal in all kinds."""
  return jax.vmap(_is_first_of_kind)(kinds)


def _is_first_of_kind(kinds: Sequence[Int[Array, " M"]]) -> Array:
  order, is_new = _sorted(kinds)
  return jnp.zeros_like(is_new).at[order].set(is_new)


def count_of_kind(*kinds: Int[Array, "B M"]) -> Int[Array, "B M"]:
  """Returns how many edges are equal to each in all kinds."""
  return jax.vmap(_count_of_kind)(kinds)


def _count_of_kind(kinds: Sequence[Int[Array, " M"]]) -> Int[Array, " M"]:
  order, is_new = _sorted(kinds)
  kind = jnp.cumsum(is_new) - 1
  counts = jax.ops.segment_sum(jnp.ones_like(kind), kind, len(kind))
  return jnp.zeros_like(kind).at[order].set(counts[kind])


def _sorted(kinds: Sequence[Int[Array, " M"]]) -> tuple[Array, Array]:
  """Sorts edges; returns their order, and whether each differs from the one before."""
  order = jnp.lexsort(tuple(kinds))
  is_new = jnp.arange(len(order)) == 0
  for kind in kinds:
    values = kind[order]
    is_new |= values != jnp.roll(values, 1)
  return order, is_new
