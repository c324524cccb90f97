"""A folder's lock keeps others out, and goes without a trace however its process ends."""

import pathlib
import signal
import subprocess
import sys

import pytest

from experiments import locks
from experiments.locks import alone_in
from relpos_jax.errors import InputError

KILLED = """import os, pathlib, signal, sys

from experiments.locks import alone_in

with alone_in(pathlib.Path(sys.argv[1])):
  os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_that_was_not_there_is_gone_again_if_nothing_was_put_in_it(tmp_path):
  folder = tmp_path / "deep" / "run"
  with pytest.raises(ZeroDivisionError), alone_in(folder):
    assert folder.is_dir() and 1 / 0
  assert not [*tmp_path.iterdir()] and tmp_path.exists()
  with alone_in(folder):
    (folder / "a").touch()
  assert [path.name for path in folder.iterdir()] == ["a"]


def test_the_second_is_refused_in_its_own_words_and_the_first_stays_alone(tmp_path):
  words = f"another training is at work in {tmp_path}: wait for it, or give another --workdir"
  with alone_in(tmp_path):
    for _ in range(2):
      with pytest.raises(InputError, match=words), alone_in(tmp_path, "training", "workdir"):
        pass


def test_a_lock_that_its_holder_has_just_removed_is_nobodys(tmp_path, monkeypatch):
  """Whoever comes next makes another file of this name."""
  flock = locks.fcntl.flock

  def remove_and_lock(descriptor, how):
    pathlib.Path(tmp_path, ".lock").unlink()
    flock(descriptor, how)

  monkeypatch.setattr(locks.fcntl, "flock", remove_and_lock)
  with pytest.raises(InputError, match="another sweep is at work"), alone_in(tmp_path):
    pass


def test_one_that_was_killed_leaves_no_lock(tmp_path, request):
  words = [sys.executable, "-c", KILLED, str(tmp_path)]
  killed = subprocess.run(words, cwd=request.config.rootpath)
  assert killed.returncode == -signal.SIGKILL and (tmp_path / ".lock").exists()
  with alone_in(tmp_path):
    pass
  assert not [*tmp_path.iterdir()]
