"""A learned logarithm of the distance: KERPLE (Chi et al. 2022)."""

import jax.numpy as jnp
from flax import nnx

from relpos_jax import DistanceBias
from relpos_jax.nn import Positions


class Scheme(Positions):
  """Subtracts r1 log(1 + r2 |j - i|) from the logits of each head."""

  def __init__(self, num_heads, max_distance, *, rngs=None):
    self.max_distance = max_distance
    self.log_r1, self.log_r2 = (nnx.Param(jnp.zeros(num_heads)) for _ in range(2))

  def __call__(self):
    distances = jnp.abs(jnp.arange(-self.max_distance, self.max_distance + 1))[:, None]
    r1, r2 = jnp.exp(self.log_r1[...]), jnp.exp(self.log_r2[...])  # positive
    return DistanceBias(-r1 * jnp.log1p(r2 * distances))
