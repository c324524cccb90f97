"""Attention with relative positions and relations, in JAX.

`dot_product_attention(query, key, value, relations=...)` computes attention with a
relation between every query and every key. `relations` is one of the classes below, or
a tuple of several:

    import jax
    from relpos_jax import RelativePositions, dot_product_attention

    # q, k, v have shape [B, T, N, H]; there is a table for keys and one for values.
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 10, 8, 64))
    tables = jax.random.normal(jax.random.key(1), (2, 33, 64))
    z = dot_product_attention(q, k, v, relations=RelativePositions(*tables))

`explain` says which implementation runs a call, and why. `attention_weights` returns
the weights. `merge` combines attention to parts of the keys, and `edge_attention`
attends along a list of edges. `rotate` applies rotary positions before the call.
`mesh_axes` names the mesh axes that shard a call.

Flax layers are in `relpos_jax.nn` and `relpos_jax.linen`, models in
`relpos_jax.models`, and beam search and sampling in `relpos_jax.decoding`.
"""

from relpos_jax.attention.choice import explain
from relpos_jax.attention.edges import edge_attention
from relpos_jax.attention.operator import (
  attention_weights,
  dot_product_attention,
  merge,
)
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
