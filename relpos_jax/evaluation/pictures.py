"""Curves: how runs learn, what attention costs, scores over length; the look of all pictures."""

import math
import pathlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
  FixedLocator,
  LogLocator,
  MaxNLocator,
  NullLocator,
  StrMethodFormatter,
)

from relpos_jax.files import whole_file

_TRAIN, _VALID, QUIET = "#4477aa", "#cc3311", "#666666"
_MARKED: dict[str, Any] = dict(markersize=3.5, linewidth=1.8)
# Told apart by colour-blind readers too: Paul Tol's "bright" and "vibrant", and by their marks.
COLOURS = (
  *("#000000", "#4477aa", "#ee6677", "#228833", "#ccbb44"),
  *("#66ccee", "#aa3377", "#ee7733", "#009988", "#999999"),
)
_MARKERS = "osD^vPX<>*d"
DPI = 150


class CostPanel(NamedTuple):
  """One measure, such as milliseconds, over the length T: a curve of (T, measure) for each name."""

  title: str
  measure: str
  curves: Mapping[str, Sequence[tuple[float, float]]]


class SpreadPanel(NamedTuple):
  """Curves with their spread: points (x, lowest, middle, highest) for each name."""

  x: str
  y: str
  curves: Mapping[str, Sequence[tuple[float, float, float, float]]]
  mark: tuple[float, str] | None = None  # a broken line at this x, and its words


