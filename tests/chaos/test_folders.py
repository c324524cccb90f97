"""Run directories that were changed or cannot be used, and a full disk."""

import pathlib
import resource
import shutil

import pytest

from chaos.run import digests, kept
from chaos.training import ROOT
from experiments.training.checkpoint_reader import list_steps

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize("how", ["moved away", "dangling link"])
def test_missing(how, training, tmp_path, begin):
  begin(how)
  workdir = training.copy(tmp_path / "run")
  shutil.rmtree(workdir / "checkpoints" / "100")
  (workdir / "checkpoints").rename(tmp_path / "elsewhere")
  if how == "dangling link":
    (workdir / "checkpoints").symlink_to(tmp_path / "nowhere")
  before = (workdir / "metrics.jsonl").read_bytes()
  _check_refused(training, tmp_path, workdir)
  assert (workdir / "metrics.jsonl").read_bytes() == before
  assert not (tmp_path / "nowhere").exists()
  (workdir / "checkpoints").unlink(missing_ok=True)
  (tmp_path / "elsewhere").rename(workdir / "checkpoints")
  assert training.to_its_end(workdir) == []


def _check_refused(training, folder: pathlib.Path, workdir: pathlib.Path, cwd=ROOT) -> None:
  """Asserts that stderr is one line, and the exit status 2, before anything is compiled."""
  compiled = folder / "compiled"
  with training.started(workdir, cwd=cwd, JAX_COMPILATION_CACHE_DIR=str(compiled)) as run:
    assert run.wait() == 2, run.err()
  assert run.err().startswith("error: ") and run.err().count("\n") == 1, run.err()
  assert not compiled.exists() or not [*compiled.iterdir()], "something was compiled"


@pytest.mark.parametrize("name", ["a[b]", "a*b", "a?b", "a\\b", "in a*b"])
def test_paths(name, training, tmp_path, begin):
  begin(name)
  cwd = tmp_path / name.removeprefix("in ")
  if name.startswith("in "):  # a relative path in such a folder
    cwd.mkdir()
    _check_refused(training, tmp_path, pathlib.Path("run"), cwd)
    assert not [*cwd.iterdir()]
  else:
    _check_refused(training, tmp_path, cwd)
    assert not cwd.exists()


@pytest.mark.parametrize("num_kept", [1, 2])
def test_links(num_kept, training, tmp_path, begin):
  begin(f"10 -> 100 and 120 -> 100, and --prune={num_kept}")
  folder = training.copy(tmp_path / "run") / "checkpoints"
  for name in ("10", "120"):
    (folder / name).symlink_to("100")
  found = training.checkpoints(folder.parent, f"--prune={num_kept}")
  assert found.returncode == 0, found.stdout + found.stderr
  there = {path.name for path in folder.iterdir() if path.is_dir() and not path.is_symlink()}
  assert there == {"100", "80"} if num_kept == 2 else there == {"100"}
  assert all(digests(folder.parent, int(step)) for step in there)


def test_disk(number, training, tmp_path, rng, begin):
  # A limit on the size of the files that the process may write makes the disk full.
  workdir = tmp_path / "run"
  with training.started(workdir) as run:
    step = rng.choice((20, 40, 60))
    run.until(lambda: kept(workdir) >= step)
    for pid in run.pids():
      _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
      resource.prlimit(pid, resource.RLIMIT_FSIZE, (2**16, most))
    status = run.wait()
  steps = list_steps(workdir / "checkpoints")
  begin(f"full after step {max(steps, default=0)}")
  assert status == 2, run.err()
  messages = training.messages(run)
  assert len(messages) == 1 and messages[0].startswith("error: cannot write a checkpoint in "), (
    messages
  )
  assert steps and all(digests(workdir, step) for step in steps)
  assert training.to_its_end(workdir) == []
