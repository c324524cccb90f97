"""Tests runs in a bucket of Google Cloud Storage, served on this machine."""

import importlib.util
import signal

import numpy as np
import pytest

pytest.importorskip("gcsfs")

import gcs_server
from test_train import _interrupt_at, metrics, results

from experiments import train as train_command
from relpos_jax.files import to_path
from relpos_jax.training.checkpoint import Checkpoints
from relpos_jax.training.metrics import read_metrics
from relpos_jax.training.workdir import list_damaged, list_steps


@pytest.fixture(scope="module")
def bucket():
  with gcs_server.serve() as server, pytest.MonkeyPatch.context() as patch:
    for name, value in server.env.items():
      patch.setenv(name, value)
    yield server


@pytest.fixture(scope="module")
def run(bucket, train):
  """Returns the folder of a run that was stopped after step 7 and resumed."""
  save = Checkpoints.save

  def save_after_metrics(self, step, state):
    assert read_metrics("gs://bucket/runs/stopped")[-1]["step"] == step
    save(self, step, state)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Checkpoints, "save", save_after_metrics)
    interrupt = lambda: signal.raise_signal(signal.SIGTERM)
    patch.setattr(train_command.Reporter, "step", _interrupt_at(7, interrupt))
    answer = train("gs://bucket/runs/stopped")
  assert answer.status == 128 + signal.SIGTERM, answer.err
  answer = train("gs://bucket/runs/stopped")
  assert answer.status == 0, answer.err
  return to_path("gs://bucket/runs/stopped")


@pytest.fixture
def check_equal(workdir, parameters):
  """Raises AssertionError unless a run has the parameters, metrics and scores of the local one."""

  def check_equal(run) -> None:
    for ours, theirs in zip(parameters(run, 12), parameters(workdir, 12), strict=True):
      np.testing.assert_array_equal(ours, theirs)
    assert metrics(run) == metrics(workdir) and results(run) == results(workdir)

  return check_equal


def copy(bucket, folder: str):
  """Copies the run's objects into another folder."""
  for name in bucket.names("runs/stopped"):
    bucket.objects[folder + name] = bucket.objects["runs/stopped" + name]
  return to_path(f"gs://bucket/{folder}")


def test_a_run_that_was_stopped_and_resumed_has_all_of_a_local_one(
  bucket, run, workdir, check_equal
):
  check_equal(run)
  files = {str(path.relative_to(workdir)) for path in workdir.rglob("*") if path.is_file()}
  is_same = lambda name: not name.startswith(("checkpoints/", "tensorboard/"))
  names = bucket.names("runs/stopped/")
  assert set(filter(is_same, names)) == set(filter(is_same, files))
  assert sum(name.startswith("tensorboard/") for name in names) == 2  # one for each start
  assert (run / "samples.txt").read_bytes() == (workdir / "samples.txt").read_bytes()


def test_evaluate_and_translate_read_it(call, run, workdir, check_equal):
  (run / "results.json").unlink()
  answer = call("evaluate", f"--workdir={run}")
  assert answer.status == 0, answer.err
  check_equal(run)
  ours, theirs = (
    call("translate", f"--workdir={x}", "--beam_size=1", stdin=b"the dog sees a tree.\n")
    for x in (run, workdir)
  )
  assert (ours.status, ours.out) == (0, theirs.out), ours.err


def test_a_damaged_checkpoint_is_found_by_its_digest_and_passed_over(
  bucket, run, train, check_equal
):
  damaged = copy(bucket, "runs/damaged")
  for name in bucket.names():
    if name.startswith("runs/damaged/checkpoints/12/") and "/d/" in name:
      generation, content = bucket.objects[name]
      flipped = bytearray(content)
      flipped[::101] = (octet ^ 4 for octet in flipped[::101])
      bucket.objects[name] = generation, bytes(flipped)
  answer = train(damaged)
  assert answer.status == 0, answer.err
  assert f"checkpoint {damaged}/checkpoints/12 is damaged: " in answer.err
  assert "renamed to damaged-12" in answer.err
  assert [path.name for path in list_damaged(damaged / "checkpoints")] == ["damaged-12"]
  check_equal(damaged)


def test_an_interrupted_upload_is_no_checkpoint_and_the_run_goes_on_before_it(
  bucket, train, check_equal
):
  folder = "runs/interrupted/checkpoints/9/"
  bucket.refuse = lambda method, name: (
    403 * (method in ("POST", "PUT") and name == f"{folder}commit_success.txt")
  )
  try:
    answer = train("gs://bucket/runs/interrupted")
  finally:
    bucket.refuse = lambda method, name: 0
  assert (answer.status, answer.err.splitlines()[-1].count("cannot use gs://")) == (2, 1), (
    answer.err
  )
  assert bucket.names(folder) and "commit_success.txt" not in bucket.names(folder)
  interrupted = to_path("gs://bucket/runs/interrupted")
  assert list_steps(interrupted / "checkpoints") == [3, 6]
  answer = train(interrupted)
  assert answer.status == 0 and "is trained to step 6\n" in answer.out, answer.err
  check_equal(interrupted)


def test_what_is_not_there_is_one_line_before_anything_is_compiled(
  bucket, train, call, run, monkeypatch
):
  def refused(answer, *words):
    assert (answer.status, answer.err.count("\n"), answer.num_compilations) == (2, 1, 0), answer
    assert all(word in answer.err for word in words), answer.err

  refused(train("s3://bucket/run"), "s3://bucket/run", "gs://BUCKET/RUN")
  refused(train("gs:/bucket/run"), "gs:/bucket/run", "gs://BUCKET/RUN")
  refused(train("gs://bucket/run", "--profile_steps=1:2"), "--profile_steps", "local")
  refused(train("gs://missing/run"), "gs://missing/run", "bucket")
  refused(call("evaluate", "--workdir=gs://bucket/nothing"), "no training run")
  refused(call("checkpoints", f"--workdir={run}"), "gcloud storage cp")
  find = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "gcsfs" and find(name))
  refused(train("gs://bucket/run"), "pip install gcsfs")


def test_a_run_without_its_checkpoints_does_not_start_again(bucket, run, train):
  lost = copy(bucket, "runs/lost")
  for name in bucket.names("runs/lost/checkpoints/"):
    del bucket.objects[f"runs/lost/checkpoints/{name}"]
  answer = train(lost)
  assert answer.status == 2 and "are gone" in answer.err, answer.err
