"""Which platform a call is compiled for."""

import jax

_GPUS = ("cuda", "rocm")  # as topologies and abstract devices name them


def target_platform() -> str:
  """The platform of the mesh in context, or JAX's own: "cpu", "gpu" or "tpu".

  A mesh in context knows its devices' platform, be they here (`jax.set_mesh`) or only described
  (`jax.experimental.topologies`): what is traced in it is what they would run.

  >>> from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
  >>> chip = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
  >>> with use_abstract_mesh(AbstractMesh((8,), ("data",), abstract_device=chip)):
  ...   target_platform()
  'tpu'
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  platform = jax.default_backend() if device is None else device.platform
  return "gpu" if platform in _GPUS else platform
