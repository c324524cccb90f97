"""equinox.nn.MultiheadAttention with projections that change nothing."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np

from adapters import in_jax, pair_mask, refuse_if, takes

PACKAGES = ("equinox", "jax")


@takes("mask", "causal", "query_offset", "query_segments", "key_segments")
@in_jax
def attend(x, options):
  batch, queries, heads, width = x["query"].shape
  refuse_if(x["key"].shape[2] != heads, "as many key heads as query heads")
  sizes = dict(vo_size=x["value"].shape[3], qk_size=width)
  key = jax.random.key(0)
  layer = equinox.nn.MultiheadAttention(heads, heads * width, key=key, **sizes)
  names = "query_proj", "key_proj", "value_proj", "output_proj"
  layer = equinox.tree_at(
    lambda y: [getattr(y, name) for name in names], layer, [equinox.nn.Identity()] * 4
  )
  mask = pair_mask(x, options)
  mask = jnp.asarray(np.broadcast_to(mask, (batch, heads, *mask.shape[2:])))
  rows = [
    x[name].reshape(batch, x[name].shape[1], -1) for name in ("query", "key", "value")
  ]
  return jax.vmap(layer)(*rows, mask).reshape(batch, queries, heads, -1)
