"""Markdown tables, and pages with generated blocks between hand-written text."""

import json
import math
import pathlib
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.errors import InputError
from experiments.evaluation.records import Record
from experiments.evaluation.statistics import (
  Comparison,
  Interval,
  Scores,
  compare_scores,
  student_interval,
)

_MOST_PAIRED = 8  # names in a table of all pairs

Rows = Mapping[str, Sequence[Record]]  # the runs of each row of a table, with complete configs
Point = tuple[int | float, float, float, float]  # x, and the lowest, mean and highest of y


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Returns a Markdown table."""
  line = lambda cells: f"| {' | '.join(cells)} |"
  return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])


def mean_and_interval(values: Sequence[float] | np.ndarray, digits: int = 2) -> str:
  """Formats a mean and, for two or more values, half of its 95% interval.

  >>> mean_and_interval([1.0, 2.0, 3.0]), mean_and_interval([1.0]), mean_and_interval([])
  ('2.00 ± 2.48', '1.00', '-')
  """
  return format_interval(student_interval(values), digits) if len(values) else "-"


def format_interval(interval: Interval, digits: int = 2, sign: str = "") -> str:
  """Formats a mean and half of its interval; the sign "+" is for a difference."""
  mean, half_width = interval
  around = "" if half_width is None else f" ± {half_width:.{digits}f}"
  return f"{mean:{sign}.{digits}f}{around}"


def format_comparison(comparison: Comparison, digits: int = 2) -> str:
  """Formats a difference, its interval and its p-value, in bold if the difference is clear.

  >>> format_comparison(Comparison(Interval(0.5, 0.25), 0.001))
  '**+0.50 ± 0.25**, p 0.001'
  """
  difference, p_value = comparison
  bold = "**" if comparison.is_clear() else ""
  return f"{bold}{format_interval(difference, digits, '+')}{bold}, p {p_value:.3f}"


def column_table(title: str, rows: Iterable, columns: Mapping[str, Mapping[Any, str]]) -> str:
  """Returns a table of columns of cells by row; a dash for a missing cell."""
  name = lambda row: f"{row:,}" if isinstance(row, int) else row
  cells = [[name(row), *(of.get(row, "-") for of in columns.values())] for row in rows]
  return markdown_table([title, *columns], cells)


def pair_table(title: str, names: Sequence[str], cell: Callable[[str, str], str]) -> str:
  """Returns a table of all pairs of names; `cell` takes the row's name, then the column's.

  >>> print(pair_table("BLEU", ["k=0", "k=1"], lambda first, second: f"{first} - {second}"))
  | BLEU, row - column | k=0 | k=1 |
  |---|---|---|
  | k=0 | - | k=0 - k=1 |
  | k=1 | k=1 - k=0 | - |
  """
  columns = {b: {a: cell(a, b) for a in names if a != b} for b in names}
  return column_table(f"{title}, row - column", names, columns)


def comparison_table(
  title: str, names: Iterable[str], scores: Mapping[str, Scores], digits: int = 2
) -> str:
  """Returns a table of the comparisons of all pairs; a dash for a name without scores.

  More than 8 names are compared with the first one only.
  """
  names = [*names]
  compare = lambda a, b: format_comparison(compare_scores(scores[a], scores[b]), digits)
  cell = lambda a, b: compare(a, b) if {a, b} <= {*scores} else "-"
  if len(names) <= _MOST_PAIRED:
    return pair_table(title, names, cell)
  first, *others = names
  return column_table(title, others, {f"minus {first}": {x: cell(x, first) for x in others}})


def config_table(rows: Rows) -> str:
  """Returns a table of the config values, except the seed, that differ between rows.

  >>> runs = {f"k={k}": [dict(config={"model.k": k, "task": "music"})] for k in (4, 16)}
  >>> print(config_table(runs))
  | config | model.k |
  |---|---|
  | k=4 | `4` |
  | k=16 | `16` |
  """
  configs = {row: runs[0]["config"] for row, runs in rows.items()}
  keys = sorted({key for config in configs.values() for key in config} - {"seed"})
  # 0 and 0.0 are the same value.
  shown = lambda x: x if x and isinstance(x, str) else json.dumps(x).removesuffix(".0")
  column = lambda key: {row: f"`{shown(x[key])}`" for row, x in configs.items() if key in x}
  differs = lambda of: len({of.get(row) for row in rows}) > 1
  return column_table("config", rows, {key: of for key in keys if differs(of := column(key))})


def run_facts(rows: Rows, facts: Mapping[str, object]) -> str:
  """Lists the given facts, and the budget, machine, code and versions of the runs."""
  records = [run for runs in rows.values() for run in runs]
  each = lambda of: ", ".join(sorted({str(of(record)) for record in records}))
  minutes = statistics.median(record["budget"]["minutes"] for record in records)
  facts = dict(facts) | {
    "updates": each(lambda r: f"{r['budget']['updates']:,}"),
    "tokens or nodes per update": each(lambda r: f"{r['budget']['tokens_per_update']:,}"),
    "minutes per run (median)": f"{minutes:.1f}",
    "checkpoints averaged": each(
      lambda r: len(r.get("checkpoints", ())) or r["config"]["decoding.average_checkpoints"]
    ),
    "hardware": each(lambda r: r["hardware"]),
    "date": each(lambda r: r["date"][:10]),
    "commit": each(lambda r: re.sub("([0-9a-f]{12})[0-9a-f]+", r"\1", r["commit"] or "unknown")),
    **{name: each(lambda r, n=name: r["packages"].get(n)) for name in ("python", "jax", "flax")},
  }
  return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def mean_column(
  rows: Rows, value: Callable[[Record], float | None], digits: int = 2
) -> dict[str, str]:
  """Returns the mean of the finite values over the runs of each row, and its interval.

  >>> rows = dict(both=[dict(loss=2.0), dict(loss=None)])
  >>> mean_column(rows, lambda run: run["loss"])
  {'both': '2.00 (1 not finite)'}
  """
  cells = {}
  for row, runs in rows.items():
    values = [x for x in map(value, runs) if x is not None and math.isfinite(x)]
    lost = f" ({len(runs) - len(values)} not finite)" if len(values) < len(runs) else ""
    cells[row] = mean_and_interval(values, digits) + lost
  return cells


def seed_columns(rows: Rows) -> dict[str, dict[str, str]]:
  """Returns the first columns of every table of a sweep: seeds, and the last valid loss."""
  return {
    "seeds": {row: ", ".join(str(run["seed"]) for run in runs) for row, runs in rows.items()},
    "valid loss": mean_column(rows, lambda run: run["curve"][-1][1], 3),
  }


def curve_points(runs: Sequence[Record], column: int) -> list[Point]:
  """Returns (step, lowest, mean, highest) over the runs for a column of their curves.

  >>> curve_points([dict(curve=[[9, 2.0, None]]), dict(curve=[[9, 4.0, None]])], column=1)
  [(9, 2.0, 3.0, 4.0)]
  """
  values: dict[int, list[float]] = {}
  for point in (point for run in runs for point in run["curve"] if point[column] is not None):
    values.setdefault(point[0], []).append(point[column])
  return [(step, min(of), statistics.fmean(of), max(of)) for step, of in sorted(values.items())]


def rewrite_blocks(page: pathlib.Path, blocks: Mapping[str, str]) -> None:
  """Replaces generated blocks of a Markdown page and keeps everything else.

  A block is between the lines `<!-- begin NAME -->` and `<!-- end NAME -->`. New blocks are
  appended, and a missing page is created. Raises InputError: a block begins and does not end.
  """
  text = page.read_text(encoding="utf-8") if page.exists() else ""
  for name, content in blocks.items():
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
    block = f"{begin}{content.strip()}\n{end}"
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if begun and not ended:
      raise InputError(f"{page}: block {name!r} does not end: add the line {end.strip()}")
    text = before + block + after if begun else f"{text.rstrip()}\n\n{block}".lstrip()
  page.write_text(text, encoding="utf-8")
