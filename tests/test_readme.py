"""What the README shows runs."""

import pathlib
import re

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_readmes_examples_run():
  blocks = re.findall(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.DOTALL | re.MULTILINE)
  names = {}
  for block in blocks:
    exec(block, names)
  assert len(blocks) == 2
  assert names["z"].shape == names["q"].shape and names["y"].shape == (2, 10, 512)
