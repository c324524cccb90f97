"""The section of a table about lengths that its runs were not trained on."""

import functools
import math
import pathlib
from collections.abc import Mapping

import numpy as np

from experiments.reports import claims, markdown
from experiments.reports.results import Table, config_value
from experiments.reports.scored import Scored, inside, lengths_of, score_table, splits_of
from relpos_jax.evaluation.pictures import SpreadPanel, spread_curves
from relpos_jax.evaluation.statistics import Scores, length_bands, student_interval


def length_section(table: Table, title: str, folder: pathlib.Path) -> list[str]:
  """Its lines, none if no sentence is longer than those trained on; a picture in folder/report."""
  splits = splits_of(table)
  trained = config_value(table.records()[0], "batches.max_length") - 1  # without the end mark
  lengths = lengths_of(table.records()[0], splits)
  if not (lengths > trained).any() or not (lengths <= trained).any():
    return []
  bands = length_bands(lengths, trained, smallest=max(20, len(lengths) // 20))
  scores = {band: score_table(table, splits, band, num_samples=0) for band in bands}
  within = score_table(table, splits, (0, trained))
  above = score_table(table, splits, (trained + 1, math.inf))
  picture = folder / "report" / f"{table.sweep}-length.png"
  spread_curves([_length_panel(lengths, scores, trained)], picture)
  return [
    f"### By length: {title}",
    "",
    f"Tokens of the vocabulary, of a sentence's longer side. Training lets in up to {trained}: so "
    f"long are {within.num_sentences:,} sentences, longer {above.num_sentences:,}. SacreBLEU.",
    "",
    *_two_sides(within, above, trained),
    "",
    _length_sentences(within, above, trained),
    "",
    *_band_table(scores),
    "",
    f"![BLEU by length: {title}](report/{picture.name})",
    "",
  ]


def _two_sides(within: Scored, above: Scored, trained: int) -> list[str]:
  rows = []
  for row, short in within.rows.items():
    long = above.rows[row]
    of_both = (markdown.mean_of(of.seeds) for of in (short, long))
    change = student_interval(_change(short, long).seeds)
    rows.append([row, *of_both, markdown.signed(change)])
  return markdown.table(["", f"up to {trained}", f"above {trained}", "change"], rows)


def _length_sentences(within: Scored, above: Scored, trained: int) -> str:
  rows = list(above.rows)
  change = Scored(0, {row: _change(within.rows[row], above.rows[row]) for row in rows})
  return (
    "The paper says of clipping that it lets a model generalise to lengths unseen in training, and "
    f"gives no numbers. Above {trained} tokens, "
    f"{claims.differences(rows, functools.cache(above.compare))} In the change, where a smaller "
    f"loss is above a greater one, {claims.differences(rows, functools.cache(change.compare))}"
  )


def _change(short: Scores, long: Scores) -> Scores:
  """Of each seed, and of samples that are drawn of short and of long sentences apart."""
  return Scores(long.seeds - short.seeds, long.samples - short.samples)


def _band_table(scores: Mapping[tuple[int, int], Scored]) -> list[str]:
  rows = [
    [
      *(_band_name(*band), f"{scored.num_sentences:,}"),
      *(markdown.mean_of(of.seeds, digits=1) for of in scored.rows.values()),
    ]
    for band, scored in scores.items()
  ]
  names = next(iter(scores.values())).rows
  return markdown.table(["tokens", "sentences", *names], rows)


def _band_name(first: int, last: int) -> str:
  return f"{first}" if first == last else f"{first} to {last}"


def _length_panel(
  lengths: np.ndarray, scores: Mapping[tuple[int, int], Scored], trained: int
) -> SpreadPanel:
  """BLEU at each band's mean length: the mean over seeds, from the lowest to the highest."""
  curves: dict[str, list[tuple[float, float, float, float]]] = {}
  for band, scored in scores.items():
    middle = float(lengths[inside(lengths, band)].mean())
    for row, (seeds, _) in scored.rows.items():
      point = (middle, float(seeds.min()), float(seeds.mean()), float(seeds.max()))
      curves.setdefault(row, []).append(point)
  return SpreadPanel("tokens", "sacreBLEU", curves, (trained + 0.5, "limit of training"))
