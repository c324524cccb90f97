"""The encoder ignores padding, and its schemes read the positions of a batch."""

import pytest
from flax import nnx

from experiments import command
from experiments.length_tasks.tasks import TASKS
from experiments.length_tasks.train import make_model

pytestmark = pytest.mark.usefixtures("in_the_repository")
SMALL = ("num_layers=2", "width=16", "num_heads=2", "feed_forward=16")


def make(scheme: str, *changes: str) -> nnx.Module:
  words = [f"--config=configs/length_tasks.py:stack_manipulation,{scheme}"]
  words += [f"--config.model.{change}" for change in (*SMALL, *changes)]
  config = command.parse({"config": command.CONFIG}, words)["config"]
  make = lambda: make_model(config, TASKS["stack_manipulation"], nnx.Rngs(0))
  return nnx.jit(make)()
