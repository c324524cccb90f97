"""Masks: which query may attend to which key."""

import functools

import jax.numpy as jnp

from relpos_jax.typing import Array, Bool, Float, Int

# The logit of a hidden pair. It is finite, so that a query that sees no key does not
# become NaN. Logits below half of it count as hidden.
LOWEST = 0.7 * float(jnp.finfo(jnp.float32).min)


def combine(*masks: Bool[Array, "..."] | None) -> Bool[Array, "..."] | None:
  """Returns the logical and of the masks given, or None if there are none."""
  given = [mask for mask in masks if mask is not None]
  return functools.reduce(jnp.logical_and, given) if given else None


def cap(logits: Float[Array, "..."], soft_cap: float | None) -> Float[Array, "..."]:
  """Returns c tanh(logits / c) for a soft cap c; logits that hide a pair stay as they are."""
  if soft_cap is None:
    return logits
  return jnp.where(logits <= LOWEST / 2, logits, soft_cap * jnp.tanh(logits / soft_cap))


def causal(
  queries: Int[Array, "#B T"], keys: Int[Array, "#B S"]
) -> Bool[Array, "#B 1 T S"]:
  """Returns True where the position of the key is not later than that of the query."""
  # By the distance: positions across 2**31 wrap around, and their distances do not.
  return keys[:, None, None, :] - queries[:, None, :, None] <= 0


def within(
  lengths: Int[Array, " B"] | None, size: int
) -> Bool[Array, "B 1 1 {size}"] | None:
  """Returns True for the first `lengths` of `size` tokens, or None without lengths."""
  if lengths is None:
    return None
  return jnp.arange(size)[None, None, None] < lengths[:, None, None, None]
