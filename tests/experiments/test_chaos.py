"""The command chaos: all of it with -m slow, as a user calls it; what it says, always."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from experiments import chaos
from experiments.faults import report
from experiments.faults.families import FAMILIES, Family
from experiments.faults.tries import Try

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
  "flag, words",
  [
    ("--only=kill,flood", "unknown 'flood'; want some of kill,term,bits"),
    ("--scale=huge", "--scale is short or long"),
    ("--tries=-1", "--tries at least 0"),
    ("--parallel=0", "--parallel at least 1"),
    (f"--workdir={ROOT}", "is not empty: give --workdir a new folder"),
    ("--out=setup.cfg/x", "cannot use setup.cfg/x (Not a directory): give another --out"),
  ],
)
def test_mistakes_are_told_before_anything_is_done(call, flag, words):
  answer = call("chaos", flag)
  assert answer.status == 2 and words in answer.err and answer.err.count("\n") == 1


@pytest.fixture
def fake(monkeypatch):
  """Two kinds of faults of which nothing comes but what `tries` says."""
  tries = dict(good=[Try("one", figures={"seconds": 2.0}), Try("end", number=0)], bad=[])
  for name in tries:
    do = lambda subject, rng, number, name=name: iter([*tries[name], Try(f"{rng.random()}")])
    family = Family(f"a {name} fault", "nothing", do, short=2, long=3, seconds=1)
    monkeypatch.setitem(FAMILIES, name, family)
  monkeypatch.setattr(chaos, "Subject", lambda folder: folder)
  return tries


def test_every_kind_has_a_row_and_the_files_keep_those_of_other_calls(call, fake, tmp_path):
  first = call("chaos", "--only=good", f"--out={tmp_path}", "--seed=5")
  assert first.status == 0, first.err
  assert "good 1/2: one: held, seconds 2; 0 min left" in first.err
  assert "| a good fault | 2 | 2 | seconds 2 | nothing |" in first.out
  again = call("chaos", "--only=bad", f"--out={tmp_path}", "--seed=5", "--parallel=2")
  page = (tmp_path / "faults.md").read_text()
  assert "| a good fault | 2 | 2 |" in page and "| a bad fault | 1 | 1 |" in page
  assert again.status == 0 and "All held." in page
  found = json.loads((tmp_path / "faults.json").read_text())
  assert found["good"]["seed"] == 5 and found["good"]["environment"]["git_commit"] in page
  assert re.search(r"^good(, bad)?: 2.*, \d+ cores of (.*\n)*```\npython ", page, re.MULTILINE)


def test_what_comes_when_is_a_function_of_the_seed(call, fake):
  lines = [call("chaos", "--only=bad", f"--seed={seed}").err for seed in (1, 1, 2)]
  assert lines[0] == lines[1] != lines[2]


def test_what_does_not_hold_is_named_with_how_to_do_it_again(call, fake, tmp_path):
  fake["bad"].append(Try("flipped", "SILENT: other values came back"))
  answer = call("chaos", "--only=good,bad", "--seed=7", f"--out={tmp_path}")
  assert answer.status == 1
  assert answer.err.splitlines()[-1] == (
    "did not hold: bad; to do it again: python -m experiments.chaos --only=bad --seed=7 "
    "--scale=short --tries=0"
  )
  assert "| a bad fault | 2 | 1 |" in answer.out
  assert "- bad: flipped: SILENT: other values came back" in (tmp_path / "faults.md").read_text()


def test_files_that_are_something_else_are_refused(call, fake, tmp_path):
  (tmp_path / "faults.json").write_text('{"good": 3}')
  answer = call("chaos", "--only=bad", f"--out={tmp_path}")
  assert answer.status == 2 and "cannot read" in answer.err
  assert answer.err.count("\n") == 1  # before anything was done


def test_the_page_of_the_results_is_what_the_raw_results_say():
  found = report.read(ROOT / "results" / "faults.json")
  assert (ROOT / "results" / "faults.md").read_text(encoding="utf-8") == report.page(found)
  assert [*found] == [*FAMILIES]


@pytest.mark.slow
def test_all_faults_of_the_short_form_are_borne(tmp_path):
  command = [sys.executable, "-m", "experiments.chaos", f"--out={tmp_path}", "--parallel=2"]
  result = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
  assert result.returncode == 0, result.stderr
  assert "DID NOT HOLD" not in result.stderr and "All held." in (tmp_path / "faults.md").read_text()
