"""Tests runs in buckets, gs:// and s3://, served on this machine."""

import importlib.util
import itertools
import signal

import bucket_server
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import flip_bits
from test_train import _interrupt_at, metrics, results

from experiments import command, files
from experiments.errors import InputError
from experiments.files import to_path
from experiments.training import loop
from experiments.training.checkpoint import Checkpoints
from experiments.training.checkpoint_reader import COMPLETE, list_damaged, list_steps
from experiments.training.metrics import read_metrics

pytestmark = pytest.mark.buckets


@pytest.fixture(scope="module")
def bucket():
  with bucket_server.serve() as server, pytest.MonkeyPatch.context() as patch:
    for name, value in server.env.items():
      patch.setenv(name, value)
    yield server


@pytest.fixture(scope="module", params=["gs", "s3"])
def root(bucket, request):
  """Returns the folder of a bucket that holds the runs, gs://bucket/gs or s3://bucket/s3."""
  pytest.importorskip(dict(gs="gcsfs", s3="s3fs")[request.param])
  return f"{request.param}://bucket/{request.param}"


@pytest.fixture(scope="module")
def run(bucket, root, train):
  """Returns the folder of a run that was stopped after step 7 and resumed."""
  save = Checkpoints.save

  def save_after_metrics(self, step, state):
    assert read_metrics(to_path(f"{root}/stopped"))[-1]["step"] == step
    assert ".lock" in bucket.names(f"{root[-2:]}/stopped/")
    save(self, step, state)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Checkpoints, "save", save_after_metrics)
    interrupt = lambda: signal.raise_signal(signal.SIGTERM)
    patch.setattr(loop.Reporter, "step", _interrupt_at(7, interrupt))
    answer = train(f"{root}/stopped")
  assert answer.status == 128 + signal.SIGTERM, answer.err
  assert ".lock" not in bucket.names(f"{root[-2:]}/stopped/")
  answer = train(f"{root}/stopped")
  assert answer.status == 0, answer.err
  return to_path(f"{root}/stopped")


@pytest.fixture
def check_equal(workdir, parameters):
  """Raises AssertionError unless a run has the parameters, metrics and scores of the local one."""

  def check_equal(run) -> None:
    for ours, theirs in zip(parameters(run, 12), parameters(workdir, 12), strict=True):
      np.testing.assert_array_equal(ours, theirs)
    assert metrics(run) == metrics(workdir) and results(run) == results(workdir)

  return check_equal


def in_bucket(path) -> str:
  """Returns the name of a path in its bucket."""
  return str(path).partition("://bucket/")[2]


def copy(bucket, run, name: str):
  """Copies the run's objects into a folder of another name."""
  copied = run.with_name(name)
  for name in bucket.names(in_bucket(run)):
    bucket.objects[in_bucket(copied) + name] = bucket.objects[in_bucket(run) + name]
  return copied


def test_a_run_that_was_stopped_and_resumed_has_all_of_a_local_one(
  bucket, run, workdir, check_equal
):
  check_equal(run)
  files = {
    str(path.relative_to(workdir)) for path in workdir.rglob("*") if path.is_file()
  }
  is_same = lambda name: (
    not name.startswith(("checkpoints/", "tensorboard/", "average.npz"))
  )
  names = bucket.names(f"{in_bucket(run)}/")
  assert set(filter(is_same, names)) == set(filter(is_same, files))
  assert list_steps(run / "checkpoints") == [6, 9, 12]
  assert (
    sum(name.startswith("tensorboard/") for name in names) == 2
  )  # one for each start
  assert (run / "samples.txt").read_bytes() == (workdir / "samples.txt").read_bytes()


def test_evaluate_and_translate_read_it(call, run, workdir, check_equal):
  (run / "results.json").unlink()
  answer = call("evaluate", f"--workdir={run}")
  assert answer.status == 0, answer.err
  check_equal(run)
  ours, theirs = (
    call(
      "translate", f"--workdir={x}", "--beam_size=1", stdin=b"the dog sees a tree.\n"
    )
    for x in (run, workdir)
  )
  assert (ours.status, ours.out) == (0, theirs.out), ours.err


