r"""Compiles relative attention for long music and reports its memory, which need not be there.

  python -m experiments.benchmark memory --lengths=512,2048,8192,65536 --out=results
  python -m experiments.benchmark memory --lengths= --step_lengths=16384,32768,65536 --out=results

Music Transformer's setting (Huang et al. 2018): relations on keys alone, a table for each head,
causal, no relation beyond half the length, float32. One layer's attention is compiled for each of
--lengths: gathered (`per_position`), skewed (`skew`) and by blocks (`chunked`), with relations and
without, forward alone and with gradients. Memory is the compiler's, beyond arguments and results.

Then one training step of a whole model runs on a sequence of random tokens, at the longest of
--step_lengths whose program fits into the free memory.

Writes OUT/music/memory.json, OUT/music/step.json, a picture, and the blocks `memory` and `step` of
OUT/music.md.
"""

import functools
import itertools
import pathlib
import resource
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments import command
from experiments.benchmark import timing
from experiments.benchmark.timing import Record, parse_lengths
from relpos_jax import RelativePositions, dot_product_attention
from relpos_jax.data.batching import Tokens
from relpos_jax.data.tokenizer import BOS
from relpos_jax.errors import InputError
from relpos_jax.evaluation.pictures import CostPanel, cost_curves
from relpos_jax.evaluation.tables import markdown_table, rewrite_blocks
from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig
from relpos_jax.music import voices
from relpos_jax.music.task import language_loss
from relpos_jax.training.step import init_state, make_train_step

FORMS = {"per_position": "gathered", "skew": "skewed", "chunked": "by blocks"}
_PASSES = {False: "forward", True: "forward and backward"}
_FITTED_FROM = 2048

FLAGS = dict(
  lengths=command.Flag(
    "512,1024,2048,4096,8192,16384,32768,65536", "L, separated by commas; one layer is compiled"
  ),
  step_lengths=command.Flag("", "lengths to try a training step at; the longest that fits runs"),
  heads=command.Flag(8, "of attention"),
  width=command.Flag(64, "of a head; D is heads times width"),
  layers=command.Flag(6, "of the model that makes the training step"),
  out=command.Flag("runs/benchmark", "the folder to write to"),
)


def main(lengths: str, step_lengths: str, heads: int, width: int, layers: int, out: str) -> None:
  """Compiles the layers, makes the step, and rewrites the blocks of the page."""
  compiled = parse_lengths("lengths", lengths)
  tried = parse_lengths("step_lengths", step_lengths)
  folder = command.make_folder(pathlib.Path(out, "music"), "out")
  if compiled:
    rows = [measure(length, heads, width) for length in compiled]
    settings = dict(heads=heads, width=width)
    timing.write_results(folder / "memory.json", dict(settings=settings, rows=rows))
  if tried:
    timing.write_results(folder / "step.json", train_step(tried, heads, width, layers))
  write_page(folder.parent)


