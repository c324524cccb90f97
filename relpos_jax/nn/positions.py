"""Positions of a layer: trained tables of relative positions, and sinusoids."""

import numbers
from collections.abc import Callable
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from relpos_jax.attention.relations import Relations, RelativePositions
from relpos_jax.typing import Array, ArrayLike, Beyond, Float, Int


def init_table(
  key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
) -> Array:
  """Draws a table from Glorot's uniform distribution over [R, N*H], or [R, H].

  Tensor2Tensor does the same.
  """
  out_axes = range(1, len(shape))
  glorot = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform", 0, out_axes)
  return glorot(key, shape, dtype)


def table_shape(
  max_distance: int, left: int | None, num_heads: int | None, head_width: int
) -> tuple[int, ...]:
  """Returns `[R, H]` or `[R, N, H]`: distances from -left to max_distance."""
  if left is None:
    left = max_distance
  if not all(isinstance(x, numbers.Integral) and x >= 0 for x in (left, max_distance)):
    raise ValueError(
      f"max_distance is {max_distance!r}, left {left!r}; want integers from 0 on"
    )
  num_rows = left + 1 + max_distance
  if num_heads is None:
    return num_rows, head_width
  return num_rows, num_heads, head_width


def new_table(
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  dtype: DTypeLike,
  init: Callable[..., Array] = init_table,
) -> nnx.Param:
  """Returns a new parameter."""
  return nnx.Param(init(rngs.params(), shape, dtype))


class Positions(nnx.Module):
  """The positions of a self-attention layer.

  They are a relation, or change queries and keys.

  A layer calls `arguments`. A scheme that is a relation defines `__call__`, which
  returns it:

  >>> from relpos_jax import DistanceBias
  >>> class Nearby(Positions):
  ...   def __init__(self, num_heads, *, rngs):
  ...     self.table = nnx.Param(jnp.zeros((2 * 8 + 1, num_heads)))
  ...   def __call__(self):
  ...     return DistanceBias(self.table[...], beyond="zero")
  >>> from relpos_jax.nn import MultiHeadAttention
  >>> rngs = nnx.Rngs(0)
  >>> layer = MultiHeadAttention(32, 4, positions=Nearby(4, rngs=rngs), rngs=rngs)
  >>> layer(jnp.ones((2, 5, 32))).shape
  (2, 5, 32)
  """

  def __call__(self) -> Relations:
    """Returns the relation between queries and keys."""
    raise NotImplementedError(
      f"{type(self).__name__} has no relation: it changes `arguments`"
    )

  def arguments(
    self,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
  ) -> dict[str, Any]:
    """Returns the operator's query and key, and relations and scale where they differ.

    Positions and offset are those of the call, None by default.
    """
    return dict(query=query, key=key, relations=self())


class TableOptions(TypedDict, total=False):
  """The options of `RelativePositionTables`, for editors."""

  left: int | None
  num_heads: int | None
  keys: bool
  values: bool
  beyond: Beyond
  dtype: DTypeLike
  param_dtype: DTypeLike
  table_init: Callable[..., Array]


class RelativePositionTables(Positions):
  """Owns the trained vectors w^K and w^V of Shaw et al. 2018, section 3.2.

  Attention layers given the same object share its tables.

  Args:
    max_distance: k, the distance at which positions are clipped; tables have 2k + 1
      rows.
    left: the distance on the left, if it is not k; tables have left + 1 + k rows.
      Causal attention needs no rows on the right: k = 0.
    head_width: H, the width of a row.
    num_heads: N for a table per head, `[R, N, H]`, as `config.model.tables_per_head`
      says in experiments; None for one shared by heads, `[R, H]`.
    keys, values: whether there is a key table, and a value table.
    beyond: "clip" to the outermost rows, or "zero": no term beyond k (Music
      Transformer).
    dtype: of the tables in the computation.
    param_dtype: of the parameters.
    table_init: `(key, shape, dtype)` returns a table. With `jax.nn.initializers.zeros`
      a pretrained model starts unchanged; `nnx.with_partitioning(init_table, names)`
      names the axes.

  >>> tables = RelativePositionTables(16, 64, num_heads=8, rngs=nnx.Rngs(0))
  >>> tables().key.shape
  (33, 8, 64)
  """

  def __init__(
    self,
    max_distance: int,
    head_width: int,
    *,
    left: int | None = None,
    num_heads: int | None = None,
    keys: bool = True,
    values: bool = True,
    beyond: Beyond = "clip",
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    table_init: Callable[..., Array] = init_table,
    rngs: nnx.Rngs,
  ):
    shape = table_shape(max_distance, left, num_heads, head_width)
    arguments = rngs, shape, param_dtype, table_init
    self.key = new_table(*arguments) if keys else None
    self.value = new_table(*arguments) if values else None
    self.left = left
    self.beyond = beyond
    self.dtype = dtype

  def __call__(self) -> RelativePositions:
    """Returns the relation of these tables, in the compute dtype."""
    key = None if self.key is None else self.key[...].astype(self.dtype)
    value = None if self.value is None else self.value[...].astype(self.dtype)
    return RelativePositions(key, value, beyond=self.beyond, left=self.left)


def sinusoids(
  positions: Int[Array, "*B T"], width: int
) -> Float[Array, "*B T {width}"]:
  """Returns sines, then cosines, of positions at wavelengths from 2 pi to 20,000 pi.

  Vaswani et al. 2017, section 3.5, laid out as in Tensor2Tensor: the halves side by
  side. `width` must be even.

  >>> sinusoids(jnp.arange(3), 4).shape
  (3, 4)
  """
  rates = 10_000.0 ** -jnp.linspace(0.0, 1.0, width // 2)
  angles = jnp.multiply.outer(positions, rates)
  return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
