"""Notebooks are stored as they were written: without outputs. That they run, nbmake tests."""

import json
import pathlib

import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_stored_without_outputs(path):
  cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
  code = [cell for cell in cells if cell["cell_type"] == "code"]
  assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)
