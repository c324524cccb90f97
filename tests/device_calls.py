"""Calls of the operator on several simulated devices, compared with one device."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from compiling import quickly, with_gradients
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from relpos_jax import dot_product_attention, mesh_axes


def call_by(name, *args, **options):
  return dot_product_attention(*args, **options, implementation=name)


def places_of(axes, mesh, along):
  """Returns the sharding of each array, of whose axes `along` has the mesh axes by letter."""
  spec = lambda letters: PartitionSpec(*map(along.get, letters))
  return {name: NamedSharding(mesh, spec(letters)) for name, letters in axes.items()}


def check_devices_equal_one(
  attend, attention, axes, sizes, along, mesh, kind, ring=False, dtype=jnp.float32, tolerance=1e-4
):
  """Checks `attend(attention, arrays)` of arrays with these axes, and returns the compiled text.

  One device has `reference`, whose numbers all implementations give and which compiles fastest.

  `sizes` are those of the axes by letter, 1 if absent, and `mesh` those of the mesh axes by name.
  The mesh is in context if its axes are "explicit", "named", or "constrained" in the program alone;
  "manual" is in `jax.shard_map`. On a ring, keys are sharded as queries.
  """
  random = np.random.default_rng(0).normal
  arrays = {
    name: jnp.asarray(random(size=[sizes.get(x, 1) for x in letters]), dtype)
    for name, letters in axes.items()
  }
  axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
  mesh = jax.make_mesh((*mesh.values(),), (*mesh,), axis_types=(axis_type,) * len(mesh))
  places = places_of(axes, mesh, along)
  output = places_of(dict(output="BTNH"), mesh, along)["output"]
  wanted = functools.partial(attend, functools.partial(call_by, "reference"))
  wanted = quickly(functools.partial(with_gradients, wanted))(arrays)
  attend = functools.partial(attend, attention)
  context = contextlib.nullcontext()
  specs = {name: place.spec for name, place in places.items()}
  if kind == "constrained":
    unplaced = attend
    attend = lambda arrays: unplaced(jax.lax.with_sharding_constraint(arrays, specs))
  elif kind == "manual":
    attend = jax.shard_map(attend, mesh=mesh, in_specs=(specs,), out_specs=output.spec)
  elif kind == "named" or ring:
    first = lambda letter: along.get(letter, ())
    keys = dict(keys=first("S")) if ring else {}
    context = mesh_axes(batch=first("B"), heads=first("N"), queries=first("T"), **keys)
  jit = functools.partial(quickly, functools.partial(with_gradients, attend))
  if kind in ("explicit", "constrained"):
    sharded = jit()
  elif ring:
    sharded = jit(in_shardings=(places,))
  else:
    sharded = jit(in_shardings=(places,), out_shardings=(output, (places,)))
  is_in_context = kind in ("explicit", "named", "constrained")
  with context, jax.set_mesh(mesh) if is_in_context else contextlib.nullcontext():
    if kind == "explicit":
      arrays = jax.device_put(arrays, places)
    compiled = sharded.lower(arrays).compile()
    found = compiled(arrays)
  close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
  jax.tree.map(close, found, wanted)
  if kind == "explicit":
    assert jax.typeof(found[0]).sharding.spec == output.spec
  return compiled.as_text()
