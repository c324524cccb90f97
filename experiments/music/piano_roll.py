"""Draws piano rolls: the notes of a piece, and what the model attends to."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.data.tokenizer import BOS, PAD
from experiments.evaluation.pictures import COLOURS, GREY, clean, make_figure, save
from experiments.files import Path
from experiments.music.midi_files import Score
from experiments.training.run import Run, copy_to_process
from relpos_jax.decoding.sampling import prefill
from relpos_jax.models.layers import decoding_model
from relpos_jax.typing import Array, Float, Int, PyTree

_VOICE_COLOURS = (COLOURS[0], COLOURS[2], COLOURS[1], COLOURS[4])
_MAX_COLUMNS = 400  # for weights: narrower columns could not be told apart


@functools.partial(jax.jit, static_argnums=0)
def last_weights(
  graphdef: nnx.GraphDef, params: PyTree, tokens: Int[Array, "1 L"]
) -> Float[Array, "layers L"]:
  """Computes the last token's attention weights in each layer, averaged over heads.

  The model decodes the last token with a cache of the others, so memory is linear in L.
  """
  model = decoding_model(graphdef, params)
  before, last = tokens[:, :-1], tokens[:, -1:]
  cache = model.init_cache(*tokens.shape)
  if before.size:
    _, cache = prefill(model.decode, cache, before, pad=PAD)
  model.set_attributes(sow_weights=True, raise_if_not_found=False)
  _, sown = nnx.capture(model.decode, nnx.Intermediate)(last, cache)
  layers = []
  for number in range(len(sown["layers"])):
    (weights_1N1L,) = sown["layers"][number]["self_attention"]["weights"]
    layers.append(jnp.mean(weights_1N1L[0, :, 0], axis=0))
  return jnp.stack(layers)


def draw(
  run: Run, piece: Int[np.ndarray, "L"], path: Path, prompt_length: int = 0
) -> Path:
  """Draws the notes of a piece and the model's attention; returns the path.

  Notes are bars in the colours of their voices. The first `prompt_length` tokens have a
  grey background. Below the notes, each row shows the attention weights of a layer, for
  the prediction after the last token (at the dashed line). A stronger grey means more
  weight.
  """
  codec = run.vocabulary
  tokens = jnp.asarray([[BOS, *piece.tolist()]])
  weights = np.asarray(last_weights(run.graphdef, copy_to_process(run.params), tokens))
  times = codec.times(piece)
  heights = [3.4, 0.4 + 0.2 * len(weights)]
  figure = make_figure(10.0, 0.5 + sum(heights))
  notes, below = figure.subplots(2, sharex=True, height_ratios=heights)
  last = _draw_notes(notes, codec.decode_score(piece), codec.ticks)
  end = max(1.0, times[-1], last)  # an empty piece needs an axis, too
  notes.set_xlim(0, end)
  prompt_end = times[prompt_length]
  if prompt_end:
    notes.axvspan(0, prompt_end, color=GREY, alpha=0.15, linewidth=0, zorder=0)
    options = dict(va="bottom", color=GREY, fontsize=9)
    options |= dict(transform=notes.get_xaxis_transform())
    notes.text(prompt_end, 1.01, "prompt ", ha="right", **options)
    notes.text(prompt_end, 1.01, " model", ha="left", **options)
  _draw_attention(below, weights, times, end)
  for ax in (notes, below):
    ax.axvline(times[-1], color=GREY, linestyle="--", linewidth=1)
  below.set_xlabel(f"time ({codec.step})")
  return save(figure, path)


def _draw_notes(ax: Any, score: Score, ticks: int) -> float:
  """Draws notes as bars in the colours of their parts; returns the end of the last."""
  bars = dict(height=0.85, edgecolor=GREY, linewidth=0.4, zorder=2)
  colours = itertools.cycle(_VOICE_COLOURS)
  for part, colour in zip(score.parts, colours, strict=False):
    starts, ends, pitches, _ = np.array(part.notes).reshape(-1, 4).T
    lengths = (ends - starts) / ticks
    ax.barh(pitches, lengths, left=starts / ticks, color=colour, **bars)
  clean(ax)
  pitches = [note.pitch for note in score.notes] or [60]
  lowest, highest = min(pitches) - 2, max(pitches) + 2
  ax.set_ylim(lowest, highest)
  cs = range(12 * -(-lowest // 12), highest + 1, 12)
  ax.set_yticks(cs, [f"C{pitch // 12 - 1}" for pitch in cs])
  ax.set_ylabel("pitch")
  return max((note.end for note in score.notes), default=0) / ticks


def _draw_attention(
  ax: Any, layer_weights: np.ndarray, times: np.ndarray, end: float
) -> None:
  """Draws the attention weights of each layer in a row; each row has its own scale."""
  from matplotlib.colors import LinearSegmentedColormap

  colours = LinearSegmentedColormap.from_list("weights", [f"{GREY}00", GREY])
  edges = np.linspace(0, end, int(min(_MAX_COLUMNS, end)) + 1)
  token_times = np.append(0.0, times[:-1])  # the begin token has the first time
  rows = []
  for weights in layer_weights:
    sums, _ = np.histogram(token_times, edges, weights=weights)
    rows.append(np.sqrt(sums / sums.max()))  # roots, so that small weights are visible
  ax.pcolormesh(edges, np.arange(len(rows) + 1) + 0.5, rows, cmap=colours, vmin=0)
  ax.set_yticks(range(1, len(rows) + 1))
  ax.invert_yaxis()
  ax.set_ylabel("layer")
  ax.spines[["top", "right"]].set_visible(False)
  ax.set_title("attention at the dashed line", loc="left", fontsize=9)
