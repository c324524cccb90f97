"""Positions for a layer: trained tables of relative positions, and sinusoids."""

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
  """Draws a table from Glorot's uniform distribution for a matrix [R, N*H] or [R, H].

  Tensor2Tensor does the same.
  """
  out_axes = range(1, len(shape))
  return jax.nn.initializers.glorot_uniform(0, out_axes)(key, shape, dtype)


def table_shape(
  max_distance: int, left: int | None, num_heads: int | None, head_width: int
) -> tuple[int, ...]:
  """Returns `[R, H]` or `[R, N, H]`, for distances from -left to max_distance."""
  if left is None:
    left = max_distance
  if not all(isinstance(x, numbers.Integral) and x >= 0 for x in (left, max_distance)):
    raise ValueError(
      f"max_distance is {max_distance!r}, left {left!r}; want integers from 0 on"
    )
  heads = () if num_heads is None else (num_heads,)
  return left + 1 + max_distance, *heads, head_width


def new_table(
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  dtype: DTypeLike,
  init: Callable[..., Array] = init_table,
) -> nnx.Param:
  """Returns a new parameter, drawn by `init`."""
  return nnx.Param(init(rngs.params(), shape, dtype))


class Positions(nnx.Module):
  """Defines the positions of a self-attention layer. Other classes inherit from it.

  The layer calls `arguments`, and gives what it returns to the operator. To add a
  relation, a subclass only has to define `__call__`, which returns the relation. To
  change the query, the key or the scale, a subclass overrides `arguments`.

  >>> from relpos_jax import DistanceBias
  >>> class DistancePositions(Positions):
  ...   def __init__(self, num_heads, *, rngs):
  ...     self.table = nnx.Param(jnp.zeros((2 * 8 + 1, num_heads)))
  ...   def __call__(self):
  ...     return DistanceBias(self.table[...], beyond="zero")
  >>> from relpos_jax.nn import MultiHeadAttention
  >>> rngs = nnx.Rngs(0)
  >>> positions = DistancePositions(4, rngs=rngs)
  >>> layer = MultiHeadAttention(32, 4, positions=positions, rngs=rngs)
  >>> layer(jnp.ones((2, 5, 32))).shape
  (2, 5, 32)
  """

  def __call__(self) -> Relations:
    """Returns the relation between queries and keys."""
    raise NotImplementedError(
      f"{type(self).__name__} has no relation: define `__call__`, or `arguments`"
    )

  def arguments(
    self,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
  ) -> dict[str, Any]:
    """Returns arguments for the operator: query, key, and any of relations and scale.

    The positions and the offset are those that the layer was called with, or None.
    """
    relations = self()
    if relations is None:
      raise ValueError(
        f"{type(self).__name__}.__call__ returns None; want a relation, or a tuple"
      )
    return dict(query=query, key=key, relations=relations)


class TableOptions(TypedDict, total=False):
  """Names the options of `RelativePositionTables`, for type checkers."""

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

  Attention layers with the same object share its tables.

  Args:
    max_distance: k, the distance at which positions are clipped. Tables have 2k + 1
      rows.
    left: the clipping distance on the left, if it differs from k. Then tables have left
      + 1 + k rows. Causal attention needs no rows on the right, so k may be 0.
    head_width: H, the width of a row.
    num_heads: N for a table per head, `[R, N, H]`; None for a table shared by the
      heads, `[R, H]`. In experiments, `config.model.tables_per_head` decides.
    keys, values: whether there is a key table, and a value table.
    beyond: "clip" to the outermost rows, or "zero" for no term beyond them (Music
      Transformer).
    dtype: the dtype of the tables in the computation.
    param_dtype: the dtype of the parameters.
    table_init: a function `(key, shape, dtype)` that returns a table. With
      `jax.nn.initializers.zeros` a pretrained model starts unchanged.
      `nnx.with_partitioning(init_table, names)` names the axes.

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
    self.beyond: Beyond = beyond
    self.dtype = dtype

  def __call__(self) -> RelativePositions:
    """Returns the relation with these tables, cast to `dtype`."""
    key = None if self.key is None else self.key[...].astype(self.dtype)
    value = None if self.value is None else self.value[...].astype(self.dtype)
    return RelativePositions(key, value, beyond=self.beyond, left=self.left)


def sinusoids(
  positions: Int[Array, "*B T"], width: int
) -> Float[Array, "*B T {width}"]:
  """Returns sines, then cosines, of positions at wavelengths from 2 pi to 20,000 pi.

  Vaswani et al. 2017, section 3.5. As in Tensor2Tensor, the first half of the columns
  are sines, and the second half cosines. `width` must be even.

  >>> sinusoids(jnp.arange(3), 4).shape
  (3, 4)
  """
  if width % 2:
    raise ValueError(f"width is {width}; want an even number")
  rates = 10_000.0 ** -jnp.linspace(0.0, 1.0, width // 2)
  angles = jnp.multiply.outer(positions, rates)
  return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
