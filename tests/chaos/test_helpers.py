"""The helpers of the faults: waits, and the table. These tests run by default."""

import shutil
import subprocess
import sys

import pytest

from chaos import table
from chaos.run import Run
from chaos.training import ROOT


@pytest.fixture
def run(tmp_path):
  """Returns the run of a process that lives for ten seconds."""
  run = Run(tmp_path / "run", tmp_path / "log")
  for suffix in (".out", ".err"):
    run.log.with_suffix(suffix).touch()
  run.processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10)"]))
  yield run
  run.processes[0].kill()
  run.processes[0].wait()


def test_a_wait_that_times_out_fails_though_the_process_lives(run):
  with pytest.raises(TimeoutError):
    run.until(lambda: False, seconds=0.1)
  with pytest.raises(TimeoutError):
    run.wait(seconds=0.1)
  run.until(lambda: True)


def test_a_wait_fails_where_the_process_ends_first(run):
  run.processes[0].kill()
  run.processes[0].wait()
  with pytest.raises(RuntimeError, match="ended too soon"):
    run.until(lambda: False)
  run.until(lambda: True)


def test_the_page_is_that_of_the_record(tmp_path):
  for name in ("faults.json", "faults.md"):
    shutil.copy(ROOT / "results" / name, tmp_path)
  table.write(tmp_path, {})
  for name in ("faults.json", "faults.md"):
    assert (tmp_path / name).read_text() == (ROOT / "results" / name).read_text()


def test_a_fault_replaces_its_own_row_and_a_figure_is_the_largest_or_a_count(tmp_path):
  where = dict.fromkeys(("date", "cpu_cores", "cpu", "git_commit", "command"), "x")
  where["packages"] = {"jax": "1", "orbax-checkpoint": "2"}
  tried = lambda problem, **figures: dict(what="it", problem=problem, figures=figures)
  kill = dict(title="killed", demand="it goes on", environment=where)
  kill["tries"] = [tried("", lost=4), tried("late", lost=9)]
  bits = kill | dict(title="flipped", tries=[tried("", harmless=True), tried("", harmless=True)])
  table.write(tmp_path, dict(kill=kill))
  table.write(tmp_path, dict(bits=bits))
  text = (tmp_path / "faults.md").read_text()
  assert "- kill, bits: x, x cores of x, jax 1, orbax-checkpoint 2, commit x, `x`" in text
  assert "| killed | 2 | 1 | lost 9 | it goes on |" in text
  assert "| flipped | 2 | 2 | harmless 2 |" in text
