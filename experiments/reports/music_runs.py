"""The section on music that was trained on: likelihoods by row, beside the published ones."""

import functools
import itertools
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from experiments.reports import captions, markdown
from experiments.reports.claims import lone_seeds
from experiments.reports.records import Record, read_checked
from experiments.reports.results import (
  Table,
  config_value,
  described,
  files_of,
  made_how,
  table_of,
)
from experiments.reports.tables import learning_points
from experiments.tasks.music_scores import PUBLISHED, WITH_INSTRUMENTS, published
from relpos_jax.evaluation.pictures import SpreadPanel, spread_curves
from relpos_jax.evaluation.statistics import Comparison, Scores, compare_scores, draw_sentences

_ABOUT = """Written by `python -m experiments.report` from `runs/*.jsonl`, a line a run. Negative
log-likelihood of whole pieces in nats, each token given all before it: a token, the ends of pieces
included; a token without them; a time step. Lower is better. The mean over seeds, and after ± half
its 95% interval by Student's t; a difference is of two means, its interval by Welch's t, and p is
the paired bootstrap's over the pieces. It is called beyond the spread where the interval leaves out
zero and p is below 0.05; each pair is judged by itself, with no allowance for how many there
are."""
_MEASURES = {"nll": "a token", "without_ends": "without ends", "per_step": "a step"}
_DIGITS = 3
Compare = Callable[[str, str], Comparison]


def sections(folder: pathlib.Path) -> list[str]:
  """The lines of all sweeps of music in folder/runs; their pictures go into folder/music.

  Raises:
    InputError: a damaged record.
  """
  tables = [_read(file) for file in files_of("music", folder / "runs")]
  lines = [line for table in tables for line in _section(table, folder)]
  return ["## Likelihood", "", _ABOUT, "", *lines] if lines else []


def _read(file: pathlib.Path) -> Table:
  """Its table; those that diverged are set apart, however many they are."""
  records = read_checked(file, _check)
  table = table_of(file.stem, [record for record in records if _is_finite(record)], _setting)
  lost = [
    f"{record['row']}, seed {record['seed']}: no finite likelihood"
    for record in records
    if not _is_finite(record)
  ]
  return table._replace(apart=[*table.apart, *lost])


def _is_finite(record: Record) -> bool:
  return all(math.isfinite(of[name]) for of in record["scores"].values() for name in _MEASURES)


def _section(table: Table, folder: pathlib.Path) -> list[str]:
  if not table.rows:
    none = "No run has a finite likelihood."
    return [f"### {table.sweep}", "", none, "", *captions.set_apart(table)]
  splits = [*table.records()[0]["scores"]]
  compare = functools.cache(lambda first, second: _compare(table, first, second, splits[0]))
  (folder / "music").mkdir(exist_ok=True)
  picture = folder / "music" / f"{table.sweep}-learning.png"
  spread_curves([_learning(table)], picture)
  lines = [f"### {table.sweep}", "", _caption(table), "", *_table(table, splits, compare), ""]
  lines += [" ".join(_sentences(table, splits[0], compare)), ""]
  lines += captions.not_finite(table)
  lines += captions.set_apart(table)
  return [*lines, f"![Learning curves: {table.sweep}](music/{picture.name})", ""]


def _setting(record: Record) -> dict[str, str]:
  """What all runs of a table have in common, in words."""
  return made_how(record, "tokens") | dict(
    pieces=", ".join(
      described(name, [tokens for tokens, _ in rows])
      for name, rows in sorted(record["sentences"].items())
    ),
  )


def _check(record: Record, split: str) -> None:
  of, rows = record["scores"][split], np.array(record["sentences"][split], float)
  if not rows.size or rows.shape[1:] != (2,):
    raise ValueError(f"the pieces of {split} are not two numbers each")
  for name in _MEASURES:
    if not isinstance(of.get(name), int | float):
      raise ValueError(f"no number {name!r} in the scores of {split}")
  value = float(_nll(rows, np.ones((1, len(rows))))[0])
  # Of a run that diverged neither is a number.
  if not np.isclose(value, of["nll"], rtol=0, atol=1e-4, equal_nan=True):
    raise ValueError(f"the pieces of {split} give {value:.4f} nats a token, not {of['nll']:.4f}")


def _nll(rows: np.ndarray, draws: np.ndarray) -> np.ndarray:
  """Nats a token, ends included, of each draw [draws, pieces] of rows [pieces, 2]."""
  return draws @ rows[:, 1] / (draws @ (rows[:, 0] + 1))


def _compare(table: Table, first: str, second: str, split: str) -> Comparison:
  return compare_scores(*(_scores(table.rows[row], split) for row in (first, second)))


