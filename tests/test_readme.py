"""Tests that the examples of README and docs run."""

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
