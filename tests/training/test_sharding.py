"""Where arrays live: rows split over devices, everything else on all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax.errors import InputError
from relpos_jax.training.sharding import data_mesh, replicate, shard_rows


@pytest.mark.parametrize("num_devices, size", [(None, 8), (1, 1), (3, 3), (8, 8)])
def test_the_mesh_has_the_devices_asked_for(num_devices, size):
  mesh = data_mesh(num_devices)
  assert dict(mesh.shape) == {"data": size}
  assert list(mesh.devices) == jax.devices()[:size]


@pytest.mark.parametrize("num_devices", [9, 0, -1])
def test_a_mesh_of_devices_that_are_not_there_is_refused(num_devices):
  with pytest.raises(InputError, match=f"num_devices is {num_devices}: choose 1 to 8"):
    data_mesh(num_devices)


def test_rows_are_split_in_order():
  rows = np.arange(16 * 3).reshape(16, 3)
  (sharded,) = shard_rows((rows,), data_mesh(4))
  np.testing.assert_array_equal(sharded, rows)
  for index, shard in enumerate(sharded.addressable_shards):
    assert shard.device == jax.devices()[index]
    np.testing.assert_array_equal(shard.data, rows[4 * index : 4 * index + 4])


def test_replicas_are_whole_on_every_device():
  tree = replicate(dict(a=jnp.arange(3), b=jnp.ones(())), data_mesh(8))
  for leaf in jax.tree.leaves(tree):
    assert leaf.is_fully_replicated and len(leaf.devices()) == 8
