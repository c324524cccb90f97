"""Piano rolls show notes and attention; the attention weights are the model's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from compiling import randomly
from flax import nnx
from matplotlib.text import Text

from experiments.music import piano_roll as module
from experiments.music import voices
from experiments.music.piano_roll import last_weights
from experiments.training.task import Run
from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig

PIECE = voices.encode(np.array([[67, -1, -1, 48]] * 4 + [[65, -1, -1, 48]] * 4))
TOKENS = np.array([[1, 5, 7, 3, 5, 8]])


@pytest.fixture
def draw(tmp_path, monkeypatch):
  """Returns a function that draws and returns the figure's axes and texts."""
  figures = []
  monkeypatch.setattr(module, "save", lambda figure, path: figures.append(figure) or path)

  def draw(piece, weights, **options):
    monkeypatch.setattr(module, "last_weights", lambda *_: weights)
    module.draw(Run(None, voices.CODEC, None, None, None), piece, tmp_path / "a.png", **options)
    figures[-1].draw_without_rendering()
    return figures[-1].axes, {text.get_text().strip() for text in figures[-1].findobj(Text)}

  return draw


def test_notes_are_bars_and_weights_a_row_for_each_layer(draw):
  weights = np.zeros((2, 33))
  weights[[0, 0, 1], [0, 9, 25]] = 0.5, 0.5, 1.0  # the begin, and tokens at steps 2 and 6
  (ax, below), texts = draw(PIECE, weights, prime=16)
  (bars,) = ax.containers
  boxes = {(x.get_x(), x.get_width(), x.get_y() + x.get_height() / 2) for x in bars}
  assert boxes == {(0, 4, 67), (4, 4, 65), (0, 8, 48)}
  colours = [bar.get_facecolor() for bar in bars]
  assert colours[0] == colours[1] != colours[2]
  rows = [mesh.get_array().ravel() for mesh in below.collections]
  assert [np.flatnonzero(row).tolist() for row in rows] == [[0, 2], [6]]
  wanted = {"C3", "C4", "time (16th notes)", "6 / 8", "2 / 2", "prime", "model"}
  assert wanted <= texts
  (area,) = (patch for patch in ax.patches if patch.get_zorder() == 0)
  assert (area.get_x(), area.get_width(), area.get_height()) == (0, 4, 1)


def test_an_empty_piece_is_drawn(draw):
  axes, texts = draw(np.empty(0, int), np.ones((2, 1)))
  assert [ax.get_xlim() for ax in axes] == [(0, 1)] * 2 and "0 / 0" in texts


def test_weights_are_those_of_the_last_token_layer_by_layer():
  config = LanguageModelConfig(
    9, num_layers=2, width=8, num_heads=2, feed_forward=8, max_distance=2, relative_values=False
  )
  graphdef, params = nnx.split(randomly(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))
  weights = np.asarray(last_weights(graphdef, params, jnp.asarray(TOKENS)))
  assert weights.shape == (2, 6)
  np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)

  @jax.jit
  def projected(params):
    model = nnx.merge(graphdef, params)
    layer = model.layers[0]
    x = layer.residuals[0].before(model.softmax(jnp.asarray(TOKENS)))
    attention = layer.self_attention
    return attention.query(x), attention.key(x), attention.tables().key

  query, key, table = projected(params)
  table = np.asarray(table, float)[[0, 0, 0, 0, 1, 2]]
  logits = np.einsum("nh,snh->ns", query[0, -1], key[0] + table) / 2
  np.testing.assert_allclose(weights[0], scipy.special.softmax(logits, -1).mean(0), rtol=1e-4)
