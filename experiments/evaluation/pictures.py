"""Pictures: learning curves, costs and scores over length, attention.

The suffix of a picture's path selects its format.
"""

import itertools
import math
import statistics
import textwrap
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.files import Path, whole_file
from relpos_jax.typing import ArrayLike, Float

# Pictures are transparent: this grey of words and axes, and the colours of curves, are
# readable on white and on dark pages.
GREY = "#808080"
# After Paul Tol's "bright" and "vibrant". Markers help readers who are colour-blind.
COLOURS = (
  *("#4477aa", "#228833", "#ee6677", "#888888", "#b39b24"),
  *("#3ba4cc", "#b8459a", "#ee7733", "#009988", "#a0643c", "#7a66cc"),
)
_MARKERS = "osD^vPX<>*d"
# Schemes of positions have the first colours, the same ones in all pictures.
SCHEMES = (
  *("relative", "both", "sinusoidal", "none", "alibi"),
  *("rotary", "t5", "xl", "content", "deberta"),
)


class CostPanel(NamedTuple):
  """A measure, such as milliseconds, over the length T: a curve of (T, measure) for each name."""

  title: str
  measure: str
  curves: Mapping[str, Sequence[tuple[float, float]]]


class Panel(NamedTuple):
  """A matrix, and the labels of its rows and columns (for attention weights, queries and keys)."""

  title: str
  weights: Float[ArrayLike, "T S"]
  rows: Sequence[str]
  columns: Sequence[str]


class SpreadPanel(NamedTuple):
  """Curves with their spread: the values at each x, for each name."""

  x: str
  y: str
  curves: Mapping[str, Mapping[float, Sequence[float]]]
  mark: tuple[float, str] | None = None  # a dotted line at this x, and its label
  ticks: Sequence[Any] = ()  # of x; at most about five are drawn


def learning_curves(
  metrics: Sequence[Mapping[str, Any]], path: Path, score: str = "BLEU", title: str = ""
) -> Path:
  """Draws the losses, the score and the learning rate over the steps, and returns the
  path.

  `metrics` are the lines of a run's metrics.jsonl: a "step" and any of "loss",
  "valid_loss", "learning_rate", and "valid_" with the name of the score in lower case.
  """
  names = {
    "loss (nats)": dict(training="loss", validation="valid_loss"),
    score: dict(validation=f"valid_{score.lower()}"),
    "learning rate": dict(training="learning_rate"),
  }
  evaluated = [line["step"] for line in metrics if "valid_loss" in line]
  panels = []
  for measure, of in names.items():
    curves = {side: _stretches(metrics, name) for side, name in of.items()}
    panels.append(SpreadPanel("step", measure, curves, ticks=evaluated))
  loss, *others = panels
  drawn = [loss, *(panel for panel in others if any(panel.curves.values()))]
  return spread_curves(drawn, path, title)


def _stretches(
  metrics: Sequence[Mapping[str, Any]], name: str
) -> dict[float, list[float]]:
  """Returns the finite values in at most 40 stretches, by the mean step of each."""
  values = [
    (line["step"], line[name]) for line in metrics if line.get(name) is not None
  ]
  finite = np.array([pair for pair in values if np.isfinite(pair[1])], float).reshape(
    -1, 2
  )
  stretches = np.array_split(finite, min(40, len(finite)) or 1)
  return {x.mean(): y.tolist() for x, y in (of.T for of in stretches) if len(x)}


def cost_curves(
  rows: Sequence[Sequence[CostPanel]], dashed: Collection[str], path: Path
) -> Path:
  """Draws rows of panels on logarithmic axes, with one legend, and returns the path.

  Curves of the names in `dashed`, the baselines, are dashed. "a (b)" has the colour of
  "a".
  """
  from matplotlib.ticker import LogLocator

  names = list(
    dict.fromkeys(name for row in rows for panel in row for name in panel.curves)
  )
  styles = _styles(names, dashed)
  columns = max(map(len, rows))
  figure = make_figure(
    4.2 * columns, 3.2 * len(rows) + 0.25 * len(names) / columns + 0.4
  )
  grid = figure.subplots(len(rows), columns, squeeze=False)
  for ax, panel in itertools.chain.from_iterable(
    map(itertools.zip_longest, grid, rows)
  ):
    if panel is None:
      ax.set_visible(False)
      continue
    for name, points in panel.curves.items():
      ax.plot(*zip(*points, strict=True), label=name, **styles[name])
    ax.set(xscale="log", yscale="log", xlabel="T", ylabel=panel.measure)
    ax.set_title(panel.title, loc="left", fontsize=9, fontweight="bold")
    lengths = sorted(
      {length for points in panel.curves.values() for length, _ in points}
    )
    ax.set_xticks(_few(lengths))
    ax.minorticks_off()
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:,.10g}")
    clean(ax)
  return _save_with_legend(figure, names, 2 * columns, path)


