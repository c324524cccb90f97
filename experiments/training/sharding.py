"""Shards arrays over a mesh with four axes:

  data      the batch
  fsdp      the batch, parameters and optimizer state
  tensor    attention's heads, and the feed-forward's hidden width
  sequence  the tokens of a sequence

Results do not depend on the mesh, with one exception: if sequences are padded to be
sharded, dropout masks differ. On a mesh with `data` alone, every device has all
parameters. To attend to a sharded sequence, each device gathers its keys and values.
With `ring`, they go round the devices instead.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.errors import InputError
from relpos_jax.attention.partitioned import mesh_axes
from relpos_jax.typing import PyTree

AXES = ("data", "fsdp", "tensor", "sequence")
ROWS = ("data", "fsdp")

# The mesh axes that shard each parameter, by a pattern for the end of its dotted path.
# The first match counts. The optimizer's moments have the same ends, and so the same
# sharding. Other arrays are replicated.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
  # [R, N, H]; [R, H] is replicated.
  (r"(^|\.)tables\.(\d+\.)?\w+", (None, "tensor", None)),
  (r"attention\.(query|key|value)\.kernel", ("fsdp", "tensor", None)),  # [D, N, H]
  (r"attention\.out\.kernel", ("tensor", None, "fsdp")),  # [N, H, D]
  (r"feed_forward\.hidden\.kernel", ("fsdp", "tensor")),  # [D, F]
  (r"feed_forward\.hidden\.bias", ("tensor",)),  # [F]
  (r"feed_forward\.out\.kernel", ("tensor", "fsdp")),  # [F, D]
  (r"(embedding|softmax)\.table", ("tensor", "fsdp")),  # [V, D]
)

AnyMesh = Mesh | AbstractMesh


def make_mesh(
  data: int = -1,
  fsdp: int = 1,
  tensor: int = 1,
  sequence: int = 1,
  *,
  ring: bool = False,  # accepted and unused: it concerns attention (`use_ring`)
  devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """Makes a mesh of the first devices; one size may be -1, for all that remain.

  Raises InputError if a size is invalid, if two are -1, if the sizes do not fit the
  devices, or if a process has no device.
  """
  every_device = jax.devices() if devices is None else list(devices)
  sizes = mesh_sizes(
    len(every_device), data=data, fsdp=fsdp, tensor=tensor, sequence=sequence
  )
  used = every_device[: math.prod(sizes.values())]
  num_processes = jax.process_count()
  processes = {device.process_index for device in used}
  if devices is None and len(processes) < num_processes:
    raise InputError(
      f"a mesh of {len(used)} devices leaves some of {num_processes} processes without "
      "any: give --config.mesh.data=-1, for all"
    )
  arranged = _arrange_devices(tuple(sizes.values()), used)
  return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _arrange_devices(sizes: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
  """Arranges devices along the axes of a mesh; neighbours stay together if possible.

  Slices of TPUs are connected by a slower network. So they divide the first axis, along
  which devices only exchange gradients.
  """
  num_slices = len({getattr(device, "slice_index", 0) for device in devices})
  if devices[0].platform == "gpu":
    num_slices = 1  # JAX gives every machine with GPUs another slice index
  options = dict(allow_split_physical_axes=True)
  if num_slices == 1:
    return mesh_utils.create_device_mesh(sizes, devices, **options)
  if sizes[0] % num_slices:
    raise InputError(
      f"config.mesh.data is {sizes[0]}: give a multiple of {num_slices}, "
      "the slices of TPUs"
    )
  first, *others = sizes
  within = (first // num_slices, *others)
  across = (num_slices, *[1] * len(others))
  return mesh_utils.create_hybrid_device_mesh(within, across, devices, **options)


def mesh_sizes(
  num_devices: int, *, ring: bool = False, **wanted: int
) -> dict[str, int]:
  """Computes the sizes of a mesh for a number of devices.

  The devices need not exist. Raises InputError if the sizes do not fit them.
  """
  text = ", ".join(f"{name}={size}" for name, size in wanted.items())
  num_open = list(wanted.values()).count(-1)
  sizes = list(filter(lambda size: size != -1, wanted.values()))
  if num_open > 1 or min(sizes) < 1:
    raise InputError(
      f"a mesh of {text}: give sizes of at least 1, and at most one -1, the rest"
    )
  rest, over = divmod(num_devices, math.prod(sizes))
  if rest == 0 or (over and num_open):
    raise InputError(
      f"a mesh of {text} does not fit {num_devices} devices: change config.mesh"
    )
  return {name: rest if size == -1 else size for name, size in wanted.items()}


def batch_multiples(sizes: Mapping[str, int], ring: bool) -> tuple[int, int]:
  """Returns two numbers: one must divide the rows of a batch, the other its tokens.

  `sizes` are the sizes of the mesh, by axis. In a ring, each device has two parts of a
  sequence.
  """
  rows, sequence = math.prod(sizes[name] for name in ROWS), sizes["sequence"]
  return rows, 2 * sequence if ring and sequence > 1 else sequence


def use_ring(loss: Callable[..., Any]) -> Callable[..., Any]:
  """Wraps a loss so that attention passes the keys of a sequence round its devices."""

  def with_ring(*args, **options):
    with mesh_axes(queries="sequence", keys="sequence"):
      return loss(*args, **options)

  return with_ring


def replicated(mesh: AnyMesh) -> NamedSharding:
  """Returns the sharding that replicates an array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: AnyMesh, num_axes: int = 2) -> NamedSharding:
  """Returns the sharding of a batch's arrays, [rows, tokens, ...] or [rows]."""
  return NamedSharding(mesh, PartitionSpec(*(ROWS, "sequence")[:num_axes]))


