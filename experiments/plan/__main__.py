r"""Estimates the memory, operations and time of a training step on TPU chips, without the chips.

  pip install -e '.[tpu]'
  python -m experiments.plan --config=configs/wmt14.py:base,ende,relative --topology=v5e:2x4
  python -m experiments.plan --config=configs/long.py --topology=v5e:4x4

The TPU's own compiler compiles the training step for all chips of the topology; no TPU is needed
and nothing runs. The batch has the longest shape of mocked sentence lengths. Times are estimates
from the chip's peak figures: a step takes the longest of its parts if all of them overlap, and
their sum if none do.
"""

import collections
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from experiments import command
from experiments.errors import InputError
from experiments.evaluation.tables import markdown_table
from experiments.plan import CHIPS, Chip, chips, parse, use_compiler
from experiments.run import build, parse_config
from experiments.training.sharding import AnyMesh, batch_sharding, make_mesh
from experiments.training.task import Task

FLAGS = dict(
  config=command.CONFIG,
  topology=command.Flag("v5e:2x4", "the kind of chip and the shape in which chips are connected"),
  effort=command.Flag("full", "the compiler's: full, as in training, or least, which is quick"),
)
_EFFORTS = dict(full=0.0, least=-1.0)  # JAX's exec_time_optimization_effort
_OUT_OF_MEMORY = r"Used [\d.]+\w* of [\d.]+\w* \w+|HLO temporaries \S+ exceeds available HBM \S+\)"


def main(config: ConfigDict, topology: str, effort: str) -> None:
  """Compiles the training step for the longest batches, and prints its table."""
  if effort not in _EFFORTS:
    raise InputError(f"--effort={effort}: give {' or '.join(_EFFORTS)}")
  chip, num_chips = parse(topology)
  use_compiler()
  task = parse_config(config, num_chips)
  mesh = make_mesh(**config.mesh, devices=chips(topology))
  jax.config.update("jax_exec_time_optimization_effort", _EFFORTS[effort])
  shape = task.mock_batches(mesh).shapes[-1]
  rows = {"chips": f"{num_chips} x {chip}", "batch": f"{shape[0]} x {shape[1]}"}
  try:
    step = compile_step(task, mesh, shape)
    rows |= figures(CHIPS[chip], step, config.training.num_steps)
  except jax.errors.JaxRuntimeError as error:
    if not (memory := re.search(_OUT_OF_MEMORY, str(error))):
      raise
    rows["does not fit"] = memory[0]
  print(markdown_table(["a chip, a step", config.name], [*map(list, rows.items())]))


def figures(chip: Chip, step: Mapping[str, Any], num_steps: int) -> dict[str, str]:
  """Returns the memory, work and times of a step on a chip, as text by name."""
  parts = estimate(chip, step)
  low, high = max(parts.values()), sum(parts.values())
  sent = ", ".join(
    f"{kind}: {_gigabytes(row['num_bytes'])} in {row['times']}"
    for kind, row in step["collectives"].items()
  )
  return {
    "memory": f"{_gigabytes(step['peak_bytes'])} of {_gigabytes(chip.hbm)}",
    "of which state and batch": _gigabytes(step["argument_bytes"]),
    "10^12 operations": f"{step['flops'] / 1e12:.2f}",
    "memory traffic": _gigabytes(step["hbm_bytes"]),
    "collectives": sent or "none",
    **{f"time of {name}": f"{1000 * part:.1f} ms" for name, part in parts.items()},
    "time": f"{1000 * low:.1f} to {1000 * high:.1f} ms",
    "all updates": f"{num_steps / 3600 * low:.1f} to {num_steps / 3600 * high:.1f} h",
    "peaks": chip.source,
  }


def estimate(chip: Chip, step: Mapping[str, Any]) -> dict[str, float]:
  """Computes the seconds of each part of one chip's step at its peak: a roofline.

  Williams et al. 2009, with the network as a further roof.
  """
  sent = sum(row["sent_bytes"] for row in step["collectives"].values())
  return dict(
    compute=step["flops"] / chip.flops,
    memory=step["hbm_bytes"] / chip.hbm_bandwidth,
    # A ring over all chips passes through each by two of its links, once in either direction.
    network=sent / (2 * chip.link_bandwidth),
  )


def _gigabytes(num_bytes: float) -> str:
  return f"{num_bytes / 1e9:.3g} GB"


def batch_of(task: Task, shape: tuple[int, ...], mesh: AnyMesh) -> Any:
  """Returns a batch of padding as shapes, sharded as in training."""

  def shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(mesh, x.ndim))

  return jax.tree.map(shape_of, task.empty_batch(shape))


def compile_step(task: Task, mesh: jax.sharding.Mesh, shape: tuple[int, ...]) -> dict[str, Any]:
  """Compiles the training step; returns the memory, operations and collectives of one chip.

  The compiler counts one pass of each loop, and takes the Pallas kernels' own estimates.
  """
  training = build(task, task.mock_vocabulary(), mesh)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # attention is chosen for its platform
    compiled = training.step.lower(training.shapes, batch_of(task, shape, mesh)).compile()
  memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
  return dict(
    argument_bytes=memory.argument_size_in_bytes,
    peak_bytes=memory.peak_memory_in_bytes,
    flops=cost["flops"],
    hbm_bytes=cost["bytes accessed"],
    collectives=by_kind(find(compiled.as_text(), mesh.size)),
  )


# Collectives in the text of a compiled program ----------------------------------------------------

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(
  r" = (.*?) (all-(?:reduce|gather|to-all)|reduce-scatter|collective-\w+)(-start)?\("
)
_CALLEES = re.compile(r"(?:calls|body)=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONDITION = re.compile(r"condition=%?([\w.-]+)")
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+)\w*\[([\d,]*)\]")


class Collective(NamedTuple):
  """One collective of a program; `times` is how often it runs in a step."""

  kind: str
  num_bytes: int  # of its result on one chip; of a reduce-scatter, of its operand
  num_chips: int  # that take part together
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

  In a loop they run as often as its body: as the compiler states, or as the only constant of its
  condition says, which is the case for TPUs; else once.
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
      trips = _TRIPS.findall(line)
      if not trips and (condition := _CONDITION.search(line)):
        trips = re.findall(r" constant\((\d+)\)", "\n".join(computations[condition[1]]))
      for callee in _CALLEES.findall(line):
        times[callee] += times[name] * (int(trips[0]) if len(trips) == 1 else 1)
  return [
    Collective(*found, times[name])
    for name, lines in computations.items()
    for line in lines
    if (found := _in_line(name, line, num_chips))
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


def _in_line(computation: str, line: str, num_chips: int) -> tuple[str, int, int] | None:
  """Returns the kind, bytes and chips of the collective of a line; None if it has none."""
  if not (found := _COLLECTIVE.search(line)):
    return None
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
  return kind, num_bytes, chips


def _bytes(shape: str) -> int:
  """Returns the bytes of a shape's arrays.

  >>> _bytes("(f32[2,3]{1,0:T(8,128)}, bf16[5]{0}, pred[])")
  35
  """
  total = 0
  for kind, sizes in _ARRAY.findall(shape):
    width = math.ceil(int(re.sub(r"\D", "", kind) or 8) / 8)  # pred takes a byte
    total += math.prod(int(size) for size in sizes.split(",") if size) * width
  return total


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
