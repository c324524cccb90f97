"""A cache for attention in a window, for any number of tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.typing import Array, Float, Int


class RollingCache(NamedTuple):
  """Stores the last W tokens of an attention layer that attends to W tokens.

  The token at position p is in slot p mod W, so the cache never fills. Positions are
  stored, so that distances stay exact. The batch is the first axis of every array, so
  that a gather reorders sequences. An empty slot has position -1.
  """

  key: Float[Array, "B W K H"]
  value: Float[Array, "B W K H"]
  positions: Int[Array, "B W"]

  @property
  def window(self) -> int:
    """Returns W, the number of tokens that a query attends to, its own included."""
    return self.positions.shape[1]

  def with_tokens(
    self,
    key: Float[Array, "B M K H"],
    value: Float[Array, "B M K H"],
    positions: Int[Array, "B M"],
  ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"], Int[Array, "B S"]]:
    """Returns keys, values and positions of the slots, followed by M new tokens."""
    return jax.tree.map(
      lambda old, new: jnp.concatenate([old, new], axis=1),
      tuple(self),
      (key, value, positions),
    )

  def write(
    self,
    key: Float[Array, "B M K H"],
    value: Float[Array, "B M K H"],
    positions: Int[Array, "B M"],
  ) -> "RollingCache":
    """Writes M tokens to their slots; padding, at position -1, is left out."""
    positions = positions.astype(jnp.int32)
    newest = jnp.max(positions, axis=1, keepdims=True, initial=-1)
    # Of more than W tokens, only the last W are written: if two tokens were written to
    # the same slot, either might stay.
    is_kept = (positions >= 0) & (positions > newest - self.window)
    slots = jnp.where(is_kept, positions % self.window, self.window)
    new = RollingCache(key, value, positions)
    return jax.tree.map(lambda old, x: _write_rows(old, slots, x), self, new)


@jax.vmap
def _write_rows(old: Array, slots: Array, new: Array) -> Array:
  return old.at[slots].set(new, mode="drop")
