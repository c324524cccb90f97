"""Tests that the README's examples run, and that notebooks are stored without outputs."""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]


def test_the_readmes_examples_run():
  text = (ROOT / "README.md").read_text("utf-8")
  blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
  assert blocks
  names = {}
  for block in blocks:
    exec(block, names)


def test_notebooks_are_stored_without_outputs():
  notebooks = [json.loads(path.read_text("utf-8")) for path in ROOT.glob("notebooks/*.ipynb")]
  cells = [cell for notebook in notebooks for cell in notebook["cells"]]
  code = [cell for cell in cells if cell["cell_type"] == "code"]
  assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)
