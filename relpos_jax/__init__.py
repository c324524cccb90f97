"""Attention with relative positions and relations, in JAX."""

from relpos_jax.attention.operator import attention_weights, dot_product_attention
from relpos_jax.attention.relations import RelativePositions

__all__ = ["RelativePositions", "attention_weights", "dot_product_attention"]
