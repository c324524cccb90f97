"""What faults lead to is judged rightly: a trainer that fails is found out."""

import contextlib
import json
import random
import shutil
import signal
import subprocess
import time
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.faults import (
  damage,
  devices,
  disk,
  kill,
  nan,
  outcome,
  poisoned,
  terminate,
  tries,
  workers,
)
from experiments.faults.outcome import Outcome, outcome_of
from experiments.faults.running import Running
from experiments.faults.tries import Try
from relpos_jax.data.batching import Batch
from relpos_jax.training.checkpoint import Checkpoints


@pytest.fixture
def copied(workdir, tmp_path):
  """A finished run of 12 steps, saved at 6, 9 and 12, to be changed."""
  return shutil.copytree(workdir, tmp_path / "run")


@pytest.fixture
def running():
  """Makes a `Running` of a folder and shell scripts, whose output is its log."""
  started = []

  def start(workdir, *scripts):
    with open(workdir.with_name(f"{workdir.name}.log"), "w") as log:
      started.extend(subprocess.Popen(["bash", "-c", script], stdout=log) for script in scripts)
    return Running(workdir, started, has_launcher=False)

  yield start
  for process in started:
    process.kill()
    process.wait()


def training_at(folder, step, saved, unfinished=None):
  """Such a folder as a run leaves that was killed after this step."""
  for name in (*map(str, saved), *([f"{unfinished}.orbax-checkpoint-tmp"] if unfinished else [])):
    (folder / "checkpoints" / name).mkdir(parents=True)
  (folder / "environment.json").touch()
  lines = [dict(step=s, time=time.time(), loss=1.0) for s in range(1, step + 1)]
  (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
  "step, saved, unfinished, problem",
  [
    (45, (20, 40), None, ""),
    (61, (20, 40), None, ""),  # the save under way is lost, and what was done beside it
    (45, (20,), 40, ""),
    (60, (20,), 40, ""),  # the save of step 60 waits for that of step 40
    (61, (20,), None, "41 steps lost"),
    (45, (), 40, "45 steps lost"),
    (19, (), None, ""),
  ],
)
def test_a_kill_may_cost_one_save(step, saved, unfinished, problem, tmp_path, running):
  (tmp_path / "run").mkdir()
  process = running(tmp_path / "run", "exec sleep 100")
  process.since -= 1
  training_at(tmp_path / "run", step, saved, unfinished)
  counts = [0, 0]
  found = kill._kill(process, counts)
  assert found.problem == problem and counts == [1, step // 20 * 20 > max(saved, default=0)]
  assert max(found.figures.values()) == step - max(saved, default=0)
  assert process.started[0].wait() == -signal.SIGKILL


@pytest.mark.parametrize(
  "status, says, lacks, problem",
  [
    (0, "stopped by SIGTERM at step 12", None, ""),
    (0, "pictures: a.png", None, ""),
    (3, "stopped by SIGTERM at step 12", None, "exit status 3"),
    (0, "done", None, "it did not say so"),
    (0, "stopped by SIGTERM at step 12", "checkpoints/12", "step 12 was reached and 9 is saved"),
    (0, "stopped by SIGTERM at step 12", "checkpoints/12/manifest", "step 12 is damaged"),
  ],
)
def test_sigterm_must_leave_the_step_reached(status, says, lacks, problem, copied, running):
  if lacks:
    shutil.rmtree(copied / lacks)
  script = f"trap 'echo {says}; exit {status}' TERM; touch {copied}/up; while :; do sleep .02; done"
  process = running(copied, script)
  assert process.wait_for((copied / "up").exists)
  found = terminate._terminate(process, random.Random(0), 1)
  assert found.problem.startswith(problem) and bool(found.problem) == bool(problem)


@pytest.mark.parametrize(
  "other, problem",
  [
    ("exec sleep 100", "the survivor is there still"),
    ("sleep 0.3", "survivors gone only after 0."),
    ("exit", "one has ended by itself"),
  ],
)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_survivor_is_found(victim, other, problem, tmp_path, running, monkeypatch):
  monkeypatch.setattr(workers, "SECONDS", 0.2)
  (tmp_path / "run").mkdir()
  scripts = ["exec sleep 100", other]
  process = running(tmp_path / "run", *(scripts if victim == 0 else reversed(scripts)))
  if other == "exit":
    process.started[1 - victim].wait()
  assert workers._kill_one(process, victim, "here").problem.startswith(problem)


def test_survivors_that_go_in_time_are_well(tmp_path, running):
  (tmp_path / "run").mkdir()
  found = workers._kill_one(running(tmp_path / "run", "sleep 0.2", "sleep 0.2"), 0, "here")
  assert not found.problem and found.figures["seconds, here"] < 5


@pytest.mark.parametrize(
  "says, status, lacks, problem",
  [
    ("error: no room for a checkpoint in x", 2, None, ""),
    ("error: no room for a checkpoint in x", 0, None, "exit status 0"),
    ("error: no space", 2, None, "not told"),
    ("error: no room for a checkpoint in x; echo Traceback", 2, None, "it told with a traceback"),
    ("error: no room for a checkpoint in x", 2, "checkpoints/*", "no step is left"),
    ("error: no room for a checkpoint in x", 2, "checkpoints/9/state", "step 9 is damaged"),
  ],
)
def test_a_full_disk_must_be_told_and_leave_the_older_steps(
  says, status, lacks, problem, copied, running
):
  for path in copied.glob(lacks) if lacks else ():
    shutil.rmtree(path)
  found = disk._fill(running(copied, f"sleep 0.2; echo {says}; exit {status}"))
  assert found.problem.startswith(problem) and bool(found.problem) == bool(problem)


@pytest.mark.parametrize("pattern, num_starts", [(tries.each_start, 3), (tries.one_start, 1)])
@pytest.mark.parametrize("most", [2, 5])
@pytest.mark.parametrize("status", [0, 3])
def test_a_run_is_struck_until_there_were_enough_or_it_came_too_late(
  pattern, num_starts, most, status
):
  """Of two faults the third came too late, or was not wanted; then the run is left alone."""
  started = []

  @contextlib.contextmanager
  def start():
    started.append(mock.Mock())
    started[-1].wait.return_value = status
    yield started[-1]

  found = [*pattern(start, most, lambda running, count: None if count == 2 else Try(f"{count}"))]
  end = [Try("the end", "exit status 3", number=0)] * bool(status)
  assert found == [Try("0"), Try("1"), *end]
  assert [run.wait.called for run in started] == [False] * (num_starts - 1) + [True]


class Finished:
  """Stands for the subject whose undisturbed run is this one."""

  def __init__(self, workdir, folder):
    self.folder, self._workdir = folder, workdir

  def undisturbed(self, processes=1):
    return outcome_of(self._workdir)

  def workdir_undisturbed(self, processes=1):
    return self._workdir


@pytest.mark.parametrize("family", [damage.bits, damage.files])
def test_damage_is_noticed(family, workdir, tmp_path):
  found = [*family(Finished(workdir, tmp_path), random.Random(0), 2)]
  assert not [each.problem for each in found if each.problem]
  assert {name for each in found for name in each.figures} <= {"fell back", "harmless"}


@pytest.mark.parametrize(
  "step, problem",
  [
    (None, "SILENT: other values came back; not set aside; not told in one line: []"),
    (9, "not set aside; not told in one line: []"),
    (12, ""),
  ],
)
def test_what_comes_back_in_silence_is_found_out(step, problem, workdir, tmp_path, monkeypatch):
  finished = Finished(workdir, tmp_path)
  saved = damage._saved(finished)
  with Checkpoints(workdir / "checkpoints") as checkpoints:
    values = dict(w=jnp.ones(3)) if step is None else checkpoints.restore(step, like=saved.like)
  monkeypatch.setattr(Checkpoints, "restore", lambda *_, like: values)
  file = saved.newest / "manifest" / "metadata"
  found = damage._restored(finished, saved, "", file, lambda path: damage._flip(path, 3))
  assert found.problem == problem and ("harmless" in found.figures) == (step == 12)


def test_a_flip_is_of_one_bit(tmp_path):
  before = random.Random(0).randbytes(9)
  for bit in (0, 7, 40, 71):
    (tmp_path / "file").write_bytes(before)
    damage._flip(tmp_path / "file", bit)
    bits = np.unpackbits(np.frombuffer(before, np.uint8), bitorder="little")
    content = np.frombuffer((tmp_path / "file").read_bytes(), np.uint8)
    after = np.unpackbits(content, bitorder="little")
    assert np.flatnonzero(bits != after).tolist() == [bit]


def test_ends_are_compared_to_the_last_bit(copied):
  wanted = outcome_of(copied)
  assert outcome.difference(copied, wanted) == ""
  name, digest = next(iter(wanted.digests.items()))
  others = wanted.digests | {name: digest[:-1] + "x"}
  assert "the final state is another" in outcome.difference(copied, wanted._replace(digests=others))
  lines = copied / "metrics.jsonl"
  text = lines.read_text()
  loss = wanted.metrics[0]["loss"]
  lines.write_text(text.replace(str(loss), str(np.nextafter(loss, 9)), 1))
  assert "metrics are others" in outcome.difference(copied, wanted)
  shutil.rmtree(copied / "checkpoints" / "12" / "state")
  assert "is damaged" in outcome.difference(copied, wanted)


def test_runs_go_on_until_all_faults_are_done(copied, monkeypatch):
  monkeypatch.setattr(tries, "difference", lambda *_: "")
  finished, asked = Finished(copied, copied.parent), []

  def disturb(workdir, most):
    asked.append((workdir.name, most))
    yield from [Try("")] * min(most, 2)

  wanted = Outcome([], {})
  found = [*tries.until_done(finished, "some", 3, wanted, disturb)]
  assert asked == [("some-0", 3), ("some-1", 1)] and sum(each.number for each in found) == 3
  with pytest.raises(RuntimeError, match="2 runs of none were over before 2 faults"):
    [*tries.until_done(finished, "none", 2, wanted, lambda *_: iter(()))]


@pytest.mark.parametrize(
  "change, problem",
  [
    (None, ""),
    ("order", "the data are others"),
    ("loss", "losses are 0.5 apart"),
    ("state", "the state is another than was saved"),
  ],
)
def test_a_move_that_changes_anything_is_found_out(change, problem, tmp_path, monkeypatch):
  moved, whole = tmp_path / "moved", tmp_path / "whole"
  for folder in (moved, whole):
    folder.mkdir()
    training_at(folder, 20, ())
    order = "".join(f"{number} {number}\n" for number in range(20))
    devices._order(folder).write_text(order)
  digests = {10: dict(step="a", w="b"), 11: dict(step="c", w="d" if change == "state" else "b")}
  monkeypatch.setattr(outcome, "digests", lambda _, step: digests[step])
  if change == "order":
    devices._order(moved).write_text(order.replace("7 7", "7 8"))
  if change == "loss":
    file = moved / "metrics.jsonl"
    file.write_text(file.read_text().replace("1.0}", "0.5}", 1))
  assert devices._compared(moved, whole, 1, "").problem == problem


def poisoned_run(folder, skipped, monkeypatch, status=0, said="", changed=""):
  """A run of twelve steps as `nan` judges it, and the subject whose run was left alone."""
  line = lambda step, loss, skips: dict(step=step, loss=loss, skipped=int(skips))
  (folder / "checkpoints" / "12").mkdir(parents=True)
  lines = [line(step, 1.0, step in skipped) for step in range(1, 13)]
  (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
  whole = [line(step, 2.0 if changed == "before" else 1.0, False) for step in range(1, 13)]
  state = lambda step: step if changed == "state" else 0
  monkeypatch.setattr(nan, "_train", lambda *_: (status, said))
  monkeypatch.setattr(outcome, "digests", lambda _, step: dict(step=step, w=state(step)))
  monkeypatch.setattr(nan, "_is_finite", lambda _: changed != "infinite")
  return mock.Mock(undisturbed=lambda: Outcome(whole, {}))


@pytest.mark.parametrize(
  "changes, problem",
  [
    (dict(), ""),
    (dict(status=3), "exit status 3"),
    (dict(skipped={6, 8}), "others were skipped"),
    (dict(changed="before"), "the steps before are others"),
    (dict(changed="state"), "the step that was skipped changed the state"),
    (dict(changed="infinite"), "parameters are not finite"),
  ],
)
def test_a_poisoned_batch_must_be_skipped_and_change_nothing(
  changes, problem, tmp_path, monkeypatch
):
  finished = poisoned_run(tmp_path, **dict(skipped={6}) | changes, monkeypatch=monkeypatch)
  assert nan._one(finished, tmp_path, 5).problem == problem


@pytest.mark.parametrize(
  "status, batch, problem",
  [(1, 7, ""), (0, 7, "exit status 0"), (1, 8, "step and batch are not named")],
)
def test_a_run_of_poisoned_batches_must_end_with_step_and_batch(
  status, batch, problem, tmp_path, monkeypatch
):
  said = f"stopped: step 8: loss nan, gradient norm nan on batch {batch} of 8x32, number 3 skipped"
  finished = poisoned_run(tmp_path, {6, 7, 8}, monkeypatch, status, said)
  assert nan._run_of_them(finished, tmp_path, 5).problem == problem


def test_poison_is_in_the_batches_named_and_checksums_know_no_padding():
  batch = Batch(np.array([[5, 6], [7, 0]]), np.array([[8, 2], [2, 0]]))
  more = Batch(*(np.pad(side, ((0, 3), (0, 0))) for side in batch))
  assert poisoned.checksum(batch) == poisoned.checksum(more)
  assert poisoned.checksum(batch) != poisoned.checksum(Batch(*(side[::-1] for side in batch)))


def test_a_state_that_is_not_finite_is_found(tmp_path):
  for value, is_finite in ((1.0, True), (np.nan, False), (np.inf, False)):
    with Checkpoints(tmp_path / str(value) / "checkpoints") as checkpoints:
      checkpoints.save(1, dict(step=jnp.int32(1), w=jnp.array([1.0, value])))
    assert nan._is_finite(tmp_path / str(value)) == is_finite
