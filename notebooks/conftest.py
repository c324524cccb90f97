"""Gives the notebooks their data sets, and skips notebooks that would have to download some."""

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
