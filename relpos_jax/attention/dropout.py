"""Dropout: a hash of the head's seed and the weight's row and column decides.

Every implementation drops the same weights, the backward pass can recompute any tile,
and nothing is stored. The hash is one multiply-xorshift finaliser of 32 bits per row
and one per weight, in int32, which every kernel language has.
"""

import jax
import jax.numpy as jnp
import numpy as np

from relpos_jax.typing import Array, Bool, Int

# 32 bits of the golden ratio, to spread consecutive numbers.
_WEYL = np.int32(-1640531527)


def keep(seeds: Array, rows: Array, columns: Array, rate: float) -> Bool[Array, "..."]:
  """Returns False with probability `rate`.

  The int32 arrays broadcast against each other.
  """
  of_row = _mix(seeds + rows.astype(np.int32) * _WEYL)
  of_weight = _mix(of_row + columns.astype(np.int32) * _WEYL)
  number = jax.lax.shift_right_logical(of_weight, np.int32(8))  # of 24 bits
  return number >= round(rate * 2**24)


def from_row(seeds: Array | None, first: int | Int[Array, "*#B"]) -> Array | None:
  """Returns seeds [B, N] that drop the same weights when rows count from `first`."""
  if seeds is None or (isinstance(first, int) and first == 0):
    return seeds
  return seeds - jnp.int32(first).reshape(-1, 1) * _WEYL


def _mix(x: Int[Array, "..."]) -> Int[Array, "..."]:
  """Applies "lowbias32", of Wellons' search for hashes with little bias."""
  x = _folded(x, 16) * np.int32(0x7FEB352D)
  x = _folded(x, 15) * np.int32(0x846CA68B - 2**32)
  return _folded(x, 16)


def _folded(x: Int[Array, "..."], shift: int) -> Int[Array, "..."]:
  return x ^ jax.lax.shift_right_logical(x, np.int32(shift))
