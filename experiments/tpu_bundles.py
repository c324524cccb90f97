r"""Counts the instructions that a TPU would run: the kernel with relations against without.

  pip install -e '.[tpu]' && python -m experiments.tpu_bundles --length=4096 --chip=v5e

No TPU is needed: the TPU's compiler writes down the bundles of instructions, one for each cycle
that waits for nothing. A kernel is a loop over tiles with a branch for each kind of tile; the
whole call is the sum over its tiles of the bundles of the branches taken. A count, not a time.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from experiments import command
from relpos_jax import RelativePositions
from relpos_jax.attention import pallas_tpu
from relpos_jax.attention.inputs import gather_inputs
from relpos_jax.errors import InputError

_LONGEST = 8192  # the backward kernel takes more keys than that in several calls
_HEADS, _WIDTH, _K = 8, 64, 16
_TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}
# What libtpu reads where there is no TPU; it and JAX read it when they are loaded.
_NO_TPU = dict(
  JAX_PLATFORMS="cpu",
  TPU_SKIP_MDS_QUERY="1",
  TPU_ACCELERATOR_TYPE="v5litepod-4",
  TPU_WORKER_HOSTNAMES="localhost",
  ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)
_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) +([A-Z]{2})?: +>* *\{(.*)", re.M)


FLAGS = dict(
  length=command.Flag(4096, "queries and keys"),
  chip=command.Flag("v5e", ", ".join(_TOPOLOGIES)),
  causal=command.Flag(False, "hide later keys"),
  dump=command.Flag("", "compile one kernel into this folder (used by the command)"),
  relations=command.Flag(False, "in that kernel"),
)


def main(length: int, chip: str, causal: bool, dump: str, relations: bool) -> None:
  """Prints a Markdown table, with a row for each kernel and direction."""
  if not 2048 <= length <= _LONGEST:
    raise InputError(f"--length={length}: give 2048 to {_LONGEST}")
  if chip not in _TOPOLOGIES:
    raise InputError(f"--chip={chip}: give one of {', '.join(_TOPOLOGIES)}")
  if dump:
    _compile(length, chip, causal, relations)
  else:
    _print_table(length, chip, causal)


def _print_table(length: int, chip: str, causal: bool) -> None:
  print(f"{chip}, T = {length}, H = {_WIDTH}, k = {_K}, bfloat16, one head\n")
  print("| kernel | relations | start | tiles by kind | end | whole call | ratio |")
  print("|---|---|---|---|---|---|---|")
  dumps = {relations: _dump(length, chip, causal, relations) for relations in (False, True)}
  for direction in ("forward", "backward"):
    plain = None
    for relations in (False, True):
      start, tiles, end, total = _count(dumps[relations], direction, length, causal, relations)
      plain = plain or total
      kinds = ", ".join(f"{name}: {bundles}" for name, bundles in tiles.items())
      row = [direction, "yes" if relations else "no", start, kinds, end, total]
      print(f"| {' | '.join(map(str, row))} | {total / plain:.3f} |")


def _dump(length: int, chip: str, causal: bool, relations: bool) -> dict[str, str]:
  """The final bundles of both kernels, from a process of its own: libtpu reads flags once."""
  with tempfile.TemporaryDirectory() as folder:
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    call = [sys.executable, "-m", "experiments.tpu_bundles", f"--dump={folder}"]
    call += [f"--length={length}", f"--chip={chip}"]
    call += ["--causal"] * causal + ["--relations"] * relations
    subprocess.run(call, env=os.environ | _NO_TPU | dict(LIBTPU_INIT_ARGS=flags), check=True)
    found = {}
    for direction in ("forward", "backward"):
      pattern = f"*relative_attention_{direction}*-final_bundles.txt"
      paths = [p for p in pathlib.Path(folder).glob(pattern) if "schedule" not in p.name]
      found[direction] = max(paths, key=lambda path: path.stat().st_size).read_text()
    return found


def _compile(length: int, chip: str, causal: bool, relations: bool) -> None:
  topology = topologies.get_topology_desc(platform="tpu", topology_name=_TOPOLOGIES[chip])
  sharding = SingleDeviceSharding(topology.devices[0])
  shape = (1, length, _HEADS, _WIDTH)
  array = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
  table = jax.ShapeDtypeStruct((2 * _K + 1, _WIDTH), jnp.float32, sharding=sharding)

  def output_and_gradients(query, key, value, *tables):
    positions = RelativePositions(*tables) if tables else None

    def attend(query, key, value, positions):
      options = dict(relations=positions, is_causal=causal)
      return pallas_tpu.attention(gather_inputs(query, key, value, **options), interpret=False)

    output, pull_back = jax.vjp(attend, query, key, value, positions)
    return output, pull_back(output)

  tables = (table, table) if relations else ()
  jax.jit(output_and_gradients).lower(array, array, array, *tables).compile()


def _count(dump: dict[str, str], direction: str, length: int, causal: bool, relations: bool):
  """Bundles of a block's start, of a tile of each kind, of a block's end, of a head's all."""
  every_step, branches = _branches(dump[direction])
  blocks = -(-length // pallas_tpu.BLOCK)
  special = ([0, -1] if causal else [1, 0, -1]) if relations else []
  if causal and not relations:
    special = [0]
  names = [*map(str, special), "others"]
  if direction == "backward" and relations and not causal:
    names[-1:] = ["others right", "others left"]
  # Sums over all queries are cleared at a head's start, and written at its end.
  once = dict(forward=0, backward=2 if relations else 1)[direction]
  start, *tiles, end = branches[once : once + len(names) + 2]
  tiles = dict(zip(names, tiles, strict=True))
  rest = sum(branches) - start - sum(tiles.values()) - end
  total = rest + blocks * (start + end) + blocks**2 * every_step
  for offset in (key - query for query in range(blocks) for key in range(blocks)):
    if causal and offset > 0:
      continue
    side = "others right" if offset > 0 else "others left"
    other = side if side in tiles else "others"
    total += tiles[str(offset) if offset in special else other]
  return start, tiles, end, total


def _branches(text: str) -> tuple[int, list[int]]:
  """Bundles of every step of the grid, and those of the branches in it, in order.

  A branch always taken leaves no jump: it is the long stretch between two others.
  """
  bundles = list(_BUNDLE.finditer(text))
  ends = {}
  for number, bundle in enumerate(bundles):
    for region in re.findall(r"(?:Start/End empty|Start) region (\d+)", bundle[3]):
      ends[region] = number
  found = []
  for number, bundle in enumerate(bundles):
    jump = re.search(r"sbr\.rel \(!?%p\w+\) target = \$region(\d+)", bundle[3])
    if jump and number < ends.get(jump[1], -1):
      found.append((number, ends[jump[1]]))
  first, last = max(found, key=lambda branch: branch[1] - branch[0])
  sizes, every_step, here = [], len(bundles) - (last - first), first
  for start, end in [*found, (last, last)]:
    if start < here or start == first:
      continue
    for size, least in ((start - here, 100), (end - start, 16)):
      if size > least:
        sizes.append(size)
      else:
        every_step += size
    here = end
  return every_step, sizes


if __name__ == "__main__":
  command.run(main, FLAGS)