def parameter_sharding(tree: PyTree, mesh: AnyMesh) -> PyTree:
  """Returns the sharding of every leaf of parameters or a training state; see `RULES`.

  An axis is not sharded if the mesh axis does not divide its size.
  """

  def shard(path, x):
    # nnx appends `value` to the paths of variables.
    name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
    for pattern, axes in RULES:
      if len(axes) == x.ndim and re.search(f"{pattern}$", name):
        return NamedSharding(mesh, _partition(x.shape, axes, mesh))
    return replicated(mesh)

  return jax.tree.map_with_path(shard, tree)


def _partition(
  shape: tuple[int, ...], axes: tuple[str | None, ...], mesh: AnyMesh
) -> PartitionSpec:
  spec = []
  for num, axis in zip(shape, axes, strict=True):
    size = mesh.shape[axis] if axis else 1
    is_sharded = size > 1 and num % size == 0
    spec.append(axis if is_sharded else None)
  # (), not (None, None): equal shardings must have equal specs.
  return PartitionSpec(*spec) if any(spec) else PartitionSpec()


def shard_shapes(mesh: AnyMesh, tree: PyTree) -> PyTree:
  """Adds the shardings of `RULES` to the shapes of parameters or a training state."""
  shardings = parameter_sharding(tree, mesh)
  return jax.tree.map(lambda x, place: x.update(sharding=place), tree, shardings)


def constrain_sharding(tree: PyTree) -> PyTree:
  """Constrains traced parameters or a training state to the shardings of `RULES`.

  Otherwise the compiler may choose other shardings, and the next step is compiled
  again. Without a mesh in context, returns the tree unchanged.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not {*AXES} <= {*mesh.axis_names}:
    return tree
  return jax.lax.with_sharding_constraint(tree, parameter_sharding(tree, mesh))


def put_batch(tree: PyTree, mesh: Mesh) -> PyTree:
  """Shards host arrays [rows, tokens, ...]; every process must pass all rows."""

  def shard(x):
    return jax.make_array_from_callback(
      x.shape, batch_sharding(mesh, x.ndim), x.__getitem__
    )

  return jax.tree.map(shard, tree)
