"""Confidence intervals over seeds, the paired bootstrap over sentences, and Markdown tables."""

import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.errors import InputError
from experiments.evaluation.bleu import bleu_of_counts
from relpos_jax.typing import Float, Int

_Values = Sequence[float] | Float[np.ndarray, "_"]
_MOST_PAIRED = 8  # names in a table of all pairs


class Interval(NamedTuple):
  """A mean and half the width of its 95% confidence interval; None for a single value."""

  mean: float
  half_width: float | None


class Scores(NamedTuple):
  """BLEU of one system: of each seed; and of each bootstrap sample, averaged over seeds."""

  seeds: Float[np.ndarray, "seeds"]
  samples: Float[np.ndarray, "samples"]


def student_interval(values: _Values, *minus: _Values) -> Interval:
  """Computes the mean of independent values and its 95% interval by Student's t.

  With further values it is the difference of the means, and its interval by Welch's t.
  """
  from scipy.special import stdtrit

  mean = float(np.mean(values) - sum(map(np.mean, minus)))
  sizes = [len(of) for of in (values, *minus)]
  if min(sizes) < 2:
    return Interval(mean, None)
  squares = [np.var(of, ddof=1) / len(of) for of in (values, *minus)]  # of the standard errors
  if not (total := sum(squares)):
    return Interval(mean, 0.0)
  freedom = total**2 / sum(x**2 / (n - 1) for x, n in zip(squares, sizes, strict=True))
  return Interval(mean, float(stdtrit(freedom, (1 + 0.95) / 2) * np.sqrt(total)))


def draw_sentences(num_sentences: int, num_samples: int = 1000) -> Int[np.ndarray, "samples n"]:
  """Draws bootstrap samples of n sentences as sacreBLEU does; returns each sentence's counts."""
  drawn = np.random.default_rng(12345).choice(num_sentences, (num_samples, num_sentences))
  drawn += num_sentences * np.arange(num_samples)[:, None]
  return np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)


def score_seeds(
  counts: Int[np.ndarray, "seeds sentences 10"], draws: Int[np.ndarray, "samples sentences"]
) -> Scores:
  """Computes the scores of a system from `sentence_counts` of each seed and `draw_sentences`."""
  # float64 uses BLAS, and its sums of counts are exact.
  sums = np.einsum("sn,knc->ksc", draws.astype(float), counts.astype(float), optimize=True)
  samples = bleu_of_counts(np.rint(sums).astype(int)).mean(axis=0)
  return Scores(bleu_of_counts(counts.sum(axis=1)), samples)


def compare_scores(first: Scores, second: Scores) -> tuple[Interval, float]:
  """Returns the difference of two systems, scored on the same draws, and its p-value.

  The p-value is that of the paired bootstrap (Koehn 2004), as sacreBLEU computes it.
  """
  difference = student_interval(first.seeds, second.seeds)
  sampled = np.abs(first.samples - second.samples)
  exceeding = np.sum(sampled - sampled.mean() > abs(difference.mean))
  return difference, (int(exceeding) + 1) / (len(sampled) + 1)


def is_clear(difference: Interval, p_value: float) -> bool:
  """Returns whether the 95% interval over seeds excludes zero and the p-value is below 5%."""
  mean, half_width = difference
  return half_width is not None and abs(mean) > half_width and p_value < 0.05


# Tables -------------------------------------------------------------------------------------------


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
  """Returns a table of all pairs of names; `cell` takes the row's name, then the column's."""
  columns = {b: {a: cell(a, b) for a in names if a != b} for b in names}
  return column_table(f"{title}, row - column", names, columns)


def comparison_table(
  title: str, names: Sequence[str], scores: Mapping[str, Scores], digits: int = 2
) -> str:
  """Returns a table of the comparisons of all pairs, with p-values; clear differences are bold.

  A name without scores has a dash. More than 8 names are compared with the first one only.
  """

  def cell(a: str, b: str) -> str:
    if not {a, b} <= {*scores}:
      return "-"
    difference, p_value = compare_scores(scores[a], scores[b])
    bold = "**" if is_clear(difference, p_value) else ""
    return f"{bold}{format_interval(difference, digits, sign='+')}{bold}, p {p_value:.3f}"

  if len(names) <= _MOST_PAIRED:
    return pair_table(title, names, cell)
  first, *others = names
  return column_table(title, others, {f"minus {first}": {x: cell(x, first) for x in others}})


def mean_and_interval(values: Sequence[float | None] | np.ndarray, digits: int = 2) -> str:
  """Formats the mean of the finite values, if any, and for two or more half of its 95% interval."""
  finite = [x for x in values if x is not None and math.isfinite(x)]
  text = format_interval(student_interval(finite), digits) if finite else "-"
  return text + f" ({len(values) - len(finite)} not finite)" * (len(finite) < len(values))


def format_interval(interval: Interval, digits: int = 2, sign: str = "") -> str:
  """Formats a mean and half of its interval; the sign "+" is for a difference."""
  mean, half_width = interval
  around = "" if half_width is None else f" ± {half_width:.{digits}f}"
  return f"{mean:{sign}.{digits}f}{around}"


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