def learning_curves(
  metrics: Sequence[Mapping[str, Any]], path: str | pathlib.Path, score: str = "BLEU"
) -> pathlib.Path:
  """Draws losses, a score and learning rate over the steps.

  Args:
    metrics: records with a "step" and any of "loss", "valid_loss", `valid_` and the score in lower
      case, and "learning_rate", such as the lines of a run's metrics.jsonl. What no record has is
      left out.
    path: the picture's file; its suffix says the format.
    score: its name, such as BLEU: the higher the better.

  Returns:
    The path.

  >>> import tempfile
  >>> records = [{"step": step, "loss": 1 / step} for step in range(1, 10)]
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   learning_curves(records, folder + "/curves.png").name
  'curves.png'
  """
  loss, valid_loss = _series(metrics, "loss"), _series(metrics, "valid_loss")
  scores, rate = _series(metrics, f"valid_{score.lower()}"), _series(metrics, "learning_rate")
  heights = [2.6] + [1.8] * bool(scores) + [1.1] * bool(rate)
  figure = Figure(figsize=(7.5, 0.6 + sum(heights)), dpi=DPI, layout="constrained")
  grid = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
  axes = list(grid[:, 0])

  _draw_loss(axes[0], loss, valid_loss)
  if scores:
    _draw_scores(axes[1], score, *scores)
  if rate:
    axes[-1].plot(*rate, color=QUIET, linewidth=1.5)
    axes[-1].set(ylabel="learning rate", ylim=(0, None))
  for ax in axes:
    clean(ax)
  axes[-1].set_xlabel("step")
  axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
  axes[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
  figure.align_ylabels(axes)
  return save(figure, path)


def cost_curves(
  rows: Sequence[Sequence[CostPanel]], quiet: Collection[str], path: str | pathlib.Path
) -> pathlib.Path:
  """Draws measures over length, both on logarithmic axes, one legend for all.

  Args:
    rows: of panels side by side.
    quiet: names whose curves are broken lines: those to compare with. "a (b)" has the colour of
      "a".
    path: the picture's file; its suffix says the format.

  Returns:
    The path.

  >>> import tempfile
  >>> panel = CostPanel("forward", "milliseconds", {"chunked": [(512, 3.0), (1024, 9.0)]})
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   cost_curves([[panel]], [], folder + "/cost.png").name
  'cost.png'
  """
  names = list(dict.fromkeys(name for row in rows for panel in row for name in panel.curves))
  kinds = list(dict.fromkeys(map(_kind, names)))
  styles = {name: _style(kinds.index(_kind(name)), name in quiet) for name in names}
  columns = max([1, *map(len, rows)])
  size = (4.2 * columns, 3.2 * len(rows) + 0.25 * len(names) / columns + 0.4)
  figure = Figure(size, dpi=DPI, layout="constrained")
  grid = figure.subplots(max(1, len(rows)), columns, squeeze=False)
  for ax in grid.flat:
    ax.set_visible(False)
  for axes, row in zip(grid, rows, strict=False):
    for ax, panel in zip(axes, row, strict=False):
      _draw_cost(ax, panel, styles)
  lines = {line.get_label(): line for ax in grid.flat for line in ax.lines}
  if lines:
    handles = [lines[name] for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=2 * columns, frameon=False)
  return save(figure, path)


def spread_curves(panels: Sequence[SpreadPanel], path: str | pathlib.Path) -> pathlib.Path:
  """Draws curves, each in a band from its lowest to its highest, side by side, under one legend.

  Args:
    panels: a name has the same colour in all of them.
    path: the picture's file; its suffix says the format.

  Returns:
    The path.

  >>> import tempfile
  >>> points = [(500, 9.0, 10.0, 10.5), (1000, 19.5, 20.0, 21.0)]
  >>> panel = SpreadPanel("step", "BLEU", {"k=4": points})
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   spread_curves([panel], folder + "/spread.png").name
  'spread.png'
  """
  names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
  size = (max(5.5, 4.6 * len(panels)), 3.9 + 0.2 * len(names) / max(1, len(panels)))
  figure = Figure(size, dpi=DPI, layout="constrained")
  grid = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
  for ax, panel in zip(grid, panels, strict=False):
    for name, points in panel.curves.items():
      _draw_spread(ax, name, points, _style(names.index(name), is_quiet=False))
    _draw_mark(ax, panel.mark)
    ax.set(xlabel=panel.x, ylabel=panel.y)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    clean(ax)
  lines = {line.get_label(): line for ax in grid for line in ax.lines}
  if names:
    handles = [lines[name] for name in names]
    rows = math.ceil(len(names) / (3 * len(panels)))
    columns = math.ceil(len(names) / rows)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
  return save(figure, path)


def _draw_spread(ax: Axes, name: str, points, style: Mapping[str, Any]) -> None:
  x, low, middle, high = np.array(points, float).reshape(-1, 4).T
  ax.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
  ax.plot(x, middle, label=name, **_MARKED, **style)


def _draw_mark(ax: Axes, mark: tuple[float, str] | None) -> None:
  if mark is None:
    return
  ax.axvline(mark[0], color=QUIET, linestyle=":", linewidth=1.2, zorder=1)
  place: dict[str, Any] = dict(xycoords=("data", "axes fraction"), textcoords="offset points")
  ax.annotate(mark[1], (mark[0], 1), xytext=(4, -2), va="top", color=QUIET, fontsize=8, **place)


def _kind(name: str) -> str:
  """What shares a colour: a name without what it says in brackets."""
  return name.partition(" (")[0]


def _style(number: int, is_quiet: bool) -> dict[str, Any]:
  return dict(
    color=COLOURS[number % len(COLOURS)],
    linestyle="--" if is_quiet else "-",
    marker=_MARKERS[number % len(_MARKERS)],
    markerfacecolor="white" if is_quiet else None,
    zorder=2 if is_quiet else 3,
  )


def _draw_cost(ax: Axes, panel: CostPanel, styles: Mapping[str, Mapping[str, Any]]) -> None:
  ax.set_visible(True)
  for name, points in panel.curves.items():
    ax.plot(*zip(*points, strict=True), label=name, **_MARKED, **styles[name])
  ax.set(xscale="log", yscale="log", xlabel="T", ylabel=panel.measure)
  ax.set_title(panel.title, loc="left", fontsize=9, fontweight="bold")
  lengths = sorted({length for points in panel.curves.values() for length, _ in points})
  # Of many lengths so many are named as have room, the last among them.
  ax.xaxis.set_major_locator(FixedLocator(lengths[:: -max(1, math.ceil(len(lengths) / 5))]))
  ax.xaxis.set_minor_locator(NullLocator())
  ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
  ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  ax.yaxis.set_minor_locator(NullLocator())
  ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
  clean(ax)


def _series(metrics, name) -> tuple[np.ndarray, np.ndarray] | None:
  """Steps and values of the records that have a number of this name."""
  pairs = [(record["step"], record[name]) for record in metrics if record.get(name) is not None]
  pairs = [pair for pair in pairs if np.isfinite(pair[1])]
  return tuple(np.array(pairs, float).T) if pairs else None


def _draw_loss(ax: Axes, loss, valid_loss) -> None:
  if loss:
    steps, values = loss
    smooth = _smooth(values)
    ax.plot(steps, values, color=_TRAIN, alpha=0.35, linewidth=0.8)
    ax.plot(steps, smooth, color=_TRAIN, linewidth=1.8, label=f"training, last {smooth[-1]:.2f}")
  if valid_loss:
    last = valid_loss[1][-1]
    ax.plot(*valid_loss, "o-", color=_VALID, label=f"validation, last {last:.2f}", **_MARKED)
  ax.set_ylabel("loss (nats)")
  if loss or valid_loss:
    ax.legend(frameon=False)


def _draw_scores(ax: Axes, name: str, steps, values) -> None:
  best = int(np.argmax(values))
  label = f"validation, best {values[best]:.3g} at step {steps[best]:,.0f}"
  ax.plot(steps, values, "o-", color=_VALID, label=label, **_MARKED)
  ax.set(ylabel=name, ylim=(0, 1.15 * values[best] or 1.0))
  ax.legend(frameon=False, loc="lower right")


def _smooth(values: np.ndarray) -> np.ndarray:
  """Centred running mean over a thirtieth of the curve, over less of it at the ends."""
  window = np.ones(len(values) // 30 + 1)
  return np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")


def clean(ax: Axes) -> None:
  """The look of all curves: no box, a pale grid behind."""
  ax.spines[["top", "right"]].set_visible(False)
  ax.grid(color="#dddddd", linewidth=0.6)
  ax.set_axisbelow(True)


def save(figure: Figure, path: str | pathlib.Path) -> pathlib.Path:
  """Writes a picture whose format its file's suffix says, and returns the path."""
  path = pathlib.Path(path)
  with warnings.catch_warnings():
    # The font lacks some scripts; a box in a picture is no reason to disturb a run.
    warnings.filterwarnings("ignore", "Glyph .* missing from")
    with whole_file(path) as file:
      suffix = path.suffix.removeprefix(".") or None
      figure.savefig(file, format=suffix, bbox_inches="tight", pad_inches=0.15)
  return path
