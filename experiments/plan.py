r"""Says what a training needs of TPU chips that are not there: memory, work, and the least time.

  pip install -e '.[tpu]'
  python -m experiments.plan --config=configs/wmt14.py:base,ende,relative --topology=v5e:2x4
  python -m experiments.plan --config=configs/wmt14.py:big,ende,relative --topology=v5e:2x4 \
      --out=results

The training step is compiled by the TPU's own compiler for all chips of the topology; no TPU is
needed and nothing runs. Batches have the shapes that mocked sentence lengths get. Times are
estimates from the chip's peak figures. Decoder-only models and several slices of chips, whose data
axis goes over all slices:

  python -m experiments.plan --config=configs/long.py --topology=v5e:4x4
  python -m experiments.plan --config=configs/wmt14.py:base,ende,relative --topology=v5e:4x4 \
      --num_slices=2 --config.batches.tokens=131072

Prints Markdown tables. With --out it also writes OUT/plans/NAME.json and, with all plans that are
there whose names begin alike, OUT/NAME.md, where NAME is cut at its first dash.
"""

import json
import pathlib
import re
import time
from collections.abc import Collection, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from experiments import command
from experiments.planning import report
from experiments.planning.compiling import (
  Shape,
  account,
  compile_step,
  first_state,
)
from experiments.planning.tables import tables
from experiments.planning.topology import chips, compiler_version, leave_tpus_alone, parse
from experiments.tasks import make_task
from experiments.validation import validate
from relpos_jax.errors import InputError
from relpos_jax.training.sharding import make_mesh
from relpos_jax.training.workdir import environment, write_whole

FLAGS = dict(
  config=command.CONFIG,
  topology=command.Flag("v5e:2x4", "the kind of chip and the shape in which chips are connected"),
  num_slices=command.Flag(1, "of that shape, between which the network is slower"),
  effort=command.Flag(
    "full", "the compiler's: full, as training has it, or least, which is soon done"
  ),
  shapes=command.Flag("longest", "the batches to compile for: longest, or all"),
  out=command.Flag("", "the folder to write to"),
  name=command.Flag("", "of the plan and its file; the config's name if not given"),
)

# What JAX calls exec_time_optimization_effort.
EFFORTS = dict(full=0.0, least=-1.0)


def main(
  config: ConfigDict,
  topology: str,
  num_slices: int,
  effort: str,
  shapes: str,
  out: str,
  name: str,
) -> None:
  """Checks the flags, compiles, prints the tables, and writes them if told where."""
  _check("effort", effort, EFFORTS)
  _check("shapes", shapes, ("longest", "all"))
  num_chips = parse(topology, num_slices).num_chips
  compiler_version()
  leave_tpus_alone()
  validate(config, num_chips)
  folder = command.make_folder(pathlib.Path(out, "plans"), "out") if out else None
  name = name or config.name
  if folder:
    _check_files(folder, name)
  mesh = make_mesh(**config.mesh, devices=chips(topology, num_slices))
  wanted = make_task(config).mock_batches(mesh).shapes
  jax.config.update("jax_exec_time_optimization_effort", EFFORTS[effort])
  plan = make_plan(config, topology, mesh, wanted if shapes == "all" else wanted[-1:])
  plan |= dict(name=name, num_slices=num_slices, effort=effort)
  print(tables([plan]))
  if folder:
    _write(folder, plan)


def _check(name: str, value: str, choices: Collection[str]) -> None:
  if value not in choices:
    raise InputError(f"--{name}={value}: give {' or '.join(choices)}")


def _check_files(folder: pathlib.Path, name: str) -> None:
  """What would fail after the work, fails before it."""
  if pathlib.PurePath(name).name != name:
    raise InputError(f"--name={name}: give a file's name, without a folder")
  report.read(folder)


def make_plan(
  config: ConfigDict, topology: str, mesh: jax.sharding.Mesh, shapes: Sequence[Shape]
) -> dict[str, Any]:
  """All that a file of results/plans holds, but for its name."""
  where = environment()
  where["packages"]["libtpu"] = compiler_version()
  _, state = first_state(config, mesh)
  return dict(
    environment=where,
    topology=topology,
    chip=parse(topology).chip,
    num_chips=mesh.size,
    config=config.to_dict() | dict(mesh=dict(mesh.shape)),  # its sizes, where one was -1
    parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
    num_steps=config.training.num_steps,
    steps=[_step(config, mesh, shape) for shape in shapes],
  )


def _step(config: ConfigDict, mesh: jax.sharding.Mesh, shape: Shape) -> dict[str, Any]:
  """What the compiler says of one shape of batches, or why it refuses it."""
  start = time.perf_counter()
  try:
    found = dict(refused="") | account(compile_step(config, mesh, shape), mesh.size)
  except jax.errors.JaxRuntimeError as error:
    if not (memory := re.search(r"Used [\d.]+\w* of [\d.]+\w* \w+", str(error))):
      raise
    found = dict(refused=memory[0])
  rows, length, *_ = shape
  seconds = round(time.perf_counter() - start, 1)
  return dict(rows=rows, length=length, compile_seconds=seconds) | found


def _write(folder: pathlib.Path, plan: dict[str, Any]) -> None:
  write_whole(folder / f"{plan['name']}.json", json.dumps(plan) + "\n")
  title = plan["name"].partition("-")[0]
  plans = [each for each in report.read(folder) if each["name"].partition("-")[0] == title]
  write_whole(folder.parent / f"{title}.md", report.page(title, plans))


if __name__ == "__main__":
  command.run(main, FLAGS)
