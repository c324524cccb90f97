"""What edge labels gain: rows of one table against each other, seed by seed."""

import math
import statistics
from collections.abc import Callable, Sequence

from experiments.reports import captions
from experiments.reports.markdown import signed
from experiments.reports.records import Record
from experiments.reports.results import Table, made_how
from relpos_jax.evaluation.statistics import Interval, student_interval

LABELS, BLIND, UNDIRECTED = "keys and values", "none", "undirected"  # rows
GUESS = "most frequent class in training"


def caption(table: Table) -> str:
  """How the runs were made."""
  records = table.records()
  how = made_how(records[0], "nodes")
  return (
    f"Every run {how['updates']} updates of {how['nodes']} nodes, padding included, "
    f"{captions.minutes(records)}. {captions.origin(records)}."
  )


def told(table: Table, of: Callable[[Record], float], where: str) -> str:
  """What labels gain over connectivity alone, and over each part; nothing where `of` is none."""
  if not {LABELS, BLIND} <= {*table.rows}:
    return ""
  mean = statistics.fmean(map(of, table.rows[LABELS]))
  if math.isnan(mean):
    return ""
  gains = []
  for row in table.rows:
    if row != LABELS:
      gain = gain_of(table, LABELS, row, of)
      gains.append(f"over {row} {signed(gain)} ({_verdict(gain)})")
  gain = gain_of(table, LABELS, BLIND, of)
  clear = _verdict(gain) == "beyond the spread" and gain.mean > 0
  said = "Edge labels gain" if clear else "A gain from edge labels is not shown"
  return f"{said}: on {where}, {LABELS} have {mean:.1f}; {'; '.join(gains)}."


def gain_of(table: Table, first: str, second: str, of: Callable[[Record], float]) -> Interval:
  """How much one row is above another, seed by seed; not a number where they share no seed."""
  values = [{run["seed"]: of(run) for run in table.rows.get(row, ())} for row in (first, second)]
  both = [seed for seed in values[0] if seed in values[1]]
  if not both:
    return Interval(math.nan, None)
  return student_interval([values[0][seed] - values[1][seed] for seed in both])


def _verdict(gain: Interval) -> str:
  if gain.half_width is None:
    return "a single pair, so nothing is said"
  return "beyond the spread" if abs(gain.mean) > gain.half_width else "inside the spread"


def spread(values: Sequence[float], digits: int = 1) -> str:
  """The mean and the standard deviation, which a single value has not; a dash for no number.

  >>> spread([1.0, 2.0, 3.0]), spread([1.0]), spread([1.0, math.nan])
  ('2.0 ± 1.0', '1.0', '-')
  """
  if any(map(math.isnan, values)):
    return "-"
  deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
  return f"{statistics.fmean(values):.{digits}f}{deviation}"
