"""Gives the notebooks their data sets, and skips notebooks that would have to download
some.

Also skips the notebook of published models where their extra is not installed.
"""

import importlib.util
import os
import pathlib

import pytest

_SHARED_DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"
_NEEDED = {
  "music.ipynb": ("CHORALES_PATH", _SHARED_DATA / "jsb"),
  "graphs.ipynb": ("CLUTRR_PATH", _SHARED_DATA / "clutrr"),
}


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
  for item in items:
    if item.path.suffix == ".ipynb":
      item.add_marker(pytest.mark.notebooks)
    variable, folder = _NEEDED.get(item.path.name, ("", None))
    if folder and folder.is_dir():
      os.environ[variable] = str(folder)
    elif folder:
      item.add_marker(pytest.mark.skip(reason=f"no data set in {folder}"))
    if item.path.name == "published.ipynb" and not importlib.util.find_spec(
      "transformers"
    ):
      item.add_marker(
        pytest.mark.skip(reason="transformers is not installed: extra published")
      )
