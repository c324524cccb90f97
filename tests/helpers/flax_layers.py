"""Flax's layers of Linen: they decode token by token what a full pass gives."""

import jax
import jax.numpy as jnp
from comparing import assert_close
from compiling import compile_quickly


def check_linen_decoding(make, params, x, full, atol=1e-5):
  """Checks `make(position)`, a decoder, against the full pass of x."""
  shapes = jax.eval_shape(make(None).init, jax.random.key(0), x)["cache"]
  cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

  @compile_quickly
  def step(cache, token, position):
    variables = {"params": params, "cache": cache}
    return make(position).apply(variables, token, mutable=["cache"])

  for t in range(x.shape[1]):
    y, variables = step(cache, x[:, t : t + 1], jnp.array([t]))
    assert_close(y[:, 0], full[:, t], atol=atol)
    cache = variables["cache"]
