"""Draws learning curves, costs and scores over length, and attention.

The suffix of a picture's path selects its format.
"""

import itertools
import math
import statistics
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.files import Path, replace_file
from relpos_jax.typing import ArrayLike, Float

# Pictures are transparent. This grey, for words and axes, and the colours of curves are
# readable on white and on dark pages.
GREY = "#808080"
# From Paul Tol's "bright" and "vibrant". Markers help readers who are colour-blind.
COLOURS = (
  "#4477aa",
  "#228833",
  "#ee6677",
  "#888888",
  "#b39b24",
  "#3ba4cc",
  "#b8459a",
  "#ee7733",
  "#009988",
  "#a0643c",
  "#7a66cc",
)
_MARKERS = "osD^vPX<>*d"
_PATTERNS = "-", "--", ":", "-."  # of the curves of one kind, in order
MOST_SHADED = 6  # curves with a band in one picture: more bands would hide each other
# Each of these position schemes has the same colour in all pictures.
SCHEMES = (
  "relative",
  "both",
  "sinusoidal",
  "none",
  "alibi",
  "rotary",
  "t5",
  "xl",
  "content",
  "deberta",
)


class CostPanel(NamedTuple):
  """Describes a plot of a measure, such as milliseconds, over the length T.

  `curves` has the points (T, measure) of each curve, by name.
  """

  title: str
  measure: str
  curves: Mapping[str, Sequence[tuple[float, float]]]


class Panel(NamedTuple):
  """Describes a plot of attention weights; rows are queries, and columns are keys."""

  title: str
  weights: Float[ArrayLike, "T S"]
  rows: Sequence[str]
  columns: Sequence[str]


class SpreadPanel(NamedTuple):
  """Describes a plot of curves with their spread.

  `curves` has, for each name, all values at each x, such as the values of all seeds.
  """

  x: str
  y: str
  curves: Mapping[str, Mapping[float, Sequence[float]]]
  mark: tuple[float, str] | None = None  # the x of a dotted line, and its label
  ticks: Sequence[Any] = ()  # on the x axis; at most about five are drawn


def learning_curves(
  metrics: Sequence[Mapping[str, Any]], path: Path, score: str = "BLEU", title: str = ""
) -> Path:
  """Draws the losses, the score and the learning rate over the steps; returns the path.

  `metrics` are the lines of a run's metrics.jsonl. A line has a "step" and any of
  "loss", "valid_loss", "learning_rate" and the score, such as "valid_bleu" for BLEU.
  """
  measures = {
    "loss (nats)": {"training": "loss", "validation": "valid_loss"},
    score: {"validation": f"valid_{score.lower()}"},
    "learning rate": {"training": "learning_rate"},
  }
  evaluated = [line["step"] for line in metrics if "valid_loss" in line]
  panels = []
  for measure, names in measures.items():
    curves = {side: _split_into_segments(metrics, name) for side, name in names.items()}
    if not panels or any(curves.values()):
      panels.append(SpreadPanel("step", measure, curves, ticks=evaluated))
  return spread_curves(panels, path, title)


def _split_into_segments(
  metrics: Sequence[Mapping[str, Any]], name: str
) -> dict[float, list[float]]:
  """Splits the finite values of a metric into up to 40 segments, in order of steps.

  Returns a dict from the mean step of each segment to its values.
  """
  steps = np.array([line["step"] for line in metrics])
  values = np.array([line.get(name) for line in metrics], float)  # None becomes NaN
  segments = {}
  for indices in np.array_split(np.flatnonzero(np.isfinite(values)), 40):
    if len(indices):
      segments[steps[indices].mean()] = values[indices].tolist()
  return segments


def cost_curves(
  rows: Sequence[Sequence[CostPanel]], dashed: Collection[str], path: Path
) -> Path:
  """Draws a grid of plots on logarithmic axes with one legend; returns the path.

  `rows` are the rows of the grid. The names in `dashed` are baselines, drawn with
  dashed curves. A curve named "a (b)" has the colour of "a".
  """
  names = _list_curves(itertools.chain(*rows))
  styles = _choose_styles(names, dashed)
  num_columns = max(map(len, rows))
  height = 3.2 * len(rows) + 0.25 * len(names) / num_columns + 0.4
  figure = make_figure(4.2 * num_columns, height)
  grid = figure.subplots(len(rows), num_columns, squeeze=False)
  for axes, panels in zip(grid, rows, strict=True):
    for ax in axes[len(panels) :]:
      ax.set_visible(False)
    for ax, panel in zip(axes, panels, strict=False):
      _draw_costs(ax, panel, styles)
  return _save_with_legend(figure, names, 2 * num_columns, path)


