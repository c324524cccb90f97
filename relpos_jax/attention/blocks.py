"""Attention with any relation, a block of queries at a time: never [B, N, T, S] weights.

A block is a call of `projected` with fewer queries. The backward pass computes each block again, so
that only the call's own arrays and their gradients are in memory. Gradients of arrays that all
queries share are added up block by block, always in the same order.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from relpos_jax.attention import dropout, projected
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.partitioned import zeros
from relpos_jax.attention.relations import (
  ContentBias,
  EdgeFeatures,
  EdgeLabels,
  FunctionBias,
  LabelBias,
  Relation,
)
from relpos_jax.typing import Array, Float, Int

# The most pairs in a block, over all its heads and sequences, unless it has the fewest queries.
_PAIRS = 2**19
_FEWEST = 16

_Arrays = dict[int, Array]  # by their place among the leaves of the inputs


def attention(inputs: Inputs, block: int | None = None) -> Float[Array, "B T N H"]:
  """Computes attention over blocks of `block` queries, by default a size for the call."""
  batch, num_queries, heads, _ = inputs.query.shape
  block = block or _default_block(batch * heads * inputs.key.shape[1])
  if block >= num_queries:
    return projected.attention(inputs)
  num_blocks = -(-num_queries // block)
  leaves, structure = jax.tree.flatten(inputs)
  axes = jax.tree.leaves(_query_axes(inputs))
  arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)}
  given = {i: x for i, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
  integers = {i: x for i, x in arrays.items() if i not in given}

  def start_of(index: Int[Array, ""]) -> Int[Array, ""]:
    return jnp.minimum(index * block, num_queries - block)  # the last block may overlap

  def read(arrays: _Arrays, start: Int[Array, ""]) -> _Arrays:
    return {i: x if axes[i] < 0 else _slice(x, start, block, axes[i]) for i, x in arrays.items()}

  def attend(floats: _Arrays, integers: _Arrays, start: Int[Array, ""]) -> Array:
    """Computes the outputs of one block from its arrays."""
    found = [(floats | integers).get(i, leaf) for i, leaf in enumerate(leaves)]
    part = jax.tree.unflatten(structure, found)
    lengths, seeds = part.query_lengths, part.dropout_seeds
    return projected.attention(
      part._replace(
        query_lengths=None if lengths is None else lengths - start,
        dropout_seeds=dropout.from_row(seeds, -start),
      )
    )

  @jax.custom_vjp
  def all_blocks(floats: _Arrays, integers: _Arrays) -> Array:
    def step(index, output):
      start = start_of(index)
      rows = attend(read(floats, start), read(integers, start), start)
      return jax.lax.dynamic_update_slice_in_dim(output, rows, start, axis=1)

    return jax.lax.fori_loop(0, num_blocks, step, zeros(inputs.query.shape, inputs.value))

  def forward(floats: _Arrays, integers: _Arrays) -> tuple[Array, tuple]:
    return all_blocks(floats, integers), (floats, integers)

  def backward(saved: tuple, d_output: Array) -> tuple[_Arrays, None]:
    floats, integers = saved

    def step(index, gradients):
      start = start_of(index)
      is_new = start + jnp.arange(block) >= index * block
      d_rows = jnp.where(is_new[:, None, None], _slice(d_output, start, block, 1), 0)
      of_block = read(integers, start)
      _, pull_back = jax.vjp(lambda floats: attend(floats, of_block, start), read(floats, start))
      (found,) = pull_back(d_rows)
      return {i: _add(x, found[i], start, axes[i]) for i, x in gradients.items()}

    first = {i: zeros(x.shape, x.astype(_wide(x))) for i, x in floats.items()}
    gradients = jax.lax.fori_loop(0, num_blocks, step, first)
    return {i: gradients[i].astype(x.dtype) for i, x in floats.items()}, None

  all_blocks.defvjp(forward, backward)
  return all_blocks(given, integers)


def _default_block(pairs_of_a_query: int) -> int:
  """Returns a power of two, at least `_FEWEST`, with at most `_PAIRS` pairs if possible."""
  return max(_FEWEST, 1 << (max(1, _PAIRS // pairs_of_a_query).bit_length() - 1))


def _query_axes(inputs: Inputs) -> Inputs:
  """Returns the axis of queries of every leaf of the inputs, -1 for a leaf that has none."""
  axes: dict[str, Any] = dict(query=1, relations=tuple(map(_axes_of, inputs.relations)))
  for name, axis in dict(bias=2, mask=2, query_positions=1, query_segment_ids=1).items():
    x = getattr(inputs, name)
    if x is not None and x.shape[axis] > 1:
      axes[name] = axis
  return jax.tree.map(lambda _: -1, inputs)._replace(**axes)


def _axes_of(relation: Relation) -> Any:
  """Returns the axis of queries of every leaf of a relation, -1 for a leaf that has none."""
  none = jax.tree.map(lambda _: -1, relation)
  match relation:
    case EdgeLabels() | LabelBias():
      return dataclasses.replace(none, labels=1)
    case EdgeFeatures():
      return dataclasses.replace(none, features=1)
    case ContentBias():
      return dataclasses.replace(none, query=1)
    case FunctionBias():
      data = dict(of_query=relation.of_query, of_pair=relation.of_pair)
      return dataclasses.replace(none, **jax.tree.map(lambda _: 1, data))
    case _:
      return none


def _slice(x: Array, start: Int[Array, ""], size: int, axis: int) -> Array:
  return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _add(total: Array, part: Array, start: Int[Array, ""], axis: int) -> Array:
  """Adds a part to an array, or to its slice from `start` on along an axis."""
  if axis < 0:
    return total + part.astype(total.dtype)
  new = _slice(total, start, part.shape[axis], axis) + part.astype(total.dtype)
  return jax.lax.dynamic_update_slice_in_dim(total, new, start, axis)


def _wide(x: Array):
  return jnp.promote_types(x.dtype, jnp.float32)
