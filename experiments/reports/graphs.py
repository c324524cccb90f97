"""The report on labelled graphs, results/graphs.md: every number in it comes from the records."""

import pathlib
import statistics

from experiments.reports import captions, graph_chains, markdown
from experiments.reports.graph_gains import BLIND, GUESS, caption, gain_of, spread, told
from experiments.reports.markdown import signed
from experiments.reports.records import Record
from experiments.reports.results import Table, config_value, files_of, made_how, read_table
from relpos_jax.training.workdir import write_whole

_INTRO = """# Attention over labelled graphs

Written by `python -m experiments.report` from `runs/*.jsonl`, a line a run. Shaw et al. 2018,
section 3.1: vectors of edge labels are added to keys and values. `configs/graph.py` says what the
systems are, which differ in nothing else. Accuracy in percent: the mean over seeds, and after ± the
standard deviation. A gain is that of the same seed or fold, its interval the 95% of Student's t; it
is called beyond the spread where that leaves out zero. Settings were chosen on valid splits.
"""


def write(folder: pathlib.Path) -> pathlib.Path:
  """Writes folder/graphs.md and its pictures from folder/runs/*.jsonl; returns the former.

  Raises:
    InputError: a damaged record.
  """
  (folder / "graphs").mkdir(exist_ok=True)
  lines = [_INTRO]
  for file in files_of("graphs", folder / "runs"):
    table = read_table(file, setting, _check_split)
    is_chain = config_value(table.records()[0], "data.source") == "clutrr"
    lines += graph_chains.section(table, folder) if is_chain else _folds(table)
  write_whole(folder / "graphs.md", "\n".join(lines))
  return folder / "graphs.md"


def setting(record: Record) -> dict[str, str]:
  """What all runs of a table have in common, in words."""
  return made_how(record, "nodes") | dict(
    splits=", ".join(sorted(record["scores"])),
  )


def _check_split(record: Record, split: str) -> None:
  of, rows = record["scores"][split], record["sentences"][split]
  if not rows or any([type(x) for x in row] != 2 * [int] for row in rows):
    raise ValueError(f"the graphs of {split} are not two whole numbers each")
  for name in ("accuracy", "loss", "majority"):
    if not isinstance(of.get(name), int | float):
      raise ValueError(f"no number {name!r} in the scores of {split}")
  value = 100 * statistics.fmean(right for _, right in rows)
  if not abs(value - of["accuracy"]) <= 0.01:  # NaN, too
    raise ValueError(f"the graphs of {split} give accuracy {value:.2f}, not {of['accuracy']:.2f}")


def _folds(table: Table) -> list[str]:
  run = table.records()[0]
  name = config_value(run, "data.tu.name") or table.sweep
  number = config_value(run, "data.tu.num_folds")
  return [
    f"## {name}: {number} stratified folds",
    "",
    "One fold is tested on, the next one is valid, all others train; each seed has its own. "
    f"{caption(table)}",
    "",
    *_fold_table(table, number),
    "",
    told(table, _test, "test"),
    "",
    *captions.set_apart(table),
  ]


def _fold_table(table: Table, number: int) -> list[str]:
  header = ["", "folds", "valid", "test", f"test: above {BLIND}"]
  rows = []
  for row, runs in table.rows.items():
    values = [
      spread([run["scores"][split]["accuracy"] for run in runs]) for split in ("valid", "test")
    ]
    above = "" if row == BLIND else signed(gain_of(table, row, BLIND, _test))
    rows.append([row, f"{len(runs)} of {number}", *values, above])
  of_folds = {run["seed"]: run for run in table.records()}.values()
  guesses = [
    spread([run["scores"][split]["majority"] for run in of_folds]) for split in ("valid", "test")
  ]
  rows.append([GUESS, f"{len(of_folds)} of {number}", *guesses, ""])
  return markdown.table(header, rows)


def _test(run: Record) -> float:
  return run["scores"]["test"]["accuracy"]
