"""Masks: which query may attend to which key."""

import functools

import jax.numpy as jnp

from relpos_jax.typing import Array, Bool, Int

# The logit of a hidden pair. It is finite, so that a query that sees no key does not become NaN.
# Logits below half of it count as hidden.
LOWEST = 0.7 * float(jnp.finfo(jnp.float32).min)


def combine(*masks: Bool[Array, "..."] | None) -> Bool[Array, "..."] | None:
  """Returns the logical and of the masks given, or None if there are none."""
  given = [mask for mask in masks if mask is not None]
  return functools.reduce(jnp.logical_and, given) if given else None


def causal(
  query_positions: Int[Array, "#B T"], key_positions: Int[Array, "#B S"]
) -> Bool[Array, "#B 1 T S"]:
  """Returns True where the key is not later than the query.

  >>> causal(jnp.array([[2, 3]]), jnp.arange(5)[None]).astype(int)
  Array([[[[1, 1, 1, 0, 0],
           [1, 1, 1, 1, 0]]]], dtype=int32)
  """
  return key_positions[:, None, None, :] <= query_positions[:, None, :, None]


def same_segment(
  query_segment_ids: Int[Array, "#B T"], key_segment_ids: Int[Array, "#B S"]
) -> Bool[Array, "#B 1 T S"]:
  """Returns True where query and key belong to one segment.

  >>> same_segment(jnp.array([[0, 1]]), jnp.array([[0, 0, 1]])).astype(int)
  Array([[[[1, 1, 0],
           [0, 0, 1]]]], dtype=int32)
  """
  return query_segment_ids[:, None, :, None] == key_segment_ids[:, None, None, :]


def window(
  query_positions: Int[Array, "#B T"], key_positions: Int[Array, "#B S"], left: int, right: int
) -> Bool[Array, "#B 1 T S"]:
  """Returns True where the key is at most `left` before the query and at most `right` after it.

  >>> window(jnp.arange(3)[None], jnp.arange(5)[None], left=1, right=2).astype(int)
  Array([[[[1, 1, 1, 0, 0],
           [1, 1, 1, 1, 0],
           [0, 1, 1, 1, 1]]]], dtype=int32)
  """
  distance = key_positions[:, None, None, :] - query_positions[:, None, :, None]
  return (-left <= distance) & (distance <= right)


def within(lengths: Int[Array, " B"], size: int) -> Bool[Array, "B {size}"]:
  """Returns True for the first `lengths` of `size` tokens.

  >>> within(jnp.array([1, 3]), 4).astype(int)
  Array([[1, 0, 0, 0],
         [1, 1, 1, 0]], dtype=int32)
  """
  return jnp.arange(size)[None] < lengths[:, None]
