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
