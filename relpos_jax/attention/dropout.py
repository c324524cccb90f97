"""Dropout by a hash of the head's seed and of the weight's row and column.

The row is the index of the query, and the column is the index of the key. With such a
hash, every implementation drops the same weights, and the backward pass can compute
again which weights were dropped. The hash is a 32-bit multiply-xorshift, applied once
per row and once per weight. It needs only int32, which every kernel language has.
"""

import numbers

import jax
import jax.numpy as jnp
import numpy as np

from relpos_jax.typing import Array, Bool, Int

# 2**32 divided by the golden ratio, as int32: it spreads consecutive integers.
_WEYL = np.int32(-1640531527)


def check_rate(rate: float) -> None:
  """Raises ValueError unless 0 <= rate < 1."""
  if not isinstance(rate, numbers.Real) or not 0 <= rate < 1:
    raise ValueError(f"dropout_rate is {rate!r}; want 0 <= rate < 1")


def keep(seeds: Array, rows: Array, columns: Array, rate: float) -> Bool[Array, "..."]:
  """Returns which weights to keep: False with probability `rate`.

  Seeds, rows and columns are int32 and broadcast against each other.
  """
  row_hash = _mix(seeds + rows.astype(np.int32) * _WEYL)
  weight_hash = _mix(row_hash + columns.astype(np.int32) * _WEYL)
  number = jax.lax.shift_right_logical(weight_hash, np.int32(8))  # 24 random bits
  return number >= round(rate * 2**24)


def from_row(seeds: Array | None, first: int | Int[Array, "*#B"]) -> Array | None:
  """Shifts the numbers of rows by `first`; returns seeds [B, N] for `keep`.

  A block of queries that begins at row s, and numbers its own rows from 0, passes
  `first=-s`. Then it drops the same weights as the whole array.
  """
  if seeds is None or (isinstance(first, int) and first == 0):
    return seeds
  return seeds - jnp.int32(first).reshape(-1, 1) * _WEYL


def _mix(x: Int[Array, "..."]) -> Int[Array, "..."]:
  """Applies the hash "lowbias32", by Chris Wellons."""
  x = _fold(x, 16) * np.int32(0x7FEB352D)
  x = _fold(x, 15) * np.int32(0x846CA68B - 2**32)
  return _fold(x, 16)


def _fold(x: Int[Array, "..."], shift: int) -> Int[Array, "..."]:
  return x ^ jax.lax.shift_right_logical(x, np.int32(shift))
