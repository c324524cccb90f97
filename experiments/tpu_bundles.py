r"""Counts the instructions that a TPU would run: the kernel with relations against without.

  pip install -e '.[tpu]' && python -m experiments.tpu_bundles --lengths=4096,16384 --chip=v5e
  python -m experiments.tpu_bundles --out=results

No TPU is needed: the TPU's compiler writes down the bundles of instructions, one for each cycle
that waits for nothing. A kernel is a loop over tiles with a branch for each kind of tile; the
whole call is the sum over its tiles of the bundles of the branches taken. A count, not a time.

Prints Markdown tables. With --out it also writes OUT/tpu_bundles.md and, with all that is in it,
OUT/tpu_bundles.json.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from experiments import command
from experiments.benchmarks import bundles
from experiments.planning.topology import NO_TPU, compiler_version
from relpos_jax import RelativePositions
from relpos_jax.attention import pallas_tpu
from relpos_jax.attention.inputs import Inputs, gather_inputs
from relpos_jax.attention.pallas_tpu_tiles import Plan
from relpos_jax.errors import InputError
from relpos_jax.training.workdir import environment, short_commit, write_whole

CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}
_HEADS, _WIDTH, _K = 8, 64, 16
_BLOCK = pallas_tpu.BLOCK
_SHORTEST = 2 * _BLOCK  # shorter ones are no loop

FLAGS = dict(
  lengths=command.Flag("4096,16384", "queries and keys, separated by commas"),
  chip=command.Flag("v5e", ", ".join(CHIPS)),
  out=command.Flag("", "the folder to write to"),
)


class Call(NamedTuple):
  """What is compiled: T queries and keys, with or without relations."""

  length: int
  is_causal: bool
  relations: bool


def main(lengths: str, chip: str, out: str) -> None:
  """Checks the flags, compiles and counts, prints the tables, and writes them if told where."""
  calls = [
    Call(length, is_causal, relations)
    for length in _lengths(lengths)
    for is_causal in (False, True)
    for relations in (False, True)
  ]
  if chip not in CHIPS:
    raise InputError(f"--chip={chip}: give one of {', '.join(CHIPS)}")
  folder = command.make_folder(out, "out") if out else None
  version = compiler_version()
  jax.config.update("jax_platforms", "cpu")
  counts = [row for call in calls for row in _count(call, chip)]
  results = dict(environment=environment(), chip=chip, counts=counts)
  results["environment"]["packages"]["libtpu"] = version
  print(report := _report(results))
  if folder:
    write_whole(folder / "tpu_bundles.json", json.dumps(results) + "\n")
    write_whole(folder / "tpu_bundles.md", report)


def _lengths(text: str) -> list[int]:
  lengths = command.lengths("lengths", text)
  if not lengths:
    raise InputError("--lengths: there are none; give some, such as 4096,16384")
  for length in lengths:
    if length < _SHORTEST:
      raise InputError(f"--lengths: {length} is too short to count; give {_SHORTEST} or more")
  return lengths


# Counting ----------------------------------------------------------------------------------------


def _count(call: Call, chip: str) -> list[dict[str, Any]]:
  """A row for each direction."""
  plan = plan_of(call)
  return [
    call._asdict() | dict(direction=direction) | bundles.count(plan, direction, texts)._asdict()
    for direction, texts in _dump(call, chip).items()
  ]


def plan_of(call: Call, block: int = _BLOCK) -> Plan:
  """The kernel's own plan of a call."""
  arrays = [jnp.zeros(array.shape, array.dtype) for array in _arguments(call)]
  return pallas_tpu.plan_of(_inputs(call, *arrays), interpret=False, block=block)[0]


def _dump(call: Call, chip: str) -> dict[str, list[str]]:
  """The final bundles of both kernels, from a process of its own: libtpu reads flags once."""
  code = f"from experiments.tpu_bundles import *; compile_kernels({call}, {chip!r})"
  with tempfile.TemporaryDirectory() as folder:
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    variables = os.environ | NO_TPU | dict(LIBTPU_INIT_ARGS=flags)
    subprocess.run([sys.executable, "-c", code], env=variables, check=True)
    return {
      direction: _texts(pathlib.Path(folder), direction) for direction in ("forward", "backward")
    }


