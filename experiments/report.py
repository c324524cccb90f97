r"""Writes the tables and pictures of the results pages from the records of runs.

  python -m experiments.report
  python -m experiments.report --results=elsewhere
  python -m experiments.report --workdirs=runs/relative,runs/sinusoidal > table.md

Each file RESULTS/runs/*.jsonl holds the records of one sweep, as `python -m experiments.sweep`
writes them. The command rewrites the blocks between <!-- begin NAME --> and <!-- end NAME --> in
RESULTS/report.md (translation), graphs.md and music.md, in positions.md for sweeps of
configs/positions.py, and the pictures of these pages; it keeps the text around the blocks.
RESULTS/multi30k/*.json, records of single runs, go into the block `runs` of multi30k.md. With
--workdirs, the command instead prints such a table of the finished runs in these folders.
"""

import pathlib
from collections.abc import Sequence

from configs import default
from experiments import command
from experiments.config import flatten
from experiments.errors import InputError
from experiments.evaluation import tables
from experiments.evaluation.records import Record, group_rows, read_records
from experiments.graphs import report as graphs
from experiments.music import report as music
from experiments.translation import report as translation

FLAGS = dict(
  results=command.Flag("results", "the folder of runs/*.jsonl and of the pages"),
  workdirs=command.Flag("", "instead, the folders of finished runs, separated by commas"),
)
_SYSTEMS = dict(translation=translation, graphs=graphs, music=music)
_PAGES = dict(translation="report", graphs="graphs", music="music")
_POSITIONS = "positions"  # a page of its own, for sweeps of several tasks


def main(results: str, workdirs: str) -> None:
  """Writes the pages, or prints a table of the runs in `workdirs`."""
  if not workdirs:
    print(*write_all(pathlib.Path(results)), sep="\n")
    return
  files = [pathlib.Path(name, "record.json") for name in workdirs.split(",")]
  for file in files:
    if not file.exists():
      raise InputError(f"no {file}: name the folders of finished runs")
  print(_runs_table(files))


def write_all(folder: pathlib.Path) -> list[pathlib.Path]:
  """Rewrites the blocks of each page with records, and returns the pages.

  Raises:
    InputError: there are no records, or a damaged one.
  """
  sweeps: dict[tuple[str, str], dict[str, tables.Rows]] = {}  # by page and task
  for file in sorted((folder / "runs").glob("*.jsonl")):
    if records := read_records(file):
      task, rows = _read(file, records)
      page = _POSITIONS if file.stem.startswith(f"{_POSITIONS}-") else _PAGES[task]
      sweeps.setdefault((page, task), {})[file.stem] = rows
  pages = []
  for (name, task), of in sweeps.items():
    pictures = folder / name
    pictures.mkdir(exist_ok=True)
    page = pictures.with_suffix(".md")
    pages += [page] if page not in pages else []
    tables.rewrite_blocks(page, _SYSTEMS[task].blocks(of, pictures))
  if files := sorted((folder / "multi30k").glob("*.json")):
    pages.append(folder / "multi30k.md")
    tables.rewrite_blocks(pages[-1], dict(runs=_runs_table(files)))
  if not pages:
    raise InputError(
      f"no records in {folder}/runs/*.jsonl: run a sweep first, with "
      "python -m experiments.sweep --config=configs/table1.py"
    )
  return pages


def _read(file: pathlib.Path, records: Sequence[Record]) -> tuple[str, tables.Rows]:
  """Returns the task of a file's records, and the records by row with complete configs."""
  try:
    task = records[0]["config"].get("task", "translation")
    metric = _SYSTEMS[task].METRIC
  except (AttributeError, LookupError, TypeError):
    raise InputError(f"{file} has no record of a known task: restore or delete it") from None
  rows = group_rows(file, records, metric)
  values = flatten(default.get_config(task))
  complete = lambda record: record | dict(config=values | record["config"])
  return task, {row: [*map(complete, runs)] for row, runs in rows.items()}


def _runs_table(files: Sequence[pathlib.Path]) -> str:
  """Returns a table of facts and scores, and one of learning curves, with a column per run."""
  facts, curves = {}, {}
  for number, file in enumerate(files, start=1):
    _, rows = _read(file, read_records(file))
    ((name, (run, *_)),) = rows.items()
    cells = dict(line[2:].split(": ", 1) for line in tables.run_facts(rows, {}).splitlines())
    cells["tokens per second"] = f"{run['budget']['tokens_per_second'] or 0:,.0f}"
    for split, scores in run["scores"].items():
      cells |= {f"{k}, {split}": f"{x:.2f}" for k, x in scores.items() if isinstance(x, float)}
    shown = lambda x, digits: "not finite" if x is None else f"{x:.{digits}f}"
    points = {step: f"{shown(loss, 3)}, {shown(score, 2)}" for step, loss, score in run["curve"]}
    facts[f"{number}: {name}"], curves[f"{number}: {name}"] = cells, points
  names = dict.fromkeys(name for cells in facts.values() for name in cells)
  steps = sorted({step for points in curves.values() for step in points})
  title = "updates: valid loss, score"
  return (
    f"{tables.column_table('run', names, facts)}\n\n{tables.column_table(title, steps, curves)}"
  )


if __name__ == "__main__":
  command.run(main, FLAGS)
