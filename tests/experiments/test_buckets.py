"""Tests runs in buckets, gs:// and s3://, served on this machine."""

import contextlib
import itertools
import signal

import bucket_server
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import flip_bits
from run_files import metrics, results, signal_at

from experiments import command, files
from experiments.errors import InputError
from experiments.files import to_path
from experiments.training import loop
from experiments.training import metrics as metrics_module
from experiments.training.checkpoint import Checkpoints
from experiments.training.checkpoint_reader import COMPLETE, list_damaged, list_steps
from experiments.training.metrics import read_metrics

pytestmark = pytest.mark.buckets

PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}


@pytest.fixture(scope="module")
def bucket():
  with bucket_server.serve() as server, pytest.MonkeyPatch.context() as patch:
    for name, value in server.env.items():
      patch.setenv(name, value)
    yield server


@pytest.fixture(scope="module", params=["gs", "s3"])
def root(bucket, request):
  """Returns the folder that holds the runs, gs://bucket/gs or s3://bucket/s3."""
  pytest.importorskip(PACKAGES[request.param])
  return f"{request.param}://bucket/{request.param}"


@pytest.fixture(scope="module")
def run(bucket, root, train):
  """Returns the folder of a run that was stopped after step 7 and resumed."""
  save, folder = Checkpoints.save, to_path(f"{root}/stopped")

  def save_after_metrics(self, step, state):
    assert read_metrics(folder)[-1]["step"] == step
    assert (folder / ".lock").exists()
    save(self, step, state)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Checkpoints, "save", save_after_metrics)
    patch.setattr(loop.Reporter, "step", signal_at(7, signal.SIGTERM))
    assert train(folder).status == 128 + signal.SIGTERM
  assert not (folder / ".lock").exists()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(metrics_module, "upload", fail_once(metrics_module.upload))
    answer = train(folder)
  assert answer.status == 0, answer.err
  assert "note: no network; tried again at the next checkpoint\n" in answer.out
  return folder


def fail_once(upload):
  """Returns a function whose first call raises what a lost connection does."""
  calls = itertools.count()

  def upload_or_fail(*arguments):
    if next(calls) == 0:
      raise InputError("no network")
    upload(*arguments)

  return upload_or_fail


@pytest.fixture
def check_equal(workdir, parameters):
  """Asserts that a run has the parameters, metrics and scores of the local one."""

  def check_equal(run) -> None:
    ours, theirs = parameters(run, 15), parameters(workdir, 15)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert metrics(run) == metrics(workdir)
    assert results(run) == results(workdir)

  return check_equal


def in_bucket(path) -> str:
  """Returns the name of a path in its bucket."""
  return str(path).partition("://bucket/")[2]


def copy(bucket, run, name: str):
  """Copies the run's objects into a folder of another name."""
  copied = run.with_name(name)
  old, new = in_bucket(run), in_bucket(copied)
  for name in bucket.names(old):
    bucket.objects[new + name] = bucket.objects[old + name]
  return copied


def test_a_run_that_was_stopped_and_resumed_has_all_of_a_local_one(
  bucket, run, workdir, check_equal
):
  check_equal(run)
  local = [str(x.relative_to(workdir)) for x in workdir.rglob("*") if x.is_file()]
  names = bucket.names(f"{in_bucket(run)}/")
  assert comparable(names) == comparable(local)
  assert list_steps(run / "checkpoints") == [9, 12, 15]
  assert (run / "samples.txt").read_bytes() == (workdir / "samples.txt").read_bytes()


def comparable(names) -> set[str]:
  other = ("checkpoints/", "tensorboard/", "average.npz")
  return {name for name in names if not name.startswith(other)}


def test_evaluate_and_translate_read_it(call, run, workdir, check_equal):
  (run / "results.json").unlink()
  answer = call("evaluate", f"--workdir={run}")
  assert answer.status == 0, answer.err
  check_equal(run)
  line = b"the dog sees a tree.\n"
  ours, theirs = (
    call("translate", f"--workdir={folder}", "--beam_size=1", stdin=line)
    for folder in (run, workdir)
  )
  assert (ours.status, ours.out) == (0, theirs.out), ours.err


def test_a_damaged_checkpoint_is_found_by_its_digest_and_passed_over(
  bucket, run, train, check_equal
):
  damaged = copy(bucket, run, "damaged")
  step = in_bucket(damaged / "checkpoints/15")
  for name in bucket.names(step):
    if "/d/" in name:
      generation, content = bucket.objects[step + name]
      bucket.objects[step + name] = generation, flip_bits(content)
  answer = train(damaged)
  assert answer.status == 0, answer.err
  assert f"checkpoint {damaged}/checkpoints/15 is damaged: " in answer.err
  assert "renamed to damaged-15" in answer.err
  assert [path.name for path in list_damaged(damaged / "checkpoints")] == ["damaged-15"]
  check_equal(damaged)


@contextlib.contextmanager
def refusing(bucket, marker: str, num_written: int | None):
  """Refuses writes after the first ones, or that of the marker alone."""
  written = itertools.count()

  def refuse(method: str, name: str) -> int:
    if method != "PUT":
      return 0
    is_late = name == marker if num_written is None else next(written) >= num_written
    return 403 * is_late

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(bucket, "refuse", refuse)
    yield


@pytest.mark.parametrize("num_written", [0, 1, 8, None])
def test_a_half_copied_checkpoint_is_none(bucket, num_written):
  pytest.importorskip("s3fs")
  folder = to_path(f"s3://bucket/small/{num_written}")
  ones, zeros = {"params": jnp.ones((2, 3))}, {"params": jnp.zeros((2, 3))}
  with Checkpoints(folder) as checkpoints:
    checkpoints.save(1, ones)

  marker = in_bucket(folder / "2" / COMPLETE)
  refusal = pytest.raises(InputError, match="cannot use s3://")
  with (
    refusing(bucket, marker, num_written),
    refusal,
    Checkpoints(folder) as checkpoints,
  ):
    checkpoints.save(2, zeros)

  assert bool(bucket.names(in_bucket(folder / "2"))) == (num_written != 0)
  with Checkpoints(folder, keep=1) as checkpoints:
    np.testing.assert_array_equal(checkpoints.restore(like=ones)["params"], 1)
    checkpoints.save(2, ones)
    assert checkpoints.steps() == [2]
    assert not bucket.names(in_bucket(folder / "1"))
    np.testing.assert_array_equal(checkpoints.restore(like=ones)["params"], 1)


def test_several_processes_do_not_save_in_s3(bucket, monkeypatch):
  pytest.importorskip("s3fs")
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  words = "several processes cannot save in s3://bucket/run: use gs://"
  refusal = pytest.raises(InputError, match=words)
  with refusal, Checkpoints(to_path("s3://bucket/run")) as checkpoints:
    checkpoints.prepare()


def test_what_is_not_there_is_one_line_before_anything_is_compiled(root, train, call):
  unknown = train("az://bucket/run")
  unknown.assert_refused("az://bucket/run gs://BUCKET/RUN or s3://BUCKET/RUN")
  train(f"{root}/run", "--profile_steps=1:2").assert_refused("--profile_steps local")
  missing = f"{root[:2]}://missing/run"
  train(missing).assert_refused(f"{missing} bucket")
  call("evaluate", f"--workdir={root}/nothing").assert_refused("no training run")


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
  folder = in_bucket(lost / "checkpoints")
  for name in bucket.names(folder):
    del bucket.objects[folder + name]
  train(lost).assert_refused("are gone")
