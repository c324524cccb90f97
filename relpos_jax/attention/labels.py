"""Relations by an integer label of each pair of query and key."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike

from relpos_jax.attention.arrays import (
  Shape,
  check_array,
  check_range,
  with_one_batch_axis,
)
from relpos_jax.attention.edge_list import EdgeList, EdgeTerms, group_edges
from relpos_jax.attention.relation import (
  Sizes,
  Tokens,
  VectorRelation,
)
from relpos_jax.typing import Array, ArrayLike, Float, Int, Integer, Leaf


class ByLabel(EdgeTerms):
  """Looks up table rows by label. Subclasses have the field `labels`."""

  labels: Leaf

  query_fields = ("labels",)

  def shares(
    self, senders: Int[Array, "B M"], receivers: Int[Array, "B M"], dtype: DTypeLike
  ) -> Float[Array, "B M"]:
    """Returns 1 for each edge, or 0 if an earlier edge has the same pair and label."""
    labels = clamp(self.labels, self.num_rows)
    _, is_new = group_edges(labels, senders, receivers)
    return (is_new & (labels >= 0)).astype(dtype)

  def edge_rows(self, table: Float[Array, "R #N *H"]) -> Float[Array, "B M #N *H"]:
    return table[jnp.maximum(clamp(self.labels, self.num_rows), 0)]

  def rows(self, queries: Tokens, keys: Tokens) -> Int[Array, "#B T S"]:
    return clamp(self.labels, self.num_rows)

  def checked_as(self, name: str, sizes: Sizes, *shapes: Shape):
    """Checks the tables, and the labels, which are indices of their rows.

    Under `jax.debug_nans`, the tables become NaN if traced labels are out of range.
    """
    relation = self.with_checked_tables(name, sizes)
    labels = check_array(f"{name}.labels", self.labels, jnp.integer, *shapes)
    check_range(f"{name}.labels", labels, relation.num_rows)
    tables = jax.tree.map(
      lambda table: nan_if_clamped(table, labels, relation.num_rows),
      dataclasses.replace(relation, labels=None),
    )
    rank = len(shapes[0]) - len(sizes.batch)
    return dataclasses.replace(tables, labels=with_one_batch_axis(labels, rank))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EdgeLabels(ByLabel, VectorRelation):
  """Adds the vector of a pair's edge label to keys, to values, or to both.

  a_ij is row `labels[i, j]` of a table. `RelativePositions` is the special case of
  labels that are clipped distances. Shaw et al. 2018, section 3.1.

  Attributes:
    labels: integers `[B, T, S]`, or `[T, S]` for all of the batch. -1 is "no relation",
      the zero vector. Other labels out of range raise if they are concrete, and are
      clamped if they are traced. Under `jax.debug_nans(True)` or JAX_DEBUG_NANS=1, such
      traced labels make the tables NaN, so that JAX raises.
    key, value: tables of aK and aV: `[E, H]`, `[E, N, H]` or None, as in
      `RelativePositions`.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import dot_product_attention
  >>> father, mother = 0, 1
  >>> labels = jnp.array([[-1, father], [mother, -1]])
  >>> q, table = jnp.ones((2, 8, 64)), jnp.ones((2, 64))
  >>> dot_product_attention(q, q, q, relations=EdgeLabels(labels, table, table)).shape
  (2, 8, 64)
  """

  labels: Leaf
  key: Leaf | None
  value: Leaf | None

  @classmethod
  def from_edges(
    cls,
    senders: ArrayLike,
    receivers: ArrayLike,
    labels: ArrayLike,
    key: ArrayLike | None,
    value: ArrayLike | None,
  ) -> EdgeList:
    """Returns the relation of a list of M edges, which label their pairs.

    All other pairs attend to each other, too, without a label. If several edges join
    the same pair, the pair gets the sum of the table rows for their labels. A repeated
    label counts once, as in `edge_attention`. Memory grows with the number of edges: no
    array `[T, S]` of labels is made.

    Args:
      senders, receivers: integers `[B, M]`, indices of keys and of queries; -1 is
        padding.
      labels: integers `[B, M]`; -1 is an edge without a label.
      key, value: the tables, as in `EdgeLabels`.

    >>> import jax.numpy as jnp
    >>> from relpos_jax import attention_weights
    >>> q, table = jnp.ones((1, 3, 1, 4)), jnp.full((1, 4), 9.0)
    >>> edge = jnp.array([[2]]), jnp.array([[0]]), jnp.array([[0]])
    >>> relations = EdgeLabels.from_edges(*edge, table, None)
    >>> weights = attention_weights(q, q, relations=relations)[0, 0]
    >>> (100 * weights).round().astype(int)
    Array([[  0,   0, 100],
           [ 33,  33,  33],
           [ 33,  33,  33]], dtype=int32)
    """
    return EdgeList(senders, receivers, cls(labels, key, value))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LabelBias(ByLabel):
  """Adds an edge bias to the logit, after the scale: a number for the pair's label.

  In Swin (Liu et al. 2021, section 3.2) the label of two patches is their offset in
  rows and columns. In Graphormer (Ying et al. 2021, section 3.1.2) the label of two
  nodes is their distance in the graph.

  Attributes:
    labels: integers `[B, T, S]`, or `[T, S]` for all of the batch, as in `EdgeLabels`;
      -1 adds nothing.
    table: `[E]`, shared by the heads, or `[E, N]`.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import attention_weights
  >>> q, labels = jnp.ones((2, 1, 8)), jnp.array([[-1, 0], [0, 1]])
  >>> relations = LabelBias(labels, jnp.array([9.0, 0.0]))
  >>> attention_weights(q, q, relations=relations)[0].round(2)
  Array([[0., 1.],
         [1., 0.]], dtype=float32)
  """

  labels: Leaf
  table: Leaf

  @classmethod
  def from_edges(
    cls, senders: ArrayLike, receivers: ArrayLike, labels: ArrayLike, table: ArrayLike
  ) -> EdgeList:
    """Returns the relation of a list of M edges, as `EdgeLabels.from_edges` does.

    If several edges join the same pair, the logit gets the sum of the biases for their
    labels. A repeated label counts once.

    Args:
      senders, receivers, labels: integers `[B, M]`, as in `EdgeLabels.from_edges`.
      table: `[E]`, shared by the heads, or `[E, N]`.

    >>> import jax.numpy as jnp
    >>> from relpos_jax import attention_weights
    >>> q, edge = jnp.ones((1, 3, 1, 4)), jnp.array([[[2]], [[0]], [[0]]])
    >>> relations = LabelBias.from_edges(*edge, jnp.array([9.0]))
    >>> attention_weights(q, q, relations=relations)[0, 0, 0].round(2)
    Array([0., 0., 1.], dtype=float32)
    """
    return EdgeList(senders, receivers, cls(labels, table))


def clamp(labels: Integer[Array, "..."], num_rows: int) -> Int[Array, "..."]:
  """Clips labels of any integer dtype to -1 ... num_rows - 1; returns them as int32."""
  promoted = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
  return jnp.clip(promoted, -1, num_rows - 1).astype(jnp.int32)


def nan_if_clamped(x: Array, labels: Integer[Array, "..."], num_rows: int) -> Array:
  """Returns x, but NaN under `jax.debug_nans` if `clamp` changes traced labels.

  Without `jax.debug_nans`, it adds nothing to the program.
  """
  debug_nans = jax.config.jax_debug_nans  # pyright: ignore
  if not debug_nans or not isinstance(labels, Tracer):
    return x
  return jnp.where(jnp.any(clamp(labels, num_rows) != labels), jnp.nan, x)
