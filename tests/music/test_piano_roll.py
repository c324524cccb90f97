"""The piano roll shows the notes it was given, read through the text of its SVG form."""

import matplotlib
import numpy as np
import pytest

from relpos_jax.music import piano_roll as module
from relpos_jax.music.codec import Span
from relpos_jax.music.piano_roll import Reach, piano_roll

SPANS = [Span(0, 4, 67, 0), Span(4, 8, 65, 0), Span(0, 8, 48, 3)]
REACH = Reach(np.array([[0.5, 0.5, 0, 0], [0, 0, 0, 1.0]]), np.array([0.0, 2.0, 4.0, 6.0]), 8.0)


@pytest.fixture
def drawn(tmp_path, monkeypatch):
  """Draws, and returns the figure's axes and the texts in the picture."""
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


def boxes(ax):
  """The notes drawn: start, end, pitch, colour."""
  return {
    (
      bar.get_x(),
      bar.get_x() + bar.get_width(),
      bar.get_y() + bar.get_height() / 2,
      bar.get_facecolor(),
    )
    for container in ax.containers
    for bar in container
  }


def test_every_note_is_where_it_sounds_in_the_colour_of_its_voice(drawn):
  (ax,), texts = drawn(SPANS)
  found = boxes(ax)
  assert {box[:3] for box in found} == {(s.start, s.end, s.pitch) for s in SPANS}
  colours = {pitch: colour for _, _, pitch, colour in found}
  assert colours[67] == colours[65] != colours[48]
  assert {"C3", "C4", "time (16th notes)"} <= {*texts} and "prime" not in texts


def test_the_prime_is_told_from_what_the_model_wrote(drawn):
  (ax,), texts = drawn(SPANS, prime=4)
  assert {"prime", "model"} <= {*texts}
  (area,) = (
    patch
    for patch in ax.patches
    if patch.get_x() == 0 and patch.get_width() == 4 and patch.get_zorder() == 0
  )
  assert area.get_height() == 1
  assert all(text.get_position()[1] > 1 for text in ax.texts)  # where no note is


def test_the_reach_has_a_row_for_each_layer_with_the_weight_at_its_time(drawn):
  (_, ax), texts = drawn(SPANS, reach=REACH)
  rows = [mesh.get_array().ravel() for mesh in ax.collections]
  assert [np.flatnonzero(row).tolist() for row in rows] == [[0, 2], [6]]
  assert {"6 / 8", "2 / 2"} <= {*texts}


def test_music_without_a_note_is_drawn(drawn):
  assert len(drawn([])[0]) == 1


def test_a_piece_that_has_lasted_no_time_is_drawn(drawn):
  """One that ends at once: the model looks at its begin alone, from there."""
  axes, texts = drawn([], reach=Reach(np.ones((2, 1)), np.zeros(1), 0.0))
  assert [ax.get_xlim() for ax in axes] == [(0, 1)] * 2 and "0 / 0" in texts
