"""Tests the lock of a folder."""

import subprocess
import sys

import pytest

from experiments.locks import lock_folder
from relpos_jax.errors import InputError

HOLDER = """import filelock, sys, time
lock = filelock.FileLock(sys.argv[1]).acquire()
print(flush=True)
time.sleep(60)"""


def test_a_lock_is_free_when_its_process_is_killed(tmp_path):
  words = [sys.executable, "-c", HOLDER, str(tmp_path / ".lock")]
  with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
    other.stdout.readline()
    refusal = f"another training is at work in {tmp_path}: wait for it, or give another --workdir"
    with pytest.raises(InputError, match=refusal), lock_folder(tmp_path, "training", "workdir"):
      pass
    other.kill()
  with lock_folder(tmp_path, "training", "workdir"):
    pass
  assert not [*tmp_path.iterdir()]


def test_a_new_folder_is_removed_if_it_is_left_empty(tmp_path):
  with pytest.raises(ZeroDivisionError), lock_folder(tmp_path / "run", "training", "workdir"):
    assert (tmp_path / "run").is_dir() and 1 / 0
  assert not [*tmp_path.iterdir()]
  with lock_folder(tmp_path / "run", "training", "workdir"):
    (tmp_path / "run" / "config.json").touch()
  assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
