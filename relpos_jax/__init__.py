"""Attention with relative positions and relations, in JAX."""

from relpos_jax.attention.choice import explain
from relpos_jax.attention.edges import edge_attention
from relpos_jax.attention.operator import attention_weights, dot_product_attention, merge
from relpos_jax.attention.partitioned import mesh_axes
from relpos_jax.attention.relations import (
  ContentBias,
  DistanceBias,
  EdgeFeatures,
  EdgeLabels,
  FunctionBias,
  KeyBias,
  LabelBias,
  LinearBias,
  RelativePositions,
)
from relpos_jax.attention.rotary import rotate

__all__ = [
  "ContentBias",
  "DistanceBias",
  "EdgeFeatures",
  "EdgeLabels",
  "FunctionBias",
  "KeyBias",
  "LabelBias",
  "LinearBias",
  "RelativePositions",
  "attention_weights",
  "dot_product_attention",
  "edge_attention",
  "explain",
  "merge",
  "mesh_axes",
  "rotate",
]
