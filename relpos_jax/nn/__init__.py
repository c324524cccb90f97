"""Flax NNX layers."""

from relpos_jax.nn.attention import KVCache, MultiHeadAttention
from relpos_jax.nn.blocks import FeedForward, Residual
from relpos_jax.nn.hooks import RelativeAttention
from relpos_jax.nn.positions import RelativePositionTables, sinusoids

__all__ = [
  "FeedForward",
  "KVCache",
  "MultiHeadAttention",
  "RelativeAttention",
  "RelativePositionTables",
  "Residual",
  "sinusoids",
]
