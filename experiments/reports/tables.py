"""A sweep's section of the report: caption, table, sentences and pictures."""

import functools
import pathlib
import statistics
from collections.abc import Mapping, Sequence

from experiments.reports import captions, claims, markdown
from experiments.reports.lengths import length_section
from experiments.reports.paper import Published, published
from experiments.reports.records import Record
from experiments.reports.results import Table, config_value, setting
from experiments.reports.scored import Scored, main_split, score_table, splits_of
from relpos_jax.evaluation.pictures import SpreadPanel, spread_curves

_PACKAGES = ("python", "jax", "flax")


def section(table: Table, folder: pathlib.Path) -> list[str]:
  """The section's lines; its pictures go into folder/report."""
  paper = published(table.sweep) or Published(table.sweep, baseline=next(iter(table.rows)))
  split = main_split(table)
  scored = score_table(table, [split])
  picture = spread_curves(_learning(table), folder / "report" / f"{table.sweep}-learning.png")
  lines = [
    f"## {paper.title}",
    "",
    _caption(table, split),
    "",
    *_main_table(table, scored, paper, split),
    "",
    " ".join(_sentences(table, scored, paper)),
    "",
  ]
  lines += captions.not_finite(table)
  lines += captions.set_apart(table)
  lines += [f"![Learning curves: {paper.title}](report/{picture.name})", ""]
  return lines + length_section(table, paper.title, folder)


# The caption -------------------------------------------------------------------------------------


def _caption(table: Table, split: str) -> str:
  records, common = table.records(), setting(table.records()[0])
  of = records[0]["scores"][split]
  data = [config_value(records[0], f"data.{name}") for name in ("source", "languages")]
  return (
    f"{' '.join(data)}, every run {common['updates']} updates of {common['tokens']} tokens, "
    f"{captions.minutes(records)}. {captions.origin(records, _PACKAGES)}. "
    f"{captions.of_which(records)} "
    f"BLEU of {len(records[0]['sentences'][split]):,} sentences of {split}: "
    f"sacreBLEU {of['signatures']['sacrebleu']}, the paper's {of['signatures']['paper_bleu']}."
  )


# The table ---------------------------------------------------------------------------------------


def _main_table(table: Table, scored: Scored, paper: Published, split: str) -> list[str]:
  others = [name for name in splits_of(table) if name != split]
  header = ["", "seeds", "valid loss", "sacreBLEU", *(f"sacreBLEU, {name}" for name in others)]
  header += ["paper's BLEU", "difference", "p", *paper.columns]
  rows = []
  for row, runs in table.rows.items():
    score = lambda split, kind, runs=runs: [run["scores"][split][kind] for run in runs]
    rows.append(
      [
        *(row, captions.seeds(runs)),
        captions.valid_loss(runs, markdown.mean_of),
        *(markdown.mean_of(score(name, "sacrebleu")) for name in [split, *others]),
        markdown.mean_of(score(split, "paper_bleu")),
        *_against(row, scored, paper),
        *(_published(column, row) for column in paper.columns.values()),
      ]
    )
  return markdown.table(header, rows)


def _against(row: str, scored: Scored, paper: Published) -> list[str]:
  """The difference from the row to compare with, and its p; that row itself has none."""
  other = paper.baselines.get(row, paper.baseline)
  if other == row or other not in scored.rows:
    return ["", ""]
  difference, p_value = scored.compare(row, other)
  return [f"{markdown.signed(difference)} from {other}", f"{p_value:.3f}"]


def _published(column: Mapping[str, float], row: str) -> str:
  return f"{column[row]:.1f}" if row in column else "-"


def _sentences(table: Table, scored: Scored, paper: Published) -> list[str]:
  compare, rows = functools.cache(scored.compare), list(table.rows)
  if paper.columns:
    column = next(iter(paper.columns.values()))
    said = [claims.ordering({row: column[row] for row in rows if row in column}, compare)]
    said += [claims.no_gain(*pair, compare) for pair in paper.no_gain if {*pair} <= {*rows}]
    if not {*rows} <= {*column}:
      said.append(f"Among all rows, {claims.differences(rows, compare)}")
  else:
    said = [f"The paper has no such table. Here, {claims.differences(rows, compare)}"]
  return [s for s in [*said, claims.lone_seeds({r: len(of) for r, of in table.rows.items()})] if s]


def _learning(table: Table) -> list[SpreadPanel]:
  """Validation loss and BLEU over updates: the mean over seeds, from the lowest to the highest."""
  curves = lambda column: {row: learning_points(runs, column) for row, runs in table.rows.items()}
  return [
    SpreadPanel("updates", "validation loss (nats per token)", curves(1)),
    SpreadPanel("updates", "validation BLEU", curves(2)),
  ]


def learning_points(runs: Sequence[Record], column: int) -> list[tuple[float, float, float, float]]:
  """Update, lowest, mean and highest over runs of a column of their curves, those there are."""
  values: dict[int, list[float]] = {}
  for point in (point for run in runs for point in run["curve"] if point[column] is not None):
    values.setdefault(point[0], []).append(point[column])
  return [(step, min(of), statistics.fmean(of), max(of)) for step, of in sorted(values.items())]
