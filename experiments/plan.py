r"""Estimates the memory, operations and time of a training step on TPU chips, without the chips.

  pip install -e '.[tpu]'
  python -m experiments.plan --config=configs/wmt14.py:base,ende,relative --topology=v5e:2x4
  python -m experiments.plan --config=configs/long.py --topology=v5e:4x4

The TPU's own compiler compiles the training step for all chips of the topology; no TPU is needed
and nothing runs. The batch is of the longest examples. Times are estimates from the chip's peak
figures: a step takes the longer of computing and memory traffic if they overlap, and their sum if
they do not. What chips send one another is left out.
"""

import importlib.util
import math
import os
import re
from typing import TYPE_CHECKING, NamedTuple

from ml_collections import ConfigDict

from experiments import command
from experiments.errors import InputError

if TYPE_CHECKING:
  from jax.sharding import Mesh
  from jax.stages import Compiled

FLAGS = dict(
  config=command.CONFIG,
  topology=command.Flag(
    "v5e:2x4", "the kind of chip and the shape in which chips are connected"
  ),
  effort=command.Flag(
    "full", "the compiler's: full, as in training, or least, which is quick"
  ),
)
_EFFORTS = dict(full=0.0, least=-1.0)  # JAX's exec_time_optimization_effort
_OUT_OF_MEMORY = (
  r"Used [\d.]+\w* of [\d.]+\w* \w+|HLO temporaries \S+ exceeds available HBM \S+\)"
)
# Makes libtpu and JAX, which read these when they are loaded, look for no TPU.
NO_TPU = dict(
  JAX_PLATFORMS="cpu",
  TPU_SKIP_MDS_QUERY="1",
  TPU_ACCELERATOR_TYPE="v5litepod-4",
  TPU_WORKER_HOSTNAMES="localhost",
  ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)


class Chip(NamedTuple):
  """Peak figures of one chip; rates are per second."""

  flops: float  # bfloat16
  hbm: float  # bytes
  hbm_bandwidth: float


CHIPS = {
  "v4": Chip(275e12, 32 * 2**30, 1200e9),
  "v5e": Chip(197e12, 16e9, 819e9),
  "v5p": Chip(459e12, 95e9, 2765e9),
  "v6e": Chip(918e12, 32e9, 1600e9),
}


def main(config: ConfigDict, topology: str, effort: str) -> None:
  """Compiles the training step for the longest batches, and prints its table."""
  if effort not in _EFFORTS:
    known = " or ".join(_EFFORTS)
    raise InputError(f"--effort={effort}: give {known}")
  import jax
  from jax.experimental import topologies

  from experiments.evaluation.tables import markdown_table
  from experiments.systems import parse_config
  from experiments.training.batches import longest_shape
  from experiments.training.sharding import make_mesh

  chip, num_chips = parse(topology)
  use_compiler()
  config = parse_config(config, num_chips)
  # A chip of v4 has two cores, which are one device as Cloud TPU sets it up.
  options = {"chip_config_name": "megacore"} if chip == "v4" else {}
  description = topologies.get_topology_desc(topology, platform="tpu", **options)
  mesh = make_mesh(**config.mesh, devices=description.devices)
  jax.config.update("jax_exec_time_optimization_effort", _EFFORTS[effort])
  shape = longest_shape(config, mesh.shape)
  rows = {"chips": f"{num_chips} x {chip}", "batch": f"{shape[0]} x {shape[1]}"}
  try:
    step = compile_step(config, mesh, shape)
    rows |= figures(CHIPS[chip], step, config.training.num_steps)
    rows["peaks"] = f"docs.cloud.google.com/tpu/docs/{chip}"
  except jax.errors.JaxRuntimeError as error:
    memory = re.search(_OUT_OF_MEMORY, str(error))
    if not memory:
      raise
    rows["does not fit"] = memory[0]
  print(markdown_table(["a chip, a step", config.name], rows.items()))


def parse(name: str) -> tuple[str, int]:
  """Reads the kind of chip and the number of chips from a topology: v5e and 8 from v5e:2x4."""
  found = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)+)", name)
  if not found or found[1] not in CHIPS:
    known = ", ".join(CHIPS)
    raise InputError(
      f"--topology={name}: give one of {known} and a shape, such as v5e:2x4"
    )
  chip, shape = found.groups()
  return chip, math.prod(map(int, shape.split("x")))


def use_compiler() -> None:
  """Makes JAX compute on the CPU and libtpu look for no TPU.

  Call it before any computation. Raises InputError: libtpu, the TPU's compiler, is missing.
  """
  if not importlib.util.find_spec("libtpu"):
    raise InputError("no libtpu, the TPU's compiler: pip install -e '.[tpu]'")
  import jax

  os.environ.update(NO_TPU)
  jax.config.update("jax_platforms", "cpu")


def compile_step(
  config: ConfigDict, mesh: "Mesh", shape: tuple[int, ...]
) -> "Compiled":
  """Compiles the training step for batches of a shape."""
  import jax

  from experiments.systems import find_system
  from experiments.training.sharding import batch_sharding

  def shape_of(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(mesh, x.ndim))

  system = find_system(config.task)
  steps = system.build(config, system.mock_vocabulary(config), mesh)
  batch = jax.tree.map(shape_of, system.empty_batch(shape))
  # Attention is chosen for the platform of the mesh.
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    return steps.train.lower(steps.shapes, batch).compile()


def figures(chip: Chip, step: "Compiled", num_steps: int) -> dict[str, str]:
  """Returns the memory, work and times of a step on a chip, as text by name.

  A roofline (Williams et al. 2009). The compiler counts one pass of each loop, and
  takes the Pallas kernels' own estimates.
  """
  memory, cost = step.memory_analysis(), step.cost_analysis()
  flops, traffic = cost["flops"], cost["bytes accessed"]
  compute_time = flops / chip.flops
  memory_time = traffic / chip.hbm_bandwidth
  low, high = max(compute_time, memory_time), compute_time + memory_time
  updates = "of any data"
  if num_steps:
    hours = num_steps / 3600
    updates = f"{hours * low:.1f} to {hours * high:.1f} h"
  return {
    "memory": f"{_gigabytes(memory.peak_memory_in_bytes)} of {_gigabytes(chip.hbm)}",
    "of which state and batch": _gigabytes(memory.argument_size_in_bytes),
    "10^12 operations": f"{flops / 1e12:.2f}",
    "memory traffic": _gigabytes(traffic),
    "time of compute": f"{1000 * compute_time:.1f} ms",
    "time of memory": f"{1000 * memory_time:.1f} ms",
    "time without the network": f"{1000 * low:.1f} to {1000 * high:.1f} ms",
    "all updates": updates,
  }


def _gigabytes(num_bytes: float) -> str:
  return f"{num_bytes / 1e9:.3g} GB"


if __name__ == "__main__":
  command.run(main, FLAGS)
