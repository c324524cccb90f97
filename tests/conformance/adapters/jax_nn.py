"""jax.nn.dot_product_attention, and flax's functions of that form."""

import jax
import jax.numpy as jnp
from flax import linen as flax_linen
from flax import nnx as flax_nnx

from adapters import in_jax, pair_mask, refuse_if, takes

PACKAGES = ("jax", "flax")


@takes("bias", "mask", "scale", "causal", "window", "query_offset")
@in_jax
def attend(x, options):
  refuse_if(options.get("query_offset"), "has no offset of queries")
  refuse_if(x["value"].shape != x["key"].shape, "values are as wide as keys")
  return jax.nn.dot_product_attention(
    x["query"],
    x["key"],
    x["value"],
    x.get("bias"),
    x.get("mask"),
    scale=options.get("scale"),
    is_causal=options.get("causal", False),
    local_window_size=options.get("window"),
    implementation="xla",
  )


@takes("bias", "mask", "causal")
@in_jax
def nnx(x, options):
  refuse_if(x["value"].shape != x["key"].shape, "values are as wide as keys")
  return flax_nnx.dot_product_attention(
    x["query"],
    x["key"],
    x["value"],
    x.get("bias"),
    x.get("mask"),
    is_causal=options.get("causal", False),
  )


@takes("bias", "mask", "causal", "query_offset", "query_segments", "key_segments")
@in_jax
def linen(x, options):
  refuse_if(x["query"].shape[2] != x["key"].shape[2], "as many key heads as heads")
  mask = pair_mask(x, options)  # as nn.make_causal_mask and combine_masks do
  arrays = x["query"], x["key"], x["value"], x.get("bias")
  return flax_linen.dot_product_attention(*arrays, jnp.asarray(mask))