def spread_curves(
  panels: Sequence[SpreadPanel],
  path: Path,
  title: str = "",
  faint: Collection[str] = (),
) -> Path:
  """Draws panels side by side with one legend, and returns the path.

  A curve shows the means, in a band from the lowest to the highest values; the `faint`
  curves are thin and have no band. A name has the same colour in all panels. A scheme
  of positions, "a" or "a, b", has it in all pictures; further curves of one scheme are
  dashed.
  """
  names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
  styles = _styles(names, _repeated(names))
  height = 3.9 + 0.2 * len(names) / len(panels) + 0.3 * bool(title)
  figure = make_figure(max(5.5, 4.6 * len(panels)), height)
  axes = figure.subplots(1, len(panels), squeeze=False)[0]
  for ax, panel in zip(axes, panels, strict=True):
    for name, values in panel.curves.items():
      thin = dict(linewidth=0.8, markersize=2.5, zorder=2) if name in faint else {}
      _draw_spread(ax, name, values, styles[name] | thin, has_band=name not in faint)
    _finish(ax, panel)
    ax.set(xlabel=panel.x, ylabel=panel.y)
  if title:
    figure.suptitle(title, fontsize=10)
  rows = math.ceil(len(names) / (3 * len(panels)))
  return _save_with_legend(figure, names, math.ceil(len(names) / rows), path)


def small_multiples(panel: SpreadPanel, path: Path, title: str = "") -> Path:
  """Draws a small panel for each curve, with the others thin and grey, and returns the path."""
  styles = _styles([*panel.curves])
  columns = math.ceil(len(panel.curves) / 2)
  figure = make_figure(1.9 * columns, 4.6)
  grid = figure.subplots(2, columns, sharex=True, sharey=True)
  for ax, name in itertools.zip_longest(grid.flat, panel.curves):
    if name is None:
      ax.set_visible(False)
      continue
    for other in panel.curves.keys() - {name}:
      thin = dict(color=GREY, linewidth=0.6, alpha=0.5, zorder=1)
      _draw_spread(ax, other, panel.curves[other], thin, has_band=False)
    _draw_spread(ax, name, panel.curves[name], styles[name])
    ax.set_title(name, loc="left", fontsize=9)
    ax.tick_params(labelsize=8)
    _finish(ax, panel)
  figure.suptitle(title, fontsize=10)
  figure.supxlabel(panel.x, fontsize=9)
  figure.supylabel(panel.y, fontsize=9)
  return save(figure, path)


def _draw_spread(
  ax: Any,
  name: str,
  values: Mapping[Any, Sequence[float]],  # by x
  style: Mapping[str, Any],
  has_band: bool = True,
) -> None:
  """Draws the means of the values at each x, and a band from the lowest to the highest."""
  x = [*values]
  low, mean, high = ([*map(of, values.values())] for of in (min, statistics.fmean, max))
  if has_band:
    ax.fill_between(x, low, high, color=style["color"], alpha=0.22, linewidth=0)
  # Markers at the ends of an axis are whole.
  ax.plot(x, mean, label=name, clip_on=False, **style)


def _finish(ax: Any, panel: SpreadPanel) -> None:
  """Draws the mark of a panel, and its axes."""
  from matplotlib.ticker import MaxNLocator

  if panel.mark:
    x, text = panel.mark
    at: dict[str, Any] = dict(
      xycoords=("data", "axes fraction"), textcoords="offset points"
    )
    ax.axvline(x, color=GREY, linestyle=":", linewidth=1.2, zorder=1)
    at |= dict(xytext=(0, 3), ha="center", va="bottom")  # above all curves
    ax.annotate(text, (x, 1), color=GREY, fontsize=8, **at)
  if panel.ticks:
    ax.set_xticks(_few(panel.ticks))
  else:
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
  ax.xaxis.set_major_formatter("{x:,.0f}")
  _end_at_0_and_100(ax)
  clean(ax)


def _end_at_0_and_100(ax: Any) -> None:
  """Cuts the margins of y at 0 and at 100, where percentages end, unless curves go beyond."""
  lowest, highest = ax.dataLim.intervaly
  low, high = ax.get_ylim()
  if lowest >= 0:
    low = max(low, 0)
  if highest <= 100:
    high = min(high, 100)
  ax.set_ylim(low, high)


def _few(ticks: Sequence[Any]) -> Sequence[Any]:
  """Returns at most about five of the ticks, the last among them."""
  return ticks[:: -math.ceil(len(ticks) / 5)][::-1]


def _kind(name: str) -> str:
  """Returns "a" for "a (b)" and "a, b"."""
  return name.partition(" (")[0].partition(",")[0]


def _repeated(names: Sequence[str]) -> list[str]:
  """Returns the names after the first of their kind."""
  kinds = [*map(_kind, names)]
  return [name for i, name in enumerate(names) if kinds[i] in kinds[:i]]


