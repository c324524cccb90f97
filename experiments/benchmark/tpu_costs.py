r"""Lists what each implementation costs on a TPU: memory traffic, operations, temporary memory.

  pip install -e '.[tpu]'
  python -m experiments.benchmark tpu_costs --chip=v5e --out=results

Needs no TPU: the figures are those that the TPU's compiler states for a program. They are no times.
It counts one pass of each loop; those of `chunked` are multiplied by the number of passes. Those of
`pallas_tpu` are the kernel's own estimate. "gathers" is `projected` as other devices run it, which
look up a label by index.

A run that was stopped continues with the calls that OUT/tpu_costs.json lacks. Prints tables; with
--out it also writes that file and block `costs` of OUT/tpu_costs.md.
"""

import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from experiments import command
from experiments.benchmark import timing
from experiments.benchmark.tpu_bundles import CHIPS
from experiments.plan import chips, use_compiler
from relpos_jax import RelativePositions
from relpos_jax.attention import pallas_tpu, projected
from relpos_jax.attention.choice import IMPLEMENTATIONS
from relpos_jax.attention.inputs import Inputs, gather_inputs
from relpos_jax.errors import InputError
from relpos_jax.evaluation.tables import column_table, rewrite_blocks
from relpos_jax.training.workdir import environment, write_whole

HEADS, WIDTH, K = 8, 64, 16
_UNITS = dict(hbm_bytes=2**20, flops=1e9, temporary_bytes=2**20)

FLAGS = dict(
  lengths=command.Flag("32,64,128,256,512,1024,2048,4096", "queries and keys"),
  batch=command.Flag(8, "sequences"),
  dtype=command.Flag("bfloat16", "bfloat16 or float32"),
  chip=command.Flag("v5e", ", ".join(CHIPS)),
  out=command.Flag("", "the folder to write to; empty: only print"),
)


def _gathers(inputs: Inputs) -> jax.Array:
  with mock.patch.object(projected, "look_up", lambda x, labels: projected.gather(labels, x)):
    return projected.attention(inputs)


def _plain(inputs: Inputs) -> jax.Array:
  arrays = inputs.query, inputs.key, inputs.value
  return jax.nn.dot_product_attention(*arrays, is_causal=inputs.is_causal)


CONTESTANTS: dict[str, Callable[[Inputs], jax.Array]] = {
  "jax.nn, no relations": _plain,
  **{name: IMPLEMENTATIONS[name].attention for name in ("projected", "per_position", "skew")},
  "gathers": _gathers,
  "chunked": IMPLEMENTATIONS["chunked"].attention,
  "pallas_tpu": lambda inputs: pallas_tpu.attention(inputs, interpret=False),
}


def main(lengths: str, batch: int, dtype: str, chip: str, out: str) -> None:
  """Compiles all calls, and writes the figures after each length."""
  numbers = timing.parse_lengths("lengths", lengths)
  if chip not in CHIPS or dtype not in ("bfloat16", "float32"):
    raise InputError(f"give --chip={' or '.join(CHIPS)} and --dtype=bfloat16 or float32")
  folder = command.make_folder(out, "out") if out else None
  settings = dict(batch=batch, dtype=dtype, chip=chip)
  results = dict(environment=environment("libtpu"), settings=settings, rows=[])
  if folder and (file := folder / "tpu_costs.json").exists():
    old = json.loads(file.read_text())
    results["rows"] = old["rows"] if old["settings"] == settings else []
  use_compiler()
  sharding = SingleDeviceSharding(chips(CHIPS[chip])[0])
  for length, *options in itertools.product(numbers, (False, True), (False, True), CONTESTANTS):
    call = dict(zip(("length", "is_causal", "backward", "name"), (length, *options), strict=True))
    if not any(call.items() <= row.items() for row in results["rows"]):
      results["rows"].append(call | _cost(*call.values(), batch, dtype, sharding))
      if folder:
        write_whole(folder / "tpu_costs.json", json.dumps(results) + "\n")
  print(block(results))
  if folder:
    write_page(folder)


def _cost(length, is_causal, backward, name, batch, dtype, sharding) -> dict[str, float]:
  """Compiles a call; returns its figures, or {} if it needs more memory than the chip has."""

  def attend(query, key, value, *tables):
    relations = RelativePositions(*tables)
    options = dict(relations=relations, is_causal=is_causal)
    return CONTESTANTS[name](gather_inputs(query, key, value, **options))

  def counted(batch: int) -> tuple[dict[str, float], list]:
    token = jax.ShapeDtypeStruct((batch, length, HEADS, WIDTH), dtype, sharding=sharding)
    table = jax.ShapeDtypeStruct((2 * K + 1, WIDTH), jnp.float32, sharding=sharding)
    function = timing.with_gradients(attend) if backward else attend
    arguments = [token] * (3 + backward) + [table] * 2
    with mock.patch.object(jax.lax, "fori_loop", wraps=jax.lax.fori_loop) as loops:
      compiled = jax.jit(function).lower(*arguments).compile()
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    found = dict(hbm_bytes=cost["bytes accessed"], flops=cost["flops"])
    return found | dict(temporary_bytes=memory.temp_size_in_bytes), loops.call_args_list

  try:
    found, loops = counted(batch)
    if loops:  # over heads and, in these, over blocks: what doubles with the batch is outside
      passes = loops[0].args[1] * loops[1].args[1]
      double, _ = counted(2 * batch)
      for figure in ("hbm_bytes", "flops"):
        outside = max(0, double[figure] - found[figure])
        found[figure] = outside + passes * (found[figure] - outside)
    return found
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return {}


# Page ---------------------------------------------------------------------------------------------


def write_page(out: pathlib.Path) -> None:
  """Rewrites the block `costs` of out/tpu_costs.md from out/tpu_costs.json, if it exists."""
  if (file := out / "tpu_costs.json").exists():
    rewrite_blocks(out / "tpu_costs.md", dict(costs=block(json.loads(file.read_text()))))


def block(results: dict[str, Any]) -> str:
  """Returns the provenance and a table for each kind of call."""
  settings, rows = results["settings"], results["rows"]
  parts = [
    f"{settings['chip']}. {timing.provenance(results, ['jax', 'libtpu'])}",
    f"{settings['dtype']}, B = {settings['batch']}, N = {HEADS}, H = {WIDTH}, k = {K}.",
  ]
  for backward, is_causal in itertools.product((False, True), (False, True)):
    columns = {}
    for row in rows:
      if (row["backward"], row["is_causal"]) == (backward, is_causal):
        figures = [f"{row[name] / unit:,.0f}" for name, unit in _UNITS.items() if name in row]
        cell = " / ".join(figures) or "does not fit"
        columns.setdefault(f"T = {row['length']:,}", {})[row["name"]] = cell
    title = "Forward and backward" if backward else "Forward"
    parts.append(f"### {title}, {'causal' if is_causal else 'bidirectional'}")
    parts.append(column_table("MiB accessed / GFLOP / MiB temporary", CONTESTANTS, columns))
  return "\n\n".join(parts)
