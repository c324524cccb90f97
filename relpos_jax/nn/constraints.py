"""Sharding constraints of activations, on the mesh in context."""

import math

import jax
from jax.sharding import PartitionSpec

from relpos_jax.attention.partitioned import AXIS_NAMES, free_names
from relpos_jax.typing import Array, Float


def constrain_activations(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
  """Constrains x, if it is [B, T, D], to be sharded over batch and tokens and whole in D.

  Applied between layers, so that the compiler moves parameters, which are sharded over D, and not
  activations. Without a mesh in context, or where it does not divide x evenly, returns x.

  >>> import jax.numpy as jnp
  >>> constrain_activations(jnp.ones((2, 3, 4))).shape
  (2, 3, 4)
  """
  return _cut(x, "BT") if x.ndim == 3 else x


def constrain_table(table: Float[Array, "V D"]) -> Float[Array, "V D"]:
  """Constrains an embedding table to be whole in D, so that it is moved and not what is looked up.

  >>> import jax.numpy as jnp
  >>> constrain_table(jnp.ones((3, 4))).shape
  (3, 4)
  """
  return _cut(table, "N")


def _cut(x: Array, letters: str) -> Array:
  """Shards the axes of x named by `letters` over the mesh in context, where it divides them."""
  mesh, names = jax.sharding.get_abstract_mesh(), free_names()
  if not names:
    return x
  cuts = [tuple(name for name in AXIS_NAMES[letter] if name in names) for letter in letters]
  even = lambda cut, size: size % math.prod(mesh.shape[name] for name in cut) == 0
  spec = (cut if even(cut, size) else () for cut, size in zip(cuts, x.shape, strict=False))
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*(cut or None for cut in spec)))
