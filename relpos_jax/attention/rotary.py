"""Rotary positions: rotates queries and keys by their positions, before attention."""

import jax.numpy as jnp

from relpos_jax.attention.arrays import accumulation_dtype, check_array
from relpos_jax.typing import Array, ArrayLike, Float


def rotate(
  x: Float[Array, "*B T N H"],
  positions: ArrayLike,
  base: float = 10_000.0,
  frequencies: ArrayLike | None = None,
) -> Float[Array, "*B T N H"]:
  """Rotates queries or keys so that their products depend on distances alone.

      angle = position * base**(-2 d / H)
      x_d, x_(d + H/2) become
      x_d cos(angle) - x_(d + H/2) sin(angle), x_(d + H/2) cos(angle) + x_d sin(angle)

  Su et al. 2021 (RoFormer), section 3.2.2. As in GPT-NeoX and Gemma, d and d + H/2 are
  a pair. The paper and GPT-J pair 2d and 2d + 1: to use such weights, reorder their
  columns. The rotation is computed in float32, or in float64 for float64 inputs.

  Args:
    x: queries or keys `[B, T, N, H]` or `[T, N, H]`; H is even.
    positions: integers or numbers `[B, T]`, or `[T]` for all of the batch.
    base: the wavelengths are 2 pi base**(2 d / H) positions.
    frequencies: `[F]`, radians per position, instead of a base. The first 2 F elements
      of x are rotated, where d and d + F are a pair. The others do not change.

  Returns:
    An array of x's shape and dtype.

  Raises:
    ValueError: H is odd, or the positions or frequencies do not fit x.

  >>> from relpos_jax import dot_product_attention
  >>> q = k = v = jnp.ones((2, 10, 8, 64))
  >>> positions = jnp.arange(10)
  >>> dot_product_attention(rotate(q, positions), rotate(k, positions), v).shape
  (2, 10, 8, 64)
  """
  *batch, length, _, width = x.shape
  if width % 2:
    raise ValueError(
      f"heads have width {width}, as x has shape {x.shape}; rotary positions want an "
      "even width"
    )
  shapes = (*batch, length), (length,)
  positions = check_array("positions", positions, jnp.number, *shapes)
  dtype = accumulation_dtype(x.dtype)
  if frequencies is None:
    exponents = jnp.arange(0, width, 2, dtype=dtype) / width
    frequencies = base**-exponents
  frequencies = jnp.asarray(frequencies, dtype)
  if frequencies.ndim != 1 or 2 * len(frequencies) > width:
    raise ValueError(
      f"frequencies has shape {frequencies.shape}; want at most ({width // 2},)"
    )
  angles = jnp.multiply.outer(positions.astype(dtype), frequencies)
  angles = jnp.expand_dims(angles, (*range(x.ndim - angles.ndim - 1), -2))
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  num_pairs = len(frequencies)
  first, second, rest = jnp.split(x, [num_pairs, 2 * num_pairs], axis=-1)
  rotated_first = first * cos - second * sin
  rotated_second = second * cos + first * sin
  rotated = jnp.concatenate([rotated_first, rotated_second, rest], axis=-1)
  return rotated.astype(x.dtype)
