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

import collections
import json
import math
import pathlib
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from experiments import command
from experiments.errors import InputError
from experiments.plan import ACROSS, chips, parse, tables, use_compiler
from experiments.run import make_optimizer, make_step, make_task, plan_model, validate
from experiments.training.sharding import AnyMesh, batch_sharding, make_mesh, shapes_on
from experiments.training.step import TrainState, init_state
from experiments.training.workdir import environment, write_whole

FLAGS = dict(
  config=command.CONFIG,
  topology=command.Flag("v5e:2x4", "the kind of chip and the shape in which chips are connected"),
  num_slices=command.Flag(1, "of that shape, between which the network is slower"),
  effort=command.Flag("full", "the compiler's: full, as in training, or least, which is quick"),
  out=command.Flag("", "the folder to write to; empty: only print"),
  name=command.Flag("", "of the plan and its file; by default the config's"),
)
_EFFORTS = dict(full=0.0, least=-1.0)  # JAX's exec_time_optimization_effort


def main(
  config: ConfigDict, topology: str, num_slices: int, effort: str, out: str, name: str
) -> None:
  """Compiles the training step, prints its tables, and writes them if there is a folder."""
  if effort not in _EFFORTS:
    raise InputError(f"--effort={effort}: give {' or '.join(_EFFORTS)}")
  _, num_chips = parse(topology, num_slices)
  use_compiler()
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
  shape = make_task(config).mock_batches(mesh).shapes[-1]
  start = time.perf_counter()
  try:
    step = dict(refused="") | compile_step(config, mesh, shape)
  except jax.errors.JaxRuntimeError as error:
    if not (memory := re.search(r"Used [\d.]+\w* of [\d.]+\w* \w+", str(error))):
      raise
    step = dict(refused=memory[0])
  seconds = round(time.perf_counter() - start, 1)
  return dict(
    environment=environment("libtpu"),
    topology=topology,
    chip=parse(topology)[0],
    num_chips=mesh.size,
    config=config.to_dict() | dict(mesh=dict(mesh.shape)),  # with sizes instead of -1
    parameters=sum(x.size for x in jax.tree.leaves(first_state(config, mesh)[1].params)),
    num_steps=config.training.num_steps,
    steps=[dict(rows=shape[0], length=shape[1], compile_seconds=seconds) | step],
  )


def first_state(config: ConfigDict, mesh: AnyMesh) -> tuple[Any, TrainState]:
  """Returns the model and, as shapes on a mesh, the state before the first step of training."""
  task = make_task(config)
  graphdef, params = plan_model(task, task.mock_vocabulary())
  start = lambda params: init_state(params, make_optimizer(config))
  return graphdef, shapes_on(mesh, jax.eval_shape(start, params))


def batch_of(config: ConfigDict, shape: tuple[int, ...], mesh: AnyMesh) -> Any:
  """Returns a batch of padding as shapes, sharded as in training."""
  shape_of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(mesh, x.ndim))
  return jax.tree.map(shape_of, make_task(config).empty_batch(shape))


def compile_step(
  config: ConfigDict, mesh: jax.sharding.Mesh, shape: tuple[int, ...]
) -> dict[str, Any]:
  """Compiles the training step; returns the memory, operations and collectives of one chip.

  The compiler counts one pass of each loop, and takes the Pallas kernels' own estimates.
  """
  graphdef, state = first_state(config, mesh)
  step = make_step(make_task(config), graphdef)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # attention is chosen for its platform
    compiled = step.lower(state, batch_of(config, shape, mesh)).compile()
  memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
  return dict(
    argument_bytes=memory.argument_size_in_bytes,
    temporary_bytes=memory.temp_size_in_bytes,
    peak_bytes=memory.peak_memory_in_bytes,
    flops=cost["flops"],
    hbm_bytes=cost["bytes accessed"],
    collectives=by_kind(find(text, mesh.size)),
    num_loops=len(re.findall(r" while\(", text)),
    num_kernels=text.count("tpu_custom_call"),
  )


# Collectives in the text of a compiled program ----------------------------------------------------

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(
  r" = (.*?) (all-(?:reduce|gather|to-all)|reduce-scatter|collective-\w+)(-start)?\("
)
_ACROSS = re.compile(r" = \((.*?), u32\[\].* send\(.*_xla_megascale_target=\"\{([\d,:]+)\}")
_CALLEES = re.compile(r"(?:calls|body)=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+)\w*\[([\d,]*)\]")


