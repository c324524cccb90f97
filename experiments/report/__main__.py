r"""Writes the tables and pictures of the results pages from the records of runs.

  python -m experiments.report
  python -m experiments.report --results=elsewhere
  python -m experiments.report --workdirs=runs/relative,runs/sinusoidal > table.md

Each file RESULTS/runs/*.jsonl (or .jsonl.xz) holds the records of one sweep, as
`python -m experiments.sweep` writes them. The command rewrites the blocks between
<!-- begin NAME --> and <!-- end NAME --> in RESULTS/report.md (translation), graphs.md and
music.md, in positions.md for sweeps of configs/positions.py, and the pictures of these pages; it
keeps the text around the blocks. RESULTS/multi30k/*.json, records of single runs, go into the block
`runs` of multi30k.md. With --workdirs, the command instead prints such a table of the finished runs
in these folders.
"""

import pathlib
from collections.abc import Sequence

from configs import default
from experiments import command
from experiments.config import flatten
from experiments.errors import InputError
from experiments.evaluation import tables
from experiments.evaluation.records import Rows, group_rows, read_records, record_files
from experiments.report import METRICS, blocks_of, run_facts

FLAGS = dict(
  results=command.Flag("results", "the folder of runs/*.jsonl and of the pages"),
  workdirs=command.Flag("", "instead, the folders of finished runs, separated by commas"),
)
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
  pages: dict[pathlib.Path, dict[str, str]] = {}
  for name, file in sorted(record_files(folder / "runs").items()):
    task, rows = _read(file)
    page = folder / (_POSITIONS if name.startswith(f"{_POSITIONS}-") else _PAGES[task])
    page.mkdir(exist_ok=True)
    pages.setdefault(page, {}).update(blocks_of(task, name, rows, page))
  if files := sorted((folder / "multi30k").glob("*.json")):
    pages[folder / "multi30k"] = dict(runs=_runs_table(files))
  if not pages:
    raise InputError(
      f"no records in {folder}/runs/*.jsonl: run a sweep first, with "
      "python -m experiments.sweep --config=configs/table1.py"
    )
  for page, blocks in pages.items():
    tables.rewrite_blocks(page.with_suffix(".md"), blocks)
  return [page.with_suffix(".md") for page in pages]


def _read(file: pathlib.Path) -> tuple[str, Rows]:
  """Returns the task of a file's records, and the records by row with complete configs."""
  records = read_records(file)
  task = records[0]["config"].get("task", "translation") if records else None
  if task not in METRICS:
    raise InputError(f"{file} has no record of a known task: restore or delete it")
  rows = group_rows(file, records, METRICS[task])
  values = flatten(default.get_config(task))
  return task, {
    row: [run | dict(config=values | run["config"]) for run in runs] for row, runs in rows.items()
  }


def _runs_table(files: Sequence[pathlib.Path]) -> str:
  """Returns a table of facts and scores, and one of learning curves, with a column per run."""
  facts, curves = {}, {}
  for number, file in enumerate(files, start=1):
    ((name, (run, *_)),) = (rows := _read(file)[1]).items()
    cells = run_facts(rows)
    cells["tokens per second"] = f"{run['budget']['tokens_per_second'] or 0:,.0f}"
    for split, scores in run["scores"].items():
      cells |= {f"{k}, {split}": f"{x:.2f}" for k, x in scores.items() if isinstance(x, float)}
    facts[f"{number}: {name}"] = cells
    curves[f"{number}: {name}"] = {
      step: f"{_finite(loss, 3)}, {_finite(score, 2)}" for step, loss, score in run["curve"]
    }
  names = dict.fromkeys(name for cells in facts.values() for name in cells)
  steps = sorted({step for points in curves.values() for step in points})
  title = "updates: valid loss, score"
  return (
    f"{tables.column_table('run', names, facts)}\n\n{tables.column_table(title, steps, curves)}"
  )


def _finite(value: float | None, digits: int) -> str:
  return "not finite" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
  command.run(main, FLAGS)
