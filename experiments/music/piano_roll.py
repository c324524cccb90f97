"""Piano rolls: the notes of a piece over time, and what the model attends to."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.data.tokenizer import BOS, PAD
from experiments.evaluation.pictures import COLOURS, GREY, clean, make_figure, save
from experiments.files import Path
from experiments.training.run import Run, own_copies
from relpos_jax.decoding.sampling import prefill
from relpos_jax.models.layers import decoding_model
from relpos_jax.typing import Array, Float, Int, PyTree

_VOICE_COLOURS = (COLOURS[0], COLOURS[2], COLOURS[1], COLOURS[4])
_MAX_COLUMNS = 400  # of a row of weights: narrower ones are indistinguishable


@functools.partial(jax.jit, static_argnums=0)
def last_weights(
  graphdef: nnx.GraphDef, params: PyTree, tokens: Int[Array, "1 L"]
) -> Float[Array, "layers L"]:
  """Computes the attention weights of the last token on all, by layer, as means over
  heads.

  The model decodes the last token with a cache of the others, so that memory is linear
  in L.
  """
  model = decoding_model(graphdef, params)
  before, last = tokens[:, :-1], tokens[:, -1:]
  cache = model.init_cache(*tokens.shape)
  if before.size:
    _, cache = prefill(model.decode, cache, before, pad=PAD)
  model.set_attributes(sow_weights=True, raise_if_not_found=False)
  _, sown = nnx.capture(model.decode, nnx.Intermediate)(last, cache)
  layers = sown["layers"]
  weights = [layers[n]["self_attention"]["weights"][0] for n in range(len(layers))]
  return jnp.stack(
    [jnp.mean(weights_1N1L[0, :, 0], axis=0) for weights_1N1L in weights]
  )


def draw(run: Run, piece: Int[np.ndarray, "L"], path: Path, prime: int = 0) -> Path:
  """Draws notes as bars, in the colours of their voices, and attention; returns the
  path.

  Below the notes, a row per layer shows the weights of the prediction after the last
  token, which is at the dashed line; stronger is more. On the right are the distances
  that hold half and nine tenths of the weight. The first `prime` tokens have a grey
  background.
  """
  codec, tokens = run.vocabulary, jnp.asarray(np.concatenate([[BOS], piece]))[None]
  weights = np.asarray(last_weights(run.graphdef, own_copies(run.params), tokens))
  times, parts = codec.times(piece), codec.decode_score(piece).parts
  spans = np.array(
    [(*note[:3], i) for i, part in enumerate(parts) for note in part.notes], int
  )
  starts, ends, pitches, voices = spans.reshape(-1, 4).T
  starts, ends = starts / codec.ticks, ends / codec.ticks
  heights = [3.4, 0.4 + 0.2 * len(weights)]
  figure = make_figure(10.0, 0.5 + sum(heights))
  notes, below = figure.subplots(2, sharex=True, height_ratios=heights)
  _draw_notes(notes, starts, ends, pitches, [_VOICE_COLOURS[voice] for voice in voices])
  # At least one step, for an empty piece.
  end = max(1.0, times[-1], ends.max(initial=0))
  notes.set_xlim(0, end)
  if begun := times[prime]:
    notes.axvspan(0, begun, color=GREY, alpha=0.15, linewidth=0, zorder=0)
    for text, side in (("prime ", "right"), (" model", "left")):
      options = dict(ha=side, va="bottom", color=GREY, fontsize=9)
      notes.text(begun, 1.01, text, transform=notes.get_xaxis_transform(), **options)
  _draw_attention(below, weights, times, end)
  for ax in (notes, below):
    ax.axvline(times[-1], color=GREY, linestyle="--", linewidth=1)
  below.set_xlabel(f"time ({codec.step})")
  return save(figure, path)


def _draw_notes(ax: Any, starts, ends, pitches, colours: Sequence[str]) -> None:
  edges = dict(height=0.85, edgecolor=GREY, linewidth=0.4, zorder=2)
  ax.barh(pitches, ends - starts, left=starts, color=colours, **edges)
  clean(ax)
  lowest, highest = min(pitches, default=60) - 2, max(pitches, default=60) + 2
  ax.set_ylim(lowest, highest)
  cs = [pitch for pitch in range(0, 128, 12) if lowest <= pitch <= highest]
  ax.set_yticks(cs, [f"C{pitch // 12 - 1}" for pitch in cs])
  ax.set_ylabel("pitch")


def _draw_attention(
  ax: Any, weights_of: np.ndarray, times: np.ndarray, end: float
) -> None:
  """Draws a row per layer, the first on top, each scaled to its own maximum."""
  from matplotlib.colors import LinearSegmentedColormap

  colours = LinearSegmentedColormap.from_list(
    "weights", [f"{GREY}00", GREY]
  )  # from transparent
  edges = np.linspace(0, end, int(min(_MAX_COLUMNS, end)) + 1)
  layers, now = len(weights_of), times[-1]
  at = np.append(0.0, times[:-1])  # the begin token is at the first step
  for layer, weights in enumerate(weights_of):
    sums, _ = np.histogram(at, edges, weights=weights)
    # Square roots make small weights visible.
    row = [layer - 0.45, layer + 0.45]
    ax.pcolormesh(edges, row, np.sqrt(sums)[None], cmap=colours, vmin=0)
    order = np.argsort(-at, kind="stable")
    held = np.cumsum(weights[order])
    last = np.minimum(np.searchsorted(held, (0.5, 0.9)), len(held) - 1)
    half, most = now - at[order[last]]
    options = dict(
      transform=ax.get_yaxis_transform(), va="center", fontsize=8, color=GREY
    )
    ax.text(1.005, layer, f"{half:,.0f} / {most:,.0f}", **options)
  ax.set_ylim(layers - 0.5, -0.5)
  ax.set_yticks(range(layers), [str(layer + 1) for layer in range(layers)], fontsize=8)
  ax.set_ylabel("layer")
  ax.spines[["top", "right"]].set_visible(False)
  title = (
    "attention at the dashed line; right: distances that hold 50% / 90% of the weight"
  )
  ax.set_title(title, loc="left", fontsize=9)
