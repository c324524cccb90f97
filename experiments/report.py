r"""Writes the tables and pictures of the results pages from the records of runs.

  python -m experiments.report
  python -m experiments.report --results=elsewhere

Each file RESULTS/runs/*.jsonl (or .jsonl.xz) holds the records of one sweep, as
`python -m experiments.sweep` writes them. The command rewrites the blocks between
<!-- begin NAME --> and <!-- end NAME --> in RESULTS/report.md (translation), graphs.md and
music.md, in positions.md and lengths.md for sweeps NAME-... of these configs, and the pictures of
these pages; it keeps the text around the blocks.
"""

import pathlib

from configs import default
from experiments import command
from experiments.config import flatten
from experiments.errors import InputError
from experiments.evaluation.records import group_rows, read_records, record_files

FLAGS = dict(
  results=command.Flag("results", "the folder of runs/*.jsonl and of the pages", is_path=True)
)
_OWN = ("positions", "lengths")  # sweeps with pages of their own


def main(results: pathlib.Path) -> list[pathlib.Path]:
  """Rewrites the blocks of each page with records; prints and returns the pages.

  Raises InputError: there are no records, or a damaged one.
  """
  from experiments.evaluation import tables  # here, as the systems' libraries take a second
  from experiments.sections import block_of

  pages: dict[pathlib.Path, dict[str, str]] = {}
  for name, file in sorted(record_files(results / "runs").items()):
    if not (records := read_records(file)):
      raise InputError(f"{file} has no record: restore or delete it")
    task = records[0]["config"].get("task", "translation")
    values = flatten(default.get_config(task))
    rows = group_rows(file, [run | dict(config=values | run["config"]) for run in records])
    own, _, has_own = name.partition("-")
    of_task = "report" if task == "translation" else task
    page = results / (own if own in _OWN and has_own else of_task)
    page.mkdir(exist_ok=True)
    pages.setdefault(page, {})[name] = block_of(task, name, rows, page)
  if not pages:
    raise InputError(
      f"no records in {results}/runs/*.jsonl: run a sweep first, with "
      f"python -m experiments.sweep --config=configs/table1.py --results={results}/runs"
    )
  for page, blocks in pages.items():
    tables.rewrite_blocks(page.with_suffix(".md"), blocks)
    print(page.with_suffix(".md"))
  return [page.with_suffix(".md") for page in pages]


if __name__ == "__main__":
  command.run(main, FLAGS)
