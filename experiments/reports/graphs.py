"""The report on labelled graphs, results/graphs.md: every number in it comes from the records."""

import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.reports import markdown
from experiments.reports.results import (
  Record,
  Table,
  config_value,
  files_of,
  made_how,
  read_table,
)
from experiments.tasks.graph_scores import CTP, LONGEST_TRAINED, lengths_panel
from relpos_jax.evaluation.pictures import spread_curves
from relpos_jax.evaluation.statistics import Interval, student_interval
from relpos_jax.training.workdir import write_whole

_INTRO = """# Attention over labelled graphs

Written by `python -m experiments.report` from `runs/*.jsonl`, a line a run. Shaw et al. 2018,
section 3.1: vectors of edge labels are added to keys and values. `configs/graph.py` says what the
systems are, which differ in nothing else. Accuracy in percent: the mean over seeds, and after ± the
standard deviation. A gain is that of the same seed or fold, its interval the 95% of Student's t; it
is called beyond the spread where that leaves out zero. Settings were chosen on valid splits.
"""
_LABELS, _BLIND = "keys and values", "none"
_GUESS = "most frequent class in training"


def write(folder: pathlib.Path) -> pathlib.Path:
  """Writes folder/graphs.md and its pictures from folder/runs/*.jsonl; returns the former.

  Raises:
    InputError: a damaged record.
  """
  (folder / "graphs").mkdir(exist_ok=True)
  lines = [_INTRO]
  for file in files_of("graphs", folder / "runs"):
    table = read_table(file, setting, _check_split)
    is_chain = config_value(table.records()[0], "data.source") == "clutrr"
    lines += (_chains if is_chain else _folds)(table, folder)
  write_whole(folder / "graphs.md", "\n".join(lines))
  return folder / "graphs.md"


def setting(record: Record) -> dict[str, str]:
  """What all runs of a table have in common, in words."""
  return made_how(record, "nodes") | dict(
    splits=", ".join(sorted(record["scores"])),
  )


def _check_split(record: Record, split: str) -> None:
  of, rows = record["scores"][split], record["sentences"][split]
  if not rows or any([type(x) for x in row] != 2 * [int] for row in rows):
    raise ValueError(f"the graphs of {split} are not two whole numbers each")
  for name in ("accuracy", "loss", "majority"):
    if not isinstance(of.get(name), int | float):
      raise ValueError(f"no number {name!r} in the scores of {split}")
  value = 100 * statistics.fmean(right for _, right in rows)
  if abs(value - of["accuracy"]) > 0.01:
    raise ValueError(f"the graphs of {split} give accuracy {value:.2f}, not {of['accuracy']:.2f}")


# Chains -------------------------------------------------------------------------------------------


def _chains(table: Table, folder: pathlib.Path) -> list[str]:
  tests = _tests(table)
  picture = folder / "graphs" / f"{table.sweep}-lengths.png"
  spread_curves([lengths_panel(_curves(table, tests))], picture)
  return [
    "## CLUTRR: kinship in chains of relations",
    "",
    f"Trained on chains of 2 to {LONGEST_TRAINED}. Valid are {_number(table, 'valid')} of the "
    f"published training rows, and no graph of them is trained on. {_caption(table)}",
    "",
    *_chain_table(table, tests),
    "",
    _told(table, _valid_longest, f"valid chains of {LONGEST_TRAINED}"),
    "",
    *_apart(table),
    "Test chains by their number of relations (graphs in brackets); CTP, without attention: "
    "Minervini et al. 2020, one seed, as the README of github.com/uclnlp/ctp prints it.",
    "",
    *_length_table(table, tests),
    "",
    f"![Accuracy over length](graphs/{picture.name})",
    "",
  ]


def _tests(table: Table) -> dict[int, str]:
  """The test splits by length."""
  splits = [name for name in table.records()[0]["scores"] if name.startswith("test_")]
  return dict(sorted((int(name.removeprefix("test_")), name) for name in splits))


def _chain_table(table: Table, tests: Mapping[int, str]) -> list[str]:
  longest, longer = LONGEST_TRAINED, [k for k in tests if k > LONGEST_TRAINED]
  header = ["", "seeds", "valid loss", "valid", f"valid, {longest}", f"test, {longest}"]
  header += [f"test, {longer[0]} to {longer[-1]}", f"valid, {longest}: below {_LABELS}"]
  long_splits = [tests[k] for k in longer]
  measures = (
    lambda run: run["scores"]["valid"]["accuracy"],
    _valid_longest,
    lambda run: run["scores"][tests[longest]]["accuracy"],
    lambda run: _pooled(run, long_splits, lambda run, split: run["scores"][split]["accuracy"]),
  )
  rows = []
  for row, runs in table.rows.items():
    losses = [run["curve"][-1][1] for run in runs]
    values = [_spread([of(run) for run in runs]) for of in measures]
    below = "" if row == _LABELS else _signed(_gain(table, _LABELS, row, _valid_longest))
    rows.append([row, _seeds(runs), _spread(losses, 3), *values, below])
  majority = lambda run, split: run["scores"][split]["majority"]
  run = table.records()[0]
  guesses = [majority(run, "valid"), None, majority(run, tests[longest])]
  guesses.append(_pooled(run, long_splits, majority))
  cells = ["" if guess is None else f"{guess:.1f}" for guess in guesses]
  return markdown.table(header, [*rows, [_GUESS, "", "", *cells, ""]])


def _valid_longest(run: Record) -> float:
  """Accuracy on the valid chains that are as long as any in training."""
  rows = run["sentences"]["valid"]
  return 100 * statistics.fmean(right for size, right in rows if size == LONGEST_TRAINED)


