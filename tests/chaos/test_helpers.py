"""What the tests of this folder wait and look for is found; this one runs by default."""

import json
import subprocess
import sys

import pytest

from chaos import table
from chaos.run import Run, wait_until
from chaos.training import ROOT


@pytest.fixture
def run(tmp_path):
  """A run of a process that lives for ten seconds."""
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
  with pytest.raises(TimeoutError):
    wait_until(lambda: False, 0.1)
  run.until(lambda: True)


def test_a_wait_fails_where_the_process_ends_first(run):
  run.processes[0].kill()
  run.processes[0].wait()
  with pytest.raises(RuntimeError, match="ended too soon"):
    run.until(lambda: False)
  run.until(lambda: True)


def test_the_table_is_that_of_the_record():
  record = json.loads((ROOT / "results" / "faults.json").read_text(encoding="utf-8"))
  page = (ROOT / "results" / "faults.md").read_text(encoding="utf-8")
  assert f"{table.BEGIN}\n{table.rows(record)}\n{table.END}\n" in page


def test_only_the_table_is_replaced_and_only_by_what_was_done(tmp_path):
  where = dict(
    zip(("date", "cpu_cores", "cpu", "git_commit", "command"), "abcde", strict=True),
    packages={"jax": "1", "orbax-checkpoint": "2"},
  )
  tried = lambda problem, **figures: dict(what="it", problem=problem, figures=figures)
  kill = dict(title="killed", demand="it goes on", environment=where)
  kill["tries"] = [tried("", lost=4), tried("late", lost=9)]
  bits = kill | dict(title="flipped", tries=[tried("", harmless=True), tried("", harmless=True)])
  page = tmp_path / "faults.md"
  page.write_text(f"Before.\n{table.BEGIN}\nstale\n{table.END}\nAfter.\n")
  table.write(tmp_path, dict(kill=kill))
  table.write(tmp_path, dict(bits=bits))
  text = page.read_text()
  assert text.startswith(f"Before.\n{table.BEGIN}\n- kill, bits: a, b cores of c, jax 1, orbax")
  assert text.endswith(f"{table.END}\nAfter.\n") and "stale" not in text
  assert "| killed | 2 | 1 | lost 9 | it goes on |" in text
  assert "| flipped | 2 | 2 | harmless 2 |" in text
