"""The picture of a piece: its notes over time, and how far back a model looks."""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from relpos_jax.evaluation.pictures import (
  COLOURS,
  DPI,
  GREY,
  Axes,
  Figure,
  clean,
  save,
)
from relpos_jax.music.attention_reach import distance_holding
from relpos_jax.music.codec import Span
from relpos_jax.typing import Float

_VOICE_COLOURS = COLOURS[1:5]
_MOST_COLUMNS = 400  # of the strip of weights: narrower ones cannot be told apart


class Reach(NamedTuple):
  """Where a model looks from one point in time.

  Attributes:
    weights: of each token, layer by layer; a layer's sum to one.
    times: the step of each token.
    now: the step looked from.
  """

  weights: Float[np.ndarray, "layers L"]
  times: Float[np.ndarray, "L"]
  now: float


def piano_roll(
  spans: Sequence[Span],
  path: str | pathlib.Path,
  *,
  step: str,
  prime: float | int = 0,
  reach: Reach | None = None,
) -> pathlib.Path:
  """Draws notes as bars over time, in the colours of their voices, and the attention's reach.

  Below the notes there is a row for each layer: its weights on the past, from the broken line, the
  darker the more. On the right is how far back half of them, and nine tenths of them, lie.

  Args:
    spans: the notes.
    path: the picture's file; its suffix says the format.
    step: what time is counted in, in words.
    prime: the step where what a model wrote begins; what was before is on grey.
    reach: where a model looks.

  Returns:
    The path.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   piano_roll([Span(0, 4, 67, 0)], folder + "/a.png", step="16th notes").name
  'a.png'
  """
  layers = 0 if reach is None else len(reach.weights)
  heights = [3.4] + [0.4 + 0.2 * layers] * (layers > 0)
  figure = Figure(figsize=(10, 0.5 + sum(heights)), dpi=DPI, layout="constrained")
  axes = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
  _draw_notes(axes[0], spans)
  ends = [span.end for span in spans] + ([] if reach is None else [reach.now])
  end = max([1, *ends])  # a step at least: a piece may end at once
  axes[0].set_xlim(0, end)
  if prime:
    axes[0].axvspan(0, prime, color="#eeeeee", zorder=0)
    _say(axes[0], prime, "prime ", "right")
    _say(axes[0], prime, " model", "left")
  if reach is not None:
    _draw_reach(axes[1], reach, float(end))
    for ax in axes:
      ax.axvline(reach.now, color="black", linestyle="--", linewidth=1)
  axes[-1].set_xlabel(f"time ({step})")
  return save(figure, path)


def _draw_notes(ax: Axes, spans: Sequence[Span]) -> None:
  for voice in sorted({span.voice for span in spans}):
    own = [span for span in spans if span.voice == voice]
    ax.barh(
      [span.pitch for span in own],
      [span.end - span.start for span in own],
      left=[span.start for span in own],
      height=0.85,
      color=_VOICE_COLOURS[voice % len(_VOICE_COLOURS)],
      edgecolor="white",
      linewidth=0.4,
      zorder=2,
    )
  clean(ax)
  pitches = [span.pitch for span in spans] or [60]
  ax.set_ylim(min(pitches) - 2, max(pitches) + 2)
  cs = range(-(-(min(pitches) - 2) // 12) * 12, max(pitches) + 3, 12)
  ax.set_yticks([*cs], [f"C{pitch // 12 - 1}" for pitch in cs])
  ax.set_ylabel("pitch")


def _say(ax: Axes, x: float | int, text: str, side: str) -> None:
  """Above the axes, where no note is."""
  place = ax.get_xaxis_transform()
  ax.text(x, 1.01, text, transform=place, ha=side, va="bottom", color=GREY, fontsize=9)


def _draw_reach(ax: Axes, reach: Reach, end: float) -> None:
  """A row for each layer, the first on top, each on a scale of its own."""
  edges = np.linspace(0, end, int(min(_MOST_COLUMNS, max(1, end))) + 1)
  layers = len(reach.weights)
  for layer, weights in enumerate(reach.weights):
    sums, _ = np.histogram(reach.times, edges, weights=weights)
    # Roots, for what is dim to be seen.
    ax.pcolormesh(edges, [layer - 0.45, layer + 0.45], np.sqrt(sums)[None], cmap="Greys", vmin=0)
    half, most = (distance_holding(share, weights, reach.times, reach.now) for share in (0.5, 0.9))
    ax.annotate(
      f"{half:,.0f} / {most:,.0f}",
      (1.005, layer),
      xycoords=("axes fraction", "data"),
      va="center",
      fontsize=8,
      color=GREY,
      annotation_clip=False,
    )
  ax.set_ylim(layers - 0.5, -0.5)
  ax.set_yticks(range(layers), [str(layer + 1) for layer in range(layers)], fontsize=8)
  ax.set_ylabel("layer")
  ax.spines[["top", "right"]].set_visible(False)
  ax.set_title(
    "where the prediction at the broken line looks;"
    " right: how far back half / nine tenths of the weight lie",
    loc="left",
    fontsize=9,
  )
