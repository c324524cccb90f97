"""Attention with relative positions and relations, in JAX."""
