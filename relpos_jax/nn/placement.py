"""Where activations live on a mesh in context."""

import math

import jax
from jax.sharding import PartitionSpec

from relpos_jax.attention.partitioned import AXIS_NAMES, free_names
from relpos_jax.typing import Array, Float


def in_place(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
  """x, if it is [B, T, D], cut by batch and by tokens as the mesh in context says, and whole in D.

  To be said where layers meet: the compiler then moves parameters, which are cut in D, and not
  activations. Without a mesh in context, or where it does not divide x evenly, x as it is.

  >>> import jax.numpy as jnp
  >>> in_place(jnp.ones((2, 3, 4))).shape
  (2, 3, 4)
  """
  return _cut(x, "BT") if x.ndim == 3 else x


def whole_rows(table: Float[Array, "V D"]) -> Float[Array, "V D"]:
  """A table whose rows are to be looked up, whole in D: it is moved, not what is looked up.

  >>> import jax.numpy as jnp
  >>> whole_rows(jnp.ones((3, 4))).shape
  (3, 4)
  """
  return _cut(table, "N")


def _cut(x: Array, letters: str) -> Array:
  """x, its axes cut by those of the mesh in context that cut these letters, where that is even."""
  mesh, names = jax.sharding.get_abstract_mesh(), free_names()
  if not names:
    return x
  cuts = [tuple(name for name in AXIS_NAMES[letter] if name in names) for letter in letters]
  even = lambda cut, size: size % math.prod(mesh.shape[name] for name in cut) == 0
  spec = (cut if even(cut, size) else () for cut, size in zip(cuts, x.shape, strict=False))
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*(cut or None for cut in spec)))
