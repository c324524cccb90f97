"""Computes confidence intervals over seeds, and formats Markdown tables."""

import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from experiments.errors import InputError
from experiments.files import write_whole
from relpos_jax.typing import Float

_Values = Sequence[float] | Float[np.ndarray, "_"]


class Interval(NamedTuple):
  """Holds a mean, and half the width of its 95% interval (None for a single value)."""

  mean: float
  half_width: float | None


def student_interval(values: _Values, *minus: _Values) -> Interval:
  """Computes the mean of independent values, and its 95% interval by Student's t.

  With a second sample, `minus`, computes the difference of the two means, and its
  interval by Welch's t.
  """
  import scipy.stats  # here, because it takes a second

  samples = [values, *minus]
  mean = float(np.mean(values) - sum(map(np.mean, minus)))
  if min(map(len, samples)) < 2:
    return Interval(mean, None)
  if not any(map(np.ptp, samples)):
    return Interval(mean, 0.0)  # scipy would return NaN
  if minus:
    test = scipy.stats.ttest_ind(*samples, equal_var=False)
  else:
    test = scipy.stats.ttest_1samp(values, 0)
  low, high = test.confidence_interval(0.95)
  return Interval(mean, float(high - low) / 2)


# Tables
# --------------------------------------------------------------------------------------


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Formats a Markdown table."""
  lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
  lines.insert(1, "|" + "---|" * len(header))
  return "\n".join(lines)


def column_table(title: str, columns: Mapping[str, Mapping[str, object]]) -> str:
  """Formats a Markdown table of columns; missing cells are dashes.

  `columns` has the cells by column and row. `title` heads the column of row names.
  """
  lines = []
  for row in dict.fromkeys(itertools.chain(*columns.values())):
    cells = [str(column.get(row, "-")) for column in columns.values()]
    lines.append([row, *cells])
  return markdown_table([title, *columns], lines)


def text_table(title: str, rows: Mapping[str, Mapping[str, float | int]]) -> str:
  """Formats numbers by row and column for a terminal; floats have four digits.

  >>> print(text_table("split", {"test": {"pairs": 1000, "BLEU": 36.6234}}))
  split   pairs    BLEU
  test    1,000   36.62
  """
  names = title, *rows
  longest = max(map(len, names))
  lines = [name.ljust(longest) for name in names]
  for column in next(iter(rows.values())):
    cells = [column]
    for numbers in rows.values():
      number = numbers[column]
      is_whole = isinstance(number, Integral)
      cells.append(f"{number:,}" if is_whole else f"{number:,.4g}")
    width = 3 + max(map(len, cells))
    lines = [line + cell.rjust(width) for line, cell in zip(lines, cells, strict=True)]
  return "\n".join(lines)


def mean_and_interval(values: Sequence[Any] | np.ndarray, digits: int = 2) -> str:
  """Formats the mean of the finite values, ± half the width of its 95% interval."""
  values = np.array(values, float)  # None becomes NaN
  finite = values[np.isfinite(values)]
  text = format_interval(student_interval(finite), digits) if len(finite) else "-"
  num_lost = len(values) - len(finite)
  return f"{text} ({num_lost} not finite)" if num_lost else text


def format_interval(interval: Interval, digits: int = 2, sign: str = "") -> str:
  """Formats a mean ± half the width of its interval; use sign "+" for a difference."""
  mean, half_width = interval
  text = f"{mean:{sign}.{digits}f}"
  if half_width is not None:
    text += f" ± {half_width:.{digits}f}"
  return text


def format_difference(
  values: Sequence[float], *minus: Sequence[float], digits: int = 2
) -> str:
  """Formats a difference and its interval, in bold if it is significant.

  The difference is the mean of `values`. With a second sample, `minus`, it is the mean
  of `values` less the mean of `minus`. It is significant if its 95% interval excludes
  zero. Returns "-" if a sample is empty.
  """
  if not values or not all(minus):
    return "-"
  interval = student_interval(values, *minus)
  text = format_interval(interval, digits, sign="+")
  mean, half_width = interval
  is_significant = half_width is not None and abs(mean) > half_width
  return f"**{text}**" if is_significant else text


def rewrite_sections(page: pathlib.Path, sections: Mapping[str, str]) -> None:
  """Replaces generated sections of a Markdown page; keeps everything else.

  A section is between the lines `<!-- begin NAME -->` and `<!-- end NAME -->`. Sections
  that the page lacks are appended, and a missing page is created. The page is written
  atomically. Raises InputError if a section has no end.
  """
  text = page.read_text(encoding="utf-8").rstrip() + "\n" if page.exists() else ""
  for name, content in sections.items():
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
    if begin not in text:
      text = f"{text.rstrip()}\n\n{begin}{end}".lstrip()
    before, _, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not ended:
      remedy = f"add the line {end.strip()}"
      raise InputError(f"{page}: section {name!r} does not end: {remedy}")
    text = f"{before}{begin}{content.strip()}\n{end}{after}"
  write_whole(page, text)
