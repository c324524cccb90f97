"""Tests how commands treat a damaged checkpoint."""

import jax
import numpy as np
from faults import damage
from run_files import metrics

from experiments.translation import train as train_module


def names(run):
  return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_training_resumes_before_damaged_ones_to_the_same_end(
  train, workdir, run_copy, parameters, monkeypatch
):
  is_damaged = f"checkpoint {run_copy}/checkpoints/15 is damaged: "
  damage(run_copy / "checkpoints/15")
  monkeypatch.setattr(train_module, "score_run", lambda *_: None)  # takes long
  answer = train(run_copy)

  assert f"{run_copy} is trained to step 12\n" in answer.out, answer.err
  assert is_damaged in answer.err
  assert names(run_copy) == ["12", "15", "9", "damaged-15"]
  ours, theirs = (parameters(run, 15) for run in (run_copy, workdir))
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)
  assert metrics(run_copy) == metrics(workdir)
