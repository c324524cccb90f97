"""Small training states, and a comparison of states bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.training.step import init_state


def make_state(seed=0):
  params = nnx.state(nnx.Linear(16, 8, rngs=nnx.Rngs(seed)), nnx.Param)
  return init_state(params, optax.adam(0.1))._replace(step=jnp.int32(seed))


def assert_same_bits(tree, wanted):
  assert jax.tree.structure(tree) == jax.tree.structure(wanted)
  for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True):
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
