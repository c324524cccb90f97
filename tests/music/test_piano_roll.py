"""Piano rolls show notes and attention; the attention weights are the model's own."""

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
import scipy.special
from flax import nnx

from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig
from relpos_jax.music import piano_roll as module
from relpos_jax.music.midi_files import Span
from relpos_jax.music.piano_roll import LastAttention, distance_holding, last_weights, piano_roll

SPANS = [Span(0, 4, 67, 0), Span(4, 8, 65, 0), Span(0, 8, 48, 3)]
WEIGHTS = np.array([[0.5, 0.5, 0, 0], [0, 0, 0, 1.0]])
ATTENTION = LastAttention(WEIGHTS, np.array([0.0, 2.0, 4.0, 6.0]), 8.0)
TOKENS = np.array([[1, 5, 7, 3, 5, 8]])


@pytest.fixture
def drawn(tmp_path, monkeypatch):
  """Returns a function that draws and returns the figure's axes and texts."""
  figures = []

  def save(figure, path):
    figures.append(figure)
    return inner(figure, path)

  inner = module.save
  monkeypatch.setattr(module, "save", save)

  def draw(*args, **options):
    path = tmp_path / "picture.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
      assert piano_roll(*args, path, step="16th notes", **options) == path
    svg = path.read_text(encoding="utf-8")
    texts = [part.split("</text>")[0].split(">")[1].strip() for part in svg.split("<text")[1:]]
    return figures[-1].axes, texts

  return draw


def test_every_note_is_a_bar_in_the_colour_of_its_voice(drawn):
  (ax,), texts = drawn(SPANS)
  bars = [bar for container in ax.containers for bar in container]
  boxes = {(x.get_x(), x.get_width(), x.get_y() + x.get_height() / 2) for x in bars}
  assert boxes == {(span.start, span.end - span.start, span.pitch) for span in SPANS}
  assert [bar.get_facecolor() for bar in bars].count(bars[0].get_facecolor()) == 2
  assert {"C3", "C4", "time (16th notes)"} <= {*texts} and "prime" not in texts


def test_the_prime_has_a_grey_background(drawn):
  (ax,), texts = drawn(SPANS, prime=4)
  assert {"prime", "model"} <= {*texts}
  (area,) = (patch for patch in ax.patches if patch.get_zorder() == 0)
  assert (area.get_x(), area.get_width(), area.get_height()) == (0, 4, 1)


def test_each_layer_has_a_row_with_the_weights_at_their_times(drawn):
  (_, ax), texts = drawn(SPANS, attention=ATTENTION)
  rows = [mesh.get_array().ravel() for mesh in ax.collections]
  assert [np.flatnonzero(row).tolist() for row in rows] == [[0, 2], [6]]
  assert {"6 / 8", "2 / 2"} <= {*texts}


def test_an_empty_piece_is_drawn(drawn):
  axes, texts = drawn([], attention=LastAttention(np.ones((2, 1)), np.zeros(1), 0.0))
  assert [ax.get_xlim() for ax in axes] == [(0, 1)] * 2 and "0 / 0" in texts


def test_weights_are_those_of_the_last_token_layer_by_layer():
  config = LanguageModelConfig(
    9, num_layers=2, width=8, num_heads=2, feed_forward=8, max_distance=2, relative_values=False
  )
  graphdef, params = nnx.split(jax.jit(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))())
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


def test_memory_grows_with_the_length_and_not_with_its_square():
  config = LanguageModelConfig(9, num_layers=2, width=8, num_heads=2, feed_forward=8)
  graphdef, params = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))
  tokens = jax.ShapeDtypeStruct((1, 8192), jnp.int32)
  compiled = last_weights.lower(graphdef, params, tokens).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 2 * 8192**2 * 4 / 8


@pytest.mark.parametrize(
  "share, distance", [(0.1, 1), (0.3, 1), (0.31, 3), (0.8, 3), (0.81, 9), (1.0, 9)]
)
def test_the_distance_holds_the_share_of_the_weight(share, distance):
  weights, times = np.array([0.2, 0.5, 0.2, 0.1]), np.array([0.0, 6.0, 8.0, 8.0])
  assert distance_holding(share, weights, times, now=9.0) == distance