def test_a_damaged_checkpoint_is_found_by_its_digest_and_passed_over(
  bucket, run, train, check_equal
):
  damaged = copy(bucket, run, "damaged")
  for name in bucket.names():
    if name.startswith(in_bucket(damaged / "checkpoints/12/")) and "/d/" in name:
      generation, content = bucket.objects[name]
      bucket.objects[name] = generation, flip_bits(content)
  answer = train(damaged)
  assert answer.status == 0, answer.err
  assert f"checkpoint {damaged}/checkpoints/12 is damaged: " in answer.err
  assert "renamed to damaged-12" in answer.err
  assert [path.name for path in list_damaged(damaged / "checkpoints")] == ["damaged-12"]
  check_equal(damaged)


@pytest.mark.parametrize("num_written", [0, 1, 8, None])
def test_a_half_copied_checkpoint_is_none(bucket, num_written):
  pytest.importorskip("s3fs")
  folder = to_path(f"s3://bucket/small/{num_written}")
  like = dict(params=dict(kernel=jnp.ones((2, 3))))
  with Checkpoints(folder) as checkpoints:
    checkpoints.save(1, like)
  written = itertools.count()
  marker = in_bucket(folder / "2" / COMPLETE)
  is_late = lambda name: (
    name == marker if num_written is None else next(written) >= num_written
  )
  bucket.refuse = lambda method, name: 403 * (method == "PUT" and is_late(name))
  try:
    with (
      pytest.raises(InputError, match="cannot use s3://"),
      Checkpoints(folder) as checkpoints,
    ):
      checkpoints.save(2, jax.tree.map(jnp.zeros_like, like))
  finally:
    bucket.refuse = lambda method, name: 0
  with Checkpoints(folder, keep=1) as checkpoints:
    assert bool(bucket.names(in_bucket(folder / "2"))) == (num_written != 0)
    assert checkpoints.steps() == [1]
    np.testing.assert_array_equal(checkpoints.restore(like=like)["params"]["kernel"], 1)
    checkpoints.save(2, like)
    assert checkpoints.steps() == [2] and not bucket.names(in_bucket(folder / "1"))
    np.testing.assert_array_equal(checkpoints.restore(like=like)["params"]["kernel"], 1)


def test_several_processes_do_not_save_in_s3(bucket, monkeypatch):
  pytest.importorskip("s3fs")
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with (
    pytest.raises(
      InputError, match="several processes cannot save in s3://bucket/run: use gs://"
    ),
    Checkpoints(to_path("s3://bucket/run")) as checkpoints,
  ):
    checkpoints.prepare()


def test_what_is_not_there_is_one_line_before_anything_is_compiled(
  root, train, call, monkeypatch
):
  scheme, package = (root[:2], dict(gs="gcsfs", s3="s3fs")[root[:2]])
  find = importlib.util.find_spec
  unknown = train("az://bucket/run"), train(f"{scheme}:/bucket/run")
  unknown[0].assert_refused("az://bucket/run gs://BUCKET/RUN or s3://BUCKET/RUN")
  unknown[1].assert_refused(f"{scheme}:/bucket/run gs://BUCKET/RUN")
  train(f"{root}/run", "--profile_steps=1:2").assert_refused("--profile_steps local")
  train(f"{scheme}://missing/run").assert_refused(f"{scheme}://missing/run bucket")
  call("evaluate", f"--workdir={root}/nothing").assert_refused("no training run")
  monkeypatch.setattr(
    importlib.util, "find_spec", lambda name: name != package and find(name)
  )
  train(f"{root}/run").assert_refused(f"pip install {package}")


def test_one_that_is_alive_holds_the_lock_and_that_of_a_killed_one_is_taken(
  root, monkeypatch, capsys
):
  monkeypatch.setattr(files, "_RENEW_SECONDS", 0.3)
  folder = to_path(f"{root}/locked")
  (folder / ".lock").write_text("someone, long ago")
  with command.lock_folder(folder, "workdir"):
    assert "for the lock of" in capsys.readouterr().err
    refusal = pytest.raises(InputError, match=f"another command is using {folder}")
    with refusal, command.lock_folder(folder, "workdir"):
      pass
  assert not (folder / ".lock").exists()


def test_a_run_without_its_checkpoints_does_not_start_again(bucket, run, train):
  lost = copy(bucket, run, "lost")
  for name in bucket.names(folder := in_bucket(lost / "checkpoints")):
    del bucket.objects[folder + name]
  train(lost).assert_refused("are gone")
