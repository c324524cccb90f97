"""Compiles relative attention for long music and reports its memory; nothing runs.

  python -m experiments.benchmark memory --lengths=512,2048,8192,65536 --out=results

The setting is that of Huang et al. 2018, Music Transformer: relations on keys alone, a table for
each head, causal, no relation beyond half the length, float32. One layer's attention is compiled:
gathered (`per_position`), skewed (`skew`) and by blocks (`chunked`), with relations and without,
forward alone and with gradients. Memory is the compiler's, beyond arguments and results.

Writes OUT/music/memory.json, a picture, and the block `memory` of OUT/music.md.
"""

import collections
import functools
import itertools
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import command
from experiments.benchmark import timing
from relpos_jax import RelativePositions, dot_product_attention
from relpos_jax.evaluation.pictures import CostPanel, cost_curves
from relpos_jax.evaluation.tables import markdown_table, rewrite_blocks
from relpos_jax.training.workdir import environment, write_whole

FORMS = {"per_position": "gathered", "skew": "skewed", "chunked": "by blocks"}
_PASSES = {False: "forward", True: "forward and backward"}
_BARE = " (no relations)"
_FITTED_FROM = 2048
HEADS, WIDTH = 8, 64

FLAGS = dict(
  lengths=command.Flag("512,1024,2048,4096,8192,16384,32768,65536", "L, separated by commas"),
  out=command.Flag("runs/benchmark", "the folder to write to"),
)


def main(lengths: str, out: str) -> None:
  """Compiles all layers and rewrites the block of the page."""
  numbers = timing.parse_lengths("lengths", lengths)
  folder = command.make_folder(pathlib.Path(out, "music"), "out")
  results = dict(environment=environment(), settings=dict(heads=HEADS, width=WIDTH))
  results["rows"] = [measure(length) for length in numbers]
  write_whole(folder / "memory.json", json.dumps(results) + "\n")
  write_page(folder.parent)


def measure(length: int) -> dict[str, Any]:
  """Returns the bytes that the paper counts, and the temporary bytes of each compiled program."""
  tokens = jax.ShapeDtypeStruct((1, length, HEADS, WIDTH), jnp.float32)
  table = jax.ShapeDtypeStruct((2 * (length // 2) + 1, HEADS, WIDTH), jnp.float32)
  programs = []
  for name, relations, backward in itertools.product(FORMS, (True, False), (False, True)):
    print(f"compiling L = {length:,}: {name}, {_PASSES[backward]}", file=sys.stderr)
    kind = dict(implementation=name, relations=relations, backward=backward)
    arguments = [tokens] * 3 + [table] * relations
    function = functools.partial(_attention, name)
    if backward:  # the cotangent is like the result
      function, arguments = timing.with_gradients(function), [tokens, *arguments]
    size = timing.compile_program(function, *arguments).temporary_bytes
    programs.append(kind | dict(temporary_bytes=size))
  counts = dict(gathered=length**2 * HEADS * WIDTH, table=table.size, logits=length**2 * HEADS)
  counts = {name: 4 * count for name, count in counts.items()}
  return dict(length=length, counts=counts, programs=programs)


def _attention(name, query, key, value, table=None):
  relations = None if table is None else RelativePositions(table, None, beyond="zero")
  return dot_product_attention(
    query, key, value, relations=relations, is_causal=True, implementation=name
  )


# Page ---------------------------------------------------------------------------------------------


def write_page(out: pathlib.Path) -> None:
  """Draws out/music/memory.png and rewrites the block `memory` of out/music.md from memory.json."""
  if not (file := out / "music/memory.json").exists():
    return
  results = json.loads(file.read_text())
  rows, (heads, width) = results["rows"], (results["settings"][x] for x in ("heads", "width"))
  parts = [
    timing.provenance(results),
    f"{heads} heads, D = {heads * width}.",
    "![Memory over length](music/memory.png)",
    "### Relative embeddings, by the paper's count",
    markdown_table(
      ["L", "gathered: D floats for each pair", "a table of distances", "logits of all heads"],
      [[f"{row['length']:,}", *map(size, row["counts"].values())] for row in rows],
    ),
  ]
  lengths, panels = [row["length"] for row in rows], []
  header = ["", *(f"L = {length:,}" for length in lengths)]
  header.append(f"doubling L, from {_FITTED_FROM:,} on")
  for backward, passes in _PASSES.items():
    sizes = collections.defaultdict(list)
    for program in itertools.chain.from_iterable(row["programs"] for row in rows):
      if program["backward"] == backward:
        name = FORMS[program["implementation"]] + _BARE * (not program["relations"])
        sizes[name].append(program["temporary_bytes"])
    cells = []
    for form in FORMS.values():
      for name in (form, form + _BARE):
        cells.append([name, *map(size, sizes[name]), _growth(lengths, sizes[name])])
      added = np.subtract(sizes[form], sizes[form + _BARE])
      cells.append([f"{form}: difference", *map(size, added), ""])
    parts += [f"### Temporary memory, {passes}", markdown_table(header, cells)]
    curves = {  # without relations the gathered form is the skewed one
      name: [(length, x / 1e6) for length, x in zip(lengths, sizes[name], strict=True)]
      for name in sorted(sizes, key=lambda name: name.endswith(_BARE))
      if name != FORMS["per_position"] + _BARE
    }
    panels.append(CostPanel(passes, "temporary memory (MB)", curves))
  cost_curves([panels], [form + _BARE for form in FORMS.values()], out / "music/memory.png")
  rewrite_blocks(out / "music.md", dict(memory="\n\n".join(part.strip() for part in parts)))


def _growth(lengths: Sequence[int], sizes: Sequence[int]) -> str:
  """Returns the factor by which memory grows when L doubles, by least squares of logarithms."""
  points = [point for point in zip(lengths, sizes, strict=True) if point[0] >= _FITTED_FROM]
  return f"x {2 ** np.polyfit(*np.log2(points).T, 1)[0]:.2f}" if len(points) > 1 else "-"


def size(number: float) -> str:
  """Formats bytes in MB, GB or TB, of ten.

  >>> size(4_196_352), size(8_589_934_592), size(9_071_105_000_000), size(-100_000)
  ('4.2 MB', '8.59 GB', '9.07 TB', '-0.1 MB')
  """
  if abs(number) < 1e9:
    return f"{number / 1e6:.1f} MB" if abs(number) < 1e8 else f"{number / 1e6:.0f} MB"
  unit, name = (1e9, "GB") if abs(number) < 1e12 else (1e12, "TB")
  return f"{number / unit:.3g} {name}"