def _draw_costs(ax: Any, panel: CostPanel, styles: Mapping[str, Any]) -> None:
  from matplotlib.ticker import LogLocator

  lengths = set()
  for name, points in panel.curves.items():
    x, y = zip(*points, strict=True)
    ax.plot(x, y, label=name, **styles[name])
    lengths.update(x)
  ax.set(xscale="log", yscale="log", xlabel="T", ylabel=panel.measure)
  ax.set_title(panel.title, loc="left", fontsize=9, fontweight="bold")
  ax.set_xticks(_thin_ticks(sorted(lengths)))
  ax.minorticks_off()
  ax.xaxis.set_major_formatter("{x:,.0f}")
  ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  ax.yaxis.set_major_formatter("{x:,.10g}")
  clean(ax)


def spread_curves(panels: Sequence[SpreadPanel], path: Path, title: str = "") -> Path:
  """Draws plots of curves side by side with one legend; returns the path.

  A curve shows the mean at each x. If there are at most 6 curves, a band around each
  shows the range from the lowest to the highest value. Curves of one name have the same
  colour in all plots. The position schemes in `SCHEMES` have the same colours in all
  pictures. A curve named "a, b" has the colour of "a"; if both are drawn, the second
  one is dashed. If all plots have the same label on the y axis, they share the axis.
  """
  names = _list_curves(panels)
  has_bands = len(names) <= MOST_SHADED
  styles = _choose_styles(names)
  height = 3.9 + 0.2 * len(names) / len(panels) + 0.3 * bool(title)
  figure = make_figure(max(5.5, 4.6 * len(panels)), height)
  has_one_y = len({panel.y for panel in panels}) == 1
  axes = [*figure.subplots(1, len(panels), squeeze=False, sharey=has_one_y)[0]]
  for ax, panel in zip(axes, panels, strict=True):
    for name, values in panel.curves.items():
      _draw_spread(ax, name, values, styles[name], has_bands)
    _format_axes(ax, panel)
    ax.set(xlabel=panel.x, ylabel=panel.y)
  for group in [axes] if has_one_y else [[ax] for ax in axes]:
    _limit_percentages(group)
  if title:
    figure.suptitle(title, fontsize=10)
  num_rows = math.ceil(len(names) / (3 * len(panels)))
  return _save_with_legend(figure, names, math.ceil(len(names) / num_rows), path)


def _list_curves(panels: Iterable[CostPanel | SpreadPanel]) -> list[str]:
  return list(dict.fromkeys(itertools.chain(*(panel.curves for panel in panels))))


def _draw_spread(
  ax: Any,
  name: str,
  values: Mapping[Any, Sequence[float]],  # by x
  style: Mapping[str, Any],
  has_band: bool,
) -> None:
  """Draws the mean at each x, and a band from the lowest to the highest value."""
  x, samples = [*values], [*values.values()]
  if has_band:
    low, high = [*map(min, samples)], [*map(max, samples)]
    ax.fill_between(x, low, high, color=style["color"], alpha=0.22, linewidth=0)
  means = [*map(statistics.fmean, samples)]
  # Without clipping, so that markers at the ends of an axis are complete.
  ax.plot(x, means, label=name, clip_on=False, **style)


def _format_axes(ax: Any, panel: SpreadPanel) -> None:
  """Draws the dotted line of a panel, if it has one, and formats its axes."""
  from matplotlib.ticker import MaxNLocator

  if panel.mark:
    x, text = panel.mark
    ax.axvline(x, color=GREY, linestyle=":", linewidth=1.2, zorder=1)
    ax.annotate(
      text,
      (x, 1),
      xycoords=("data", "axes fraction"),
      xytext=(0, 3),  # above all curves
      textcoords="offset points",
      ha="center",
      va="bottom",
      fontsize=8,
    )
  if panel.ticks:
    ax.set_xticks(_thin_ticks(panel.ticks))
  else:
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
  ax.xaxis.set_major_formatter("{x:,.0f}")
  clean(ax)


def _limit_percentages(axes: Sequence[Any]) -> None:
  """Ends the margins of the y axis, which `axes` share, at 0 and at 100."""
  values = np.array([ax.dataLim.intervaly for ax in axes])
  low, high = axes[0].get_ylim()
  if values.min() >= 0:
    low = max(low, 0)
  if values.max() <= 100:
    high = min(high, 100)
  axes[0].set_ylim(low, high)


def _thin_ticks(ticks: Sequence[Any]) -> Sequence[Any]:
  """Returns about five of the ticks, including the last."""
  every = math.ceil(len(ticks) / 5)
  first = (len(ticks) - 1) % every
  return ticks[first::every]


def _name_kind(name: str) -> str:
  """Returns the part of a name that chooses its colour: "a" for "a (b)" or "a, b"."""
  return name.partition(" (")[0].partition(",")[0]


