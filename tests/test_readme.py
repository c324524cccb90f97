"""What the README shows runs, and its figures are those of the results."""

import itertools
import json
import pathlib
import re

import numpy as np
import pytest

from experiments.reports.music import size

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
# What runs on CPUs unless another is asked for.
FASTEST = {32: "per_position", 128: "chunked", 512: "chunked", 1024: "chunked", 4096: "chunked"}


def test_the_readmes_examples_run():
  blocks = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
  names = {}
  for block in blocks:
    exec(block, names)
  assert len(blocks) == 2
  assert names["z"].shape == names["q"].shape and names["y"].shape == (2, 10, 512)


@pytest.mark.parametrize("row, is_causal", [("time", False), ("time, causal", True)])
def test_the_readmes_times_are_the_measured_ones(row, is_causal):
  cases = _backward_cases(is_causal)
  assert _row(row) == [
    f"{_ratio_to_stock(cases[length], FASTEST[length]):.2f}" for length in FASTEST
  ]


def test_the_readmes_memory_is_the_measured_one():
  cases = _backward_cases(is_causal=False)
  assert _row("memory, not causal") == [
    _memory_ratio(cases[length], FASTEST[length]) for length in FASTEST
  ]


def test_the_published_recipe_has_the_figures_of_its_records():
  folder = ROOT / "results" / "multi30k"
  text = folder.with_suffix(".md").read_text("utf-8").partition("## The published recipe")[2]
  readme = " ".join(README.split())
  curves = []
  for positions, told in (("sinusoidal", "sinusoids"), ("relative", "relative positions reach")):
    record = json.loads((folder / f"published-{positions}.json").read_text("utf-8"))
    updates, scores = f"{record['budget']['updates']:,}", record["scores"]["test"]
    sacrebleu, paper = (f"{scores[kind]:.2f}" for kind in ("sacrebleu", "paper_bleu"))
    assert f"| {positions} | {updates} | {sacrebleu} | {paper} |\n" in text
    assert f"{told} {sacrebleu} after {updates}" in readme
    curve = record["curve"]
    curves.append({f"{step:,}": [f"{loss:.3f}", f"{bleu:.2f}"] for step, loss, bleu in curve})
  rows = re.findall(r"^\| (\d[\d,]*) \|(.*)\|(.*)\|(.*)\|(.*)\|$", text, re.MULTILINE)
  shown = {step: [cell.strip() for cell in cells] for step, *cells in rows}
  assert shown == {
    step: [cell for curve in curves for cell in curve.get(step, ["", ""])]
    for step in curves[0] | curves[1]
  }


def test_the_readmes_memory_of_music_is_the_measured_one():
  rows = json.loads((ROOT / "results" / "music" / "memory.json").read_text("utf-8"))["rows"]
  (programs,) = (row["programs"] for row in rows if row["length"] == 2048)
  sizes = [
    size(program["temporary_bytes"])
    for name in ("per_position", "skew", "chunked")
    for program in programs
    if program["implementation"] == name and program["relations"] and not program["backward"]
  ]
  said = re.search(r"holds (.*) with embeddings gathered,\s(.*) skewed, (.*) by blocks", README)
  assert [*said.groups()] == sizes


@pytest.mark.parametrize(
  "name, column, of_report",
  [
    ("graphs", "valid, 4", "valid, 4"),
    ("graphs", "test, 5 to 10", "test, 5 to 10"),
    ("music", "here", "valid, a token"),
    ("report", "sacreBLEU", "sacreBLEU"),
  ],
)
def test_the_readmes_tables_are_those_of_the_reports(name, column, of_report):
  report = (ROOT / "results" / f"{name}.md").read_text("utf-8")
  told, reported = _column(README, column), _column(report, of_report)
  assert len(told) >= 4 and told == {row: reported[row] for row in told}


def _column(text, name):
  """The cells of a column by their row, of the first table that has it."""
  lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines()]
  start = next(i for i, cells in enumerate(lines) if name in cells)
  rows = itertools.takewhile(lambda cells: len(cells) == len(lines[start]), lines[start + 2 :])
  return {cells[0]: cells[lines[start].index(name)] for cells in rows}


def _row(name):
  cells = re.search(rf"^\| {name} \| (.*) \|$", README, re.MULTILINE)[1]
  return cells.split(" | ")


def _backward_cases(is_causal):
  files = (ROOT / "results" / "attention").glob("cpu*.json")
  cases = [case for file in files for case in json.loads(file.read_text("utf-8"))["cases"]]
  return {
    case["length"]: case for case in cases if case["backward"] and case["is_causal"] == is_causal
  }


def _ratio_to_stock(case, name):
  pair = next(pair for pair in case["pairs"] if (pair["name"], pair["against"]) == (name, "jax.nn"))
  return np.median(np.divide(pair["seconds"], pair["against_seconds"]))


def _memory_ratio(case, name):
  ours, stock = (case["contestants"][of]["temporary_bytes"] for of in (name, "jax.nn"))
  return f"{ours / stock:.2f}" if ours > stock else f"1/{stock / ours:.0f}"
