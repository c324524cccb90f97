"""Computes relative terms by label, without a [T, S, H] tensor of gathered table rows.

For keys, it first multiplies by the whole table, and then looks up numbers. For values,
it first sums the weights by label:

q_i . aK_ij = (q_i . table)[label_ij]
sum_j p_ij aV_ij = (sum of p_ij by label) . table
"""

import functools

import jax
import jax.numpy as jnp

from relpos_jax.attention.arrays import accumulation_dtype
from relpos_jax.typing import Array, Float, Int


def product(subscripts: str, x: Array, y: Array) -> Array:
  """Computes an einsum in x's dtype; the result has x's accumulation dtype."""
  dtype = accumulation_dtype(x.dtype)
  einsum = functools.partial(jnp.einsum, subscripts, preferred_element_type=dtype)
  if x.dtype == dtype:
    return einsum(x, y.astype(dtype))

  # XLA lacks some low-precision products on CPUs, where float32 is as fast.
  def promote_and_multiply(x, y):
    return einsum(x.astype(dtype), y.astype(dtype))

  return jax.lax.platform_dependent(
    x, y.astype(x.dtype), cpu=promote_and_multiply, default=einsum
  )


def look_up(
  numbers: Float[Array, "#B N T R"], labels: Int[Array, "#B T S"]
) -> Float[Array, "#B N T S"]:
  """Returns numbers[b, n, i, labels[b, i, j]], or 0 where the label is -1."""
  # TPUs gather slowly. On GPUs the transpose of a gather is a scatter, which adds one
  # weight after another. According to the TPU compiler, products with one-hot labels
  # move about half of the bytes or less: results/tpu_costs.md.
  return jax.lax.platform_dependent(numbers, labels, cpu=gather, default=multiply)


def sum_by_label(
  weights: Float[Array, "B N T S"], labels: Int[Array, "#B T S"], num_rows: int
) -> Float[Array, "B N T R"]:
  """Sums the weights of each query by label: the transpose of `look_up`."""
  *rows, _ = weights.shape
  sums = jax.typeof(weights).update(shape=(*rows, num_rows))
  (sums_BNTR,) = jax.linear_transpose(lambda x: look_up(x, labels), sums)(weights)
  return sums_BNTR


def multiply(
  numbers: Float[Array, "#B N T R"], labels: Int[Array, "#B T S"]
) -> Float[Array, "#B N T S"]:
  """Looks up by products with one-hot labels, at the highest precision."""
  one_hot = jax.nn.one_hot(labels, numbers.shape[-1], dtype=numbers.dtype)
  highest = jax.lax.Precision.HIGHEST
  return jnp.einsum("BNTR,BTSR->BNTS", numbers, one_hot, precision=highest)


def gather(
  numbers: Float[Array, "#B N T R"], labels: Int[Array, "#B T S"]
) -> Float[Array, "#B N T S"]:
  """Looks up numbers[b, n, i, labels[b, i, j]] by index; 0 where the label is -1."""
  batch, heads, length, num_rows = numbers.shape
  # On a CPU, one index into the flattened [T R] is twice as fast as two indices.
  first = num_rows * jnp.arange(length)
  index = first[None, :, None] + jnp.maximum(labels, 0)
  index = index.reshape(labels.shape[0], 1, -1)
  flat = numbers.reshape(batch, heads, length * num_rows)
  gathered = jnp.take_along_axis(flat, index, axis=-1, mode="promise_in_bounds")
  gathered = gathered.reshape(*gathered.shape[:2], length, -1)
  return jnp.where(labels[:, None] >= 0, gathered, 0)


def take_rows(
  table: Float[Array, "R *row"], labels: Int[Array, "*pairs"]
) -> Float[Array, "..."]:
  """Returns the table row of each label, zero for -1."""
  has_row = (labels >= 0).reshape(*labels.shape, *[1] * (table.ndim - 1))
  return jnp.where(has_row, table[labels], 0)
