r"""Counts the instructions that a TPU would run: the kernel with relations against without.

  pip install -e '.[tpu]'
  python -m experiments.benchmark tpu_bundles --lengths=4096,16384 --chip=v5e --out=results

Needs no TPU: the TPU's compiler writes the bundles of instructions, one for each cycle without
stalls. In each step the kernels of `pallas_tpu` have loops over plain tiles, a branch for each tile
near the diagonal, and the start and the end of a block of queries. The count of a call is the sum
over its steps of the bundles that run, for one head. It is a count, not a time.

Prints a table. With --out it also writes OUT/tpu_bundles.json and block `bundles` of
OUT/tpu_bundles.md.
"""

import collections
import itertools
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from experiments import command
from experiments.benchmark import timing
from experiments.errors import InputError
from experiments.evaluation.tables import markdown_table, rewrite_blocks
from experiments.files import write_whole
from experiments.plan import chips, use_compiler
from experiments.training.environment import environment
from relpos_jax import RelativePositions
from relpos_jax.attention import pallas_tpu, pallas_tpu_tiles
from relpos_jax.attention.inputs import Inputs, gather_inputs
from relpos_jax.attention.pallas_tpu_tiles import TpuPlan

CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}
DIRECTIONS = ("forward", "backward")
WIDTH = 64
_BLOCK = pallas_tpu.BLOCK
# A line: its number, what begins there, a sign for each loop it is in, its instructions.
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})?: +>* *\{(.*)", re.M)
_DELAY = 4  # bundles after a jump that run whether or not it is taken

FLAGS = dict(
  lengths=command.Flag("4096,16384", "queries and keys, separated by commas"),
  chip=command.Flag("v5e", ", ".join(CHIPS)),
  out=command.Flag("", "the folder to write to; empty: only print"),
)


def main(lengths: str, chip: str, out: str) -> None:
  """Compiles and counts all calls."""
  numbers = timing.parse_lengths("lengths", lengths)
  if min(numbers, default=0) < 2 * _BLOCK:  # shorter ones are no loop
    raise InputError(f"--lengths={lengths}: give lengths of {2 * _BLOCK} or more")
  if chip not in CHIPS:
    raise InputError(f"--chip={chip}: give one of {', '.join(CHIPS)}")
  folder = command.make_folder(out, "out") if out else None
  use_compiler()
  counts = []
  for call, compiled in compile_all(numbers, chip):
    kind = dict(zip(("length", "is_causal", "relations"), call, strict=True))
    for direction, texts in compiled.items():
      counted = count(plan_of(*call), direction, texts)
      counts.append(kind | dict(direction=direction, whole_call=counted))
  results = dict(environment=environment("libtpu"), chip=chip, counts=counts)
  print(block(results))
  if folder:
    write_whole(folder / "tpu_bundles.json", json.dumps(results) + "\n")
    write_page(folder)


def compile_all(lengths: Sequence[int], chip: str) -> Iterator[tuple[tuple, dict[str, list[str]]]]:
  """Yields each call, compiled for a chip that is not there, and the texts of its kernels.

  A call is (length, is_causal, has_relations). Its texts are the final bundles of its forward and
  of its backward kernels, in the order in which they were compiled.
  """
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    # libtpu reads its flags when it is first used.
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    sharding = SingleDeviceSharding(chips(CHIPS[chip])[0])
    for call in itertools.product(lengths, (False, True), (False, True)):
      gather, *shapes = _inputs(*call)
      arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in shapes]
      attend = lambda *arrays, gather=gather: pallas_tpu.attention(gather(*arrays), interpret=False)
      timing.compile_program(timing.with_gradients(attend), arrays[0], *arrays)
      texts = {}
      for direction in DIRECTIONS:
        paths = sorted(folder.glob(f"*relative_attention_{direction}*-final_bundles.txt"))
        texts[direction] = [path.read_text() for path in paths if "schedule" not in path.name]
      for path in folder.iterdir():
        path.unlink()
      yield call, texts


def plan_of(length: int, is_causal: bool, has_relations: bool) -> TpuPlan:
  """Returns the kernel's own plan of a call."""
  gather, *shapes = _inputs(length, is_causal, has_relations)
  inputs = gather(*(jnp.zeros(x.shape, x.dtype) for x in shapes))
  return pallas_tpu.plan_of(inputs, interpret=False)[0]


def _inputs(length: int, is_causal: bool, has_relations: bool) -> tuple:
  """Returns a function from query, key, value and tables to a call's inputs, and their shapes."""
  tokens = jax.ShapeDtypeStruct((1, length, 8, WIDTH), jnp.bfloat16)
  table = jax.ShapeDtypeStruct((2 * 16 + 1, WIDTH), jnp.float32)

  def gather(query, key, value, *tables) -> Inputs:
    relations = RelativePositions(*tables) if tables else None
    return gather_inputs(query, key, value, relations=relations, is_causal=is_causal)

  return gather, *[tokens] * 3, *[table] * 2 * has_relations


