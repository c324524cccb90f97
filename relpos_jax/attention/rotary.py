"""Rotary positions: queries and keys turned by their positions, before attention."""

import jax.numpy as jnp

from relpos_jax.attention import validation
from relpos_jax.typing import Array, ArrayLike, Float


def rotate(
  x: Float[Array, "*B T N H"], positions: ArrayLike, base: float = 10_000.0
) -> Float[Array, "*B T N H"]:
  r"""Rotates queries or keys by their positions, so that products depend on distances alone.

  $$(x_d, x_{d + H/2}) \to (x_d \cos\phi - x_{d + H/2} \sin\phi,\;
    x_{d + H/2} \cos\phi + x_d \sin\phi) \qquad \phi = \mathrm{position} \cdot base^{-2 d / H}$$

  Su et al. 2021 (RoFormer), section 3.2.2, in the half-split layout of GPT-NeoX and Gemma: d and
  d + H/2 are a pair. The paper pairs 2d and 2d + 1, as GPT-J does; weights for that layout need
  their columns reordered. It is computed in float32, or in float64 for float64.

  Args:
    x: queries or keys `[B, T, N, H]` or `[T, N, H]`; H is even.
    positions: integers or numbers `[B, T]`, or `[T]` for all of the batch.
    base: the wavelengths are 2 pi base**(2 d / H) positions.

  Returns:
    An array of x's shape and dtype.

  Raises:
    ValueError: H is odd, or the positions do not fit x.

  >>> from relpos_jax import dot_product_attention
  >>> q = k = v = jnp.ones((2, 10, 8, 64))
  >>> positions = jnp.arange(10)
  >>> dot_product_attention(rotate(q, positions), rotate(k, positions), v).shape
  (2, 10, 8, 64)
  """
  *batch, length, _, width = x.shape
  if width % 2:
    raise ValueError(f"x has shape {x.shape}; want heads of an even width")
  positions = validation.as_array("positions", positions)
  if positions.shape not in ((*batch, length), (length,)):
    raise ValueError(
      f"positions has shape {positions.shape}; want {(*batch, length)} or {(length,)}"
    )
  wide = jnp.promote_types(x.dtype, jnp.float32)
  half = width // 2
  frequencies = base ** (-jnp.arange(half, dtype=wide) / half)
  angles = positions[..., None, None].astype(wide) * frequencies
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  first, second = jnp.split(x, 2, axis=-1)
  rotated = first * cos - second * sin, second * cos + first * sin
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
