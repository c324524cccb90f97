"""What is told and drawn of classified graphs."""

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from relpos_jax.evaluation.heatmaps import Panel, counts_heatmap
from relpos_jax.evaluation.pictures import SpreadPanel, spread_curves
from relpos_jax.training.task import Evaluation

# Conditional Theorem Provers (Minervini et al. 2020), trained on chains of 2, 3 and 4: percent at
# each length, as the README of github.com/uclnlp/ctp prints them, of one seed.
CTP = dict(zip(range(2, 11), (100, 72.0, 74.0, 97.8, 96.2, 98.1, 97.8, 94.4, 89.3), strict=True))
LONGEST_TRAINED = 4  # relations of a chain
# Of the data set's splits, with the share of valid graphs that is default: the rows, and how many
# different graphs they are. Those of test_2 are in train too, and none of the others.
GRAPHS = dict(
  **dict(valid=(1_544, 247), test_2=(38, 2), test_3=(107, 7), test_4=(77, 36), test_5=(185, 185)),
  **dict(test_6=(105, 105), test_7=(155, 155), test_8=(135, 135), test_9=(124, 124)),
  test_10=(122, 122),
)
# Of these chains' rows: the answer is the most frequent in training. Records have no classes.
GUESSED_LONGEST = 63


class Row(NamedTuple):
  """A graph: its size (nodes; of CLUTRR, relations), class, answer, and the nats of its class."""

  size: int
  target: int
  answer: int
  nats: float


def evaluation(
  source: str,
  rows: Mapping[str, Sequence[Row]],
  guess: int,
  classes: Sequence[str],
  workdir: pathlib.Path,
) -> Evaluation:
  """Scores by split, beside those of who always guesses the most frequent class in training."""
  scores = {name: _score(of, guess) for name, of in rows.items()}
  results = {name: dict(graphs=len(rows[name]), **scores[name]) for name in rows}
  right = lambda row: int(row.answer == row.target)
  sentences = {name: [[row.size, right(row)] for row in of] for name, of in rows.items()}
  draw = _draw_lengths if source == "clutrr" else _draw_classes
  return Evaluation(_table(results), results, scores, sentences, (draw(rows, classes, workdir),))


def _score(rows: Sequence[Row], guess: int) -> dict[str, float]:
  percent = lambda values: 100 * statistics.fmean(values)
  return dict(
    accuracy=percent(row.answer == row.target for row in rows),
    loss=statistics.fmean(row.nats for row in rows),
    majority=percent(row.target == guess for row in rows),
  )


def _table(results: Mapping[str, Mapping[str, float | int]]) -> str:
  lines = ["split      graphs   accuracy (%)   most frequent class (%)    loss"]
  for name, of in results.items():
    values = f"{of['accuracy']:15.1f}{of['majority']:26.1f}{of['loss']:8.3f}"
    lines.append(f"{name:9}{of['graphs']:8,}{values}")
  return "\n".join(["", *lines, ""])


def _draw_lengths(rows: Mapping[str, Sequence[Row]], classes, workdir: pathlib.Path):
  tests = {name.removeprefix("test_"): of for name, of in rows.items() if name.startswith("test_")}
  right = lambda of: 100 * statistics.fmean(row.answer == row.target for row in of)
  by_length = {int(length): right(of) for length, of in tests.items()}
  curves = {"this model": by_length, "CTP": CTP}
  return spread_curves([lengths_panel({n: _lone(of) for n, of in curves.items()})],
                       workdir / "lengths.png")  # fmt: skip


def _lone(values: Mapping[int, float]):
  return [(x, y, y, y) for x, y in sorted(values.items())]


def lengths_panel(curves) -> SpreadPanel:
  """Accuracy over the length of chains: points (length, lowest, mean, highest) by name."""
  mark = LONGEST_TRAINED + 0.5, "longest in training"
  return SpreadPanel("relations in the chain", "accuracy (%)", curves, mark)


def _draw_classes(rows: Mapping[str, Sequence[Row]], classes: Sequence[str], workdir: pathlib.Path):
  """How many test graphs of each class were given each."""
  counts = np.zeros((len(classes), len(classes)), int)
  for row in rows["test"]:
    counts[row.target, row.answer] += 1
  panel = Panel("graphs of the test split", counts, classes, classes)
  return counts_heatmap(panel, workdir / "classes.png")
