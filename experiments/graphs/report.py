"""Scores of classified graphs: tables and pictures of one run, and the report of sweeps."""

import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.evaluation import tables
from experiments.evaluation.pictures import SpreadPanel, spread_curves
from experiments.evaluation.records import Metric, Record
from experiments.evaluation.statistics import student_interval
from experiments.evaluation.tables import Rows
from experiments.files import Path
from experiments.training.task import Evaluation

# Conditional Theorem Provers (Minervini et al. 2020), trained on chains of 2, 3 and 4 relations:
# accuracy in percent by length, one seed, from the README of github.com/uclnlp/ctp.
CTP = dict(zip(range(2, 11), (100.0, 72.0, 74.0, 97.8, 96.2, 98.1, 97.8, 94.4, 89.3), strict=True))
LONGEST_TRAINED = 4  # relations of a chain
# The numbers of distinct graphs in the test splits, by length.
_DISTINCT = dict(zip(range(2, 11), (2, 7, 36, 185, 105, 155, 135, 124, 122), strict=True))
# With the default share of valid graphs: all, and those of that length with the most frequent class
# in training. Records hold no classes.
_NUM_VALID, _GUESSED_LONGEST = 1_544, 63
_accuracy = lambda graphs: 100 * graphs[:, 1].mean()
METRIC = Metric("accuracy", _accuracy, tolerance=0.01, fixed=(0,), differs_by_seed=True)
_GUESS, _CTP = "most frequent class in training", "CTP, published"
# The "accuracy" of a run, or its "majority": the accuracy of the most frequent class.
_Score = Callable[[Record, str], float]


class Row(NamedTuple):
  """A classified graph: size (relations for CLUTRR, else nodes), classes, cross entropy in nats."""

  size: int
  target: int
  answer: int
  nats: float


def evaluation(
  source: str,
  rows: Mapping[str, Sequence[Row]],
  most_frequent: int,
  workdir: Path,
) -> Evaluation:
  """Returns the scores by split, and those of always predicting the most frequent class."""
  percent = lambda values: 100 * statistics.fmean(values)
  scores = {
    split: dict(
      accuracy=percent(row.answer == row.target for row in of),
      loss=statistics.fmean(row.nats for row in of),
      majority=percent(row.target == most_frequent for row in of),
    )
    for split, of in rows.items()
  }
  results = {split: dict(graphs=len(rows[split]), **of) for split, of in scores.items()}
  sentences = {
    split: [[row.size, int(row.answer == row.target)] for row in of] for split, of in rows.items()
  }
  pictures = ()
  if source == "clutrr":
    tests = {k: [scores[f"test_{k}"]["accuracy"]] for k in CTP}
    pictures = (_draw_lengths({"this model": tests}, workdir / "lengths.png"),)
  lines = ["split      graphs   accuracy (%)   most frequent class (%)    loss"]
  for split, of in results.items():
    values = f"{of['accuracy']:15.1f}{of['majority']:26.1f}{of['loss']:8.3f}"
    lines.append(f"{split:9}{of['graphs']:8,}{values}")
  return Evaluation("\n".join(["", *lines, ""]), results, scores, sentences, pictures)


def _draw_lengths(scores: Mapping[str, Mapping[int, Sequence[float]]], path: Path) -> Path:
  """Draws accuracies by row and length, over the runs, beside those of CTP."""
  scores = {**scores, _CTP: {k: [accuracy] for k, accuracy in CTP.items()}}
  curves = {
    row: [(k, min(of), statistics.fmean(of), max(of)) for k, of in by_length.items()]
    for row, by_length in scores.items()
  }
  mark = LONGEST_TRAINED + 0.5, "longest in training"
  return spread_curves([SpreadPanel("relations in the chain", "accuracy (%)", curves, mark)], path)


