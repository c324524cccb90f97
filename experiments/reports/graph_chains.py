"""The section on chains of relations, and what becomes of those longer than any in training."""

import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.reports import captions, markdown
from experiments.reports.graph_gains import GUESS, LABELS, caption, gain_of, spread, told
from experiments.reports.markdown import signed
from experiments.reports.records import Record
from experiments.reports.results import Table
from experiments.tasks.graph_scores import (
  CTP,
  DIFFERENT_LONGEST,
  GRAPHS,
  GUESSED_LONGEST,
  LONGEST_TRAINED,
  lengths_panel,
)
from relpos_jax.evaluation.pictures import spread_curves


def section(table: Table, folder: pathlib.Path) -> list[str]:
  """Its lines; its picture goes into folder/graphs."""
  tests = _tests(table)
  picture = folder / "graphs" / f"{table.sweep}-lengths.png"
  spread_curves([lengths_panel(_curves(table, tests))], picture)
  return [
    "## CLUTRR: kinship in chains of relations",
    "",
    f"Trained on chains of 2 to {LONGEST_TRAINED}. Valid are {_number(table, 'valid')} of the "
    f"published training rows{_different_valid(table)}, and no graph of them is trained on. "
    f"{caption(table)} {captions.of_which(table.records())}",
    "",
    *_chain_table(table, tests),
    "",
    told(table, _valid_longest, f"valid chains of {LONGEST_TRAINED}"),
    "",
    *captions.not_finite(table),
    *captions.set_apart(table),
    f"Test chains by their number of relations; in brackets rows{_different_tests(table)}. CTP, "
    "without attention: Minervini et al. 2020, one seed, as the README of github.com/uclnlp/ctp "
    "prints it.",
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
  header += [f"test, {longer[0]} to {longer[-1]}", f"valid, {longest}: below {LABELS}"]
  long_splits = [tests[k] for k in longer]
  measures = (
    lambda run: run["scores"]["valid"]["accuracy"],
    _valid_longest,
    lambda run: run["scores"][tests[longest]]["accuracy"],
    lambda run: _pooled(run, long_splits, lambda run, split: run["scores"][split]["accuracy"]),
  )
  rows = []
  for row, runs in table.rows.items():
    values = [spread([of(run) for run in runs]) for of in measures]
    below = "" if row == LABELS else signed(gain_of(table, LABELS, row, _valid_longest))
    rows.append([row, captions.seeds(runs), captions.valid_loss(runs, spread), *values, below])
  majority = lambda run, split: run["scores"][split]["majority"]
  run = table.records()[0]
  guesses = [majority(run, "valid"), _guessed_longest(run), majority(run, tests[longest])]
  guesses.append(_pooled(run, long_splits, majority))
  cells = [spread([guess]) for guess in guesses]
  return markdown.table(header, [*rows, [GUESS, "", "", *cells, ""]])


def _valid_longest(run: Record) -> float:
  """Accuracy on the valid chains that are as long as any in training; no number without any."""
  right = [right for size, right in run["sentences"]["valid"] if size == LONGEST_TRAINED]
  return 100 * statistics.fmean(right) if right else math.nan


def _pooled(run: Record, splits: Sequence[str], of: Callable[[Record, str], float]) -> float:
  """The mean over all graphs of these splits."""
  numbers = [len(run["sentences"][split]) for split in splits]
  return float(np.average([of(run, split) for split in splits], weights=numbers))


def _length_table(table: Table, tests: Mapping[int, str]) -> list[str]:
  first = table.records()[0]
  number = lambda split: f"; {GRAPHS[split][1]}" if _is_counted(first) else ""
  header = [""]
  header += [f"{k} ({len(first['sentences'][of])}{number(of)})" for k, of in tests.items()]
  rows = [
    [
      row,
      *(spread([run["scores"][split]["accuracy"] for run in runs]) for split in tests.values()),
    ]
    for row, runs in table.rows.items()
  ]
  rows.append(["CTP, published", *(f"{CTP[k]:.1f}" if k in CTP else "-" for k in tests)])
  guesses = (first["scores"][split]["majority"] for split in tests.values())
  return markdown.table(header, [*rows, [GUESS, *(f"{guess:.1f}" for guess in guesses)]])


def _curves(table: Table, tests: Mapping[int, str]):
  curves = {}
  for row, runs in table.rows.items():
    scores = {k: [run["scores"][split]["accuracy"] for run in runs] for k, split in tests.items()}
    curves[row] = [(k, min(of), statistics.fmean(of), max(of)) for k, of in scores.items()]
  return curves | {"CTP, published": [(k, y, y, y) for k, y in CTP.items()]}


# How many graphs differ ---------------------------------------------------------------------------


def _is_counted(run: Record) -> bool:
  """Whether its graphs are those of which it is known how many are different."""
  numbers = {split: len(rows) for split, rows in run["sentences"].items()}
  return numbers == {split: rows for split, (rows, _) in GRAPHS.items()}


def _different_valid(table: Table) -> str:
  if not _is_counted(run := table.records()[0]):
    return ""
  return (
    f" ({GRAPHS['valid'][1]} different graphs; of {LONGEST_TRAINED} relations {_num_longest(run)} "
    f"rows, {DIFFERENT_LONGEST} graphs)"
  )


def _guessed_longest(run: Record) -> float:
  """How often the guess is right of the longest valid chains; no number of graphs not counted."""
  return 100 * GUESSED_LONGEST / _num_longest(run) if _is_counted(run) else math.nan


def _num_longest(run: Record) -> int:
  return sum(size == LONGEST_TRAINED for size, _ in run["sentences"]["valid"])


def _different_tests(table: Table) -> str:
  if not _is_counted(table.records()[0]):
    return ""
  return (
    ", and how many different graphs they are: those of 2 relations are in training, too, "
    "the others are not"
  )


def _number(table: Table, split: str) -> str:
  return f"{len(table.records()[0]['sentences'][split]):,}"
