"""Tests that the examples of README and docs run, and that notebooks are stored without outputs."""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page):
  text = page.read_text("utf-8")
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
