"""Attention with any relation by blocks of queries, without [B, N, T, S] weights.

Each block is a call of `projected` with fewer queries. The backward pass recomputes
each block, so that only the arguments and their gradients are in memory. Gradients of
arrays that all queries share are summed block by block, always in the same order.
"""

import functools

import jax
import jax.numpy as jnp

from relpos_jax.attention import reference
from relpos_jax.attention.arrays import accumulation_dtype
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.tiles import default_block
from relpos_jax.typing import Array, Float

# The largest number of pairs in a block, over all heads and sequences.
_PAIRS = 2**19


def attention(inputs: Inputs) -> Array | tuple[Array, Array]:
  """Computes attention, and its residual if the inputs ask for it."""
  batch, num_queries, heads, _ = inputs.query.shape
  block = default_block(batch * heads * inputs.key.shape[1], _PAIRS)
  if block >= num_queries:
    return reference.projected(inputs)
  tokens = inputs.queries, inputs.keys
  relations = tuple(relation.with_keys(*tokens) for relation in inputs.relations)
  # Products read keys and values by head. Here they are transposed once for all blocks.
  key_BKSH, value_BKSV = inputs.key.swapaxes(1, 2), inputs.value.swapaxes(1, 2)
  shared = key_BKSH, value_BKSV, relations
  promoted = jax.tree.map(_promote, shared)

  if inputs.bias is not None and inputs.bias.shape[2] == 1:  # all blocks share it
    inputs = inputs._replace(bias=_promote(inputs.bias))

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def attend(start):
    # Casts within the block, so that gradients are summed in the accumulation dtype.
    key_BKSH, value_BKSV, relations = jax.tree.map(
      lambda x, original: x.astype(original.dtype), promoted, shared
    )
    part = inputs._replace(
      key=key_BKSH.swapaxes(1, 2), value=value_BKSV.swapaxes(1, 2), relations=relations
    )
    return reference.projected(part.block(start, block))

  starts = block * jnp.arange(-(-num_queries // block))
  # The last block may overlap the one before.
  starts = jnp.minimum(starts, num_queries - block)
  results = jax.lax.map(attend, starts)
  return jax.tree.map(lambda x: _join_blocks(x, num_queries), results)


def _promote(x: Array) -> Array:
  """Casts floating numbers to the accumulation dtype; other arrays stay."""
  if not jnp.issubdtype(x.dtype, jnp.floating):
    return x
  return x.astype(accumulation_dtype(x.dtype))


def _join_blocks(
  blocks: Float[Array, "X B C *rest"], num_queries: int
) -> Float[Array, "B {num_queries} *rest"]:
  """Concatenates X blocks of C queries.

  The last block may begin with queries of the block before: these are dropped.
  """
  num_blocks, batch, block, *rest = blocks.shape
  overlap = num_blocks * block - num_queries
  before = jnp.moveaxis(blocks[:-1], 0, 1)
  before = before.reshape(batch, (num_blocks - 1) * block, *rest)
  return jnp.concatenate([before, blocks[-1][:, overlap:]], axis=1)
