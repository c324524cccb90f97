"""Numbers and tables in Markdown."""

import math
from collections.abc import Sequence

import numpy as np

from relpos_jax.evaluation.statistics import Interval, student_interval


def mean_of(values: Sequence[float] | np.ndarray, digits: int = 2) -> str:
  """The mean and its interval, which a single value has not.

  >>> mean_of([1.0, 2.0, 3.0]), mean_of([1.0]), mean_of([])
  ('2.00 ± 2.48', '1.00', '-')
  """
  if len(values) == 0:
    return "-"
  mean, half_width = student_interval(values)
  return f"{mean:.{digits}f}{_plus_minus(half_width, digits)}"


def signed(difference: Interval, digits: int = 2) -> str:
  """A difference and its interval; a dash where it is not a number.

  >>> signed(Interval(0.5, 0.25)), signed(Interval(-0.5, None)), signed(Interval(math.nan, None))
  ('+0.50 ± 0.25', '-0.50', '-')
  """
  mean, half_width = difference
  if math.isnan(mean):
    return "-"
  return f"{mean:+.{digits}f}{_plus_minus(half_width, digits)}"


def _plus_minus(half_width: float | None, digits: int) -> str:
  return "" if half_width is None else f" ± {half_width:.{digits}f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
  """Its lines.

  >>> table(["", "BLEU"], [["k=0", "12.5"]])
  ['|  | BLEU |', '|---|---|', '| k=0 | 12.5 |']
  """
  line = lambda cells: f"| {' | '.join(cells)} |"
  return [line(header), "|" + "---|" * len(header), *map(line, rows)]