def _scores(runs: Sequence[Record], split: str) -> Scores:
  rows = [np.array(run["sentences"][split], float) for run in runs]
  draws = draw_sentences(len(rows[0]), 1000)
  samples = np.mean([_nll(of, draws) for of in rows], axis=0)
  return Scores(np.array([run["scores"][split]["nll"] for run in runs]), samples)


# The table ---------------------------------------------------------------------------------------


def _caption(table: Table) -> str:
  records, common = table.records(), _setting(table.records()[0])
  size = lambda name: captions.each(records, lambda r: config_value(r, f"model.{name}"))
  pieces = ", ".join(f"{len(rows)} of {name}" for name, rows in records[0]["sentences"].items())
  told = f" {published()}." if _is_published(table) else ""
  return (
    f"{size('num_layers')} layers of width {size('width')}, {size('num_heads')} heads; every run "
    f"{common['updates']} updates of {common['tokens']} tokens, padding included, "
    f"{captions.minutes(records)}. {captions.origin(records)}. "
    f"{captions.of_which(records)} Pieces: {pieces}.{told}"
  )


def _is_published(table: Table) -> bool:
  return config_value(table.records()[0], "data.source") == "chorales"


def _table(table: Table, splits: Sequence[str], compare: Compare) -> list[str]:
  columns = [(split, measure) for split in splits for measure in _MEASURES]
  header = ["", "seeds", *(f"{split}, {_MEASURES[measure]}" for split, measure in columns)]
  if has_published := _is_published(table):
    header.insert(3, f"published (second hand), {splits[0]}")
  best = _ordered(table, splits[0])[0]
  rows = []
  for row, runs in table.rows.items():
    values = [
      markdown.mean_of([run["scores"][split][measure] for run in runs], _DIGITS)
      for split, measure in columns
    ]
    if has_published:
      values.insert(1, f"{PUBLISHED[row]}" if row in PUBLISHED else "-")
    above = "" if row == best else _difference(compare(row, best))
    rows.append([row, captions.seeds(runs), *values, above])
  return markdown.table([*header, f"above {best}, {splits[0]}, a token"], rows)


def _difference(comparison: Comparison) -> str:
  difference, p_value = comparison
  return f"{markdown.signed(difference, _DIGITS)}, p = {p_value:.3f}"


# Sentences ---------------------------------------------------------------------------------------


def _ordered(table: Table, split: str) -> list[str]:
  """The rows, the most probable music first."""
  mean = lambda row: statistics.fmean(run["scores"][split]["nll"] for run in table.rows[row])
  return sorted(table.rows, key=mean)


def _sentences(table: Table, split: str, compare: Compare) -> list[str]:
  rows = _ordered(table, split)
  pairs = [(b, a) for a, b in itertools.combinations(rows, 2)]
  clear = [pair for pair in pairs if compare(*pair).is_clear()]
  told = "; ".join(f"{a} above {b}: {_difference(compare(a, b))}" for a, b in clear)
  said = [f"On {split}, from the lowest to the highest: {', '.join(rows)}."]
  said.append(f"Beyond the spread: {told or 'no difference'}.")
  if hidden := len(pairs) - len(clear):
    said.append(f"Inside it: {hidden} of {len(pairs)}.")
  if _is_published(table):
    said += _beside_published(rows, compare)
    said += [_reached(row, table.rows[row], split) for row in rows if row in PUBLISHED]
  return [s for s in [*said, lone_seeds({r: len(of) for r, of in table.rows.items()})] if s]


def _beside_published(rows: Sequence[str], compare: Compare) -> list[str]:
  found = []
  there = sorted((row for row in rows if row in PUBLISHED), key=lambda row: PUBLISHED[row])
  for low, high in itertools.combinations(there, 2):
    comparison = compare(high, low)
    verdict = "is not to be seen here"
    if comparison.is_clear():
      verdict = "holds here" if comparison.difference.mean > 0 else "is the other way round here"
    found.append(
      f"The ordering quoted second hand, {low} below {high}, {verdict}; of its difference not all "
      f"need be of the positions, as instrument labels alone are quoted with {WITH_INSTRUMENTS}."
    )
  return found


def _reached(row: str, runs: Sequence[Record], split: str) -> str:
  mean = statistics.fmean(run["scores"][split]["nll"] for run in runs)
  above = round(mean, _DIGITS) - PUBLISHED[row]
  verdict = f"is {above:.{_DIGITS}f} above" if above > 0 else "reaches"
  return f"{row.capitalize()} {verdict} the {PUBLISHED[row]} quoted."


# The picture -------------------------------------------------------------------------------------


def _learning(table: Table) -> SpreadPanel:
  """Validation loss after the first tenth of the updates, whose fall would hide the rest."""
  first = math.ceil(max(point[0] for run in table.records() for point in run["curve"]) / 10)
  curves = {
    row: [point for point in learning_points(runs, 1) if point[0] >= first]
    for row, runs in table.rows.items()
  }
  return SpreadPanel("updates", "validation loss (nats per token)", curves)
