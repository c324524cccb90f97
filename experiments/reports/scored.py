"""BLEU of a table's rows on the same sentences."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.reports.records import Record
from experiments.reports.results import Table, split_counts, split_lengths
from relpos_jax.evaluation.statistics import (
  Comparison,
  Scores,
  compare_scores,
  draw_sentences,
  score_seeds,
)

Band = tuple[float, float]  # the first length and the last
_ALL: Band = (0, math.inf)


class Scored(NamedTuple):
  """The same sentences' BLEU by row."""

  num_sentences: int
  rows: Mapping[str, Scores]

  def compare(self, first: str, second: str) -> Comparison:
    """How much one row is above another."""
    return compare_scores(self.rows[first], self.rows[second])


def score_table(
  table: Table, splits: Sequence[str], band: Band = _ALL, num_samples: int = 1000
) -> Scored:
  """BLEU of each row on the sentences of these splits whose length is in the band."""
  counts = {
    row: np.stack([_counts(run, splits, band) for run in runs]) for row, runs in table.rows.items()
  }
  num_sentences = next(iter(counts.values())).shape[1]
  draws = draw_sentences(num_sentences, num_samples)
  return Scored(num_sentences, {row: score_seeds(of, draws) for row, of in counts.items()})


def _counts(run: Record, splits: Sequence[str], band: Band) -> np.ndarray:
  counts = np.concatenate([split_counts(run, split) for split in splits])
  return counts[inside(lengths_of(run, splits), band)]


def inside(lengths: np.ndarray, band: Band) -> np.ndarray:
  """Which of the lengths are in the band."""
  return (band[0] <= lengths) & (lengths <= band[1])


def lengths_of(run: Record, splits: Sequence[str]) -> np.ndarray:
  """The length of each sentence of these splits."""
  return np.concatenate([split_lengths(run, split) for split in splits])


def main_split(table: Table) -> str:
  """The split whose BLEU the table shows first: test, if there is one."""
  splits = splits_of(table)
  return "test" if "test" in splits else splits[0]


def splits_of(table: Table) -> list[str]:
  """The splits that all runs of the table were scored on."""
  return list(table.records()[0]["scores"])
