r"""Writes the tables and pictures of the results pages from the records of runs.

  python -m experiments.report
  python -m experiments.report --results=mine

Each file RESULTS/runs/*.jsonl (or .jsonl.xz) holds the records of one sweep, as
`python -m experiments.sweep` writes them. The command rewrites the blocks between
<!-- begin NAME --> and <!-- end NAME --> in RESULTS/report.md (translation), graphs.md and
music.md, in positions.md and lengths.md for sweeps NAME-... of these configs, and the pictures of
these pages; it keeps the text around the blocks.
"""

import importlib
import pathlib
import shlex
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from configs import default
from experiments import command
from experiments.config import flatten
from experiments.errors import InputError
from experiments.evaluation.records import (
  Rows,
  group_rows,
  read_records,
  record_files,
  runs_folder,
)

FLAGS = dict(
  results=command.Flag(
    "results", "the folder of runs/*.jsonl and of the pages", is_path=True
  )
)
_OWN = ("positions", "lengths")  # sweeps with pages of their own


def main(results: pathlib.Path) -> list[pathlib.Path]:
  """Rewrites the blocks of each page with records; prints and returns the pages.

  Raises InputError: there are no records, or a damaged one.
  """
  # Here, as the systems' libraries take a second.
  from experiments.evaluation.tables import rewrite_blocks
  from experiments.sections import block_of

  pages: dict[pathlib.Path, dict[str, str]] = defaultdict(dict)
  for sweep, file in sorted(record_files(runs_folder(results)).items()):
    task, rows = _read_rows(file)
    folder = results / _page_name(sweep, task)
    folder.mkdir(exist_ok=True)
    section = block_of(task, sweep, rows, folder)
    page = folder.with_suffix(".md")
    pages[page][sweep] = f"{repetition(sweep, rows)}\n\n{section}"
  if not pages:
    raise InputError(
      f"no records in {results}/runs/*.jsonl: run a sweep first, with "
      f"python -m experiments.sweep --config=configs/table1.py --results={results}"
    )
  for page, sections in pages.items():
    rewrite_blocks(page, sections)
    print(page)
  return [*pages]


def _read_rows(file: pathlib.Path) -> tuple[str, Rows]:
  """Returns the task and the rows of a results file, each record with its whole config."""
  records = read_records(file)
  if not records:
    raise InputError(f"{file} has no record: restore or delete it")
  task = records[0]["config"].get("task", "translation")
  defaults = flatten(default.get_config(task))
  for record in records:
    record["config"] = defaults | record["config"]
  return task, group_rows(file, records)


def _page_name(sweep: str, task: str) -> str:
  own, _, rest = sweep.partition("-")
  if own in _OWN and rest:
    return own
  return "report" if task == "translation" else task


def repetition(sweep: str, rows: Rows) -> str:
  """Returns the command that repeats a sweep, and how many minutes its trainings took.

  There is no command for a sweep whose config or rows are not in configs/.
  """
  runs = [run for runs in rows.values() for run in runs]
  minutes = sum(run["budget"]["minutes"] for run in runs)
  plural = "s" if len(runs) > 1 else ""
  text = f"{len(runs)} training{plural}, {minutes:,.0f} minutes in all."
  source = _find_config(sweep)
  changes = dict(source.module.sweep()) if source else {}
  if not rows.keys() <= changes.keys():
    return text
  command_line = _command(source, changes, rows)
  lines = [shlex.join(command_line)]
  if rows.keys() != changes.keys():
    lines = [shlex.join([*command_line, f"--only={row}"]) for row in rows]
  return "\n".join(["```", *lines, "```", "", text])


def _command(
  source: command.ConfigFile, changes: Mapping[str, Mapping[str, Any]], rows: Rows
) -> list[str]:
  """Returns the command that trains all rows of a sweep, with what its runs changed."""
  seeds = {run["seed"] for runs in rows.values() for run in runs}
  num_seeds = max(seeds) - min(seeds) + 1
  row, runs = next(iter(rows.items()))
  config = runs[0]["config"] | {"seed": min(seeds)}
  values = flatten(source.config) | changes[row]
  words = ["python", "-m", "experiments.sweep"]
  words += [f"--config={source.name}", f"--seeds={num_seeds}"]
  for key, value in config.items():
    if key != "name" and value != values.get(key):
      words.append(f"--config.{key}={value}")
  return [*words, "--results=mine"]  # where no records are


def _find_config(sweep: str) -> command.ConfigFile | None:
  """Returns the file and argument in configs/ whose config has the name of a sweep, if any."""
  for file in sorted(pathlib.Path(default.__file__).parent.glob("*.py")):
    stem = file.stem
    if not f"{sweep}-".startswith(f"{stem}-"):
      continue
    argument = sweep.removeprefix(stem)[1:].replace("-", ",")
    arguments = [argument] if argument else []
    module = importlib.import_module(f"configs.{stem}")
    try:
      config = module.get_config(*arguments)
    except ValueError:  # the sweep has a name of its own
      continue
    if config.name == sweep and hasattr(module, "sweep"):
      name = ":".join([f"configs/{file.name}", *arguments])
      return command.ConfigFile(name, module, config)
  return None


if __name__ == "__main__":
  command.run(main, FLAGS)
