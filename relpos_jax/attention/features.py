"""Relations by a feature vector of each pair of query and key."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from relpos_jax.attention import lookup
from relpos_jax.attention.arrays import (
  Shape,
  check_array,
  with_one_batch_axis,
)
from relpos_jax.attention.edge_list import EdgeList, EdgeTerms, group_edges, sum_groups
from relpos_jax.attention.relation import Sizes, Tokens, VectorRelation
from relpos_jax.typing import Array, ArrayLike, Float, Int, Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EdgeFeatures(EdgeTerms, VectorRelation):
  """Adds the projected features of a pair to keys, to values, or to both.

  a_ij is `features[i, j] @ matrix`. With one-hot features it equals `EdgeLabels`.

  Attributes:
    features: `[B, T, S, F]`, or `[T, S, F]` for all of the batch.
    key, value: trained matrices that project features to aK and aV: `[F, H]`, shared by
      the heads, or `[F, N, H]`. None adds no such term.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import dot_product_attention
  >>> q, kernel = jnp.ones((2, 8, 64)), jnp.ones((1, 64))
  >>> bond_lengths = jnp.array([[0.0, 1.4], [1.4, 0.0]])[..., None]
  >>> relations = EdgeFeatures(bond_lengths, kernel, None)
  >>> dot_product_attention(q, q, q, relations=relations).shape
  (2, 8, 64)
  """

  features: Leaf
  key: Leaf | None
  value: Leaf | None

  query_fields = ("features",)

  @classmethod
  def from_edges(
    cls,
    senders: ArrayLike,
    receivers: ArrayLike,
    features: ArrayLike,
    key: ArrayLike | None,
    value: ArrayLike | None,
  ) -> EdgeList:
    """Returns the relation of a list of M edges, which give their pairs features.

    All other pairs attend to each other, too, without features. If several edges join
    the same pair, the pair gets the mean of their features, as in `edge_attention`.

    Args:
      senders, receivers: as in `EdgeLabels.from_edges`.
      features: `[B, M, F]`, finite ones for padding, too.
      key, value: the matrices, as in `EdgeFeatures`.

    >>> import jax.numpy as jnp
    >>> from relpos_jax import attention_weights
    >>> q, length = jnp.ones((1, 3, 1, 4)), jnp.full((1, 1, 1), 2.5)
    >>> edge = jnp.array([[2]]), jnp.array([[0]]), length
    >>> relations = EdgeFeatures.from_edges(*edge, jnp.full((1, 4), 4.0), None)
    >>> attention_weights(q, q, relations=relations)[0, 0, 0].round(2)
    Array([0., 0., 1.], dtype=float32)
    """
    return EdgeList(senders, receivers, cls(features, key, value))

  def shares(
    self, senders: Int[Array, "B M"], receivers: Int[Array, "B M"], dtype: DTypeLike
  ) -> Float[Array, "B M"]:
    """Returns 1 / n for each edge, where n edges join the same pair."""
    pairs, _ = group_edges(senders, receivers)
    return 1 / jax.vmap(sum_groups)(jnp.ones_like(pairs, dtype), pairs)

  def edge_rows(self, table: Float[Array, "R #N H"]) -> Float[Array, "B M #N H"]:
    return jnp.einsum("BMR,RNH->BMNH", self.features, table)

  def checked_as(self, name: str, sizes: Sizes, *shapes: Shape):
    """Checks the tables, and the features, which multiply their rows."""
    relation = self.with_checked_tables(name, sizes)
    wanted = [(*shape, relation.num_rows) for shape in shapes]
    features = check_array(f"{name}.features", self.features, jnp.floating, *wanted)
    features = features.astype(sizes.accumulation_dtype)
    rank = len(wanted[0]) - len(sizes.batch)
    features = with_one_batch_axis(features, rank)
    return dataclasses.replace(relation, features=features)

  def look_up(
    self, numbers: Float[Array, "#B #N _ R"], queries: Tokens, keys: Tokens
  ) -> Float[Array, "#B #N T S"]:
    return lookup.product("BNTR,BTSR->BNTS", numbers, self.features)

  def sum_by_row(
    self, weights: Float[Array, "B N T S"], queries: Tokens, keys: Tokens
  ) -> Float[Array, "B N T R"]:
    return lookup.product("BNTS,BTSR->BNTR", weights, self.features)

  def gather(
    self, table: Float[Array, "R #N H"], queries: Tokens, keys: Tokens
  ) -> Float[Array, "#B T S #N H"]:
    return jnp.einsum("BTSR,RNH->BTSNH", self.features, table)
