"""Relations between query i and key j: frozen pytrees that define a_ij."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from relpos_jax.typing import Array, Float, Int

# A row of the tables for each pair, or a number for each of their rows.
Edges = Int[Array, "#B T S"] | Float[Array, "#B T S R"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RelativePositions:
  """The signed distance j - i from query i to key j, with a vector for each in a table.

  a_ij is row `clip(j - i, -left, right) + left` of a table of R = left + 1 + right rows. With the
  default symmetric table, R = 2k + 1, row 0 is "k or more to the left", row k is "same position"
  and row 2k is "k or more to the right". Shaw et al. 2018, section 3.2.

  Attributes:
    key, value: tables of aK and aV, `[R, H]` shared by the heads or `[R, N, H]` one per head; None
      for no such term.
    beyond: "clip" gives a pair beyond the table the nearest end row; "zero" gives it no term
      (Huang et al. 2018, Music Transformer).
    left: the number of rows before "same position". None: R must be odd, and left is (R - 1) / 2.

  >>> import jax.numpy as jnp
  >>> table = jnp.ones((2 * 3 + 1, 64))
  >>> relations = RelativePositions(key=table, value=None)
  >>> relations.labels(jnp.arange(1), jnp.arange(10))
  Array([[3, 4, 5, 6, 6, 6, 6, 6, 6, 6]], dtype=int32)
  """

  # Not annotated as arrays, because trees of shardings, axes or names have the same structure.
  key: Any
  value: Any
  beyond: str = dataclasses.field(default="clip", metadata={"static": True})
  left: int | None = dataclasses.field(default=None, metadata={"static": True})

  @property
  def reach(self) -> tuple[int, int]:
    """Returns the distances of the first row, to the left, and of the last one, to the right."""
    num_rows = len(self.value if self.key is None else self.key)
    left = num_rows // 2 if self.left is None else self.left
    return left, num_rows - 1 - left

  def labels(
    self, query_positions: Int[Array, "*#B T"], key_positions: Int[Array, "*#B S"]
  ) -> Int[Array, "*#B T S"]:
    """Returns the table row of every pair; -1 is "no relation", the zero vector."""
    left, right = self.reach
    distance = key_positions[..., None, :] - query_positions[..., :, None]
    nearest = jnp.clip(distance, -left, right)
    rows = nearest + left  # the sum of the distance and left might not fit in 32 bits
    return rows if self.beyond == "clip" else jnp.where(distance == nearest, rows, -1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EdgeLabels:
  """The label of the edge from i to j in a directed graph, with a vector for each in a table.

  a_ij is row `labels[i, j]` of the table. Shaw et al. 2018, section 3.1: relative positions are
  the special case of a linear graph whose labels are clipped distances.

  Attributes:
    labels: integers `[B, T, S]`, or `[T, S]` for all of the batch; -1 is "no relation", the zero
      vector. Other labels out of range raise if they are concrete, and are clamped if traced.
    key, value: tables of aK and aV, as in `RelativePositions`: `[E, H]`, `[E, N, H]` or None.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import dot_product_attention
  >>> father, mother = 0, 1
  >>> labels = jnp.array([[-1, father], [mother, -1]])
  >>> q, table = jnp.ones((2, 8, 64)), jnp.ones((2, 64))
  >>> dot_product_attention(q, q, q, relations=EdgeLabels(labels, table, table)).shape
  (2, 8, 64)
  """

  labels: Any
  key: Any
  value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EdgeFeatures:
  """Features of the edge from i to j, mapped to a vector by a trained kernel.

  a_ij is `features[i, j] @ kernel`. With one-hot features it is `EdgeLabels`.

  Attributes:
    features: `[B, T, S, F]`, or `[T, S, F]` for all of the batch.
    key, value: kernels of aK and aV: `[F, H]`, `[F, N, H]` or None.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import dot_product_attention
  >>> q, kernel = jnp.ones((2, 8, 64)), jnp.ones((1, 64))
  >>> bond_lengths = jnp.array([[0.0, 1.4], [1.4, 0.0]])[..., None]
  >>> dot_product_attention(q, q, q, relations=EdgeFeatures(bond_lengths, kernel, None)).shape
  (2, 8, 64)
  """

  features: Any
  key: Any
  value: Any


Relations = RelativePositions | EdgeLabels | EdgeFeatures
