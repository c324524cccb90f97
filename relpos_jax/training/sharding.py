"""Where arrays live: one mesh axis, `data`, over all devices of all processes."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from relpos_jax.typing import PyTree


def data_mesh(num_devices: int | None = None) -> Mesh:
  """A mesh with the axis `data` over the first `num_devices` devices, or all.

  >>> data_mesh(1).shape
  OrderedDict({'data': 1})
  """
  devices = jax.devices()[:num_devices]
  return jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)


def replicate(tree: PyTree, mesh: Mesh) -> PyTree:
  """Puts a copy of every array on every device."""
  return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def shard_rows(tree: PyTree, mesh: Mesh) -> PyTree:
  """Splits the rows of host arrays over the devices; each process gives the rows it holds."""
  sharding = NamedSharding(mesh, PartitionSpec("data"))
  return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), tree)
