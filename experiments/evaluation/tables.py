"""Markdown tables, and pages with generated blocks between hand-written text."""

import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.errors import InputError
from experiments.evaluation.statistics import (
  Comparison,
  Interval,
  Scores,
  compare_scores,
  student_interval,
)

_MOST_PAIRED = 8  # names in a table of all pairs


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Returns a Markdown table."""
  lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
  return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def column_table(title: str, rows: Iterable, columns: Mapping[str, Mapping[Any, str]]) -> str:
  """Returns a table of columns of cells by row; a dash for a missing cell."""
  names = {row: f"{row:,}" if isinstance(row, int) else row for row in rows}
  cells = [[names[row], *(of.get(row, "-") for of in columns.values())] for row in names]
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
  title: str, names: Sequence[str], scores: Mapping[str, Scores], digits: int = 2
) -> str:
  """Returns a table of the comparisons of all pairs; a dash for a name without scores.

  More than 8 names are compared with the first one only.
  """

  def cell(a: str, b: str) -> str:
    if not {a, b} <= {*scores}:
      return "-"
    return format_comparison(compare_scores(scores[a], scores[b]), digits)

  if len(names) <= _MOST_PAIRED:
    return pair_table(title, names, cell)
  first, *others = names
  return column_table(title, others, {f"minus {first}": {x: cell(x, first) for x in others}})


def mean_and_interval(values: Sequence[float | None] | np.ndarray, digits: int = 2) -> str:
  """Formats the mean of the finite values and, for two or more, half of its 95% interval.

  >>> mean_and_interval([1.0, 2.0, 3.0]), mean_and_interval([1.0, None]), mean_and_interval([])
  ('2.00 ± 2.48', '1.00 (1 not finite)', '-')
  """
  finite = [x for x in values if x is not None and math.isfinite(x)]
  text = format_interval(student_interval(finite), digits) if finite else "-"
  return text + f" ({len(values) - len(finite)} not finite)" * (len(finite) < len(values))


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
