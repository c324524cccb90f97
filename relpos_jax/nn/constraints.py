"""Sharding constraints of activations, on the mesh in context."""

import math

import jax
from jax.sharding import PartitionSpec

from relpos_jax.attention.partitioned import AXIS_NAMES, free_names
from relpos_jax.typing import Array, Float


def constrain_activations(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
  """Constrains x, if it is [B, T, D], to be sharded over batch and tokens, but not over D.

  Used between layers, so that the compiler moves parameters, which are sharded over D, and not
  activations. Returns x without a mesh in context, or if the mesh does not divide it evenly.

  >>> import jax.numpy as jnp
  >>> constrain_activations(jnp.ones((2, 3, 4))).shape
  (2, 3, 4)
  """
  return _sharded(x, "BT") if x.ndim == 3 else x


def constrain_table(table: Float[Array, "V D"]) -> Float[Array, "V D"]:
  """Constrains an embedding table not to be sharded over D, so that lookups move the table only.

  >>> import jax.numpy as jnp
  >>> constrain_table(jnp.ones((3, 4))).shape
  (3, 4)
  """
  return _sharded(table, "N")


def _sharded(x: Array, letters: str) -> Array:
  """Shards the axes of x named by `letters` over the mesh in context, if it divides them."""
  mesh, names = jax.sharding.get_abstract_mesh(), free_names()
  if not names:
    return x
  axes = [tuple(name for name in AXIS_NAMES[letter] if name in names) for letter in letters]
  even = lambda names, size: size % math.prod(mesh.shape[name] for name in names) == 0
  spec = [n if n and even(n, size) else None for n, size in zip(axes, x.shape, strict=False)]
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))
