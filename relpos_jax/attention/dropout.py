"""Which weights are dropped: a function of the head's seed and the weight's place.

Every implementation drops the same weights, a tile can be drawn again in the backward pass, and
nothing is stored. The hash is one multiply-xorshift finaliser of 32 bits per row and one per
weight, in int32, which every kernel language has.
"""

import jax
import numpy as np

from relpos_jax.typing import Array, Bool, Int

_WEYL = np.int32(-1640531527)  # the golden ratio's 32 bits: spreads consecutive numbers


def keep(
  seeds: Int[Array, "..."], rows: Int[Array, "..."], columns: Int[Array, "..."], rate: float
) -> Bool[Array, "..."]:
  """False with probability `rate`. The arguments, int32, broadcast against each other.

  >>> import jax.numpy as jnp
  >>> rows, columns = jnp.arange(400)[:, None], jnp.arange(500)
  >>> round(float(keep(jnp.int32(7), rows, columns, rate=0.1).mean()), 2)
  0.9
  """
  of_row = _mix(seeds + rows.astype(np.int32) * _WEYL)
  of_weight = _mix(of_row + columns.astype(np.int32) * _WEYL)
  return jax.lax.shift_right_logical(of_weight, np.int32(8)) >= round(rate * 2**24)


def _mix(x: Int[Array, "..."]) -> Int[Array, "..."]:
  """The finaliser "lowbias32" of Wellons' search for hashes of little bias."""
  for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
    x = (x ^ jax.lax.shift_right_logical(x, np.int32(shift))) * np.int32(factor)
  return x ^ jax.lax.shift_right_logical(x, np.int32(16))
