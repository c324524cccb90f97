"""Checkpoints that tests of this folder share."""

import pathlib
import shutil

import pytest
from train_states import make_state

from experiments.training.checkpoint import Checkpoints


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> pathlib.Path:
  """Returns a folder of checkpoints 1, 2 and 3, read-only."""
  folder = tmp_path_factory.mktemp("run") / "checkpoints"
  with Checkpoints(folder) as checkpoints:
    for step in (1, 2, 3):
      checkpoints.save(step, make_state(step))
  return folder


@pytest.fixture
def copied(saved, tmp_path) -> pathlib.Path:
  """Copies the checkpoints, to change them."""
  return shutil.copytree(saved, tmp_path / "checkpoints")
