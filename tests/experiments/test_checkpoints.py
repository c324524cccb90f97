"""The command checkpoints, and what training makes of a checkpoint that is damaged."""

import re
import shutil

import numpy as np
import pytest

from experiments import train as train_command


@pytest.fixture
def run_copy(workdir, tmp_path):
  """A copy of a finished run's folder, to be damaged: checkpoints 6, 9 and 12."""
  return shutil.copytree(workdir, tmp_path / "run")


def damage(run, step):
  """In every data file, for parts of some are not in use."""
  for file in (run / "checkpoints" / str(step)).rglob("d/*"):
    content = bytearray(file.read_bytes())
    content[::101] = (octet ^ 4 for octet in content[::101])
    file.write_bytes(content)


def names(run):
  return sorted(path.name for path in (run / "checkpoints").iterdir())


def states(answer):
  """The table's rows: the step or folder, and its state."""
  row = re.compile(r" *(\S+)  \d{4}-\d\d-\d\d \d\d:\d\d  +[\d,]+ bytes  (.*)")
  return dict(match.groups() for match in map(row.fullmatch, answer.out.splitlines()) if match)


def test_good_ones_are_listed_unread_and_verified(call, workdir, contents):
  before = contents(workdir)
  answer = call("checkpoints", f"--workdir={workdir}")
  assert (answer.status, answer.err) == (0, "")
  assert states(answer) == {step: "not read" for step in ("12", "9", "6")}
  answer = call("checkpoints", f"--workdir={workdir}", "--verify")
  assert (answer.status, answer.err) == (0, "")
  assert states(answer) == {step: "good" for step in ("12", "9", "6")}
  assert contents(workdir) == before


def test_a_damaged_one_is_named_and_left_alone(call, run_copy, contents):
  damage(run_copy, 9)
  before = contents(run_copy)
  answer = call("checkpoints", f"--workdir={run_copy}", "--verify")
  assert answer.status == 1
  found = states(answer)
  assert found.pop("9").startswith("damaged: ") and found == {"12": "good", "6": "good"}
  assert contents(run_copy) == before


def test_the_newest_good_ones_are_kept(call, run_copy):
  damage(run_copy, 12)
  answer = call("checkpoints", f"--workdir={run_copy}", "--prune=1")
  assert answer.status == 1 and names(run_copy) == ["12", "9"]
  assert re.findall(r"deleted (\S+) \([\d,]+ bytes\)", answer.out) == [f"{run_copy}/checkpoints/6"]
  assert states(answer)["9"] == "good" and states(answer)["12"].startswith("damaged: ")


def test_the_damaged_go_when_told_to_but_not_where_none_is_good(call, run_copy):
  checkpoints = run_copy / "checkpoints"
  damage(run_copy, 12)
  (checkpoints / "9").rename(checkpoints / "damaged-9")
  (checkpoints / "damaged-9" / "reason.txt").write_text("lightning\n")
  answer = call("checkpoints", f"--workdir={run_copy}", "--prune=2")
  assert answer.status == 1 and names(run_copy) == ["12", "6", "damaged-9"]
  assert "1 good: fewer than 2" in answer.out
  assert states(answer)["damaged-9"] == "damaged: lightning"
  answer = call("checkpoints", f"--workdir={run_copy}", "--prune=2", "--damaged")
  assert answer.status == 0 and names(run_copy) == ["6"]
  damage(run_copy, 6)
  answer = call("checkpoints", f"--workdir={run_copy}", "--prune=1", "--damaged")
  assert answer.status == 1 and names(run_copy) == ["6"]


def test_a_link_is_no_checkpoint(call, run_copy):
  """It would count as the newest good one, and what it names be deleted as an old one."""
  (run_copy / "checkpoints" / "15").symlink_to("12")
  answer = call("checkpoints", f"--workdir={run_copy}", "--prune=1")
  assert (answer.status, answer.err) == (0, "") and names(run_copy) == ["12", "15"]
  assert states(answer) == {"12": "good"}


def test_evaluating_and_translating_rename_nothing(call, run_copy):
  damage(run_copy, 12)
  for name in ("evaluate", "translate"):
    answer = call(name, f"--workdir={run_copy}", stdin=b"a cat\n")
    assert answer.status == 0, answer.err
    assert f"checkpoint {run_copy}/checkpoints/12 is damaged: " in answer.err
    assert ": passed over\n" in answer.err
    assert names(run_copy) == ["12", "6", "9"]


def test_training_goes_on_from_the_newest_good_one_to_the_same_end(
  train, workdir, run_copy, parameters, monkeypatch
):
  monkeypatch.setattr(train_command, "evaluate", lambda *_: None)  # Scoring is for other tests.
  damage(run_copy, 12)
  answer = train(run_copy)
  assert answer.status == 0, answer.err
  assert f"{run_copy} is trained to step 9\n" in answer.out
  assert f"checkpoint {run_copy}/checkpoints/12 is damaged: " in answer.err
  assert names(run_copy) == ["12", "6", "9", "damaged-12"]
  for ours, theirs in zip(parameters(run_copy, 12), parameters(workdir, 12), strict=True):
    np.testing.assert_array_equal(ours, theirs)