def measure(length: int, heads: int, width: int) -> dict[str, Any]:
  """Returns the bytes that the paper counts, and the temporary bytes of each compiled program."""
  tokens = jax.ShapeDtypeStruct((1, length, heads, width), jnp.float32)
  table = jax.ShapeDtypeStruct((2 * (length // 2) + 1, heads, width), jnp.float32)
  programs = []
  for name, relations, backward in itertools.product(FORMS, (True, False), (False, True)):
    timing.report(f"compiling L = {length:,}: {name}, {_PASSES[backward]}")
    kind = dict(implementation=name, relations=relations, backward=backward)
    arguments = [tokens] * 3 + [table] * relations
    function = functools.partial(_attention, name)
    if backward:  # the cotangent is like the result
      function, arguments = timing.with_gradients(function), [tokens, *arguments]
    size = timing.compile_program(function, *arguments).temporary_bytes
    programs.append(kind | dict(temporary_bytes=size))
  pairs, distances = length**2, table.shape[0]
  counts = dict(
    gathered=pairs * heads * width, table=distances * heads * width, logits=pairs * heads
  )
  counts = {name: 4 * count for name, count in counts.items()}
  return dict(length=length, counts=counts, programs=programs)


def _attention(name, query, key, value, table=None):
  relations = None if table is None else RelativePositions(table, None, beyond="zero")
  return dot_product_attention(
    query, key, value, relations=relations, is_causal=True, implementation=name
  )


def train_step(lengths: Sequence[int], heads: int, width: int, layers: int) -> dict[str, Any]:
  """Runs a training step at the longest length that fits; returns its cost and what was too long.

  Raises:
    InputError: no length fits.
  """
  too_long = []
  for length in sorted(lengths, reverse=True):
    timing.report(f"compiling a training step at L = {length:,}")
    config = step_config(length, heads, width, layers)
    init, step = make_step(config)
    batch = Tokens(jax.ShapeDtypeStruct((1, length), jnp.int32))
    program = timing.compile_program(step, jax.eval_shape(init), batch)
    found = dict(length=length, bytes_needed=program.bytes_needed)
    if program.bytes_needed > (free := timing.free_bytes()):
      too_long.append(found | dict(free_bytes=free))
      continue
    timing.report(f"running it; it needs {size(program.bytes_needed)}")
    tokens = np.random.default_rng(0).integers(voices.SILENCE, voices.VOCAB_SIZE, (1, length))
    state, start = jax.block_until_ready(jax.jit(init)()), time.perf_counter()
    _, metrics = jax.block_until_ready(program.run(state, Tokens(jnp.asarray(tokens, jnp.int32))))
    settings = dict(heads=heads, width=width, layers=layers)
    return found | dict(
      settings=settings | dict(dropout=config.dropout_rate, dtype=config.dtype),
      seconds=time.perf_counter() - start,
      loss=float(metrics["loss"]),
      peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
      too_long=too_long,
    )
  raise InputError(
    f"--step_lengths: none fits, the shortest needs {size(too_long[-1]['bytes_needed'])} "
    f"of {size(too_long[-1]['free_bytes'])}; give shorter ones"
  )


def step_config(length: int, heads: int, width: int, layers: int) -> LanguageModelConfig:
  """Returns a model with Music Transformer's relations, computed by blocks."""
  return LanguageModelConfig(
    voices.VOCAB_SIZE,
    num_layers=layers,
    width=heads * width,
    num_heads=heads,
    feed_forward=2 * heads * width,
    positions="both",
    max_distance=length // 2,
    relative_values=False,
    beyond="zero",
    implementation="chunked",
  )


def make_step(config: LanguageModelConfig):
  """Returns a function that makes the first state, and one that makes a step of Adam from it."""
  make = lambda: LanguageModel(config, rngs=nnx.Rngs(0))
  optimizer = optax.adam(1e-4)
  step = make_train_step(
    nnx.graphdef(nnx.eval_shape(make)),
    functools.partial(language_loss, bos=BOS),
    optimizer,
    dropout_key=jax.random.key(0),
  )
  return lambda: init_state(nnx.state(make()), optimizer), step


# Page ---------------------------------------------------------------------------------------------


def write_page(out: pathlib.Path) -> None:
  """Rewrites the blocks `memory` and `step` of out/music.md, if there are such results."""
  results = timing.read_results(out / "music")
  writers = dict(memory=_memory_block, step=_step_block)
  blocks = {name: block(results[name]) for name, block in writers.items() if name in results}
  if "memory" in blocks:
    peers = [f"{form} (no relations)" for form in FORMS.values()]
    cost_curves([_panels(results["memory"]["rows"])], peers, out / "music/memory.png")
  if blocks:
    rewrite_blocks(out / "music.md", blocks)


def _memory_block(results: Record) -> str:
  rows, settings = results["rows"], results["settings"]
  heads = settings["heads"]
  parts = [
    timing.provenance(results),
    f"{heads} heads, D = {heads * settings['width']}.",
    "![Memory over length](music/memory.png)",
    "### Relative embeddings, by the paper's count",
    markdown_table(
      ["L", "gathered: D floats for each pair", "a table of distances", "logits of all heads"],
      [[f"{row['length']:,}", *map(size, row["counts"].values())] for row in rows],
    ),
  ]
  header = ["", *(f"L = {row['length']:,}" for row in rows)]
  for backward, passes in _PASSES.items():
    cells = []
    for name, form in FORMS.items():
      have, lack = ([_bytes(row, name, has, backward) for row in rows] for has in (True, False))
      added = [with_ - without for with_, without in zip(have, lack, strict=True)]
      cells.append([form, *map(size, have), _growth(rows, have)])
      cells.append([f"{form} (no relations)", *map(size, lack), _growth(rows, lack)])
      cells.append([f"{form}: difference", *map(size, added), ""])
    title = f"### Temporary memory, {passes}"
    parts += [title, markdown_table([*header, f"doubling L, from {_FITTED_FROM:,} on"], cells)]
  return "\n\n".join(part.strip() for part in parts)


def _growth(rows: Sequence[Record], sizes: Sequence[int]) -> str:
  """Returns the factor by which memory grows when L doubles, by least squares of logarithms."""
  points = [(row["length"], x) for row, x in zip(rows, sizes, strict=True)]
  points = np.log2([point for point in points if point[0] >= _FITTED_FROM])
  return f"x {2 ** np.polyfit(*points.T, 1)[0]:.2f}" if len(points) > 1 else "-"


def _bytes(row: Record, name: str, has_relations: bool, backward: bool) -> int:
  kind = dict(implementation=name, relations=has_relations, backward=backward)
  (found,) = (of for of in row["programs"] if kind.items() <= of.items())
  return found["temporary_bytes"]


def _panels(rows: Sequence[Record]) -> list[CostPanel]:
  """Returns a panel for each pass; without relations the gathered form is the skewed one."""
  panels = []
  for backward, passes in _PASSES.items():
    curves = {}
    for has, (name, form) in itertools.product((True, False), FORMS.items()):
      if has or name != "per_position":
        points = [(row["length"], _bytes(row, name, has, backward) / 1e6) for row in rows]
        curves[form if has else f"{form} (no relations)"] = points
    panels.append(CostPanel(passes, "temporary memory (MB)", curves))
  return panels


def _step_block(results: Record) -> str:
  settings = results["settings"]
  rows = [[row, f"not run: {size(row['free_bytes'])} are free"] for row in results["too_long"]]
  took = f"{results['seconds']:,.0f} s, at most {size(results['peak_bytes'])} resident"
  rows.append([results, f"{took}, loss {results['loss']:.2f}"])
  cells = [[f"{row['length']:,}", size(row["bytes_needed"]), told] for row, told in rows]
  return "\n".join(
    [
      timing.provenance(results),
      f"{settings['layers']} layers, {settings['heads']} heads, "
      f"D = {settings['heads'] * settings['width']}, dropout {settings['dropout']}, "
      f"{settings['dtype']}.\n",
      markdown_table(["L", "compiled: all memory", "one step"], cells),
    ]
  )


def size(number: float) -> str:
  """Formats bytes in MB, GB or TB, of ten.

  >>> size(4_196_352), size(8_589_934_592), size(9_071_105_000_000), size(-100_000)
  ('4.2 MB', '8.59 GB', '9.07 TB', '-0.1 MB')
  """
  if abs(number) < 1e9:
    return f"{number / 1e6:.1f} MB" if abs(number) < 1e8 else f"{number / 1e6:.0f} MB"
  unit, name = (1e9, "GB") if abs(number) < 1e12 else (1e12, "TB")
  return f"{number / unit:.3g} {name}"
