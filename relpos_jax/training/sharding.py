"""Where arrays live: one mesh axis, `data`, over all devices of all processes."""

from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from relpos_jax.errors import InputError
from relpos_jax.typing import PyTree


def data_mesh(num_devices: int | None = None, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh with the axis `data` over the first `num_devices` devices, or all.

  The devices are those there are, or those given, such as a topology's.

  Raises InputError when there are fewer devices.

  >>> dict(data_mesh(1).shape)
  {'data': 1}
  """
  devices = jax.devices() if devices is None else list(devices)
  num_devices = len(devices) if num_devices is None else num_devices
  if not 1 <= num_devices <= len(devices):
    raise InputError(f"num_devices is {num_devices}: choose 1 to {len(devices)}, those there are")
  return jax.make_mesh((num_devices,), ("data",), (AxisType.Auto,), devices=devices[:num_devices])


def everywhere(mesh: Mesh | AbstractMesh) -> NamedSharding:
  """Of what every device has a copy of: parameters, and the optimiser's state."""
  return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh | AbstractMesh) -> NamedSharding:
  """Of what is split over the devices by its rows: batches."""
  return NamedSharding(mesh, PartitionSpec("data"))


def replicate(tree: PyTree, mesh: Mesh) -> PyTree:
  """Puts a copy of every array on every device."""
  return jax.device_put(tree, everywhere(mesh))


def shard_rows(tree: PyTree, mesh: Mesh) -> PyTree:
  """Splits the rows of host arrays over the devices; every process gives all of them."""
  sharding = by_rows(mesh)
  place = lambda x: jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
  return jax.tree.map(place, tree)
