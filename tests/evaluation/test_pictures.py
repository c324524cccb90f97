"""Pictures show their data and labels, read from the text of their SVG form."""

import html
import re

import matplotlib
import matplotlib.image
import numpy as np
import pytest

from experiments.evaluation import pictures
from experiments.evaluation.pictures import (
  Panel,
  SpreadPanel,
  attention_heatmap,
  learning_curves,
  spread_curves,
)

RECORDS = [
  {"step": step, "loss": 5 / step, "learning_rate": step / 1000}
  for step in range(1, 101)
]
RECORDS += [
  {"step": 50, "valid_loss": 0.3, "valid_bleu": 12.25},
  {"step": 100, "valid_loss": 0.2345, "valid_bleu": None},
  {"step": 101, "loss": float("nan")},
]


@pytest.fixture
def words_of(tmp_path):
  """Draws a picture and returns the texts in it."""

  def draw(function, *args):
    path = tmp_path / "picture.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
      assert function(*args, path) == path
    texts = re.findall("<text[^>]*>(.*?)</text>", path.read_text(encoding="utf-8"))
    return [html.unescape(text) for text in texts]

  return draw


@pytest.fixture
def figures(monkeypatch):
  """Returns a list that takes figures in place of files."""
  figures = []

  def save(figure, path):
    figures.append(figure)
    return path

  monkeypatch.setattr(pictures, "save", save)
  return figures


def test_a_scheme_has_the_same_colour_and_marker_in_every_picture(figures, tmp_path):
  def styles(*names):
    curves = {name: {250: [99.0, 100.0], 500: [99.0, 100.0]} for name in names}
    panel = SpreadPanel("updates", "BLEU", curves, ticks=[250, 500])
    spread_curves([panel], tmp_path / "picture.png")
    (ax,) = figures.pop().axes
    styles = {}
    for line in ax.lines:
      look = line.get_color(), line.get_marker(), line.get_linestyle()
      styles[line.get_label()] = look
    return styles

  one = styles("relative", "xl", "mine")
  other = styles("mine", "other", "xl", "relative, k=16")
  assert other["xl"] == one["xl"]
  assert other["relative, k=16"] == one["relative"]
  assert len({*other.values()}) == 4
  names = [*pictures.SCHEMES, "mine"]
  assert len({*styles(*names).values()}) == len(names)
  kind = styles("relative, k=16", "relative, k=4", "relative, k=8").values()
  assert len({look[:2] for look in kind}) == 1
  assert [look[2] for look in kind] == ["-", "--", ":"]


def test_plots_of_one_quantity_share_an_axis_that_has_all_values(figures, tmp_path):
  panels = []
  for values in ((50.0, 70.0), (10.0, 95.0)):
    curves = {"mine": dict(enumerate([value] for value in values))}
    panels.append(SpreadPanel("length", "accuracy (%)", curves))
  spread_curves(panels, tmp_path / "picture.png")
  first, second = (ax.get_ylim() for ax in figures.pop().axes)
  assert first == second
  assert 0 <= first[0] < 10
  assert 95 < first[1] <= 100


def test_curves_show_every_series(words_of):
  words = words_of(learning_curves, RECORDS)
  wanted = {"training", "validation", "BLEU", "learning rate", "loss (nats)"}
  assert wanted <= {*words}
  assert words.count("step") == 3


@pytest.mark.parametrize(
  "records", [[], [{"step": 1, "loss": float("nan"), "valid_bleu": 0.0}]]
)
def test_almost_empty_curves_are_drawn(records, tmp_path):
  assert learning_curves(records, tmp_path / "curves.png").stat().st_size > 0


def test_spreads_are_drawn_side_by_side_with_one_legend(words_of):
  values = {500: [1.0, 1.0, 4.0], 1000: [3.0, 4.0, 5.0]}
  loss = SpreadPanel("updates", "loss", {"k=4": values, "k=16 (all)": values})
  bleu = SpreadPanel("updates", "BLEU", {"none": {500: [2.0]}}, mark=(750.0, "longest"))
  words = words_of(spread_curves, [loss, bleu])
  assert {"loss", "BLEU", "longest", "1,000"} <= {*words}
  assert words.count("updates") == 2
  names = ("k=4", "k=16 (all)", "none")
  assert [word for word in words if word in names] == [*names]


def test_words_label_the_axes_unchanged(words_of):
  rows = ["Käse", "kostet", "$x^2$", "3_4"]
  columns = ["Straße", r"\alpha", "_", "$5", "</s>"]
  panel = Panel("1 $ a_b $", np.eye(4, 5), rows, columns)
  words = words_of(attention_heatmap, [panel, Panel("2", [[0.1]], "a", "b")])
  assert [word for word in words if word in rows] == rows
  assert [word for word in words if word in columns] == columns
  assert [word for word in words if word in ("1 $ a_b $", "2")] == ["1 $ a_b $", "2"]
  assert words.count("attention weight") == 1


def test_rows_run_down_and_columns_to_the_right(tmp_path):
  weights = np.zeros((6, 4))
  weights[5, 1] = 1.0
  panel = Panel("", weights, "abcdef", "ab犬😀")
  path = attention_heatmap([panel], tmp_path / "attention.png")
  red = matplotlib.image.imread(path)[:, :, 0]
  is_dark = (red > 0.02) & (red < 0.05)
  is_dark[:, int(0.75 * is_dark.shape[1]) :] = False  # the colour bar
  y, x = np.mean(np.argwhere(is_dark), axis=0) / is_dark.shape
  assert 0.7 < y < 1.0
  assert 0.2 < x < 0.45
