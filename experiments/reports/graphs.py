"""The report on labelled graphs, results/graphs.md: every score of ours is from the records."""

import pathlib
import statistics
from collections.abc import Sequence

from configs import graph
from experiments.reports import captions, graph_chains, markdown
from experiments.reports.graph_gains import (
  BLIND,
  GUESS,
  LABELS,
  UNDIRECTED,
  caption,
  gain_of,
  spread,
  told,
)
from experiments.reports.markdown import signed
from experiments.reports.records import Record, read_checked
from experiments.reports.results import (
  Table,
  config_value,
  described,
  files_of,
  made_how,
  table_of,
)
from experiments.tasks.graph_data import fold_of
from relpos_jax.training.workdir import write_whole

_INTRO = f"""# Attention over labelled graphs

Written by `python -m experiments.report` from `runs/*.jsonl`, a line a run. Shaw et al. 2018,
section 3.1: vectors of edge labels are added to keys and values. Accuracy in percent: the mean over
seeds, and after ± the standard deviation. A gain is that of the same seed or fold, its interval the
95% of Student's t; it is called beyond the spread where that leaves out zero; each pair is judged
by itself, with no allowance for how many there are.

The systems of `configs/graph.py`, which differ in nothing else:

{"".join(f"- {row}: {what}{chr(10)}" for row, what in graph.systems().items())}"""


def write(folder: pathlib.Path) -> pathlib.Path:
  """Writes folder/graphs.md and its pictures from folder/runs/*.jsonl; returns the former.

  Raises:
    InputError: a damaged record.
  """
  (folder / "graphs").mkdir(exist_ok=True)
  lines = [_INTRO]
  for file in files_of("graphs", folder / "runs"):
    # A fold is the seed's, and so are its graphs.
    table = table_of(file.stem, read_checked(file, _check_split), setting, _graphs)
    is_chain = _is_chain(table.records()[0])
    lines += graph_chains.section(table, folder) if is_chain else _folds(table)
  write_whole(folder / "graphs.md", "\n".join(lines))
  return folder / "graphs.md"


def setting(record: Record) -> dict[str, str]:
  """What all runs of a table have in common, in words."""
  common = made_how(record, "nodes")
  if _is_chain(record):
    return common | _graphs(record)
  fixed = config_value(record, "data.tu.fold")
  return common | dict(
    data=config_value(record, "data.tu.name"),
    folds=f"{config_value(record, 'data.tu.num_folds')}",
    fold="the seed's" if fixed == -1 else f"{fixed}",
  )


def _is_chain(record: Record) -> bool:
  return config_value(record, "data.source") == "clutrr"


def _graphs(record: Record) -> dict[str, str]:
  """The graphs by what no model changes: their sizes, and how often the guess is right."""
  splits = (
    described(name, [(size, round(record["scores"][name]["majority"], 6)) for size, _ in rows])
    for name, rows in sorted(record["sentences"].items())
  )
  return dict(graphs=", ".join(splits))


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
  is_repeated = any(len(_by_fold(runs)) < len(runs) for runs in table.rows.values())
  whose = "some seeds share one" if is_repeated else "each seed has its own"
  return [
    f"## {name}: {number} stratified folds",
    "",
    f"One fold is tested on, the next one is valid, all others train; {whose}. Folds share "
    f"training graphs, so an interval over them is a rough one. {caption(table)}",
    "",
    *_fold_table(table, number),
    "",
    *_twins(table),
    told(table, _test, "test"),
    "",
    *captions.set_apart(table),
  ]


def _by_fold(runs: Sequence[Record]) -> dict[int, Record]:
  """A run of each fold."""
  tu = lambda run, name: config_value(run, f"data.tu.{name}")
  return {fold_of(run["seed"], tu(run, "fold"), tu(run, "num_folds")): run for run in runs}


def _twins(table: Table) -> list[str]:
  """That two rows are one model, where every score of every fold is the same."""
  scores = [
    {run["seed"]: run["scores"] for run in table.rows.get(row, ())} for row in (LABELS, UNDIRECTED)
  ]
  if not scores[0] or scores[0] != scores[1]:
    return []
  same = "all scores are the same in every fold: each edge is listed in both directions already."
  return [f"{UNDIRECTED.capitalize()} is {LABELS} here by construction, and {same}", ""]


def _fold_table(table: Table, number: int) -> list[str]:
  header = ["", "folds", "valid", "test", f"test: above {BLIND}"]
  rows = []
  for row, runs in table.rows.items():
    values = [
      spread([run["scores"][split]["accuracy"] for run in runs]) for split in ("valid", "test")
    ]
    above = "" if row == BLIND else signed(gain_of(table, row, BLIND, _test))
    folds = len(_by_fold(runs))
    repeated = f", {len(runs)} runs" if folds < len(runs) else ""
    rows.append([row, f"{folds} of {number}{repeated}", *values, above])
  of_folds = _by_fold(table.records()).values()
  guesses = [
    spread([run["scores"][split]["majority"] for run in of_folds]) for split in ("valid", "test")
  ]
  rows.append([GUESS, f"{len(of_folds)} of {number}", *guesses, ""])
  return markdown.table(header, rows)


def _test(run: Record) -> float:
  return run["scores"]["test"]["accuracy"]
