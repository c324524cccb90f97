r"""Estimates the memory, operations and time of a training step on TPU chips, without the chips.

  pip install -e '.[tpu]'
  python -m experiments.plan --config=configs/wmt14.py:base,ende,relative --topology=v5e:2x4
  python -m experiments.plan --config=configs/long.py --topology=v5e:4x4 --out=results
  python -m experiments.plan --config=configs/wmt14.py:base,ende,relative --topology=v5e:4x4 \
      --num_slices=2 --config.batches.tokens=131072

The TPU's own compiler compiles the training step for all chips of the topology; no TPU is needed
and nothing runs. The batch has the longest shape of mocked sentence lengths. Times are estimates
from the chip's peak figures. With several slices, the data axis goes over all of them.

Prints Markdown tables. With --out it also writes OUT/plans/NAME.json, and the tables of all plans
there whose names begin alike as blocks of OUT/TITLE.md, TITLE being NAME up to its first dash.
"""

import json
import pathlib
import re
import time
from typing import Any

import jax
from ml_collections import ConfigDict

from experiments import command
from experiments.config import make_task, validate
from experiments.plan import collectives, tables
from experiments.plan.topology import chips, compiler_version, leave_tpus_alone, parse
from experiments.run import make_optimizer, make_step, plan_model
from relpos_jax.errors import InputError
from relpos_jax.training.sharding import AnyMesh, batch_sharding, make_mesh, shapes_on
from relpos_jax.training.step import TrainState, init_state
from relpos_jax.training.workdir import environment, write_whole

FLAGS = dict(
  config=command.CONFIG,
  topology=command.Flag("v5e:2x4", "the kind of chip and the shape in which chips are connected"),
  num_slices=command.Flag(1, "of that shape, between which the network is slower"),
  effort=command.Flag("full", "the compiler's: full, as in training, or least, which is quick"),
  out=command.Flag("", "the folder to write to; empty: only print"),
  name=command.Flag("", "of the plan and its file; by default the config's"),
)
_EFFORTS = dict(full=0.0, least=-1.0)  # JAX's exec_time_optimization_effort

Shape = tuple[int, ...]  # rows, tokens; of graphs more


def main(
  config: ConfigDict,
  topology: str,
  num_slices: int,
  effort: str,
  out: str,
  name: str,
) -> None:
  """Compiles the training step, prints its tables, and writes them if there is a folder."""
  if effort not in _EFFORTS:
    raise InputError(f"--effort={effort}: give {' or '.join(_EFFORTS)}")
  _, num_chips = parse(topology, num_slices)
  compiler_version()
  leave_tpus_alone()
  validate(config, num_chips)
  folder = command.make_folder(pathlib.Path(out, "plans"), "out") if out else None
  mesh = make_mesh(**config.mesh, devices=chips(topology, num_slices))
  jax.config.update("jax_exec_time_optimization_effort", _EFFORTS[effort])
  plan = make_plan(config, topology, mesh)
  plan |= dict(name=name or config.name, num_slices=num_slices, effort=effort)
  for table in tables.blocks([plan]).values():
    print(f"{table}\n")
  if folder:
    write_whole(folder / f"{plan['name']}.json", json.dumps(plan) + "\n")
    tables.main(out)


def make_plan(config: ConfigDict, topology: str, mesh: jax.sharding.Mesh) -> dict[str, Any]:
  """Compiles a training step for the longest batches; returns the contents of a plan's file."""
  where = environment()
  where["packages"]["libtpu"] = compiler_version()
  _, state = first_state(config, mesh)
  return dict(
    environment=where,
    topology=topology,
    chip=parse(topology)[0],
    num_chips=mesh.size,
    config=config.to_dict() | dict(mesh=dict(mesh.shape)),  # with sizes instead of -1
    parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
    num_steps=config.training.num_steps,
    steps=[_step(config, mesh, make_task(config).mock_batches(mesh).shapes[-1])],
  )


def _step(config: ConfigDict, mesh: jax.sharding.Mesh, shape: Shape) -> dict[str, Any]:
  """Returns the compiler's figures of a step, or its message if memory does not suffice."""
  start = time.perf_counter()
  try:
    found = dict(refused="") | account(compile_step(config, mesh, shape), mesh.size)
  except jax.errors.JaxRuntimeError as error:
    if not (memory := re.search(r"Used [\d.]+\w* of [\d.]+\w* \w+", str(error))):
      raise
    found = dict(refused=memory[0])
  seconds = round(time.perf_counter() - start, 1)
  return dict(rows=shape[0], length=shape[1], compile_seconds=seconds) | found


def first_state(config: ConfigDict, mesh: AnyMesh) -> tuple[Any, TrainState]:
  """Returns the model and, as shapes on a mesh, the state before the first step of training."""
  task = make_task(config)
  graphdef, params = plan_model(task, task.mock_vocabulary())
  start = lambda params: init_state(params, make_optimizer(config))
  return graphdef, shapes_on(mesh, jax.eval_shape(start, params))


def batch_of(config: ConfigDict, shape: Shape, mesh: AnyMesh) -> Any:
  """Returns a batch of [rows, tokens] as shapes, sharded as in training."""
  shape_of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(mesh, x.ndim))
  return jax.tree.map(shape_of, make_task(config).empty_batch(shape))


def compile_step(config: ConfigDict, mesh: jax.sharding.Mesh, shape: Shape):
  """Compiles the training step for batches of [rows, tokens] on the devices of a mesh.

  The mesh is in context, so that attention is chosen for its platform.
  """
  graphdef, state = first_state(config, mesh)
  step = make_step(make_task(config), graphdef)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    return step.lower(state, batch_of(config, shape, mesh)).compile()


def account(compiled, num_chips: int) -> dict[str, Any]:
  """Returns the memory, operations and collectives of one chip in a step.

  The compiler counts one pass of each loop, and takes the Pallas kernels' own estimates.
  """
  memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
  return dict(
    argument_bytes=memory.argument_size_in_bytes,
    temporary_bytes=memory.temp_size_in_bytes,
    peak_bytes=memory.peak_memory_in_bytes,
    flops=cost["flops"],
    hbm_bytes=cost["bytes accessed"],
    collectives=collectives.by_kind(collectives.find(text, num_chips)),
    num_loops=len(re.findall(r" while\(", text)),
    num_kernels=text.count("tpu_custom_call"),
  )


if __name__ == "__main__":
  command.run(main, FLAGS)
