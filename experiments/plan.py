r"""Estimates memory and time of a training step on TPU chips, without such chips.

  pip install -e '.[tpu]'
  python -m experiments.plan --config=configs/wmt14.py:base,ende,relative \
      --topology=v5e:2x4
  python -m experiments.plan --config=configs/long.py --topology=v5e:4x4

The TPU's compiler compiles the training step for all chips of the topology. It needs no
TPU, and nothing runs. The batch holds the longest examples. Times are estimates from
the chip's peak figures, by computation and by memory traffic: a step takes the longer
of the two if they overlap, and their sum if they do not. Communication between chips is
left out, and the compiler counts one iteration of each loop: with microbatches, or
where attention is `chunked`, as in configs/long.py, times are far too low. The memory
is right.
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
    "v5e:2x4", "kind of chip, and the shape in which the chips are connected"
  ),
  effort=command.Flag(
    "full", "the compiler's effort: full, as in training, or least, to be quick"
  ),
)
_EFFORTS = dict(full=0.0, least=-1.0)  # JAX's exec_time_optimization_effort
_OUT_OF_MEMORY = (
  r"Used [\d.]+\w* of [\d.]+\w* \w+|HLO temporaries \S+ exceeds available HBM \S+\)"
)
# libtpu and JAX read these when they are loaded, and then do not look for a TPU.
NO_TPU = dict(
  JAX_PLATFORMS="cpu",
  TPU_SKIP_MDS_QUERY="1",
  TPU_ACCELERATOR_TYPE="v5litepod-4",
  TPU_WORKER_HOSTNAMES="localhost",
  ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)


class Chip(NamedTuple):
  """Holds the peak figures of one chip; rates are per second."""

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
  """Compiles the training step for the longest batches, and prints its estimates."""
  if effort not in _EFFORTS:
    known = " or ".join(_EFFORTS)
    raise InputError(f"--effort={effort}: give {known}")
  import jax
  from jax.experimental import topologies

  from experiments.evaluation.tables import markdown_table
  from experiments.systems import check_is_of_tokens, parse_config
  from experiments.training.batches import longest_shape
  from experiments.training.sharding import make_mesh

  chip, num_chips = parse(topology)
  use_compiler()
  config = parse_config(config, num_chips)
  check_is_of_tokens(config)
  # Cloud TPU presents the two cores of a v4 chip as one device.
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
  """Parses a topology: v5e:2x4 gives the kind of chip, v5e, and their number, 8."""
  match = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)+)", name)
  if not match or match[1] not in CHIPS:
    known = ", ".join(CHIPS)
    raise InputError(
      f"--topology={name}: give one of {known} and a shape, such as v5e:2x4"
    )
  chip, shape = match.groups()
  return chip, math.prod(map(int, shape.split("x")))


def use_compiler() -> None:
  """Makes JAX compute on the CPU, and keeps libtpu from looking for a TPU.

  Call it before any computation. Raises InputError if libtpu, which has the TPU's
  compiler, is missing.
  """
  if not importlib.util.find_spec("libtpu"):
    raise InputError("no libtpu, the TPU's compiler: pip install -e '.[tpu]'")
  import jax

  os.environ.update(NO_TPU)
  jax.config.update("jax_platforms", "cpu")


def compile_step(
  config: ConfigDict, mesh: "Mesh", shape: tuple[int, ...]
) -> "Compiled":
  """Compiles the training step for batches of this shape."""
  import jax

  from experiments.systems import find_system
  from experiments.training.sharding import batch_sharding

  def shape_of(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(mesh, x.ndim))

  system = find_system(config.task)
  steps = system.build(config, system.mock_vocabulary(config), mesh)
  batch = jax.tree.map(shape_of, system.empty_batch(shape))
  # The mesh in context tells the operator to choose TPU implementations.
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    return steps.train.lower(steps.shapes, batch).compile()


def figures(chip: Chip, step: "Compiled", num_steps: int) -> dict[str, str]:
  """Estimates memory, operations and times of a step; returns texts by name.

  The times follow the roofline model (Williams et al. 2009). The compiler counts one
  iteration of each loop. For Pallas kernels it uses the estimates that they declare.
  """
  memory, cost = step.memory_analysis(), step.cost_analysis()
  peak = _gigabytes(memory.peak_memory_in_bytes)
  flops, traffic = cost["flops"], cost["bytes accessed"]
  compute_time = flops / chip.flops
  memory_time = traffic / chip.hbm_bandwidth
  low, high = max(compute_time, memory_time), compute_time + memory_time
  updates = "unknown: config.training.num_epochs depends on the data"
  if num_steps:
    hours = num_steps / 3600
    updates = f"{hours * low:.1f} to {hours * high:.1f} h"
  sizes = {
    "memory": f"{peak} of {_gigabytes(chip.hbm)}",
    "memory of state and batch": _gigabytes(memory.argument_size_in_bytes),
    "10^12 operations": f"{flops / 1e12:.2f}",
    "memory traffic": _gigabytes(traffic),
  }
  times = {
    "time of compute": f"{1000 * compute_time:.1f} ms",
    "time of memory": f"{1000 * memory_time:.1f} ms",
    "time without the network": f"{1000 * low:.1f} to {1000 * high:.1f} ms",
    "all updates": updates,
  }
  return sizes | times


def _gigabytes(num_bytes: float) -> str:
  return f"{num_bytes / 1e9:.3g} GB"


if __name__ == "__main__":
  command.run(main, FLAGS)