def _choose_styles(
  names: Sequence[str], dashed: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
  """Chooses the style of each curve.

  Names of one kind, such as "a" and "a (b)", share colour and marker, but not the
  pattern of the line. The curves of names in `dashed` are dashed.
  """
  numbers, others = {}, []
  for kind in dict.fromkeys(map(_name_kind, names)):
    if kind in SCHEMES:
      numbers[kind] = SCHEMES.index(kind)
    else:
      others.append(kind)
  free = sorted({*range(len(COLOURS))} - {*numbers.values()})
  numbers.update(zip(others, itertools.cycle(free), strict=False))
  styles, num_drawn = {}, Counter()
  for name in names:
    kind = _name_kind(name)
    style = {"color": COLOURS[numbers[kind]], "marker": _MARKERS[numbers[kind]]}
    style |= {"markersize": 3.5, "linewidth": 1.8, "zorder": 3}
    pattern = 1 if name in dashed else num_drawn[kind] % len(_PATTERNS)
    if pattern:
      style |= {"markerfacecolor": "white", "zorder": 2}
    styles[name] = style | {"linestyle": _PATTERNS[pattern]}
    num_drawn[kind] += 1
  return styles


def _save_with_legend(
  figure: Any, names: Sequence[str], columns: int, path: Path
) -> Path:
  lines = {}
  for ax in figure.axes:
    for line in ax.lines:
      lines[line.get_label()] = line
  handles = [lines[name] for name in names]
  place = "outside lower center"
  figure.legend(handles=handles, loc=place, ncols=columns, frameon=False)
  return save(figure, path)


def attention_heatmap(panels: Sequence[Panel], path: Path) -> Path:
  """Draws plots of attention weights side by side, with one colour scale for all.

  The picture is readable for up to three plots with five to forty words per axis.
  Returns the path.
  """
  longest = max(max(np.shape(panel.weights)) for panel in panels)
  size = float(np.clip(8.0 / longest, 0.09, 0.45))  # of a weight, in inches
  widths = [size * len(panel.columns) for panel in panels]
  heights = [size * len(panel.rows) for panel in panels]
  # Leaves room for labels on the left of each plot and above. Unused room is cut off.
  figure = make_figure(1 + sum(widths) + 1.6 * len(panels), 2.6 + max(heights))
  axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
  highest = float(max(np.max(panel.weights) for panel in panels))
  fontsize = min(11.0, 43 * size)
  for ax, panel in zip(axes, panels, strict=True):
    image = _draw_weights(ax, panel, highest, fontsize)
    ax.set_title(
      panel.title, loc="left", fontweight="bold", wrap=True, parse_math=False
    )
  # panchor=False keeps the panels aligned at the top.
  bar = figure.colorbar(
    image, ax=list(axes), anchor=(0, 1), panchor=False, shrink=0.6, aspect=25, pad=0.02
  )
  bar.set_label("attention weight")
  bar.outline.set_visible(False)
  return save(figure, path)


def _draw_weights(ax: Any, panel: Panel, highest: float, fontsize: float) -> Any:
  """Draws attention weights with labels; a weight of `highest` has the darkest blue."""
  image = ax.pcolormesh(
    np.asarray(panel.weights),
    cmap="Blues",
    vmin=0.0,
    vmax=highest,
    edgecolors="white",
    linewidth=0.4,
  )
  # Without parse_math, dollar signs in words would start formulas.
  text = {"fontsize": fontsize, "parse_math": False}
  ax.set_yticks(np.arange(len(panel.rows)) + 0.5, panel.rows, **text)
  ax.set_xticks(np.arange(len(panel.columns)) + 0.5, panel.columns, rotation=90, **text)
  ax.tick_params(length=0)
  ax.xaxis.tick_top()
  ax.invert_yaxis()
  ax.set_aspect("equal", anchor="N")
  ax.spines[:].set_visible(False)
  ax.set(xlabel="key", ylabel="query")
  return image


def make_figure(width: float, height: float) -> Any:
  """Makes an empty figure; width and height are in inches."""
  from matplotlib.figure import Figure  # here, because it takes a quarter of a second

  return Figure((width, height), dpi=150, layout="constrained")


def clean(ax: Any) -> None:
  """Removes the box around curves and draws a pale grid behind them."""
  ax.spines[["top", "right"]].set_visible(False)
  ax.grid(color=GREY, alpha=0.3, linewidth=0.6)
  ax.set_axisbelow(True)


def save(figure: Any, path: Path) -> Path:
  """Writes a transparent picture with grey words and axes; returns its path."""
  from matplotlib.text import Text

  for ax in figure.axes:
    ax.tick_params(colors=GREY)
    ax.spines[:].set_color(GREY)
  for text in figure.findobj(Text):
    text.set_color(GREY)
  with warnings.catch_warnings():
    # The font lacks some scripts; a box stands for a missing glyph.
    warnings.filterwarnings("ignore", "Glyph .* missing from")
    with replace_file(path) as file:
      options = {"bbox_inches": "tight", "pad_inches": 0.15, "transparent": True}
      figure.savefig(file, format=path.suffix[1:], **options)
  return path
