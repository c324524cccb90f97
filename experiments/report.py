r"""Writes the tables and pictures of the results pages from the records of runs.

  python -m experiments.report
  python -m experiments.report --results=mine

Each file RESULTS/runs/*.jsonl (or .jsonl.xz) holds the records of one sweep, as
`python -m experiments.sweep` writes them. The command rewrites one section for each
sweep, between <!-- begin NAME --> and <!-- end NAME -->, and draws its pictures. The
text around the sections stays. The pages in RESULTS are report.md (translation),
graphs.md, music.md and length_tasks.md. Sweeps that are named positions-... or
lengths-... have pages of their own.
"""

import itertools
import pathlib
from collections import defaultdict

from configs import default
from experiments import command
from experiments.config import flatten
from experiments.errors import InputError
from experiments.evaluation.records import (
  Records,
  group_records,
  read_records,
  record_files,
  runs_folder,
)

FLAGS = dict(
  results=command.Flag(
    "results", "the folder of the pages, with records in runs/", is_path=True
  )
)
# Pages by the start of the names of sweeps.
_OWN_PAGES = "positions", "lengths"


def main(results: pathlib.Path) -> list[pathlib.Path]:
  """Rewrites the section of each sweep with records; prints and returns the pages.

  Raises InputError if there are no records, or if one is damaged.
  """
  # Imported here because the systems' libraries take a second to load.
  from experiments.evaluation.tables import rewrite_sections
  from experiments.sections import compare_tasks, make_section

  pages = defaultdict(dict)
  length_tasks = []
  for sweep, file in sorted(record_files(runs_folder(results)).items()):
    task, records = _read_records(file)
    folder = results / _choose_page(sweep, task)
    folder.mkdir(exist_ok=True)
    section = make_section(task, sweep, records, folder)
    page = folder.with_suffix(".md")
    pages[page][sweep] = f"{_describe_cost(records)}\n\n{section}"
    if task == "length_tasks":
      length_tasks.append(records)
  if len(length_tasks) > 1:
    pages[results / "length_tasks.md"]["tasks"] = compare_tasks(length_tasks)
  if not pages:
    raise InputError(
      f"no records in {results}/runs/*.jsonl: run a sweep first, with "
      f"python -m experiments.sweep --config=configs/table1.py --results={results}"
    )
  for page, sections in pages.items():
    rewrite_sections(page, sections)
    print(page)
  return [*pages]


def _read_records(file: pathlib.Path) -> tuple[str, Records]:
  """Reads a results file; returns its task, and its records with complete configs."""
  records = read_records(file)
  if not records:
    raise InputError(f"{file} has no record: restore or delete it")
  task = records[0]["config"].get("task", "translation")
  defaults = flatten(default.get_config(task))
  for record in records:
    record["config"] = defaults | record["config"]
  return task, group_records(file, records)


def _choose_page(sweep: str, task: str) -> str:
  start, _, rest = sweep.partition("-")
  if start in _OWN_PAGES and rest:
    return start
  return "report" if task == "translation" else task


def _describe_cost(records: Records) -> str:
  runs = list(itertools.chain(*records.values()))
  minutes = sum(run["budget"]["minutes"] for run in runs)
  plural = "s" if len(runs) > 1 else ""
  return f"{len(runs)} training{plural}, {minutes:,.0f} minutes in all."


if __name__ == "__main__":
  command.run(main, FLAGS)
