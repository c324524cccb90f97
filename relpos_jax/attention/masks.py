"""Boolean masks: True where a query attends to a key."""

import functools

import jax.numpy as jnp

from relpos_jax.typing import Array, Bool, Float, Int

# The logit of a masked pair. It is finite, so that a fully masked query does not become
# NaN. Pairs with logits below half of it count as masked.
LOWEST = 0.7 * float(jnp.finfo(jnp.float32).min)
UNLIMITED = 2**31 - 1  # a distance that masks nothing


def combine(*masks: Bool[Array, "..."] | None) -> Bool[Array, "..."] | None:
  """Returns the logical and of the masks that are not None; None if all are."""
  present = [mask for mask in masks if mask is not None]
  return functools.reduce(jnp.logical_and, present) if present else None


def cap(logits: Float[Array, "..."], soft_cap: float | None) -> Float[Array, "..."]:
  """Returns c tanh(logits / c) for a soft cap c, except for masked logits."""
  if soft_cap is None:
    return logits
  return jnp.where(logits <= LOWEST / 2, logits, soft_cap * jnp.tanh(logits / soft_cap))


def causal(
  queries: Int[Array, "#B T"], keys: Int[Array, "#B S"]
) -> Bool[Array, "#B 1 T S"]:
  """Returns True where the key's position is not later than the query's."""
  # Compares the distance, since positions may wrap around at 2**31.
  return keys[:, None, None, :] - queries[:, None, :, None] <= 0
