"""What a_ij is: the relations between query i and key j, as frozen pytrees of tables."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from relpos_jax.typing import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RelativePositions:
  """The signed distance j - i from query i to key j, looked up in a table.

  a_ij is row `clip(j - i, -left, right) + left` of a table of R = left + 1 + right rows, so rows
  are ordered by increasing j - i. With the default symmetric table, R = 2k + 1, row 0 is "k or
  more to the left", row k is "same position" and row 2k is "k or more to the right".
  Shaw et al. 2018, section 3.2.

  Attributes:
    key: table of aK, `[R, H]` shared by the heads or `[R, N, H]` one per head; None for no key
      term.
    value: table of aV, of the same R; None for no value term.
    beyond: "clip" gives a pair beyond the table the nearest end row; "zero" gives it no term
      (Huang et al. 2018, Music Transformer).
    left: the number of rows before "same position". None: R must be odd, and left is (R - 1) / 2.

  >>> import jax.numpy as jnp
  >>> table = jnp.ones((2 * 3 + 1, 64))
  >>> relations = RelativePositions(key=table, value=None)
  >>> relations.labels(jnp.arange(1), jnp.arange(10))
  Array([[3, 4, 5, 6, 6, 6, 6, 6, 6, 6]], dtype=int32)
  """

  # The leaves are not annotated as arrays: a pytree also carries shardings, axes or names there.
  key: Any
  value: Any
  beyond: str = dataclasses.field(default="clip", metadata={"static": True})
  left: int | None = dataclasses.field(default=None, metadata={"static": True})

  def labels(
    self, query_positions: Int[Array, "*#B T"], key_positions: Int[Array, "*#B S"]
  ) -> Int[Array, "*#B T S"]:
    """The table row of every pair; -1 is "no relation", the zero vector."""
    num_rows = len(self.value if self.key is None else self.key)
    left = num_rows // 2 if self.left is None else self.left
    rows = key_positions[..., None, :] - query_positions[..., :, None] + left
    nearest = jnp.clip(rows, 0, num_rows - 1)
    return nearest if self.beyond == "clip" else jnp.where(rows == nearest, rows, -1)


def vectors(
  table: Float[Array, "R #N H"], labels: Int[Array, "B T S"]
) -> Float[Array, "B T S N H"]:
  """a_ij itself: the table's row of every label, zero where the label is -1."""
  return jnp.where(labels[..., None, None] >= 0, table[labels], 0)
