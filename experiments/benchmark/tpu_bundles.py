r"""Counts the instructions that a TPU would run: the kernel with relations against without.

  pip install -e '.[tpu]'
  python -m experiments.benchmark tpu_bundles --lengths=4096,16384 --chip=v5e --out=results

Needs no TPU: the TPU's compiler writes the bundles of instructions, one for each cycle without
stalls. The kernels of `pallas_tpu` are a loop over tiles with branches for each kind of tile, and
for the start and the end of a block of queries. The count of a call is the sum over its tiles of
the bundles of the branches taken, for one head. It is a count, not a time.

Prints a table. With --out it also writes OUT/tpu_bundles.json and block `bundles` of
OUT/tpu_bundles.md.
"""

import collections
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from experiments import command
from experiments.benchmark import timing
from experiments.benchmark.timing import parse_lengths
from experiments.plan import NO_TPU, compiler_version
from relpos_jax import RelativePositions
from relpos_jax.attention import pallas_tpu, pallas_tpu_tiles
from relpos_jax.attention.inputs import Inputs, gather_inputs
from relpos_jax.attention.pallas_tpu_tiles import TpuPlan
from relpos_jax.errors import InputError
from relpos_jax.evaluation.tables import markdown_table, rewrite_blocks
from relpos_jax.training.workdir import environment

CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}
_HEADS, _WIDTH, _K, _BLOCK = 8, 64, 16, pallas_tpu.BLOCK
# A line: its number, what begins there, a sign for each loop it is in, its instructions.
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})?: +>* *\{(.*)", re.M)
_DELAY = 4  # bundles after a jump that run whether or not it is taken

FLAGS = dict(
  lengths=command.Flag("4096,16384", "queries and keys, separated by commas"),
  chip=command.Flag("v5e", ", ".join(CHIPS)),
  out=command.Flag("", "the folder to write to; empty: only print"),
)


class Call(NamedTuple):
  """A call to compile: T queries and keys, with or without relations."""

  length: int
  is_causal: bool
  relations: bool


def main(lengths: str, chip: str, out: str) -> None:
  """Compiles and counts all calls."""
  numbers = parse_lengths("lengths", lengths)
  if min(numbers, default=0) < 2 * _BLOCK:  # shorter ones are no loop
    raise InputError(f"--lengths={lengths}: give lengths of {2 * _BLOCK} or more")
  if chip not in CHIPS:
    raise InputError(f"--chip={chip}: give one of {', '.join(CHIPS)}")
  folder = command.make_folder(out, "out") if out else None
  version = compiler_version()
  jax.config.update("jax_platforms", "cpu")
  counts = []
  for call in itertools.starmap(Call, itertools.product(numbers, (False, True), (False, True))):
    for direction, texts in compile_texts(call, chip).items():
      whole_call = count(plan_of(call), direction, texts)
      counts.append(call._asdict() | dict(direction=direction, whole_call=whole_call))
  results = dict(environment=environment(), chip=chip, counts=counts)
  results["environment"]["packages"]["libtpu"] = version
  print(block(results))
  if folder:
    timing.write_results(folder / "tpu_bundles.json", results)
    write_page(folder)


# Compiling ----------------------------------------------------------------------------------------


def compile_texts(call: Call, chip: str) -> dict[str, list[str]]:
  """Returns the final bundles of each kernel's calls, in the order in which they were compiled.

  A new process compiles them, because libtpu reads its flags once.
  """
  code = f"from experiments.benchmark.tpu_bundles import *; compile_kernels({call}, {chip!r})"
  with tempfile.TemporaryDirectory() as folder:
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    variables = os.environ | NO_TPU | dict(LIBTPU_INIT_ARGS=flags)
    subprocess.run([sys.executable, "-c", code], env=variables, check=True)
    texts = {}
    for direction in ("forward", "backward"):
      paths = pathlib.Path(folder).glob(f"*relative_attention_{direction}*-final_bundles.txt")
      final = [path for path in sorted(paths) if "schedule" not in path.name]
      texts[direction] = [path.read_text() for path in final]
  return texts


def compile_kernels(call: Call, chip: str) -> None:
  """Compiles a call, forward and backward, for a chip that is not there."""
  topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
  sharding = SingleDeviceSharding(topology.devices[0])
  arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in _arguments(call)]

  def output_and_gradients(*arrays):
    attend = lambda *arrays: pallas_tpu.attention(_inputs(call, *arrays), interpret=False)
    output, pull_back = jax.vjp(attend, *arrays)
    return output, pull_back(output)

  jax.jit(output_and_gradients).lower(*arrays).compile()


def plan_of(call: Call, block: int = _BLOCK) -> TpuPlan:
  """Returns the kernel's own plan of a call."""
  arrays = [jnp.zeros(array.shape, array.dtype) for array in _arguments(call)]
  return pallas_tpu.plan_of(_inputs(call, *arrays), interpret=False, block=block)[0]


def _arguments(call: Call) -> list[jax.ShapeDtypeStruct]:
  """Returns the shapes of query, key and value, then of both tables if there are relations."""
  tokens = jax.ShapeDtypeStruct((1, call.length, _HEADS, _WIDTH), jnp.bfloat16)
  table = jax.ShapeDtypeStruct((2 * _K + 1, _WIDTH), jnp.float32)
  return [tokens] * 3 + [table] * 2 * call.relations


