"""Piano rolls show notes and attention; the attention weights are the model's own."""

import itertools

import jax.numpy as jnp
import numpy as np
from compiling import make_random
from flax import nnx

from experiments.evaluation.pictures import make_figure
from experiments.music import piano_roll as module
from experiments.music import voices
from experiments.music.midi_files import Note, Part, Score
from experiments.music.piano_roll import last_weights
from experiments.training.run import Run
from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig

PIECE = voices.encode(np.array([[67, -1, -1, 48]] * 4 + [[65, -1, -1, 48]] * 4))
TOKENS = np.array([[1, 5, 7, 3, 5, 8]])


def test_notes_are_bars_and_weights_a_row_for_each_layer(tmp_path, monkeypatch):
  weights, figures = np.zeros((2, 33)), []
  # The begin, and tokens at steps 2 and 6.
  weights[[0, 0, 1], [0, 9, 25]] = 0.5, 0.5, 1.0
  monkeypatch.setattr(module, "last_weights", lambda *_: weights)
  monkeypatch.setattr(
    module, "save", lambda figure, path: figures.append(figure) or path
  )
  run = Run(None, voices.CODEC, None, None, None)

  module.draw(run, PIECE, tmp_path / "a.png", prompt_length=16)

  ax, below = figures[0].axes
  bars = itertools.chain(*ax.containers)
  boxes = {(x.get_x(), x.get_width(), x.get_y() + 0.425) for x in bars}
  assert boxes == {(0, 4, 67), (4, 4, 65), (0, 8, 48)}
  (mesh,) = below.collections
  rows, steps = np.nonzero(mesh.get_array())
  assert [*zip(rows, steps, strict=True)] == [(0, 0), (0, 2), (1, 6)]


def test_every_part_is_drawn_even_if_colours_repeat():
  parts = [Part(str(pitch), [Note(0, 4, pitch, 80)]) for pitch in range(60, 65)]
  ax = make_figure(2.0, 2.0).subplots()
  module._draw_notes(ax, Score(parts, 4, [(0, 0.5)]), ticks=1)
  assert len(ax.containers) == len(parts)


SIZES = dict(num_layers=2, width=8, num_heads=2, feed_forward=8, max_distance=2)


def test_weights_are_those_of_the_last_token_layer_by_layer():
  config = LanguageModelConfig(9, relative_values=False, **SIZES)
  model = make_random(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
  weights = last_weights(*nnx.split(model), jnp.asarray(TOKENS))
  model.set_attributes(sow_weights=True, raise_if_not_found=False)
  _, sown = nnx.capture(model, nnx.Intermediate)(jnp.asarray(TOKENS))
  for found, layer in zip(weights, sown["layers"].values(), strict=True):
    (wanted,) = layer["self_attention"]["weights"]
    np.testing.assert_allclose(found, wanted[0, :, -1].mean(0), rtol=1e-4)
