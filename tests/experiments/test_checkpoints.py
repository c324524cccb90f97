"""Tests how commands treat a damaged checkpoint."""

import re

import jax
import numpy as np
from faults import damage
from run_files import metrics

from experiments.translation import train as train_module


def names(run):
  return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_damaged_ones_are_passed_over_and_training_resumes_before_them_to_the_same_end(
  call, train, workdir, run_copy, parameters, monkeypatch
):
  is_damaged = f"checkpoint {run_copy}/checkpoints/12 is damaged: "
  damage(run_copy / "checkpoints/12")
  assert call("translate", f"--workdir={run_copy}").status == 0  # the average was kept
  (run_copy / "average.npz").unlink()
  answer = call("evaluate", f"--workdir={run_copy}")
  assert answer.status == 0, answer.err
  assert re.search(f"{is_damaged}.*: passed over\n", answer.err)
  assert names(run_copy) == ["12", "6", "9"]

  monkeypatch.setattr(train_module, "score_run", lambda *_: None)  # takes long
  answer = train(run_copy)

  assert f"{run_copy} is trained to step 9\n" in answer.out, answer.err
  assert is_damaged in answer.err
  assert names(run_copy) == ["12", "6", "9", "damaged-12"]
  ours, theirs = (parameters(run, 12) for run in (run_copy, workdir))
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)
  assert metrics(run_copy) == metrics(workdir)
