"""Attention with any relation, a block of queries at a time: never [B, N, T, S]
weights.

A block is a call of `projected` with fewer queries. The backward pass computes each
block again, so that only the call's own arrays and their gradients are in memory.
Gradients of arrays that all queries share are added up block by block, always in the
same order.
"""

from typing import Any

import jax
import jax.numpy as jnp

from relpos_jax.attention import dropout, masks, projected, reference
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.partitioned import first_derivatives_only, zeros
from relpos_jax.attention.relations import KeyBias
from relpos_jax.typing import Array, Int

# The most pairs in a block, over all its heads and sequences, unless it has the fewest
# queries.
_PAIRS = 2**19
_FEWEST = 16

# The axis of queries of each field, of the inputs or of a relation, that has one.
_QUERY_AXES = dict.fromkeys(("query", "query_positions", "query_segment_ids"), 1)
_QUERY_AXES |= dict.fromkeys(("labels", "features", "of_query", "of_pair"), 1)
_QUERY_AXES |= dict(bias=2, mask=2, query_mask=2)

_Arrays = dict[int, Array]  # by their place among the leaves of the inputs
_slice, _put = jax.lax.dynamic_slice_in_dim, jax.lax.dynamic_update_slice_in_dim


def attention(inputs: Inputs, block: int | None = None) -> Array | tuple[Array, Array]:
  """Computes attention, and its residual if the inputs ask for it.

  A block has `block` queries, by default a number for the call.
  """
  batch, num_queries, heads, _ = inputs.query.shape
  block = block or _default_block(batch * heads * inputs.key.shape[1])
  if block >= num_queries:
    return projected.attention(inputs)
  wide = jnp.promote_types(inputs.query.dtype, jnp.float32)
  sinks = inputs.sinks
  if sinks is None:
    sinks = zeros((heads,), inputs.query.astype(wide)) - jnp.inf
  relations = list(inputs.relations)
  for i, x in enumerate(relations):
    if isinstance(x, KeyBias):  # all keys are projected once
      relations[i] = projected.ProjectedKeys(
        projected.project(inputs, x), x.beyond, x.reach[0]
      )
  inputs = inputs._replace(relations=tuple(relations), sinks=None)
  num_blocks = -(-num_queries // block)
  hides = reference.may_hide(inputs)
  # The products of a block read keys and values by head: they are transposed once for
  # all blocks.
  by_head = dict(
    key=jnp.swapaxes(inputs.key, 1, 2), value=jnp.swapaxes(inputs.value, 1, 2)
  )
  leaves, structure = jax.tree.flatten(inputs._replace(**by_head))
  axes = [_query_axis(path, x) for path, x in jax.tree.leaves_with_path(inputs)]
  arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)}
  given = {i: x for i, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
  integers = {i: x for i, x in arrays.items() if i not in given}

  def start_of(index: Int[Array, ""]) -> Int[Array, ""]:
    return jnp.minimum(index * block, num_queries - block)  # the last block may overlap

  def read(arrays: _Arrays, start: Int[Array, ""]) -> _Arrays:
    return {
      i: x if axes[i] < 0 else _slice(x, start, block, axes[i])
      for i, x in arrays.items()
    }

  def part_of(arrays: _Arrays, start: Int[Array, ""]) -> Inputs:
    """Returns the inputs of one block."""
    part = jax.tree.unflatten(
      structure, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
    )
    return part._replace(
      key=jnp.swapaxes(part.key, 1, 2),
      value=jnp.swapaxes(part.value, 1, 2),
      dropout_seeds=dropout.from_row(part.dropout_seeds, -start),
    )

  def logits_of(arrays: _Arrays, start: Int[Array, ""]) -> Array:
    return reference.masked_logits(part_of(arrays, start), projected.relative_logits)

  def output_of(weights: Array, arrays: _Arrays, start: Int[Array, ""]) -> Array:
    return reference.weighted_sum(
      part_of(arrays, start), weights, projected.relative_values
    )

  @jax.custom_vjp
  def all_blocks(
    sinks: Array, floats: _Arrays, integers: _Arrays
  ) -> tuple[Array, Array]:
    return forward(sinks, floats, integers)[0]

  def forward(sinks: Array, floats: _Arrays, integers: _Arrays) -> tuple[tuple, tuple]:
    def step(index, found):
      start = start_of(index)
      of_block = read(floats | integers, start)
      logits = logits_of(of_block, start)
      highest = logits.max(-1, keepdims=True)
      maximum = jnp.maximum(highest, jnp.maximum(sinks, masks.LOWEST))
      powers = jnp.exp(logits - maximum)
      total = powers.sum(-1, keepdims=True) + jnp.exp(sinks - maximum)
      if hides:  # all weights of a query that sees no key are zero
        total = jnp.where(highest <= masks.LOWEST / 2, jnp.inf, total)
      new = output_of(powers / total, of_block, start), maximum, total
      return jax.tree.map(
        lambda x, part, axis: _put(x, part, start, axis), found, new, (1, 2, 2)
      )

    _, _, value, *_ = floats.values()
    of_query = zeros((batch, heads, num_queries, 1), sinks)
    empty = (
      zeros((batch, num_queries, heads, value.shape[3]), value),
      of_query,
      of_query,
    )
    # Separately: in a logsumexp float32 would lose the total beside a large maximum.
    output, maximum, total = jax.lax.fori_loop(0, num_blocks, step, empty)
    residual = jnp.where(jnp.isinf(total), -jnp.inf, maximum + jnp.log(total))
    return (output, residual), (sinks, floats, integers, maximum, total)

  def backward(saved: tuple, cotangents: tuple) -> tuple[Array, _Arrays, None]:
    sinks, floats, integers, maximum, total = saved
    d_output, d_residual = cotangents

    def step(index, found):
      d_sinks, gradients = found
      start = start_of(index)
      is_new = start + jnp.arange(block) >= index * block
      d_rows = jnp.where(is_new[:, None, None], _slice(d_output, start, block, 1), 0)
      own, others = read(floats, start), read(integers, start)
      logits, of_logits = jax.vjp(lambda x: logits_of(x | others, start), own)
      highest, sums = (_slice(x, start, block, 2) for x in (maximum, total))
      weights = jnp.exp(logits - highest) / sums
      _, of_output = jax.vjp(lambda w, x: output_of(w, x | others, start), weights, own)
      d_weights, first = of_output(d_rows)
      delta = (weights * d_weights).sum(-1, keepdims=True)
      delta -= jnp.where(is_new[:, None], _slice(d_residual, start, block, 2), 0)
      (second,) = of_logits(weights * (d_weights - delta))
      of_sinks = jnp.exp(sinks - highest) / sums
      d_sinks -= (of_sinks * delta).sum((0, 2, 3), keepdims=True)
      return d_sinks, {
        i: _add(_add(x, first[i], start, axes[i]), second[i], start, axes[i])
        for i, x in gradients.items()
      }

    wide = {
      i: x.astype(jnp.promote_types(x.dtype, jnp.float32)) for i, x in floats.items()
    }
    empty = jax.tree.map(lambda x: zeros(x.shape, x), (sinks, wide))
    d_sinks, gradients = jax.lax.fori_loop(0, num_blocks, step, empty)
    return d_sinks, {i: gradients[i].astype(x.dtype) for i, x in floats.items()}, None

  all_blocks.defvjp(forward, first_derivatives_only(backward))
  output, residual = all_blocks(sinks[None, :, None, None], given, integers)
  return (output, residual[..., 0].swapaxes(1, 2)) if inputs.return_residual else output


def _default_block(pairs_of_a_query: int) -> int:
  """Returns a power of two, at least `_FEWEST`, with at most `_PAIRS` pairs if possible."""
  return max(_FEWEST, 1 << (max(1, _PAIRS // pairs_of_a_query).bit_length() - 1))


def _query_axis(path: tuple, x: Any) -> int:
  """Returns the axis of queries of a leaf of the inputs, -1 for a leaf that has none."""
  field = path[2] if path[0].name == "relations" else path[0]
  axis = _QUERY_AXES.get(field.name, -1)
  return axis if axis >= 0 and x.shape[axis] > 1 else -1


def _add(total: Array, part: Array, start: Int[Array, ""], axis: int) -> Array:
  """Adds a part to an array, or to its slice from `start` on along an axis."""
  if axis < 0:
    return total + part.astype(total.dtype)
  new = _slice(total, start, part.shape[axis], axis) + part.astype(total.dtype)
  return _put(total, new, start, axis)
