"""The digest of the code is of the code that runs, wherever it was imported from."""

import pathlib
import shutil

import pytest

import experiments
import relpos_jax
from experiments.training.environment import code_version


@pytest.mark.parametrize("package", [relpos_jax, experiments])
def test_the_digest_is_of_the_packages_that_are_imported(
  package, tmp_path, monkeypatch
):
  (folder,) = map(pathlib.Path, package.__path__)
  ignored = shutil.ignore_patterns("*.xz")
  copy = shutil.copytree(folder, tmp_path / folder.name, ignore=ignored)
  before = code_version()
  monkeypatch.setattr(package, "__path__", [str(copy)])
  assert code_version() == before
  with open(copy / "run.py", "a") as file:
    file.write("# another version")
  assert code_version() != before
