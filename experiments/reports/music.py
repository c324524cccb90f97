"""The report on music, results/music.md: every number in it comes from the raw JSON files."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.reports import music_runs
from experiments.reports.markdown import table
from relpos_jax.errors import InputError
from relpos_jax.evaluation.pictures import CostPanel, cost_curves
from relpos_jax.evaluation.record import hardware
from relpos_jax.training.workdir import read_json, short_commit, write_whole

Record = Mapping[str, Any]

_INTRO = """# Music

Huang et al. 2018, Music Transformer: [arXiv:1809.04281](https://arxiv.org/abs/1809.04281).
"""
_MEMORY = """## Memory of one layer's attention

Written by `python -m experiments.memory` from `music/memory.json`; its `--help` says how it
measures. Relations on keys alone, a table for each head, causal, nothing beyond half the length,
float32, one sequence. MB and GB are 10^6 and 10^9 bytes, as in the paper. Memory is what the
compiler sets aside beyond arguments and results; nothing ran, so no machine need have had it.
Without relations: the same implementation, `relations=None`. With less without is what relations
add to the peak, not the size of the relative term: it may lie, at no cost, in a
buffer that is free by then."""
_BLOCKS = """By blocks, a causal call is at most four stretches, of blocks of at most 256
queries. Up to 1,024 tokens a stretch is a single block: the compiler unrolls that loop and holds
the buffers of several stretches at once. From 2,048 on a stretch has more blocks, its loop
stays, and the next stretch uses its buffers again: growth is fitted from there, by least squares
of logarithms."""
_FITTED_FROM = 2048
_PAPER_LENGTH, _PAPER_WIDTH = 2048, 512
# Section 1 of the paper, of a layer of _PAPER_LENGTH and _PAPER_WIDTH.
_PAPER = {"per_position": "8.5 GB", "skew": "4.2 MB"}
_FORMS = {
  "per_position": "gathered (Shaw et al. 2018)",
  "skew": "skewed (Huang et al. 2018)",
  "chunked": "by blocks",
}
_PASSES = {False: "forward", True: "forward and backward"}


def write(out: pathlib.Path) -> pathlib.Path:
  """Writes out/music.md, a section for each kind of raw results there is, and their pictures.

  These are the runs of music in out/runs, out/music/memory.json and out/music/step.json.

  Raises:
    InputError: there are none, or a damaged record.
  """
  sections = [
    *music_runs.sections(out),
    *_measured(out / "music" / "memory.json", _memory),
    *_measured(out / "music" / "step.json", _step),
  ]
  if not sections:
    raise InputError(f"no results in {out / 'music'}: measure first, with --lengths=512,1024")
  write_whole(out / "music.md", "\n".join([_INTRO, *sections]))
  return out / "music.md"


def _measured(file: pathlib.Path, tell: Callable[[Record, pathlib.Path], list[str]]) -> list[str]:
  """The section on the results in a file, none where there is no file."""
  if not file.exists():
    return []
  results = read_json(file)
  try:
    return tell(results, file)
  except (LookupError, TypeError, ValueError) as error:
    raise InputError(
      f"{file} is not as experiments.memory writes it ({error!r}): restore or delete it"
    ) from error


def _where(results: Record) -> list[str]:
  """Where, when and by what command it was measured."""
  where = results["environment"]
  versions = ", ".join(f"{name} {where['packages'][name]}" for name in ("jax", "jaxlib"))
  return [
    f"{hardware(where)}, {where['date'][:10]}, "
    f"Python {where['python']}, {versions}, commit {short_commit(where['git_commit'])}.",
    "",
    f"```\n{where['command']}\n```",
    "",
  ]


# Memory -------------------------------------------------------------------------------------------


def _memory(results: Record, file: pathlib.Path) -> list[str]:
  rows, settings = results["rows"], results["settings"]
  heads, width = settings["heads"], settings["width"]
  lines = [f"{_MEMORY} D = {heads * width}, {heads} heads.", "", _BLOCKS, "", *_where(results)]
  picture = cost_curves([_panels(rows)], _names(False), file.with_suffix(".png"))
  lines += [f"![Memory over length](music/{picture.name})", ""]
  for row in rows:
    if (row["length"], heads * width) == (_PAPER_LENGTH, _PAPER_WIDTH):
      lines += _beside_the_paper(row)
  for backward, passes in _PASSES.items():
    lines += [f"### {passes.capitalize()}", "", *_table(rows, backward), ""]
    title = f"### What relations add to the peak, {passes}: with less without"
    lines += [title, "", *_relative_table(rows, backward), ""]
  return lines


def _beside_the_paper(row: Record) -> list[str]:
  """The paper counts the relative embeddings that are held; so are ours counted, from shapes."""
  embeddings = {name: row["counts"]["table"] for name in _FORMS}
  embeddings["per_position"] = row["counts"]["gathered"]
  cells = [
    [
      form,
      _PAPER.get(name, "-"),
      size(embeddings[name]),
      size(_bytes(row, name, True, False) - _bytes(row, name, False, False)),
      size(_bytes(row, name, True, False)),
    ]
    for name, form in _FORMS.items()
  ]
  header = ["", "paper", "ours, counted so", "compiled: added to peak", "compiled: all temporary"]
  return [
    f"### Beside the paper's figures: L = {_PAPER_LENGTH:,}, D = {_PAPER_WIDTH}, a layer, forward",
    "",
    *table(header, cells),
    "",
    "The paper counts the relative embeddings: gathered, a vector of D floats for each of L x L "
    "pairs; skewed, one for each distance. Ours are counted from the shapes of what is gathered, "
    f"and of the table. The relative logits, {size(row['counts']['logits'])} for all heads, are "
    "not in that count: the skewed form holds them, the form by blocks does not.",
    "",
  ]


def _table(rows: Sequence[Record], backward: bool) -> list[str]:
  cells = [
    [
      _name(name, has),
      *(size(_bytes(row, name, has, backward)) for row in rows),
      _growth(rows, name, has, backward),
    ]
    for has in (True, False)
    for name in _FORMS
  ]
  lengths = [f"L = {row['length']:,}" for row in rows]
  return table(["", *lengths, f"doubling L, from {_FITTED_FROM:,} on"], cells)


def _relative_table(rows: Sequence[Record], backward: bool) -> list[str]:
  term = lambda row, name: _bytes(row, name, True, backward) - _bytes(row, name, False, backward)
  cells = [[_FORMS[name], *(size(term(row, name)) for row in rows)] for name in _FORMS]
  return table(["", *(f"L = {row['length']:,}" for row in rows)], cells)


def _growth(rows: Sequence[Record], name: str, has: bool, backward: bool) -> str:
  """By what factor memory grows where the length doubles, as fitted to the long ones."""
  long = {row["length"]: _bytes(row, name, has, backward) for row in rows}
  long = {length: size for length, size in long.items() if length >= _FITTED_FROM}
  if len(long) < 2:
    return "-"
  exponent, _ = np.polyfit(np.log2([*long]), np.log2([*long.values()]), 1)
  return f"x {2**exponent:.2f}"


def _bytes(row: Record, name: str, has: bool, backward: bool) -> int:
  kind = lambda program: (program["implementation"], program["relations"], program["backward"])
  return {kind(of): of["temporary_bytes"] for of in row["programs"]}[name, has, backward]


def _name(name: str, has_relations: bool) -> str:
  return _FORMS[name] if has_relations else f"{_FORMS[name].partition(' (')[0]} (no relations)"


def _names(has_relations: bool) -> list[str]:
  return [_name(name, has_relations) for name in _FORMS]


def _panels(rows: Sequence[Record]) -> list[CostPanel]:
  return [
    CostPanel(
      passes,
      "temporary memory (MB)",
      {
        _name(name, has): [(row["length"], _bytes(row, name, has, backward) / 1e6) for row in rows]
        for has in (True, False)
        for name in _FORMS
        if has or name != "per_position"  # without relations it is the skewed form, to the byte
      },
    )
    for backward, passes in _PASSES.items()
  ]


def size(number: float | int) -> str:
  """Bytes in MB or GB, or TB, of ten.

  >>> size(4_196_352), size(8_589_934_592), size(9_071_105_000_000), size(-100_000)
  ('4.2 MB', '8.59 GB', '9.07 TB', '-0.1 MB')
  """
  if abs(number) < 1e9:
    return f"{number / 1e6:.1f} MB" if abs(number) < 1e8 else f"{number / 1e6:.0f} MB"
  unit, name = (1e9, "GB") if abs(number) < 1e12 else (1e12, "TB")
  return f"{number / unit:.3g} {name}"


# A step of training -------------------------------------------------------------------------------


def _step(results: Record, _: pathlib.Path) -> list[str]:
  settings = results["settings"]
  heads, width = settings["heads"], settings["width"]
  lines = [
    "## A step of training at the longest length that fits",
    "",
    f"{settings['layers']} layers, D = {heads * width}, {heads} heads, relative positions up to "
    f"half the length and sinusoids, attention by blocks, dropout {settings['dropout']}, "
    f"{settings['dtype']}, Adam, one sequence of random tokens. The time is of one step, beside "
    "whatever else the machine did.",
    "",
    *_where(results),
  ]
  rows = [
    _step_row(row, f"not run: {size(row['free_bytes'])} are free") for row in results["too_long"]
  ]
  took = (
    f"{results['seconds']:,.0f} s, at most {size(results['peak_bytes'])} resident, "
    f"loss {results['loss']:.2f}"
  )
  rows.append(_step_row(results, took))
  return [*lines, *table(["L", "compiled: all memory", "one step"], rows), ""]


def _step_row(row: Record, became: str) -> list[str]:
  return [f"{row['length']:,}", size(row["bytes_needed"]), became]
