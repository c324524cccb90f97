"""The page of the faults. These tests run by default."""

import shutil

from chaos import table
from chaos.training import ROOT


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
