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
  from experiments.evaluation import (
    tables,
  )  # here, as the systems' libraries take a second
  from experiments.sections import block_of

  pages: dict[pathlib.Path, dict[str, str]] = {}
  for name, file in sorted(record_files(runs_folder(results)).items()):
    if not (records := read_records(file)):
      raise InputError(f"{file} has no record: restore or delete it")
    task = records[0]["config"].get("task", "translation")
    values = flatten(default.get_config(task))
    rows = group_rows(
      file, [run | dict(config=values | run["config"]) for run in records]
    )
    own, _, has_own = name.partition("-")
    of_task = "report" if task == "translation" else task
    page = results / (own if own in _OWN and has_own else of_task)
    page.mkdir(exist_ok=True)
    block = f"{repetition(name, rows)}\n\n{block_of(task, name, rows, page)}"
    pages.setdefault(page, {})[name] = block
  if not pages:
    raise InputError(
      f"no records in {results}/runs/*.jsonl: run a sweep first, with "
      f"python -m experiments.sweep --config=configs/table1.py --results={results}"
    )
  for page, blocks in pages.items():
    tables.rewrite_blocks(page.with_suffix(".md"), blocks)
    print(page.with_suffix(".md"))
  return [page.with_suffix(".md") for page in pages]


def repetition(sweep: str, rows: Rows) -> str:
  """Returns the command that repeats a sweep, and how many minutes its trainings took.

  There is no command for a sweep whose config or rows are not in configs/.
  """
  runs = [run for of_row in rows.values() for run in of_row]
  minutes = sum(run["budget"]["minutes"] for run in runs)
  plural = "s" if len(runs) > 1 else ""
  text = f"{len(runs)} training{plural}, {minutes:,.0f} minutes in all."
  commands = _commands(sweep, rows)
  if commands:
    text = "\n".join(["```", *commands, "```", "", text])
  return text


def _commands(sweep: str, rows: Rows) -> list[str]:
  """Returns the command that trains rows of a sweep of configs/; one for each if not for all."""
  source = _find_config(sweep)
  changes = dict(source.module.sweep()) if source else {}
  if not rows.keys() <= changes.keys():
    return []
  seeds = [run["seed"] for runs in rows.values() for run in runs]
  words = ["python", "-m", "experiments.sweep", f"--config={source.name}"]
  words.append(f"--seeds={max(seeds) - min(seeds) + 1}")
  row, runs = next(iter(rows.items()))
  values = flatten(source.config)
  own = dict(name=runs[0]["config"]["name"], seed=runs[0]["seed"])
  known = values | changes[row] | own
  given = {key: x for key, x in runs[0]["config"].items() if x != known.get(key)}
  if min(seeds) != values["seed"]:
    given["seed"] = min(seeds)
  words += [f"--config.{key}={x}" for key, x in given.items()]
  words.append("--results=mine")  # where no records are
  if rows.keys() == changes.keys():
    return [shlex.join(words)]
  return [shlex.join([*words, f"--only={row}"]) for row in rows]


def _find_config(sweep: str) -> command.ConfigFile | None:
  """Returns the file and argument in configs/ whose config has the name of a sweep, if any."""
  for file in sorted(pathlib.Path(default.__file__).parent.glob("*.py")):
    stem, argument = file.stem, ""
    if sweep.startswith(f"{stem}-"):
      argument = sweep.removeprefix(f"{stem}-").replace("-", ",")
    elif sweep != stem:
      continue
    module = importlib.import_module(f"configs.{stem}")
    try:
      config = module.get_config(*[argument] * bool(argument))
    except ValueError:  # the sweep has a name of its own
      continue
    if config.name == sweep and hasattr(module, "sweep"):
      name = f"configs/{file.name}" + f":{argument}" * bool(argument)
      return command.ConfigFile(name, module, config)
  return None


if __name__ == "__main__":
  command.run(main, FLAGS)
