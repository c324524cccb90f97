"""The key-value cache: keys and values of tokens read, with their absolute positions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.typing import Array, Bool, Float, Int

_EMPTY = -1


class KVCache(NamedTuple):
  """The cache of one attention layer. Every leaf has the batch first, so a gather reorders beams.

  A token is found by the position stored in its slot, not by the slot. Padding takes a slot with
  position -1, which no query sees, so rows may be padded left, right or in between.

  Attributes:
    key, value: the projections of the tokens read.
    positions: absolute position of each slot's token; -1 where the slot is empty or padding.
    length: number of slots taken in each row.
  """

  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K H"]
  positions: Int[Array, "B S"]
  length: Int[Array, " B"]

  @property
  def filled(self) -> Bool[Array, "B S"]:
    """Returns which slots hold a token."""
    return self.positions != _EMPTY

  def append(
    self,
    key: Float[Array, "B M K H"],
    value: Float[Array, "B M K H"],
    positions: Int[Array, "B M"],
  ) -> "KVCache":
    """Writes M tokens into the next slots of every row.

    Raises ValueError if they do not fit and `length` is concrete. Under `jit` the caller makes the
    cache large enough: tokens past the end would overwrite the last ones.
    """
    size, new = self.key.shape[1], key.shape[1]
    if not isinstance(self.length, jax.core.Tracer) and int(self.length.max()) + new > size:
      raise ValueError(f"cache of {size} slots holds {self.length.max()} tokens: no room for {new}")
    return KVCache(
      key=_write(self.key, key, self.length),
      value=_write(self.value, value, self.length),
      positions=_write(self.positions, positions, self.length),
      length=self.length + new,
    )


def empty_cache(
  batch_size: int, num_slots: int, num_heads: int, head_width: int, dtype=jnp.float32
) -> KVCache:
  """Returns a cache without tokens.

  >>> empty_cache(2, 16, num_heads=8, head_width=64).key.shape
  (2, 16, 8, 64)
  """
  shape = (batch_size, num_slots, num_heads, head_width)
  return KVCache(
    key=jnp.zeros(shape, dtype),
    value=jnp.zeros(shape, dtype),
    positions=jnp.full((batch_size, num_slots), _EMPTY, jnp.int32),
    length=jnp.zeros((batch_size,), jnp.int32),
  )


def _write(rows, new, starts):
  """Writes `new` at slot `starts` of each row."""
  write = lambda row, x, start: jax.lax.dynamic_update_slice_in_dim(row, x, start, axis=0)
  return jax.vmap(write)(rows, new.astype(rows.dtype), starts)
