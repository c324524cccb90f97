"""Calls of the operator on several devices, against one."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from comparing import assert_close
from compiling import compile_quickly, run_with_gradients, with_gradients
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from relpos_jax import (
  ContentBias,
  DistanceBias,
  KeyBias,
  LinearBias,
  RelativePositions,
  dot_product_attention,
  mesh_axes,
)

TENSORS = "query", "key", "value", "bias", "sinks"


def relations_of(arrays):
  """Yields the relations of the arrays that are there."""
  if "value_table" in arrays:
    yield RelativePositions(arrays["key_table"], arrays["value_table"])
  if "bias_table" in arrays:
    yield DistanceBias(arrays["bias_table"], beyond="zero", left=6)
  if "by_key_table" in arrays:
    yield KeyBias(arrays["by_key_table"])
  if "slopes" in arrays:
    yield LinearBias(arrays["slopes"])
  if "content" in arrays:
    yield ContentBias(arrays["content"], arrays["content_table"])


def attend(attention, arrays, **options):
  """Calls an attention function with arrays, and the relations of those given."""
  tensors = {name: arrays[name] for name in TENSORS if name in arrays}
  relations = tuple(relations_of(arrays))
  return attention(**tensors, relations=relations, **options)


def attention_by(name):
  return functools.partial(dot_product_attention, implementation=name)


def shardings(axes, mesh, along):
  """Returns the sharding of each array; `along` has the mesh axes by letter."""
  places = {}
  for name, letters in axes.items():
    places[name] = NamedSharding(mesh, PartitionSpec(*map(along.get, letters)))
  return places


@dataclasses.dataclass
class Devices:
  """Devices, and how a call's arrays lie on them.

  The mesh is in context if its axes are "explicit", "named", or "constrained" in the
  program alone; "manual" is in `jax.shard_map`.
  """

  mesh_sizes: Mapping[str, int]
  along: Mapping[str, str | tuple[str, ...]]  # mesh axes by an axis's letter
  kind: str = "auto"

  def make_mesh(self):
    axis_type = AxisType.Explicit if self.kind == "explicit" else AxisType.Auto
    sizes, names = (*self.mesh_sizes.values(),), (*self.mesh_sizes,)
    return jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(names))

  def names(self, is_ring):
    """Returns a context that names the mesh axes."""
    if self.kind != "named" and not is_ring:
      return contextlib.nullcontext()
    first = {letter: self.along.get(letter, ()) for letter in "BNTS"}
    keys = {"keys": first["S"]} if is_ring else {}
    return mesh_axes(batch=first["B"], heads=first["N"], queries=first["T"], **keys)


def random_arrays(axes, sizes, dtype):
  random = np.random.default_rng(0).normal
  arrays = {}
  for name, letters in axes.items():
    shape = [sizes.get(letter, 1) for letter in letters]
    arrays[name] = jnp.asarray(random(size=shape), dtype)
  return arrays


@functools.cache
def run_on_one_device(call, axes, sizes, dtype):
  """Returns random arrays, and the reference's results; once for each call and axes."""
  arrays = random_arrays(dict(axes), dict(sizes), dtype)
  reference = functools.partial(call, attention_by("reference"))
  return arrays, run_with_gradients(reference, arrays)


def check_devices_equal_one(
  call: Callable, attention, axes, sizes, devices: Devices, is_ring=False
):
  """Checks `call(attention, arrays)` of arrays with these axes; returns the program.

  `sizes` are those of the axes by letter, 1 if absent. A ring is in float64.
  """
  dtype, tolerance = (jnp.float64, 1e-10) if is_ring else (jnp.float32, 1e-4)
  items = tuple(axes.items()), tuple(sizes.items())
  arrays, wanted = run_on_one_device(call, *items, dtype)
  mesh, kind = devices.make_mesh(), devices.kind
  places = shardings(axes, mesh, devices.along)
  (output,) = shardings({"output": "BTNH"}, mesh, devices.along).values()
  specs = {name: place.spec for name, place in places.items()}
  run = functools.partial(call, attention)
  if kind == "manual":
    run = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=output.spec)

  def run_in_place(arrays):
    if kind == "constrained":
      arrays = jax.lax.with_sharding_constraint(arrays, specs)
    return run(arrays)

  has_given_results = kind not in ("explicit", "constrained") and not is_ring
  options = {"out_shardings": (output, (places,))} if has_given_results else {}
  is_in_context = kind in ("explicit", "named", "constrained")
  mesh_context = jax.set_mesh(mesh) if is_in_context else contextlib.nullcontext()
  with devices.names(is_ring), mesh_context:
    if kind != "constrained":
      arrays = jax.device_put(arrays, places)
    program = compile_quickly(
      functools.partial(with_gradients, run_in_place), **options
    )
    compiled = program.lower(arrays).compile()
    actual = compiled(arrays)
  assert_close(actual, wanted, rtol=tolerance, atol=tolerance)
  if kind == "explicit":
    assert jax.typeof(actual[0]).sharding.spec == output.spec
  return compiled.as_text()