def _pooled(run: Record, splits: Sequence[str], of: Callable[[Record, str], float]) -> float:
  """The mean over all graphs of these splits."""
  numbers = [len(run["sentences"][split]) for split in splits]
  return float(np.average([of(run, split) for split in splits], weights=numbers))


def _length_table(table: Table, tests: Mapping[int, str]) -> list[str]:
  first = table.records()[0]
  header = ["", *(f"{k} ({len(first['sentences'][split])})" for k, split in tests.items())]
  rows = [
    [
      row,
      *(_spread([run["scores"][split]["accuracy"] for run in runs]) for split in tests.values()),
    ]
    for row, runs in table.rows.items()
  ]
  rows.append(["CTP, published", *(f"{CTP[k]:.1f}" if k in CTP else "-" for k in tests)])
  guesses = (first["scores"][split]["majority"] for split in tests.values())
  return markdown.table(header, [*rows, [_GUESS, *(f"{guess:.1f}" for guess in guesses)]])


def _curves(table: Table, tests: Mapping[int, str]):
  curves = {}
  for row, runs in table.rows.items():
    scores = {k: [run["scores"][split]["accuracy"] for run in runs] for k, split in tests.items()}
    curves[row] = [(k, min(of), statistics.fmean(of), max(of)) for k, of in scores.items()]
  return curves | {"CTP, published": [(k, y, y, y) for k, y in CTP.items()]}


# Folds --------------------------------------------------------------------------------------------


def _folds(table: Table, folder: pathlib.Path) -> list[str]:
  run = table.records()[0]
  name = config_value(run, "data.tu.name") or table.sweep
  number = config_value(run, "data.tu.num_folds")
  header = ["", "folds", "valid", "test", f"test: above {_BLIND}"]
  rows = []
  for row, runs in table.rows.items():
    values = [
      _spread([run["scores"][split]["accuracy"] for run in runs]) for split in ("valid", "test")
    ]
    above = "" if row == _BLIND else _signed(_gain(table, row, _BLIND, _test))
    rows.append([row, f"{len(runs)} of {number}", *values, above])
  of_folds = {run["seed"]: run for run in table.records()}.values()
  guesses = [
    _spread([run["scores"][split]["majority"] for run in of_folds]) for split in ("valid", "test")
  ]
  rows.append([_GUESS, f"{len(of_folds)} of {number}", *guesses, ""])
  return [
    f"## {name}: {number} stratified folds",
    "",
    "One fold is tested on, the next one is valid, all others train; each seed has its own. "
    f"{_caption(table)}",
    "",
    *markdown.table(header, rows),
    "",
    _told(table, _test, "test"),
    "",
    *_apart(table),
  ]


def _test(run: Record) -> float:
  return run["scores"]["test"]["accuracy"]


# Both ---------------------------------------------------------------------------------------------


def _caption(table: Table) -> str:
  records, common = table.records(), setting(table.records()[0])
  minutes = statistics.median(record["budget"]["minutes"] for record in records)
  each = lambda of: ", ".join(sorted({of(record) for record in records}))
  return (
    f"Every run {common['updates']} updates of {common['nodes']} nodes, padding included, "
    f"{minutes:.1f} minutes (the median). {each(lambda r: r['hardware'])}; "
    f"{each(lambda r: r['date'][:10])}; commit {common['commit']}; "
    f"jax {each(lambda r: r['packages']['jax'])}."
  )


def _number(table: Table, split: str) -> str:
  return f"{len(table.records()[0]['sentences'][split]):,}"


def _told(table: Table, of: Callable[[Record], float], where: str) -> str:
  """What labels gain over connectivity alone, and over each part of them."""
  if not {_LABELS, _BLIND} <= {*table.rows}:
    return ""
  told = []
  for row in table.rows:
    if row != _LABELS:
      gain = _gain(table, _LABELS, row, of)
      told.append(f"over {row} {_signed(gain)} ({_verdict(gain)})")
  mean = statistics.fmean(map(of, table.rows[_LABELS]))
  gain = _gain(table, _LABELS, _BLIND, of)
  clear = _verdict(gain) == "beyond the spread" and gain.mean > 0
  said = "Edge labels gain" if clear else "A gain from edge labels is not shown"
  return f"{said}: on {where}, {_LABELS} have {mean:.1f}; {'; '.join(told)}."


def _gain(table: Table, first: str, second: str, of: Callable[[Record], float]) -> Interval:
  """How much one row is above another, seed by seed."""
  values = [{run["seed"]: of(run) for run in table.rows.get(row, ())} for row in (first, second)]
  both = [seed for seed in values[0] if seed in values[1]]
  if not both:
    return Interval(float("nan"), None)
  return student_interval([values[0][seed] - values[1][seed] for seed in both])


def _verdict(gain: Interval) -> str:
  if gain.half_width is None:
    return "a single pair, so nothing is said"
  return "beyond the spread" if abs(gain.mean) > gain.half_width else "inside the spread"


def _signed(gain: Interval) -> str:
  return "-" if gain.mean != gain.mean else markdown.signed(gain)


def _spread(values: Sequence[float], digits: int = 1) -> str:
  """The mean and the standard deviation, which a single value has not.

  >>> _spread([1.0, 2.0, 3.0]), _spread([1.0])
  ('2.0 ± 1.0', '1.0')
  """
  deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
  return f"{statistics.fmean(values):.{digits}f}{deviation}"


def _seeds(runs: Sequence[Record]) -> str:
  return ", ".join(str(run["seed"]) for run in runs)


def _apart(table: Table) -> list[str]:
  if not table.apart:
    return []
  return ["Set apart, and in no number here:", "", *(f"- {line}" for line in table.apart), ""]