def _texts(folder: pathlib.Path, direction: str) -> list[str]:
  """Those of a kernel's calls, in the order in which they were compiled."""
  pattern = f"*relative_attention_{direction}*-final_bundles.txt"
  paths = [path for path in sorted(folder.glob(pattern)) if "schedule" not in path.name]
  return [path.read_text() for path in paths]


def compile_kernels(call: Call, chip: str) -> None:
  """Compiles a call, forward and backward, for a chip that is not there."""
  topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
  sharding = SingleDeviceSharding(topology.devices[0])
  arrays = [
    jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for array in _arguments(call)
  ]

  def output_and_gradients(*arrays):
    attend = lambda *arrays: pallas_tpu.attention(_inputs(call, *arrays), interpret=False)
    output, pull_back = jax.vjp(attend, *arrays)
    return output, pull_back(output)

  jax.jit(output_and_gradients).lower(*arrays).compile()


def _arguments(call: Call) -> list[jax.ShapeDtypeStruct]:
  """Query, key and value, then both tables if there are relations."""
  tokens = jax.ShapeDtypeStruct((1, call.length, _HEADS, _WIDTH), jnp.bfloat16)
  of_relations = jax.ShapeDtypeStruct((2 * _K + 1, _WIDTH), jnp.float32)
  return [tokens] * 3 + [of_relations] * 2 * call.relations


def _inputs(call: Call, query, key, value, *tables) -> Inputs:
  relations = RelativePositions(*tables) if tables else None
  return gather_inputs(query, key, value, relations=relations, is_causal=call.is_causal)


# Report ------------------------------------------------------------------------------------------

_INTRO = f"""# What the TPU's kernel takes, in instructions

Written by `python -m experiments.tpu_bundles`, whose `--help` says how it counts: bundles of
instructions, made by the TPU's own compiler, for one head. No TPU has run them.
H = {_WIDTH}, k = {_K}, bfloat16; a block of queries has {_BLOCK}, a tile is {_BLOCK} by {_BLOCK}.

Start and end are those of a block of queries; every step is what each tile takes besides, such as
the jumps over branches. Tiles near the diagonal have code of their own, here named for how many
tiles right of it they are; the others share theirs. The ratio is to the same kernel without
relations.
"""
_HEAD = "kernel", "relations", "every step", "start", "tiles by kind", "end", "whole call", "ratio"


def _report(results: Mapping[str, Any]) -> str:
  lines = [_INTRO, *_header(results), ""]
  counts = results["counts"]
  for length, is_causal in dict.fromkeys((row["length"], row["is_causal"]) for row in counts):
    those = [row for row in counts if (row["length"], row["is_causal"]) == (length, is_causal)]
    lines += [f"## T = {length:,}, {'causal' if is_causal else 'bidirectional'}", ""]
    lines += [f"| {' | '.join(cells)} |" for cells in _table(those)] + [""]
  return "\n".join(lines)


def _header(results: Mapping[str, Any]) -> list[str]:
  where = results["environment"]
  versions = ", ".join(f"{name} {where['packages'][name]}" for name in ("jax", "libtpu"))
  commit = short_commit(where["git_commit"])
  about = f"{results['chip']}, {where['date'][:10]}, Python {where['python']}, {versions}"
  return [f"{about}, commit {commit}.", "", f"```\n{where['command']}\n```"]


def _table(rows: Sequence[Mapping[str, Any]]) -> list[Sequence[str]]:
  """The cells of a row for each kernel, with and without relations."""
  plain = {row["direction"]: row["whole_call"] for row in rows if not row["relations"]}
  order = lambda row: (row["direction"] == "backward", row["relations"])
  cells = [_cells(row, plain[row["direction"]]) for row in sorted(rows, key=order)]
  return [_HEAD, ["---"] * len(_HEAD), *cells]


def _cells(row: Mapping[str, Any], plain: int) -> list[str]:
  tiles = ", ".join(f"{kind}: {bundles:,}" for kind, bundles in row["tiles"].items())
  return [
    row["direction"],
    "yes" if row["relations"] else "no",
    *(f"{row[part]:,}" for part in ("every_step", "start")),
    tiles,
    *(f"{row[part]:,}" for part in ("end", "whole_call")),
    f"{row['whole_call'] / plain:.3f}",
  ]


if __name__ == "__main__":
  command.run(main, FLAGS)
