"""Reports of sweeps over labelled graphs: accuracy by row, by length of chains and over folds."""

import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from relpos_jax.evaluation import tables
from relpos_jax.evaluation.pictures import spread_curves
from relpos_jax.evaluation.records import Metric, Record
from relpos_jax.evaluation.statistics import Interval, student_interval
from relpos_jax.evaluation.tables import Rows
from relpos_jax.graphs.scores import (
  CTP,
  GRAPHS,
  GUESSED_LONGEST,
  LONGEST_TRAINED,
  lengths_panel,
)

METRIC = Metric(
  "accuracy",
  lambda graphs: 100 * graphs[:, 1].mean(),
  tolerance=0.01,
  fixed=(0,),
  differs_by_seed=True,
)
_GUESS, _CTP = "most frequent class in training", "CTP, published"
_Score = Callable[[Record, str], float]  # the accuracy of a run, or of the guess: "majority"


def write(sweeps: Mapping[str, Rows], folder: pathlib.Path) -> pathlib.Path:
  """Writes the blocks of folder/graphs.md, the rows by sweep, and pictures in folder/graphs."""
  (folder / "graphs").mkdir(exist_ok=True)
  blocks = {}
  for sweep, rows in sweeps.items():
    first = next(iter(rows.values()))[0]
    section = _chains if first["config"]["data.source"] == "clutrr" else _folds
    parts = [*section(sweep, rows, first, folder), tables.config_table(rows)]
    blocks[sweep] = "\n\n".join([*parts, tables.run_facts(rows, {})])
  tables.rewrite_blocks(folder / "graphs.md", blocks)
  return folder / "graphs.md"


def _mean_and_deviation(values: Sequence[float], digits: int = 1) -> str:
  """Formats a mean and a standard deviation, which a single value does not have.

  >>> _mean_and_deviation([1.0, 2.0, 3.0]), _mean_and_deviation([1.0]), _mean_and_deviation([])
  ('2.0 ± 1.0', '1.0', '-')
  """
  if not values:
    return "-"
  deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
  return f"{statistics.fmean(values):.{digits}f}{deviation}"


def _column(rows: Rows, guesses: Sequence[Record], score: _Score) -> dict[str, str]:
  """Returns the accuracy of each row, and of the guess in the data of the runs `guesses`."""
  ours = tables.mean_column(rows, lambda run: score(run, "accuracy"), 1, _mean_and_deviation)
  guess = _mean_and_deviation([score(run, "majority") for run in guesses])
  return ours | {_GUESS: guess.replace("nan", "-")}


def _pair_table(title: str, rows: Rows, score: _Score) -> str:
  """Returns the gains of rows over one another, each the mean over the seeds that both have."""

  def gain(first: str, second: str) -> str:
    values, others = (
      {run["seed"]: score(run, "accuracy") for run in rows[row]} for row in (first, second)
    )
    both = [values[seed] - others[seed] for seed in values if seed in others]
    return tables.signed_difference(student_interval(both) if both else Interval(math.nan, None))

  return tables.pair_table(f"{title}, row - column", [*rows], gain)


def _split(*splits: str) -> _Score:
  """Returns the score over all graphs of these splits."""
  numbers = lambda run: [len(run["sentences"][split]) for split in splits]
  scores = lambda run, name: [run["scores"][split][name] for split in splits]
  return lambda run, name: float(np.average(scores(run, name), weights=numbers(run)))


# Chains of relations ------------------------------------------------------------------------------


def _chains(sweep: str, rows: Rows, first: Record, folder: pathlib.Path) -> list[str]:
  tests = sorted(int(name[5:]) for name in first["scores"] if name.startswith("test_"))
  longest, longer = LONGEST_TRAINED, [k for k in tests if k > LONGEST_TRAINED]
  column = lambda score: _column(rows, [first], score)
  columns = tables.seed_columns(rows, _mean_and_deviation) | {
    "valid": column(_split("valid")),
    f"valid, {longest}": column(_valid_longest),
    f"test, {longest}": column(_split(f"test_{longest}")),
    f"test, {longer[0]} to {longer[-1]}": column(_split(*(f"test_{k}" for k in longer))),
  }
  by_length = {
    f"{k} ({_num_graphs(first, f'test_{k}')})": column(_split(f"test_{k}"))
    | ({_CTP: f"{CTP[k]:.1f}"} if k in CTP else {})
    for k in tests
  }
  picture = folder / "graphs" / f"{sweep}-lengths.png"
  spread_curves([lengths_panel(_curves(rows, tests))], picture)
  return [
    tables.column_table(sweep, [*rows, _GUESS], columns),
    _pair_table(f"valid, {longest}", rows, _valid_longest),
    tables.column_table("test, relations (graphs)", [*rows, _CTP, _GUESS], by_length),
    f"![Accuracy over length](graphs/{picture.name})",
  ]


def _valid_longest(run: Record, name: str) -> float:
  """Computes the score of the valid chains that are as long as any in training, or NaN.

  The guess is known for the published graphs alone: records have no classes.
  """
  right = [right for size, right in run["sentences"]["valid"] if size == LONGEST_TRAINED]
  if name == "majority":
    is_published = ";" in _num_graphs(run, "valid")
    return 100 * GUESSED_LONGEST / len(right) if is_published else math.nan
  return 100 * statistics.fmean(right) if right else math.nan


def _num_graphs(run: Record, split: str) -> str:
  """Returns the number of graphs and, if they are the published ones, of different graphs."""
  number, (published, different) = len(run["sentences"][split]), GRAPHS.get(split, (0, 0))
  return f"{number}; {different}" if number == published else f"{number}"


def _curves(rows: Rows, tests: Sequence[int]) -> dict[str, list[tuple[float, ...]]]:
  curves = {_CTP: [(k, y, y, y) for k, y in CTP.items()]}
  for row, runs in rows.items():
    scores = {k: [run["scores"][f"test_{k}"]["accuracy"] for run in runs] for k in tests}
    curves[row] = [(k, min(of), statistics.fmean(of), max(of)) for k, of in scores.items()]
  return {row: curves[row] for row in (*rows, _CTP)}


# Folds --------------------------------------------------------------------------------------------


def _folds(sweep: str, rows: Rows, first: Record, folder: pathlib.Path) -> list[str]:
  """Returns the tables of runs whose seeds test on a fold each."""
  guesses = next(iter(rows.values()))
  columns = {name: _column(rows, guesses, _split(name)) for name in ("valid", "test")}
  columns = {"seeds": tables.seed_columns(rows)["seeds"]} | columns
  title = (
    f"{sweep}: {first['config']['data.tu.name']}, {first['config']['data.tu.num_folds']} folds"
  )
  return [
    tables.column_table(title, [*rows, _GUESS], columns),
    _pair_table("test", rows, _split("test")),
  ]
