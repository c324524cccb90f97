"""Programs for accelerators that are not there."""

import jax
import jax.numpy as jnp
from calls import make_shapes
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from relpos_jax.attention.inputs import gather_inputs


def target(platform, kind="chip", devices=8):
  """Returns the context of a mesh of devices that are not there."""
  device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
  types = (AxisType.Auto,)
  mesh = AbstractMesh((devices,), ("data",), types, abstract_device=device)
  return use_abstract_mesh(mesh)


def make_loss(attention, **options):
  """Returns a loss with the kernels of a module as compiled for a GPU."""

  def loss(query, key, value, relations):
    inputs = gather_inputs(query, key, value, relations=relations, **options)
    return attention(inputs, interpret=False).astype(jnp.float32).sum()

  return loss


def make_gradient(attention, **options):
  loss = make_loss(attention, **options)
  return jax.grad(loss, argnums=(0, 1, 2, 3))


def lower_for_an_h100(function, *arrays):
  with target("cuda", "NVIDIA H100 80GB HBM3", 1):
    traced = jax.jit(function).trace(*arrays)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def check_kernels(attention, name, sizes, options):
  """Checks for three kernels of this name for an H100, and no [T, S] around them."""
  arrays = make_shapes(**sizes)
  lowered = lower_for_an_h100(make_gradient(attention, **options), *arrays)
  assert lowered.count(name) == 3
  length = arrays[0].shape[1]
  assert f"x{length}x{length}x" not in lowered
