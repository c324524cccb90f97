"""Pictures, read through the text of their SVG form."""

import matplotlib
import pytest


@pytest.fixture
def words_of(tmp_path):
  """Draws, and returns the texts in the picture."""

  def draw(function, *args):
    path = tmp_path / "picture.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
      assert function(*args, path) == path
    svg = path.read_text(encoding="utf-8")
    texts = [part.split("</text>")[0].split(">")[1] for part in svg.split("<text")[1:]]
    return [text.replace("&lt;", "<").replace("&gt;", ">") for text in texts]

  return draw
