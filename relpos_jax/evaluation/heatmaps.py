"""Matrices as pictures: where models look, and which class was taken for which."""

import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from relpos_jax.evaluation.pictures import DPI, QUIET, Axes, Figure, save
from relpos_jax.typing import ArrayLike, Float

_POINTS_PER_INCH = 72
_MOST_PIXELS = 8_000  # of a side, beyond which few programs open a picture


class Panel(NamedTuple):
  """One matrix of attention weights, and the words of its rows (queries) and columns (keys)."""

  title: str
  weights: Float[ArrayLike, "T S"]
  rows: Sequence[str]
  columns: Sequence[str]


def attention_heatmap(panels: Sequence[Panel], path: str | pathlib.Path) -> pathlib.Path:
  """Draws attention weights, words on their axes, side by side on one colour scale.

  Args:
    panels: one to three are readable, of five to forty words an axis.
    path: the picture's file; its suffix says the format.

  Returns:
    The path.

  Raises:
    ValueError: no panels, or weights of another shape than the words.

  >>> import tempfile
  >>> words = ["Ein", "Hund", "schläft", "."]
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   attention_heatmap([Panel("Encoder", np.eye(4), words, words)], folder + "/a.png").name
  'a.png'
  """
  if not panels:
    raise ValueError("panels is empty: give at least one")
  for title, weights, rows, columns in panels:
    if np.shape(weights) != (len(rows), len(columns)):
      raise ValueError(
        f"{title}: weights {np.shape(weights)} for {len(rows)} rows and {len(columns)} columns"
      )
  longest = max(max(len(panel.rows), len(panel.columns)) for panel in panels)
  cell = float(np.clip(8.0 / longest, 0.09, 0.45))
  fontsize = min(11.0, 0.6 * cell * _POINTS_PER_INCH)
  widths = [len(panel.columns) * cell for panel in panels]
  size = _size(panels, cell, fontsize)
  figure = Figure(size, dpi=min(DPI, _MOST_PIXELS / max(size)), layout="constrained")
  axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
  highest = float(max(np.max(panel.weights) for panel in panels))
  for ax, panel, width in zip(axes, panels, widths, strict=True):
    image = _draw_weights(ax, panel, highest, fontsize)
    title = textwrap.fill(panel.title, max(26, int(10 * width)), break_on_hyphens=False)
    ax.set_title(title, loc="left", fontsize=12, fontweight="bold", parse_math=False)
  # Without panchor=False the bar would centre the panels again, which are aligned at the top.
  bar = figure.colorbar(
    image, ax=list(axes), anchor=(0, 1), panchor=False, shrink=0.6, aspect=25, pad=0.02
  )
  bar.set_label("attention weight")
  bar.outline.set_visible(False)
  return save(figure, path)


def counts_heatmap(panel: Panel, path: str | pathlib.Path) -> pathlib.Path:
  """Draws how many of each class (rows) were given which (columns), the numbers in the cells.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   counts_heatmap(Panel("test", [[5, 1], [0, 7]], "ab", "ab"), folder + "/c.png").name
  'c.png'
  """
  counts = np.asarray(panel.weights)
  side = 1.6 + 0.45 * len(panel.rows)
  figure = Figure((side + 0.6, side), dpi=DPI, layout="constrained")
  ax = figure.subplots()
  _draw_weights(ax, panel, float(max(1, counts.max())), fontsize=9.0)
  for (row, column), number in np.ndenumerate(counts):
    colour = "white" if 2 * number > counts.max() else "black"
    ax.text(column + 0.5, row + 0.5, f"{number:,}", ha="center", va="center", color=colour)
  ax.set(ylabel="class", xlabel="answer")
  ax.set_title(panel.title, loc="left", fontsize=10)
  return save(figure, path)


def _draw_weights(ax: Axes, panel: Panel, highest: float, fontsize: float):
  _, weights, rows, columns = panel
  image = ax.pcolormesh(
    np.asarray(weights), cmap="Blues", vmin=0.0, vmax=highest, edgecolors="white", linewidth=0.4
  )
  # Words are no formulas, whatever dollars they have.
  text: dict[str, Any] = dict(fontsize=fontsize, parse_math=False)
  ax.set_yticks(np.arange(len(rows)) + 0.5, rows, **text)
  ax.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=90, **text)
  ax.tick_params(length=0)
  ax.xaxis.tick_top()
  ax.invert_yaxis()
  ax.set_aspect("equal", anchor="N")
  ax.spines[:].set_visible(False)
  ax.set_ylabel("query", color=QUIET)
  ax.set_xlabel("key", color=QUIET)
  return image


def _size(panels: Sequence[Panel], cell: float, fontsize: float) -> tuple[float, float]:
  """Inches for the cells, their words and a margin; a letter is 0.6 of the font size wide."""
  letter = 0.6 * fontsize / _POINTS_PER_INCH
  inches = lambda words, others: len(words) * cell + max(map(len, others)) * letter
  width = sum(inches(panel.columns, panel.rows) + 0.6 for panel in panels)
  height = max(inches(panel.rows, panel.columns) for panel in panels)
  return width + 1.0, height + 1.0
