"""Attention with relations by distance, by blocks of queries and tiles of keys.

The arithmetic is in tiles.py. If the mesh shards the queries along their sequence, each
device computes its own queries with all keys.
"""

import functools
import math
from typing import Any

import jax

from relpos_jax.attention import band, tiles
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.partitioned import axes_of_tokens
from relpos_jax.attention.tiles import Plan, Results, Sides


def attention(inputs: Inputs) -> Any:
  """Computes attention, and its residual if the inputs ask for it."""
  names = axes_of_tokens(inputs.explicit)
  mesh = jax.sharding.get_abstract_mesh()
  num_devices = math.prod(mesh.shape[name] for name in names)
  if num_devices == 1 or inputs.query.shape[1] % num_devices:
    return band.finish(inputs, tiles.attend(*band.prepare(inputs)))
  names_of_keys = names if inputs.key.shape[1] % num_devices == 0 else ()
  inputs = inputs._replace(bias=inputs.bias_of_each())
  attend = functools.partial(_attend_to_all_keys, names_of_keys)
  return band.attend_on_devices(attend, inputs, names, names_of_keys)


def _attend_to_all_keys(
  names: tuple[str, ...], plan: Plan, floats: Sides, marks: Sides
) -> Results:
  """Gathers the keys of all devices, and computes attention.

  `names` are the mesh axes that shard the keys: if empty, there is nothing to gather.
  The transpose of the gather sums the gradients of each device's keys.
  """

  def gather(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, names, axis=1, tiled=True)

  if names:
    keys, key_marks = jax.tree.map(gather, (floats.keys, marks.keys))
    floats, marks = floats._replace(keys=keys), marks._replace(keys=key_marks)
  return tiles.attend(plan, floats, marks)
