"""Curves show what they were given, read through the text of their SVG form."""

import subprocess
import sys

import matplotlib
import matplotlib.image
import numpy as np
import pytest

from relpos_jax.evaluation.pictures import (
  CostPanel,
  SpreadPanel,
  _smooth,
  cost_curves,
  learning_curves,
  spread_curves,
)

RECORDS = [
  *({"step": step, "loss": 5 / step, "learning_rate": step / 1000} for step in range(1, 101)),
  {"step": 50, "valid_loss": 0.3, "valid_bleu": 12.25},
  {"step": 100, "valid_loss": 0.2345, "valid_bleu": None},
  {"step": 101, "loss": float("nan")},
]


def test_curves_show_every_series(words_of):
  words = words_of(learning_curves, RECORDS)
  assert "training, last 0.05" in words
  assert "validation, last 0.23" in words
  assert "validation, best 12.2 at step 50" in words
  assert {"step", "BLEU", "learning rate", "loss (nats)"} <= set(words)


def test_curves_leave_out_what_was_not_measured(words_of):
  words = words_of(learning_curves, [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
  assert "BLEU" not in words and "learning rate" not in words
  assert not any("validation" in word for word in words)


@pytest.mark.parametrize(
  "records",
  [[], [{"step": 1, "loss": 3.0}], [{"step": 1, "loss": float("nan"), "valid_bleu": 0.0}]],
)
def test_curves_of_almost_nothing(records, tmp_path):
  assert learning_curves(records, tmp_path / "curves.png").stat().st_size > 0


@pytest.mark.parametrize("length", [1, 2, 29, 30, 1000])
def test_smoothing_is_a_mean(length):
  values = np.random.default_rng(length).normal(size=length)
  smooth = _smooth(values)
  assert smooth.shape == values.shape
  assert values.min() <= smooth.min() and smooth.max() <= values.max()
  np.testing.assert_allclose(_smooth(np.full(length, 2.5)), 2.5)


def test_costs_are_drawn_over_length_with_one_legend(words_of):
  time = CostPanel("forward", "milliseconds", {"a": [(32, 0.5), (4096, 2e6)], "a (b)": [(32, 1)]})
  memory = CostPanel("forward", "MiB", {"a": [(32, 3)], "c": [(32, 4)]})
  words = words_of(cost_curves, [[time, memory], [time]], ["c"])
  assert {"32", "4,096", "1,000,000", "milliseconds", "MiB"} <= set(words)
  assert [word for word in words if word in ("a", "a (b)", "c")] == ["a", "a (b)", "c"]
  assert words.count("forward") == 3


@pytest.mark.parametrize("rows", [[], [[]], [[CostPanel("forward", "MiB", {})]]])
def test_costs_of_nothing(rows, tmp_path):
  assert cost_curves(rows, [], tmp_path / "cost.png").stat().st_size > 0


def test_spreads_are_drawn_side_by_side_with_one_legend(words_of):
  points = [(500, 1.0, 2.0, 4.0), (1000, 3.0, 4.0, 5.0)]
  loss = SpreadPanel("updates", "loss", {"k=4": points, "k=16 (all)": points})
  bleu = SpreadPanel("updates", "BLEU", {"none": points[:1]}, mark=(750.0, "longest"))
  words = words_of(spread_curves, [loss, bleu])
  assert {"loss", "BLEU", "longest", "1,000"} <= set(words) and words.count("updates") == 2
  names = ("k=4", "k=16 (all)", "none")
  assert [word for word in words if word in names] == [*names]


def test_a_band_reaches_from_the_lowest_to_the_highest(tmp_path):
  def height_of_colour(low: float, high: float) -> int:
    points = [(x, low, 50.0, high) for x in (0, 1)]
    limits = SpreadPanel("x", "y", {"a": [(0, 0, 0, 0), (1, 100, 100, 100)], "b": points})
    image = matplotlib.image.imread(spread_curves([limits], tmp_path / "spread.png"))
    middle = image[:, image.shape[1] // 2, :3]
    return int(np.sum(middle[:, 2] - middle[:, 0] > 0.05))

  narrow, wide = height_of_colour(45.0, 55.0), height_of_colour(20.0, 55.0)
  assert 2.5 < wide / narrow < 4.5


@pytest.mark.parametrize("curves", [None, {}, {"a": []}])
def test_spreads_of_nothing(curves, tmp_path):
  panels = [] if curves is None else [SpreadPanel("x", "y", curves)]
  assert spread_curves(panels, tmp_path / "spread.png").stat().st_size > 0


def test_no_window_system_is_touched():
  """pyplot would choose a backend for the whole process."""
  code = "import relpos_jax.evaluation.pictures, sys; sys.exit('matplotlib.pyplot' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
