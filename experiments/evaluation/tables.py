"""Confidence intervals over seeds, and Markdown tables."""

import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.errors import InputError
from relpos_jax.typing import Float

_Values = Sequence[float] | Float[np.ndarray, "_"]


class Interval(NamedTuple):
  """A mean and half the width of its 95% confidence interval; None for a single value."""

  mean: float
  half_width: float | None


def student_interval(values: _Values, *minus: _Values) -> Interval:
  """Computes the mean of independent values and its 95% interval by Student's t.

  With further values it is the difference of the means, and its interval by Welch's t.
  """
  from scipy.special import stdtrit

  mean = float(np.mean(values) - sum(map(np.mean, minus)))
  sizes = [len(of) for of in (values, *minus)]
  if min(sizes) < 2:
    return Interval(mean, None)
  squares = [
    np.var(of, ddof=1) / len(of) for of in (values, *minus)
  ]  # of the standard errors
  if not (total := sum(squares)):
    return Interval(mean, 0.0)
  freedom = total**2 / sum(x**2 / (n - 1) for x, n in zip(squares, sizes, strict=True))
  return Interval(mean, float(stdtrit(freedom, (1 + 0.95) / 2) * np.sqrt(total)))


# Tables
# -------------------------------------------------------------------------------------------


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Returns a Markdown table."""
  lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
  return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def column_table(
  title: str, rows: Iterable, columns: Mapping[str, Mapping[Any, str]]
) -> str:
  """Returns a table of columns of cells by row; a dash for a missing cell."""
  names = {row: f"{row:,}" if isinstance(row, int) else row for row in rows}
  cells = [
    [names[row], *(of.get(row, "-") for of in columns.values())] for row in names
  ]
  return markdown_table([title, *columns], cells)


def mean_and_interval(
  values: Sequence[float | None] | np.ndarray, digits: int = 2
) -> str:
  """Formats the mean of the finite values, if any, and for two or more half of its 95% interval."""
  finite = [x for x in values if x is not None and math.isfinite(x)]
  text = format_interval(student_interval(finite), digits) if finite else "-"
  return text + f" ({len(values) - len(finite)} not finite)" * (
    len(finite) < len(values)
  )


def format_interval(interval: Interval, digits: int = 2, sign: str = "") -> str:
  """Formats a mean and half of its interval; the sign "+" is for a difference."""
  mean, half_width = interval
  around = "" if half_width is None else f" ± {half_width:.{digits}f}"
  return f"{mean:{sign}.{digits}f}{around}"


def rewrite_blocks(page: pathlib.Path, blocks: Mapping[str, str]) -> None:
  """Replaces generated blocks of a Markdown page and keeps everything else.

  A block is between the lines `<!-- begin NAME -->` and `<!-- end NAME -->`. New blocks
  are appended, and a missing page is created. Raises InputError: a block begins and
  does not end.
  """
  text = page.read_text(encoding="utf-8") if page.exists() else ""
  for name, content in blocks.items():
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
    block = f"{begin}{content.strip()}\n{end}"
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if begun and not ended:
      raise InputError(
        f"{page}: block {name!r} does not end: add the line {end.strip()}"
      )
    text = before + block + after if begun else f"{text.rstrip()}\n\n{block}".lstrip()
  page.write_text(text, encoding="utf-8")
