"""The examples in the README run."""

import pathlib
import re

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text("utf-8")


def test_the_readmes_examples_run():
  blocks = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
  assert blocks
  names = {}
  for block in blocks:
    exec(block, names)
