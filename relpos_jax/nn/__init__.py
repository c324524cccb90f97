"""Flax NNX layers with relative positions."""

from relpos_jax.nn.attention import KVCache, MultiHeadAttention
from relpos_jax.nn.attention_fn import RelativeAttention
from relpos_jax.nn.feed_forward import FeedForward, Residual
from relpos_jax.nn.positions import Positions, RelativePositionTables, sinusoids
from relpos_jax.nn.rolling_cache import RollingCache
from relpos_jax.nn.schemes import (
  AlibiPositions,
  ContentPositions,
  DebertaPositions,
  RotaryPositions,
  T5Positions,
  TransformerXLPositions,
)

__all__ = [
  "AlibiPositions",
  "ContentPositions",
  "DebertaPositions",
  "FeedForward",
  "KVCache",
  "MultiHeadAttention",
  "Positions",
  "RelativeAttention",
  "RelativePositionTables",
  "Residual",
  "RollingCache",
  "RotaryPositions",
  "T5Positions",
  "TransformerXLPositions",
  "sinusoids",
]
