"""Tables in Markdown, and pages that hold generated blocks between a person's words."""

import math
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from relpos_jax.errors import InputError
from relpos_jax.evaluation.statistics import Interval, student_interval


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  r"""Returns a Markdown table.

  >>> print(markdown_table(["", "BLEU"], [["k=0", "12.5"]]))
  |  | BLEU |
  |---|---|
  | k=0 | 12.5 |
  """
  line = lambda cells: f"| {' | '.join(cells)} |"
  return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])


def mean_and_interval(values: Sequence[float] | np.ndarray, digits: int = 2) -> str:
  """Formats a mean and half of its 95% interval, which a single value does not have.

  >>> mean_and_interval([1.0, 2.0, 3.0]), mean_and_interval([1.0]), mean_and_interval([])
  ('2.00 ± 2.48', '1.00', '-')
  """
  if len(values) == 0:
    return "-"
  mean, half_width = student_interval(values)
  return f"{mean:.{digits}f}{_plus_minus(half_width, digits)}"


def signed_difference(difference: Interval, digits: int = 2) -> str:
  """Formats a difference and its interval; a dash if it is not a number.

  >>> signed_difference(Interval(0.5, 0.25)), signed_difference(Interval(-0.5, None))
  ('+0.50 ± 0.25', '-0.50')
  """
  mean, half_width = difference
  return "-" if math.isnan(mean) else f"{mean:+.{digits}f}{_plus_minus(half_width, digits)}"


def _plus_minus(half_width: float | None, digits: int) -> str:
  return "" if half_width is None else f" ± {half_width:.{digits}f}"


def rewrite_blocks(page: pathlib.Path, blocks: Mapping[str, str]) -> None:
  """Replaces generated blocks of a Markdown page and keeps everything else as it is.

  A block stands between the lines `<!-- begin NAME -->` and `<!-- end NAME -->`. A block that the
  page does not have yet is appended to it; a page that is not there yet is made.

  Raises:
    InputError: a block begins and does not end.

  >>> import tempfile
  >>> page = pathlib.Path(tempfile.mkdtemp(), "page.md")
  >>> rewrite_blocks(page, dict(numbers="1"))
  >>> _ = page.write_text(page.read_text() + "A person's conclusion.\\n")
  >>> rewrite_blocks(page, dict(numbers="2"))
  >>> print(page.read_text(), end="")
  <!-- begin numbers -->
  2
  <!-- end numbers -->
  A person's conclusion.
  """
  text = page.read_text(encoding="utf-8") if page.exists() else ""
  for name, content in blocks.items():
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
    block = f"{begin}{content.strip()}\n{end}"
    if begin not in text:
      text = f"{text.rstrip()}\n\n{block}".lstrip()
      continue
    if end not in text:
      raise InputError(f"{page}: block {name!r} does not end: add the line {end.strip()}")
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    text = re.sub(pattern, lambda _, block=block: block, text, count=1, flags=re.DOTALL)
  page.write_text(text, encoding="utf-8")
