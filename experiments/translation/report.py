"""Reports of translation sweeps: BLEU by row, pairs of rows, sentence lengths, learning curves."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.evaluation import statistics, tables
from experiments.evaluation.bleu import bleu_of_counts, sentence_counts
from experiments.evaluation.pictures import SpreadPanel, spread_curves
from experiments.evaluation.records import Metric, Record
from experiments.evaluation.statistics import Scores
from experiments.evaluation.tables import Rows

METRIC = Metric(
  "sacrebleu",
  lambda sentences: float(bleu_of_counts(sentence_counts(sentences[:, 1:]).sum(axis=0))),
  tolerance=0.01,
  fixed=(0, 2),
)
# Shaw et al. 2018: Table 1 is on newstest2014, Tables 2 and 3 on newstest2013.
_PAPER = {
  "table1": {
    "paper, EN-DE base": dict(relative=26.8, sinusoidal=26.5),
    "paper, EN-DE big": dict(relative=29.2, sinusoidal=27.9),
    "paper, EN-FR base": dict(relative=38.7, sinusoidal=38.2),
    "paper, EN-FR big": dict(relative=41.5, sinusoidal=41.2),
  },
  "table2": {
    "paper, EN-DE base": {
      f"k={k}": bleu
      for k, bleu in {0: 12.5, 1: 25.5, 2: 25.8, 4: 25.9, 16: 25.8, 64: 25.9, 256: 25.8}.items()
    }
  },
  "table3": {
    "paper, EN-DE base": {"keys and values": 25.8, "keys": 25.8, "values": 25.3, "neither": 12.5}
  },
}


def blocks(sweeps: Mapping[str, Rows], folder: pathlib.Path) -> dict[str, str]:
  """Returns the blocks of the page from the rows by sweep, and draws its pictures in `folder`."""
  found = {}
  for sweep, rows in sweeps.items():
    found[sweep] = _sweep(sweep, rows, folder)
    found[f"by-length-{sweep}"] = _by_length(sweep, rows, folder)
  found["no-positions"] = _no_positions(sweeps)
  return {name: text for name, text in found.items() if text}


def _sweep(sweep: str, rows: Rows, folder: pathlib.Path) -> str:
  first, splits = _first(rows), _splits(rows)
  picture = folder / f"{sweep}-learning.png"
  curves = lambda column: {row: tables.curve_points(runs, column) for row, runs in rows.items()}
  loss = SpreadPanel("updates", "validation loss (nats per token)", curves(1))
  spread_curves([loss, SpreadPanel("updates", "validation BLEU", curves(2))], picture)

  mean = lambda split, name: tables.mean_column(rows, lambda run: run["scores"][split][name])
  columns = tables.seed_columns(rows)
  for split in splits:
    columns["sacreBLEU" if split == splits[0] else f"sacreBLEU, {split}"] = mean(split, "sacrebleu")
  columns["paper's BLEU"] = mean(splits[0], "paper_bleu")
  for name, published in _PAPER.get(sweep.partition("-")[0], {}).items():
    columns[name] = {row: f"{bleu:.1f}" for row, bleu in published.items()}

  signatures = first["scores"][splits[0]]["signatures"]
  facts = {
    "data": f"{first['config']['data.source']} {first['config']['data.languages']}",
    **{f"sentences of {split}": f"{len(of):,}" for split, of in first["sentences"].items()},
    **{"sacreBLEU": signatures["sacrebleu"], "paper's BLEU": signatures["paper_bleu"]},
  }
  parts = [
    tables.column_table(sweep, rows, columns),
    tables.comparison_table(f"sacreBLEU of {splits[0]}", rows, _score(rows)),
    f"![Learning curves: {sweep}]({folder.name}/{picture.name})",
    tables.config_table(rows),
    tables.run_facts(rows, facts),
  ]
  return "\n\n".join(parts)


def _first(rows: Rows) -> Record:
  return next(iter(rows.values()))[0]


def _splits(rows: Rows) -> list[str]:
  """Returns the splits that the runs were scored on, test first."""
  return sorted(_first(rows)["scores"], key=lambda split: split != "test")


def _sentences(run: Record, splits: Sequence[str]) -> np.ndarray:
  return np.concatenate([np.array(run["sentences"][split]) for split in splits])


def _score(rows: Rows, is_in: np.ndarray | None = None, num_samples: int = 1000):
  """Computes the `Scores` of each row on test, or on the selected sentences of all splits."""
  splits, is_in = (_splits(rows)[:1], slice(None)) if is_in is None else (_splits(rows), is_in)
  counts = {
    row: np.stack([sentence_counts(_sentences(run, splits)[is_in, 1:]) for run in runs])
    for row, runs in rows.items()
  }
  draws = statistics.draw_sentences(next(iter(counts.values())).shape[1], num_samples)
  return {row: statistics.score_seeds(of, draws) for row, of in counts.items()}


def _by_length(sweep: str, rows: Rows, folder: pathlib.Path) -> str:
  """Returns the tables of BLEU by length, "" if no sentence is longer than those trained on.

  A length is that of the longer side in tokens of the vocabulary, over all splits.
  """
  trained = _first(rows)["config"]["batches.max_length"] - 1  # without the end mark
  lengths = _sentences(_first(rows), _splits(rows))[:, 0]
  is_long = lengths > trained
  if is_long.all() or not is_long.any():
    return ""
  short, long = _score(rows, ~is_long), _score(rows, is_long)
  change = {
    row: Scores(long[row].seeds - short[row].seeds, long[row].samples - short[row].samples)
    for row in rows
  }
  cells = lambda scores: {row: tables.mean_and_interval(of.seeds) for row, of in scores.items()}
  columns = {
    f"up to {trained} ({(~is_long).sum():,})": cells(short),
    f"above {trained} ({is_long.sum():,})": cells(long),
    "change": cells(change),
  }
  picture = folder / f"{sweep}-length.png"
  parts = [
    tables.column_table(f"{sweep}: tokens (sentences)", rows, columns),
    tables.comparison_table(f"above {trained}", rows, long),
    tables.comparison_table("change", rows, change),
    _bands(rows, lengths, trained, picture),
    f"![BLEU by length: {sweep}]({folder.name}/{picture.name})",
  ]
  return "\n\n".join(parts)


def _bands(rows: Rows, lengths: np.ndarray, trained: int, picture: pathlib.Path) -> str:
  """Returns the table of BLEU by bands of lengths, and draws it at each band's mean length."""
  cells, curves, smallest = [], {row: [] for row in rows}, max(20, len(lengths) // 20)
  for first, last in statistics.length_bands(lengths, trained, smallest):
    is_in = (first <= lengths) & (lengths <= last)
    seeds = {row: of.seeds for row, of in _score(rows, is_in, num_samples=0).items()}
    name = f"{first}" if first == last else f"{first} to {last}"
    means = [tables.mean_and_interval(of, digits=1) for of in seeds.values()]
    cells.append([name, f"{is_in.sum():,}", *means])
    for row, of in seeds.items():
      curves[row].append((lengths[is_in].mean(), of.min(), of.mean(), of.max()))
  mark = (trained + 0.5, "limit of training")
  spread_curves([SpreadPanel("tokens", "sacreBLEU", curves, mark)], picture)
  return tables.markdown_table(["tokens", "sentences", *rows], cells)


def _no_positions(sweeps: Mapping[str, Rows]) -> str:
  """Compares k=0, where all positions are alike, with runs without positions on the same data."""
  names = {("table2", "k=0"), ("table3", "neither")}
  pair = {row: sweeps[sweep][row] for sweep, row in sorted(names) if row in sweeps.get(sweep, {})}
  data = [_sentences(runs[0], ["test"])[:, METRIC.fixed] for runs in pair.values()]
  if len(pair) < 2 or not np.array_equal(*data):
    return ""
  return tables.comparison_table("sacreBLEU of test", pair, _score(pair))