def blocks(sweeps: Mapping[str, Rows], folder: pathlib.Path) -> dict[str, str]:
  """Returns the blocks of the page from the rows by sweep, and draws its pictures in `folder`."""
  found = {}
  for sweep, rows in sweeps.items():
    first = next(iter(rows.values()))[0]
    section = _chains if first["config"]["data.source"] == "clutrr" else _folds
    parts = [*section(sweep, rows, first, folder), tables.config_table(rows)]
    found[sweep] = "\n\n".join([*parts, tables.run_facts(rows, {})])
  return found


def _column(rows: Rows, guesses: Sequence[Record], score: _Score) -> dict[str, str]:
  """Returns the accuracy of each row, and of the most frequent class in the runs `guesses`."""
  ours = tables.mean_column(rows, lambda run: score(run, "accuracy"), 1)
  guess = tables.mean_and_interval([score(run, "majority") for run in guesses], 1)
  return ours | {_GUESS: guess.replace("nan", "-")}


def _pair_table(title: str, rows: Rows, score: _Score) -> str:
  """Returns the differences between rows, averaged over the seeds that both rows have."""

  def gain(first: str, second: str) -> str:
    values, others = (
      {run["seed"]: score(run, "accuracy") for run in rows[row]} for row in (first, second)
    )
    both = [values[seed] - others[seed] for seed in values if seed in others]
    return tables.format_interval(student_interval(both), sign="+") if both else "-"

  return tables.pair_table(title, [*rows], gain)


def _split(*splits: str) -> _Score:
  """Returns the score over all graphs of these splits."""
  numbers = lambda run: [len(run["sentences"][split]) for split in splits]
  scores = lambda run, name: [run["scores"][split][name] for split in splits]
  return lambda run, name: float(np.average(scores(run, name), weights=numbers(run)))


def _chains(sweep: str, rows: Rows, first: Record, folder: pathlib.Path) -> list[str]:
  longest, longer = LONGEST_TRAINED, [k for k in CTP if k > LONGEST_TRAINED]
  column = lambda score: _column(rows, [first], score)
  columns = tables.seed_columns(rows) | {
    "valid": column(_split("valid")),
    f"valid, {longest}": column(_valid_longest),
    f"test, {longest}": column(_split(f"test_{longest}")),
    f"test, {longer[0]} to {longer[-1]}": column(_split(*(f"test_{k}" for k in longer))),
  }
  by_length = {}
  for k in CTP:
    name = f"{k} ({len(first['sentences'][f'test_{k}'])}; {_DISTINCT[k]})"
    by_length[name] = column(_split(f"test_{k}")) | {_CTP: f"{CTP[k]:.1f}"}
  accuracies = lambda runs, k: [run["scores"][f"test_{k}"]["accuracy"] for run in runs]
  scores = {row: {k: accuracies(runs, k) for k in CTP} for row, runs in rows.items()}
  picture = _draw_lengths(scores, folder / f"{sweep}-lengths.png")
  return [
    tables.column_table(sweep, [*rows, _GUESS], columns),
    _pair_table(f"valid, {longest}", rows, _valid_longest),
    tables.column_table("test, relations (graphs)", [*rows, _CTP, _GUESS], by_length),
    f"![Accuracy over length](graphs/{picture.name})",
  ]


def _valid_longest(run: Record, name: str) -> float:
  """Computes the score of the longest valid chains; the majority for the published graphs only."""
  right = [right for size, right in run["sentences"]["valid"] if size == LONGEST_TRAINED]
  if name == "majority":
    is_published = len(run["sentences"]["valid"]) == _NUM_VALID
    return 100 * _GUESSED_LONGEST / len(right) if is_published else math.nan
  return 100 * statistics.fmean(right) if right else math.nan


def _folds(sweep: str, rows: Rows, first: Record, folder: pathlib.Path) -> list[str]:
  guesses = next(iter(rows.values()))
  columns = {name: _column(rows, guesses, _split(name)) for name in ("valid", "test")}
  columns = {"seeds": tables.seed_columns(rows)["seeds"]} | columns
  values = first["config"]
  title = f"{sweep}: {values['data.tu.name']}, {values['data.tu.num_folds']} folds"
  return [
    tables.column_table(title, [*rows, _GUESS], columns),
    _pair_table("test", rows, _split("test")),
  ]