# Counting -----------------------------------------------------------------------------------------


def count(plan: TpuPlan, direction: str, texts: Sequence[str]) -> int:
  """Counts the bundles that the "forward" or "backward" kernels of a plan run for one head.

  Raises:
    ValueError: there are more or fewer texts than calls, or one has other branches than the plan.
  """
  num_queries, num_keys = plan.num_blocks
  most = pallas_tpu.KEYS_A_CALL // plan.block if direction == "backward" else num_keys
  # Calls differ in their keys, not in the kinds of tiles that they have code for.
  kinds = {offset: _kind(plan, offset) for offset in range(num_keys - 1, -num_queries, -1)}
  total = 0
  for first, text in zip(range(0, num_keys, most), texts, strict=True):
    keys = range(first, min(first + most, num_keys))
    key = jax.ShapeDtypeStruct((1, 1, WIDTH, len(keys) * plan.block), jnp.bfloat16)
    num_steps = len(keys) // pallas_tpu_tiles.tiles_a_step(plan, dict(key=key))
    names = list(dict.fromkeys(kind for kind in kinds.values() if kind))
    if plan.period and num_steps > 1:  # otherwise they are no branches, or small
      names = ["start", *names, "end"]
    if direction == "backward":
      names = ["clear keys", *names, "write keys"]
    every_step, of_queries, sizes = branches(text)
    if len(sizes) != len(names):
      raise ValueError(f"the text has branches of {sizes} bundles; want {', '.join(names)}")
    runs = collections.Counter(kinds[j - i] for i in range(num_queries) for j in keys)
    times = dict.fromkeys(names, 1) | dict.fromkeys(kinds.values(), 0) | runs
    times |= dict(start=num_queries, end=num_queries)
    total += num_queries * (num_steps * every_step + of_queries)
    total += sum(size * times[name] for name, size in zip(names, sizes, strict=True))
  return total


def _kind(plan: TpuPlan, offset: int) -> str | None:
  """Returns the kind of the tile at an offset, by the kernel's own dispatch; None if none runs."""
  found = []

  def tile(_operands, _number, _offset, side):
    found.append(f"others {side}" if side else str(offset))

  with jax.disable_jit():
    pallas_tpu_tiles.for_tiles(plan, {}, offset, 1, tile)
  return found[0] if found else None


def branches(text: str) -> tuple[int, int, list[int]]:
  """Counts the bundles of every step of the grid, of small branches, and of each large one.

  The body of a loop over tiles is a large branch. The small ones run once per block of queries.
  """
  jumps = _jumps(bundles := _BUNDLE.findall(text))
  first, _ = max(jumps, key=lambda jump: jump[1] - jump[0])
  small, large, here = 0, [], first
  for start, end in sorted(tuple(sorted(jump)) for jump in jumps):
    if start < here or start == first or end - start <= 8:
      continue
    if end - start < 100:
      small += end - start
    else:
      large.append(end - start)
    here = end
  return len(bundles) - small - sum(large), small, large


def _jumps(bundles: Sequence[str]) -> list[tuple[int, int]]:
  """Returns the bundle after each jump that is not taken, and the one where it leads."""
  starts = {
    region: number
    for number, bundle in enumerate(bundles)
    for region in re.findall(r"Start(?:/End empty)? region (\d+)", bundle)
  }
  found = []
  for number, bundle in enumerate(bundles):
    if jump := re.search(r"sbr\.rel \(!?%p\w+\) target = \$region(\d+)", bundle):
      found.append((number + 1 + _DELAY, starts[jump[1]]))
  return found


# Page ---------------------------------------------------------------------------------------------


def write_page(out: pathlib.Path) -> None:
  """Rewrites the block `bundles` of out/tpu_bundles.md from out/tpu_bundles.json, if it exists."""
  if (file := out / "tpu_bundles.json").exists():
    rewrite_blocks(out / "tpu_bundles.md", dict(bundles=block(json.loads(file.read_text()))))


def block(results: timing.Record) -> str:
  """Returns the provenance and a row for each kernel with relations beside that without."""
  kinds = collections.defaultdict(dict)
  for row in results["counts"]:
    kind = row["length"], row["is_causal"], DIRECTIONS.index(row["direction"])
    kinds[kind][row["relations"]] = row["whole_call"]
  rows = []
  for (length, is_causal, direction), counts in sorted(kinds.items()):
    mask, ratio = "causal" if is_causal else "bidirectional", counts[True] / counts[False]
    cells = [f"{counts[False]:,}", f"{counts[True]:,}", f"{ratio:.3f}"]
    rows.append([f"{length:,}", mask, DIRECTIONS[direction], *cells])
  header = ["T", "mask", "kernel", "without relations", "with relations", "ratio"]
  provenance = timing.provenance(results, ["jax", "libtpu"])
  return f"{results['chip']}. {provenance}\n{markdown_table(header, rows)}"
