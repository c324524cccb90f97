"""Positions of a layer: trained tables of relative positions, and sinusoids."""

import jax
import jax.numpy as jnp
from flax import nnx

from relpos_jax.attention.relations import RelativePositions
from relpos_jax.typing import Array, Float, Int


def init_table(key: Array, shape: tuple[int, ...]) -> Float[Array, "R ..."]:
  """Draws a table from Glorot's uniform distribution over [R, N*H], or [R, H], as Tensor2Tensor."""
  if shape[0] < 1:
    raise ValueError(f"max_distance is {shape[0] // 2}; want 0 or more")
  out_axes = range(1, len(shape))
  glorot = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform", 0, out_axes)
  return glorot(key, shape)


class RelativePositionTables(nnx.Module):
  """Owns the trained vectors w^K and w^V of Shaw et al. 2018, section 3.2.

  Attention layers given the same object share its tables.

  Args:
    max_distance: k, the distance at which positions are clipped; tables have 2k + 1 rows.
    head_width: H, the width of a row.
    num_heads: N for a table per head, `[R, N, H]`; None for one shared by heads, `[R, H]`.
    keys, values: whether there is a key table, and a value table.
    beyond: "clip" to the outermost rows, or "zero": no term beyond k (Music Transformer).
    dtype: of the tables in the computation; parameters are float32.

  >>> tables = RelativePositionTables(16, 64, num_heads=8, rngs=nnx.Rngs(0))
  >>> tables().key.shape
  (33, 8, 64)
  """

  def __init__(
    self,
    max_distance: int,
    head_width: int,
    *,
    num_heads: int | None = None,
    keys: bool = True,
    values: bool = True,
    beyond: str = "clip",
    dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    heads = () if num_heads is None else (num_heads,)
    shape = (2 * max_distance + 1, *heads, head_width)
    self.key = nnx.Param(init_table(rngs.params(), shape)) if keys else None
    self.value = nnx.Param(init_table(rngs.params(), shape)) if values else None
    self.beyond = beyond
    self.dtype = dtype

  def __call__(self) -> RelativePositions:
    """Returns the relation of these tables, in the compute dtype."""
    cast = lambda table: None if table is None else table[...].astype(self.dtype)
    return RelativePositions(cast(self.key), cast(self.value), beyond=self.beyond)


def sinusoids(positions: Int[Array, "*B T"], width: int) -> Float[Array, "*B T {width}"]:
  """Returns sines, then cosines, of positions at wavelengths from 2 pi to 20,000 pi.

  Vaswani et al. 2017, section 3.5, laid out as in Tensor2Tensor: the halves side by side.
  `width` must be even.

  >>> sinusoids(jnp.arange(3), 4).shape
  (3, 4)
  """
  rates = 10_000.0 ** -jnp.linspace(0.0, 1.0, width // 2)
  angles = positions[..., None] * rates
  return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
