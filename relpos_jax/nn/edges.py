"""Trained edge vectors: tables of labels and kernels of features."""

import jax.numpy as jnp
from flax import nnx

from relpos_jax.attention.relations import EdgeFeatures, EdgeLabels
from relpos_jax.attention.validation import check_sizes
from relpos_jax.nn.positions import init_table
from relpos_jax.typing import Array, Float, Int


class EdgeTables(nnx.Module):
  """Owns the vectors of a graph's edge labels, and the kernels of its edge features.

  Shaw et al. 2018, section 3.1. Layers given the same object share its tables.

  Args:
    num_labels: E, rows of the tables.
    num_features: F, rows of the kernels; 0 for none.
    head_width: H, the width of a row.
    num_heads: N for a table per head, `[E, N, H]`; None for one shared by heads, `[E, H]`.
    keys, values: whether there is the key term, and the value term.
    dtype: of the tables in the computation; parameters are float32.

  Raises:
    ValueError: a size is less than 1, or the number of features negative.

  >>> tables = EdgeTables(3, 64, num_features=2, rngs=nnx.Rngs(0))
  >>> tables.of_list(jnp.array([0, 2, 1]), jnp.ones((3, 2)))["features"].key.shape
  (2, 64)
  >>> tables.of_pairs(jnp.ones((4, 4, 5))).key.shape
  (5, 64)
  """

  def __init__(
    self,
    num_labels: int,
    head_width: int,
    *,
    num_features: int = 0,
    num_heads: int | None = None,
    keys: bool = True,
    values: bool = True,
    dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    heads = () if num_heads is None else (num_heads,)
    check_sizes(0, num_features=num_features)
    check_sizes(1, num_labels=num_labels, head_width=head_width, num_heads=num_heads or 1)
    make = lambda there, rows: (
      nnx.Param(init_table(rngs.params(), (rows, *heads, head_width))) if there and rows else None
    )
    self.key, self.value = make(keys, num_labels), make(values, num_labels)
    self.key_kernel, self.value_kernel = make(keys, num_features), make(values, num_features)
    self.dtype = dtype

  def of_list(
    self, labels: Int[Array, "*B M"], features: Float[Array, "*B M F"]
  ) -> dict[str, EdgeLabels | EdgeFeatures]:
    """Returns the options `labels` and, if there are features, `features` of `edge_attention`."""
    options: dict = dict(labels=EdgeLabels(labels, self._cast(self.key), self._cast(self.value)))
    if self.key_kernel is not None or self.value_kernel is not None:
      kernels = self._cast(self.key_kernel), self._cast(self.value_kernel)
      options["features"] = EdgeFeatures(features, *kernels)
    return options

  def of_pairs(self, features: Float[Array, "*B T S R"]) -> EdgeFeatures:
    """Returns the relation of `pair_features`: rows of the labels, then of the features."""
    return EdgeFeatures(
      features,
      _joined(self._cast(self.key), self._cast(self.key_kernel)),
      _joined(self._cast(self.value), self._cast(self.value_kernel)),
    )

  def _cast(self, table: nnx.Param | None) -> Array | None:
    return None if table is None else table[...].astype(self.dtype)


def _joined(table: Array | None, kernel: Array | None) -> Array | None:
  return table if kernel is None or table is None else jnp.concatenate([table, kernel])
