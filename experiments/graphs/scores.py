"""Scores of classified graphs: accuracy by split, and over the length of chains."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from experiments.evaluation.pictures import SpreadPanel, spread_curves
from experiments.evaluation.records import Metric
from experiments.files import Path
from experiments.training.task import Evaluation

# Conditional Theorem Provers (Minervini et al. 2020), trained on chains of 2, 3 and 4 relations:
# accuracy in percent by length, one seed, from the README of github.com/uclnlp/ctp.
CTP = dict(zip(range(2, 11), (100.0, 72.0, 74.0, 97.8, 96.2, 98.1, 97.8, 94.4, 89.3), strict=True))
NAME = "CTP, published"
LONGEST_TRAINED = 4  # relations of a chain
METRIC = Metric(
  "accuracy",
  lambda graphs: 100 * graphs[:, 1].mean(),
  tolerance=0.01,
  fixed=(0,),
  differs_by_seed=True,
)


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

  def percent(values: Iterable[bool]) -> float:
    return 100 * statistics.fmean(values)

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
    pictures = (draw_lengths({"this model": tests}, workdir / "lengths.png"),)
  lines = ["split      graphs   accuracy (%)   most frequent class (%)    loss"]
  for split, of in results.items():
    values = f"{of['accuracy']:15.1f}{of['majority']:26.1f}{of['loss']:8.3f}"
    lines.append(f"{split:9}{of['graphs']:8,}{values}")
  return Evaluation("\n".join(["", *lines, ""]), results, scores, sentences, pictures)


def draw_lengths(scores: Mapping[str, Mapping[int, Sequence[float]]], path: Path) -> Path:
  """Draws accuracies by row and length, over the runs, beside those of CTP."""
  scores = {**scores, NAME: {k: [accuracy] for k, accuracy in CTP.items()}}
  curves = {
    row: [(k, min(of), statistics.fmean(of), max(of)) for k, of in by_length.items()]
    for row, by_length in scores.items()
  }
  mark = LONGEST_TRAINED + 0.5, "longest in training"
  return spread_curves([SpreadPanel("relations in the chain", "accuracy (%)", curves, mark)], path)
