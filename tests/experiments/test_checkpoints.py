"""Tests the command checkpoints, and how other commands treat a damaged checkpoint."""

import re
import shutil

import numpy as np
from faults import damage
from test_train import metrics

from experiments import trainer as trainer_module
from experiments.training import checkpoint_reader


def names(run):
  return sorted(path.name for path in (run / "checkpoints").iterdir())


def states(answer):
  """Returns the table's rows: the step or folder, and its state."""
  row = re.compile(r" *(\S+)  \d{4}-\d\d-\d\d \d\d:\d\d  +[\d,]+ bytes  (.*)")
  return dict(match.groups() for match in map(row.fullmatch, answer.out.splitlines()) if match)


def test_checkpoints_are_listed_and_verified(call, run_copy, contents):
  answer = call("checkpoints", f"--workdir={run_copy}")
  assert (answer.status, answer.err) == (0, "")
  assert states(answer) == {step: "not read" for step in ("12", "9", "6")}
  answer = call("checkpoints", f"--workdir={run_copy}", "--verify")
  assert (answer.status, answer.err) == (0, "")
  assert states(answer) == {step: "good" for step in ("12", "9", "6")}
  damage(run_copy / "checkpoints/9")
  before = contents(run_copy)
  answer = call("checkpoints", f"--workdir={run_copy}", "--verify")
  found = states(answer)
  assert answer.status == 1 and contents(run_copy) == before
  assert found.pop("9").startswith("damaged: ") and found == {"12": "good", "6": "good"}


def test_pruning_keeps_the_newest_good_ones_and_the_damaged(call, run_copy):
  checkpoints = run_copy / "checkpoints"
  damage(run_copy / "checkpoints/12")
  shutil.copytree(checkpoints / "12", checkpoints / "damaged-12")
  (checkpoints / "damaged-12" / "reason.txt").write_text("lightning\n")
  (checkpoints / "15").symlink_to("9")  # a link is no checkpoint
  call("checkpoints", f"--workdir={run_copy}", "--prune=-1").assert_refused("prune=-1 non-negative")
  answer = call("checkpoints", f"--workdir={run_copy}", "--prune=3")
  assert answer.status == 1 and names(run_copy) == ["12", "15", "6", "9", "damaged-12"]
  assert "2 good: fewer than 3" in answer.out
  answer = call("checkpoints", f"--workdir={run_copy}", "--prune=1")
  assert answer.status == 1 and names(run_copy) == ["12", "15", "9", "damaged-12"]
  assert re.findall(r"deleted (\S+) \([\d,]+ bytes\)", answer.out) == [f"{checkpoints}/6"]
  found = states(answer)
  assert found["9"] == "good" and found["12"].startswith("damaged: ")
  assert found["damaged-12"] == "damaged: lightning"


def test_a_step_that_the_training_deletes_meanwhile_is_no_damage(call, run_copy, monkeypatch):
  oldest = run_copy / "checkpoints" / "6"

  def examine(path):
    if path == oldest:
      shutil.rmtree(oldest)
    real(path)

  real = checkpoint_reader.examine
  monkeypatch.setattr(checkpoint_reader, "examine", examine)
  answer = call("checkpoints", f"--workdir={run_copy}", "--verify")
  assert (answer.status, answer.err) == (0, "")
  assert states(answer) == dict.fromkeys(("12", "9"), "good")


def test_damaged_ones_are_passed_over_and_training_resumes_before_them_to_the_same_end(
  call, train, workdir, run_copy, parameters, monkeypatch
):
  damage(run_copy / "checkpoints/12")
  assert call("translate", f"--workdir={run_copy}").status == 0  # the average was kept
  (run_copy / "average.npz").unlink()
  for name in ("evaluate", "translate"):
    answer = call(name, f"--workdir={run_copy}", stdin=b"a cat\n")
    assert answer.status == 0, answer.err
    assert f"checkpoint {run_copy}/checkpoints/12 is damaged: " in answer.err
    assert ": passed over\n" in answer.err
    assert names(run_copy) == ["12", "6", "9"]
  monkeypatch.setattr(trainer_module, "evaluate", lambda *_: None)  # Scoring is for other tests.
  answer = train(run_copy)
  assert answer.status == 0, answer.err
  assert f"{run_copy} is trained to step 9\n" in answer.out
  assert f"checkpoint {run_copy}/checkpoints/12 is damaged: " in answer.err
  assert names(run_copy) == ["12", "6", "9", "damaged-12"]
  for ours, theirs in zip(parameters(run_copy, 12), parameters(workdir, 12), strict=True):
    np.testing.assert_array_equal(ours, theirs)
  assert metrics(run_copy) == metrics(workdir)
  assert (run_copy / "samples.txt").read_bytes() == (workdir / "samples.txt").read_bytes()
