"""Heat maps show what they were given, where it belongs."""

import matplotlib.image
import numpy as np
import PIL.Image
import pytest

from relpos_jax.evaluation import pictures
from relpos_jax.evaluation.pictures import Panel, attention_heatmap, counts_heatmap


def test_words_stand_on_the_axes_as_they_are(words_of):
  rows, columns = ["Käse", "kostet", "$x^2$", "3_4"], ["Straße", r"\alpha", "_", "$5", "</s>"]
  words = words_of(attention_heatmap, [Panel("1 $ a_b $", np.eye(4, 5), rows, columns)])
  assert [word for word in words if word in rows] == rows
  assert [word for word in words if word in columns] == columns
  assert "1 $ a_b $" in words and "attention weight" in words


def test_rows_run_down_and_columns_to_the_right(tmp_path):
  weights = np.zeros((6, 4))
  weights[5, 1] = 1.0
  path = attention_heatmap([Panel("", weights, "abcdef", "abcd")], tmp_path / "attention.png")
  red = matplotlib.image.imread(path)[:, :, 0]
  is_dark = (red > 0.02) & (red < 0.05)
  is_dark[:, int(0.75 * is_dark.shape[1]) :] = False  # the colour bar
  y, x = np.mean(np.argwhere(is_dark), axis=0) / is_dark.shape
  assert 0.7 < y < 1.0 and 0.2 < x < 0.45


def test_panels_stand_in_order_on_one_scale(words_of):
  weak = np.full((2, 2), 0.1)
  panels = [Panel(title, weak, ["a", "b"], ["c", "d"]) for title in ("first", "second", "third")]
  words = words_of(attention_heatmap, panels)
  assert [word for word in words if word in ("first", "second", "third")] == [
    "first", "second", "third",
  ]  # fmt: skip
  assert words.count("attention weight") == 1


@pytest.mark.parametrize("word", ["犬が眠る", "😀", "", "Donaudampfschifffahrtsgesellschaft"])
def test_any_word_is_drawn_without_a_warning(word, tmp_path):
  panel = Panel(word, np.ones((1, 1)), [word], [word])
  assert attention_heatmap([panel], tmp_path / "attention.png").stat().st_size > 0


@pytest.mark.parametrize("num_words", [5, 40, 100])
def test_pictures_keep_a_sensible_size(num_words, tmp_path):
  words = [f"Wort{i}" for i in range(num_words)]
  panel = Panel("Encoder", np.eye(num_words), words, words)
  path = attention_heatmap([panel] * 2, tmp_path / "attention.png")
  width = int.from_bytes(path.read_bytes()[16:20], "big")
  assert 500 < width < 8000


def test_pictures_of_long_sentences_are_drawn_smaller(tmp_path, monkeypatch):
  monkeypatch.setattr(pictures, "_MOST_PIXELS", 800)  # of 8,000 words matplotlib draws none
  panel = Panel("Long", np.ones((1, 40)), ["x"], ["word"] * 40)
  with PIL.Image.open(attention_heatmap([panel], tmp_path / "attention.png")) as picture:
    assert 500 < max(picture.size) < 900


def test_what_cannot_be_drawn(tmp_path):
  with pytest.raises(ValueError, match="panels is empty"):
    attention_heatmap([], tmp_path / "attention.png")
  with pytest.raises(ValueError, match=r"Encoder: weights \(2, 3\) for 2 rows and 2 columns"):
    attention_heatmap([Panel("Encoder", np.ones((2, 3)), "ab", "cd")], tmp_path / "attention.png")


def test_counts_are_written_into_their_cells(words_of):
  counts = [[5, 0], [1200, 7]]
  words = words_of(counts_heatmap, Panel("test split", counts, ["no", "yes"], ["no", "yes"]))
  assert [word for word in words if word[0].isdigit()] == ["5", "0", "1,200", "7"]
  assert {"class", "answer", "test split"} <= {*words} and not {"query", "key"} & {*words}
  assert words.count("no") == words.count("yes") == 2