def _inputs(call: Call, query, key, value, *tables) -> Inputs:
  relations = RelativePositions(*tables) if tables else None
  return gather_inputs(query, key, value, relations=relations, is_causal=call.is_causal)


# Counting -----------------------------------------------------------------------------------------


def count(plan: TpuPlan, direction: str, texts: Sequence[str]) -> int:
  """Counts the bundles that the "forward" or "backward" kernel of a plan runs for one head.

  `texts` are the final bundles of the kernel's calls.

  Raises:
    ValueError: there are more or fewer texts than calls, or one has other branches than the plan.
  """
  last = plan.num_blocks[1]
  most = pallas_tpu.KEYS_A_CALL // plan.block if direction == "backward" else last
  calls = [(plan._replace(key_block=x), min(most, last - x)) for x in range(0, last, most)]
  return sum(_count(*call, direction, text) for call, text in zip(calls, texts, strict=True))


def _count(plan: TpuPlan, num_key_blocks: int, direction: str, text: str) -> int:
  num_queries, num_keys = plan.num_blocks
  offsets = [*plan.special_offsets(), *range(num_keys - 1, -num_queries, -1)]
  kinds = list(filter(None, dict.fromkeys(_kind(plan, direction, x) for x in offsets)))
  names = ["start", *kinds, "end"]
  if direction == "backward":
    names = ["clear keys", *["clear tables"] * (plan.period > 0), *names, "write keys"]
  every_step, sizes = branches(text)
  if len(sizes) != len(names):
    raise ValueError(f"the text has branches of {sizes} bundles; want those of {', '.join(names)}")
  tiles = itertools.product(range(num_queries), range(num_key_blocks))
  runs = collections.Counter(_kind(plan, direction, plan.key_block + k - q) for q, k in tiles)
  times = dict(start=num_queries, end=num_queries) | {kind: runs[kind] for kind in kinds}
  of_branches = sum(
    size * times.get(name, 1)
    for name, size in zip(names, sizes, strict=True)  # others run once
  )
  return num_queries * num_key_blocks * every_step + of_branches


def _kind(plan: TpuPlan, direction: str, offset: int) -> str | None:
  """Returns the kind of the tile at an offset, by the kernel's own dispatch; None if none runs."""
  sides = []
  by_side = direction == "backward" and plan.period > 0
  tile = lambda offset, is_right: sides.append("right" if is_right else "left")
  pallas_tpu_tiles.dispatch(plan, offset, tile, by_side=by_side)
  if not sides:
    return None
  if offset in plan.special_offsets():
    return str(offset)
  return f"others {sides[0]}" if by_side else "others"


def branches(text: str) -> tuple[int, list[int]]:
  """Counts the bundles that run in every step of the grid, and those of its branches, in order.

  A branch always taken leaves no jump: it is the long stretch between two others.
  """
  bundles = [bundle[1] for bundle in _BUNDLE.finditer(text)]
  jumps = _jumps(bundles)
  first, last = max(jumps, key=lambda jump: jump[1] - jump[0])
  sizes, every_step, here = [], len(bundles) - (last - first), first
  for start, end in [*jumps, (last, last)]:
    if start < here or start == first:
      continue
    for size, least in ((start - here, 100), (end - start, 10)):
      if size > least:
        sizes.append(size)
      else:
        every_step += size
    here = end
  return every_step, sizes


def _jumps(bundles: Sequence[str]) -> list[tuple[int, int]]:
  """Returns the first bundle that each jump ahead leaves out, and the first after those."""
  starts = {
    region: number
    for number, bundle in enumerate(bundles)
    for region in re.findall(r"Start(?:/End empty)? region (\d+)", bundle)
  }
  found = []
  for number, bundle in enumerate(bundles):
    jump = re.search(r"sbr\.rel \(!?%p\w+\) target = \$region(\d+)", bundle)
    if jump and starts[jump[1]] > number:
      found.append((number + 1 + _DELAY, starts[jump[1]]))
  return found


# Page ---------------------------------------------------------------------------------------------


def write_page(out: pathlib.Path) -> None:
  """Rewrites the block `bundles` of out/tpu_bundles.md from out/tpu_bundles.json, if it exists."""
  if (file := out / "tpu_bundles.json").exists():
    rewrite_blocks(out / "tpu_bundles.md", dict(bundles=block(json.loads(file.read_text()))))


def block(results: timing.Record) -> str:
  """Returns the provenance and a row for each kernel with relations beside that without."""
  plain, rows = {}, []
  order = lambda row: (row["length"], row["is_causal"], row["direction"] == "backward")
  for row in sorted(results["counts"], key=order):
    if not row["relations"]:
      plain[order(row)] = row["whole_call"]
      continue
    relative, without = row["whole_call"], plain[order(row)]
    mask = "causal" if row["is_causal"] else "bidirectional"
    counts = [f"{without:,}", f"{relative:,}", f"{relative / without:.3f}"]
    rows.append([f"{row['length']:,}", mask, row["direction"], *counts])
  header = ["T", "mask", "kernel", "without relations", "with relations", "ratio"]
  return f"{results['chip']}. {timing.provenance(results, ['jax', 'libtpu'])}\n" + markdown_table(
    header, rows
  )