class Collective(NamedTuple):
  """One collective of a program; `times` is how often it runs in a step."""

  kind: str
  num_bytes: int  # of its result on one chip; of a reduce-scatter, of its operand
  num_chips: int  # that take part together; across slices, one of each
  times: int

  @property
  def sent_bytes(self) -> float:
    """Returns the bytes that a chip sends each time, in a ring over those that take part.

    >>> Collective("all-reduce", 800, num_chips=8, times=1).sent_bytes
    1400.0
    """
    if self.kind.startswith("collective-"):
      return float(self.num_bytes)
    rounds = 2 if self.kind.startswith("all-reduce") else 1
    return rounds * self.num_bytes * (self.num_chips - 1) / self.num_chips


def find(text: str, num_chips: int) -> list[Collective]:
  """Finds the collectives of a compiled program (`Compiled.as_text()`) that runs on `num_chips`.

  In a loop they run as often as its body, or once if the compiler does not state how often.
  """
  computations, lines = {}, []
  for line in text.splitlines():  # callers stand after those they call, the entry last
    if head := _COMPUTATION.match(line):
      lines = computations[head[2]] = []
    else:
      lines.append(line)
  times = collections.Counter({name: 1 for name in list(computations)[-1:]})
  for name in reversed(computations):
    for line in computations[name]:
      trips = _TRIPS.search(line)
      for callee in _CALLEES.findall(line):
        times[callee] += times[name] * (int(trips[1]) if trips else 1)
  return [
    Collective(*found, times[name])
    for name, lines in computations.items()
    for line in lines
    for found in _in_line(name, line, num_chips)
  ]


def by_kind(found: Iterable[Collective]) -> dict[str, dict[str, float]]:
  """Adds up how often each kind runs in a step, its bytes, and the bytes that a chip sends."""
  total = collections.defaultdict(lambda: dict(times=0, num_bytes=0, sent_bytes=0.0))
  for collective in found:
    row, times = total[collective.kind], collective.times
    row["times"] += times
    row["num_bytes"] += times * collective.num_bytes
    row["sent_bytes"] += times * collective.sent_bytes
  return dict(total)


def _in_line(computation: str, line: str, num_chips: int) -> Iterator[tuple[str, int, int]]:
  """Yields the kind, bytes and chips of the collective of a line, if it has one."""
  if across := _ACROSS.search(line):
    ends = [[int(end) for end in part.split(":")] for part in across[2].split(",")]  # "1,4:6"
    yield ACROSS, _bytes(across[1]), sum(end[-1] - end[0] + 1 for end in ends)
  if found := _COLLECTIVE.search(line):
    shape, kind, starts = found.groups()
    chips = _num_chips(line, num_chips)
    if starts and kind != "all-reduce":  # a tuple of operands, results and others
      parts = re.findall(r"\([^()]*\)|\w+\[[\d,]*\]", re.sub(r"\{[^}]*\}", "", shape)[1:-1])
      shape = parts[1]
    num_bytes = _bytes(shape)
    if computation.startswith("all-reduce-scatter"):  # a fusion: each chip keeps its part
      kind = "reduce-scatter"
    elif kind == "reduce-scatter":
      num_bytes *= chips
    yield kind, num_bytes, chips


def _bytes(shape: str) -> int:
  """Returns the bytes of a shape's arrays.

  >>> _bytes("(f32[2,3]{1,0:T(8,128)}, bf16[5]{0}, pred[])")
  35
  """
  sizes = lambda text: [int(size) for size in text.split(",") if size]
  width = lambda kind: math.ceil(int(re.sub(r"\D", "", kind) or 8) / 8)  # pred takes a byte
  return sum(math.prod(sizes(text)) * width(kind) for kind, text in _ARRAY.findall(shape))


def _num_chips(line: str, num_chips: int) -> int:
  """Returns the chips of a group: {{0,1},{2,3}}, [2,2]<=[4] or mesh['x'=2,'y'=2] {'y'}."""
  if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
    return listed[1].count(",") + 1
  if tiled := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
    return int(tiled[1])
  if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
    # 'x':(2)4 is a part of 'x', four long.
    parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
    return math.prod(int(part or sizes[name]) for name, part in parts)
  return num_chips


if __name__ == "__main__":
  command.run(main, FLAGS)