def _styles(
  names: Sequence[str], dashed: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
  """Returns the style of the curve of each name: a colour and a marker for each kind."""
  kinds = list(dict.fromkeys(map(_kind, names)))
  numbers = {kind: SCHEMES.index(kind) for kind in kinds if kind in SCHEMES}
  others = [kind for kind in kinds if kind not in SCHEMES]
  free = [number for number in range(len(COLOURS)) if number not in numbers.values()]
  numbers |= zip(others, itertools.cycle(free or range(len(COLOURS))), strict=False)
  styles = {}
  for name in names:
    number = numbers[_kind(name)]
    style = dict(
      color=COLOURS[number], marker=_MARKERS[number], markersize=3.5, linewidth=1.8
    )
    if name in dashed:
      style |= dict(linestyle="--", markerfacecolor="white", zorder=2)
    else:
      style |= dict(zorder=3)
    styles[name] = style
  return styles


def _save_with_legend(
  figure: Any, names: Sequence[str], columns: int, path: Path
) -> Path:
  lines = {line.get_label(): line for ax in figure.axes for line in ax.lines}
  handles = [lines[name] for name in names]
  figure.legend(
    handles=handles, loc="outside lower center", ncols=columns, frameon=False
  )
  return save(figure, path)


def attention_heatmap(panels: Sequence[Panel], path: Path) -> Path:
  """Draws matrices of attention weights side by side on one colour scale, and returns
  the path.

  Up to three panels of five to forty words per axis are readable.
  """
  longest = max(max(len(panel.rows), len(panel.columns)) for panel in panels)
  cell = float(np.clip(8.0 / longest, 0.09, 0.45))
  fontsize = min(11.0, 0.6 * cell * 72)  # a point is 1/72 inch
  widths = [len(panel.columns) * cell for panel in panels]
  # Inches of the cells, the labels and a margin; a letter is 0.6 of the font size wide.
  letter = 0.6 * fontsize / 72
  figure = make_figure(
    1.0
    + sum(len(x.columns) * cell + max(map(len, x.rows)) * letter + 0.6 for x in panels),
    1.0 + max(len(x.rows) * cell + max(map(len, x.columns)) * letter for x in panels),
  )
  axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
  highest = float(max(np.max(panel.weights) for panel in panels))
  # Dollar signs in words do not start formulas.
  text: dict[str, Any] = dict(fontsize=fontsize, parse_math=False)
  for ax, panel, width in zip(axes, panels, widths, strict=True):
    cells = dict(
      cmap="Blues", vmin=0.0, vmax=highest, edgecolors="white", linewidth=0.4
    )
    image = ax.pcolormesh(np.asarray(panel.weights), **cells)
    ax.set_yticks(np.arange(len(panel.rows)) + 0.5, panel.rows, **text)
    ax.set_xticks(
      np.arange(len(panel.columns)) + 0.5, panel.columns, rotation=90, **text
    )
    ax.tick_params(length=0)
    ax.xaxis.tick_top()
    ax.invert_yaxis()
    ax.set_aspect("equal", anchor="N")
    ax.spines[:].set_visible(False)
    ax.set_ylabel("query", color=GREY)
    ax.set_xlabel("key", color=GREY)
    title = textwrap.fill(panel.title, max(26, int(10 * width)), break_on_hyphens=False)
    ax.set_title(title, loc="left", fontsize=12, fontweight="bold", parse_math=False)
  # panchor=False keeps the panels aligned at the top.
  bar = figure.colorbar(
    image, ax=list(axes), anchor=(0, 1), panchor=False, shrink=0.6, aspect=25, pad=0.02
  )
  bar.set_label("attention weight")
  bar.outline.set_visible(False)
  return save(figure, path)


def make_figure(width: float, height: float) -> Any:
  """Returns an empty figure of a size in inches."""
  from matplotlib.figure import Figure  # here, as it takes a quarter of a second

  return Figure((width, height), dpi=150, layout="constrained")


def clean(ax: Any) -> None:
  """Removes the box around curves and draws a pale grid behind them."""
  ax.spines[["top", "right"]].set_visible(False)
  ax.grid(color=GREY, alpha=0.3, linewidth=0.6)
  ax.set_axisbelow(True)


def save(figure: Any, path: Path) -> Path:
  """Writes a transparent picture, its words and axes in grey, and returns its path."""
  _grey(figure)
  with warnings.catch_warnings():
    # The font lacks some scripts; it draws a box for a missing glyph.
    warnings.filterwarnings("ignore", "Glyph .* missing from")
    with whole_file(path) as file:
      options = dict(bbox_inches="tight", pad_inches=0.15, transparent=True)
      figure.savefig(file, format=path.suffix[1:], **options)
  return path


def _grey(figure: Any) -> None:
  """Makes words and axes grey, so that they are readable on light and dark pages."""
  from matplotlib.text import Text

  for ax in figure.axes:
    ax.tick_params(colors=GREY)
    ax.spines[:].set_color(GREY)
  for text in figure.findobj(Text):
    text.set_color(GREY)
