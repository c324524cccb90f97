r"""Lists the memory traffic, operations and temporary memory of attention on a TPU.

  pip install -e '.[tpu]'
  python -m experiments.benchmark tpu_costs --out=results

Needs no TPU: the figures are those that the compiler for v5e states, and no times. It counts one
pass of each loop; the figures of `chunked` are multiplied by the number of passes, and those of
`pallas_tpu` are the kernel's own estimate. "gathers" is `projected` as CPUs run it, "T5" has T5's
bias per distance and head instead of the tables. Writes OUT/tpu_costs.json, and block `costs` of
OUT/tpu_costs.md.
"""

import itertools
import json
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from experiments import command
from experiments.benchmark import timing
from experiments.evaluation.tables import column_table, rewrite_blocks
from experiments.files import write_whole
from experiments.plan import chips, use_compiler
from experiments.training.environment import environment
from relpos_jax import DistanceBias, RelativePositions
from relpos_jax.attention import choice, pallas_tpu, projected
from relpos_jax.attention.inputs import Inputs, gather_inputs

BATCH, HEADS, WIDTH, K, DTYPE = 8, 8, 64, 16, "bfloat16"
FLAGS = dict(
  lengths=command.Flag("32,64,128,256,512,1024,2048,4096", "queries and keys"),
  out=command.Flag("runs/benchmark", "the folder to write to"),
)


def _with_t5(inputs: Inputs) -> Inputs:
  """Returns a call with a bias of 257 rows, T5's number, made of the key table."""
  rows = jnp.repeat(inputs.relations[0].key[:, 0, :HEADS], 8, axis=0)[:257]
  return inputs._replace(relations=(DistanceBias(rows),))


_gathering = mock.patch.object(projected, "look_up", lambda x, i: projected.gather(i, x))
CONTESTANTS = {
  "jax.nn": lambda x: jax.nn.dot_product_attention(*x[:3], is_causal=x.is_causal),
  **{x: choice.IMPLEMENTATIONS[x].attention for x in ("projected", "per_position", "chunked")},
  "pallas_tpu": lambda inputs: pallas_tpu.attention(inputs, interpret=False),
  "skew": choice.IMPLEMENTATIONS["skew"].attention,
  "gathers": _gathering(choice.IMPLEMENTATIONS["projected"].attention),
  "T5, projected": lambda x: CONTESTANTS["projected"](_with_t5(x)),
  "T5, pallas_tpu": lambda x: CONTESTANTS["pallas_tpu"](_with_t5(x)),
}
SLOW_TO_COMPILE = ("skew", "gathers")  # minutes for more than 512 tokens


def main(lengths: str, out: str) -> None:
  """Compiles all calls, writes the figures after each, and the page."""
  file = command.make_folder(out, "out") / "tpu_costs.json"
  results = dict(environment=environment("libtpu"), rows=[])
  use_compiler()
  calls = timing.parse_lengths("lengths", lengths), (False, True), (False, True), CONTESTANTS
  for call in itertools.product(*calls):
    kind = dict(zip(("length", "is_causal", "backward", "name"), call, strict=True))
    if kind["name"] not in SLOW_TO_COMPILE or kind["length"] <= 512:
      results["rows"].append(kind | cost(**kind))
      write_whole(file, json.dumps(results) + "\n")
  write_page(file.parent)


def cost(name: str, length: int, is_causal: bool, backward: bool, batch: int = BATCH):
  """Compiles a call; returns its figures by name, or {} if it does not fit the chip's memory."""

  def attend(query, key, value, *tables):
    options = dict(relations=RelativePositions(*tables), is_causal=is_causal)
    return CONTESTANTS[name](gather_inputs(query, key, value, **options))

  sharding = SingleDeviceSharding(chips("v5e:2x2")[0])
  token = jax.ShapeDtypeStruct((batch, length, HEADS, WIDTH), DTYPE, sharding=sharding)
  table = jax.ShapeDtypeStruct((2 * K + 1, WIDTH), jnp.float32, sharding=sharding)
  function = timing.with_gradients(attend) if backward else attend
  try:
    with mock.patch.object(jax.lax, "fori_loop", wraps=jax.lax.fori_loop) as loop:
      compiled = jax.jit(function).lower(*[token] * (3 + backward), table, table).compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return {}
  found, memory = compiled.cost_analysis(), compiled.memory_analysis()
  found = dict(hbm_bytes=found["bytes accessed"], flops=found["flops"])
  if name == "chunked" and batch == BATCH:  # what doubles with the batch is outside the loops
    double = cost(name, length, is_causal, backward, 2 * batch)
    heads, blocks = (call.args[1] for call in loop.call_args_list[:2])
    outside = {x: max(0, double[x] - found[x]) for x in found}
    found = {x: outside[x] + heads * blocks * (found[x] - outside[x]) for x in found}
  return found | dict(temporary_bytes=memory.temp_size_in_bytes)


def write_page(out: pathlib.Path) -> None:
  """Rewrites the block `costs` of out/tpu_costs.md from out/tpu_costs.json, if it exists."""
  if not (file := out / "tpu_costs.json").exists():
    return
  results, parts = json.loads(file.read_text()), []
  for backward, is_causal in itertools.product((False, True), (False, True)):
    columns = {}
    for row in sorted(results["rows"], key=lambda row: row["length"]):
      if (row["backward"], row["is_causal"]) == (backward, is_causal):
        figures = [row.get(x, 0) for x in ("hbm_bytes", "flops", "temporary_bytes")]
        cell = "{:,.0f} / {:,.1f} / {:,.0f}".format(*np.divide(figures, (2**20, 1e9, 2**20)))
        cells = columns.setdefault(f"T = {row['length']:,}", {})
        cells[row["name"]] = cell if figures[0] else "does not fit"
    title = "Forward and backward" if backward else "Forward"
    table = column_table("MiB moved / GFLOP / MiB temporary", CONTESTANTS, columns)
    parts.append(f"### {title}, {'causal' if is_causal else 'bidirectional'}\n\n{table}")
  parts = [timing.provenance(results, ["jax", "libtpu"]), *parts]
  rewrite_blocks(out / "tpu_costs.md", dict(costs="\n\n".join(parts)))
