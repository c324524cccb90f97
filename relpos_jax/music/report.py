"""Reports of music sweeps: negative log-likelihood by row, pairs of rows, learning curves."""

import pathlib
from collections.abc import Callable, Mapping

import numpy as np

from relpos_jax.evaluation import tables
from relpos_jax.evaluation.pictures import SpreadPanel, spread_curves
from relpos_jax.evaluation.records import Metric
from relpos_jax.evaluation.statistics import Scores, compare_scores, draw_sentences
from relpos_jax.evaluation.tables import Rows
from relpos_jax.music.scores import PUBLISHED

_MEASURES = {"nll": "a token", "without_ends": "without ends", "per_step": "a step"}
_DIGITS = 3


def _nats_per_token(pieces: np.ndarray, draws: np.ndarray) -> np.ndarray:
  """Computes nats per token, ends included, of each draw [draws, pieces] of pieces [pieces, 2]."""
  return draws @ pieces[:, 1] / (draws @ (pieces[:, 0] + 1))


METRIC = Metric(
  "nll",
  lambda pieces: float(_nats_per_token(pieces, np.ones((1, len(pieces))))[0]),
  tolerance=1e-4,
  fixed=(0,),
)


def write(sweeps: Mapping[str, Rows], folder: pathlib.Path) -> pathlib.Path:
  """Writes the blocks of folder/music.md, the rows by sweep, and pictures in folder/music."""
  (folder / "music").mkdir(exist_ok=True)
  blocks = {sweep: _sweep(sweep, rows, folder) for sweep, rows in sweeps.items()}
  tables.rewrite_blocks(folder / "music.md", blocks)
  return folder / "music.md"


def _sweep(sweep: str, rows: Rows, folder: pathlib.Path) -> str:
  first = next(iter(rows.values()))[0]
  splits, config = [*first["scores"]], first["config"]
  picture = folder / "music" / f"{sweep}-learning.png"
  spread_curves([_learning(rows)], picture)
  facts = {f"pieces of {split}": len(of) for split, of in first["sentences"].items()}
  facts |= {name: config[f"model.{name}"] for name in ("num_layers", "width", "num_heads")}
  columns = tables.seed_columns(rows)
  for split, name in ((split, name) for split in splits for name in _MEASURES):
    nats = lambda run, split=split, name=name: run["scores"][split][name]
    columns[f"{split}, {_MEASURES[name]}"] = tables.mean_column(rows, nats, _DIGITS)
  if config["data.source"] == "chorales":
    published = {row: str(nats) for row, nats in PUBLISHED.items()}
    columns["published (second hand), valid, a token"] = published
  title = f"{splits[0]}, a token, row - column"
  parts = [
    tables.column_table(sweep, rows, columns),
    tables.pair_table(title, [*rows], _compare(rows, splits[0])),
    f"![Learning curves: {sweep}](music/{picture.name})",
    tables.config_table(rows),
    tables.run_facts(rows, facts),
  ]
  return "\n\n".join(parts)


def _compare(rows: Rows, split: str) -> Callable[[str, str], str]:
  """Compares rows over the runs whose likelihood is finite; a dash if a row has none."""
  finite = lambda runs: [run for run in runs if np.isfinite(run["scores"][split]["nll"])]
  runs_of = {row: finite(runs) for row, runs in rows.items() if finite(runs)}
  scores = {}
  for row, runs in runs_of.items():
    pieces = [np.array(run["sentences"][split], float) for run in runs]
    draws = draw_sentences(len(pieces[0]))
    samples = np.mean([_nats_per_token(of, draws) for of in pieces], axis=0)
    scores[row] = Scores(np.array([run["scores"][split]["nll"] for run in runs]), samples)
  compare = lambda a, b: tables.format_comparison(compare_scores(scores[a], scores[b]), _DIGITS)
  return lambda a, b: compare(a, b) if {a, b} <= {*scores} else "-"


def _learning(rows: Rows) -> SpreadPanel:
  """Returns valid loss after the first tenth of the updates, whose fall would hide the rest."""
  first = max(step for runs in rows.values() for run in runs for step, *_ in run["curve"]) / 10
  curves = {
    row: [point for point in tables.curve_points(runs, 1) if point[0] >= first]
    for row, runs in rows.items()
  }
  return SpreadPanel("updates", "validation loss (nats per token)", curves)
