"""Tests the command ten_minutes, on the records of the repository."""

import re
import shutil

import pytest

from experiments import command, ten_minutes
from experiments.sweep import plan_runs

SCHEME = "results/ten_minutes/mine.py"


@pytest.fixture
def folder(tmp_path, monkeypatch, request):
  """Returns a folder with the page, its records and the configs."""
  root = request.config.rootpath
  shutil.copytree(root / ten_minutes.FOLDER, tmp_path / ten_minutes.FOLDER)
  page = ten_minutes.FOLDER.with_suffix(".md")
  shutil.copy(root / page, tmp_path / page)
  shutil.copytree(root / "configs", tmp_path / "configs")
  monkeypatch.chdir(tmp_path)
  return tmp_path


def test_the_page_is_what_the_command_writes(folder, call):
  page = folder / ten_minutes.FOLDER.with_suffix(".md")
  text = page.read_text("utf-8")
  page.write_text(re.sub(r"(?m)^\| (t5|relative) .*\n", "", text), "utf-8")
  answer = call("ten_minutes", "--scheme=t5", "--seeds=2")
  assert answer.status == 0
  assert re.search(r"(?m)^t5: BLEU [\d.]+ ± [\d.]+, \d+ seeds$", answer.out)
  assert page.read_text("utf-8") == text


def test_a_file_is_a_scheme(folder, monkeypatch):
  shutil.copy(folder / "results/ten_minutes/kerple.py", folder / SCHEME)
  monkeypatch.syspath_prepend(str(folder))
  values = command.parse(dict(config=command.SWEEP), [f"--config={ten_minutes.SWEEP}"])
  runs = plan_runs(values["config"], 2, folder / "runs")
  (first, second) = (run for run in runs if run.configuration == "mine")
  assert "--config.model.positions=results.ten_minutes.mine:Scheme" in first.command
  assert first.digest != second.digest


def test_a_scheme_without_a_file_is_refused(folder, call):
  answer = call("ten_minutes", "--scheme=mine")
  answer.assert_refused("--scheme=mine relative mine.py Scheme")
