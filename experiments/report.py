r"""Writes the report of the sweeps from their raw results: tables, sentences and pictures.

  python -m experiments.report
  python -m experiments.report --results=elsewhere
  python -m experiments.report --workdirs=runs/relative,runs/sinusoidal,runs/none \
      --out=results/multi30k.md

RESULTS/runs/*.jsonl are read, a sweep each, as `python -m experiments.sweep` leaves them;
of translation RESULTS/report.md and RESULTS/report/*.png are written anew, of graphs
RESULTS/graphs.md, of music RESULTS/music.md. No number comes from elsewhere but those published.
With --workdirs, a table of these runs' own folders is printed instead, or written to --out.
"""

import pathlib
from collections.abc import Mapping

from experiments import command
from experiments.reports import graphs, markdown, music, paper, runs
from experiments.reports.records import Record
from experiments.reports.results import Table, files_of, read_tables, setting
from experiments.reports.scored import main_split, score_table
from experiments.reports.tables import section
from relpos_jax.errors import InputError
from relpos_jax.evaluation.statistics import Comparison, compare_scores
from relpos_jax.training.workdir import write_whole

FLAGS = dict(
  results=command.Flag("results", "the folder of runs/*.jsonl, report.md and report/*.png"),
  workdirs=command.Flag(
    "", "instead, the folders of finished translation runs, separated by commas"
  ),
  out=command.Flag("-", "the Markdown file to write for --workdirs; - prints"),
)
_INTRO = f"""# The paper's tables at a small scale

Written by `python -m experiments.report` from `runs/*.jsonl`, a line a run; nothing is typed by
hand but the paper's numbers. Those are of other data and {paper.BUDGET}: only the
order of rows is to be compared.

A number is the mean over seeds, and after ± half its 95% interval by Student's t; one seed has no
interval. A difference is of two means, its interval by Welch's t. p is the paired bootstrap's over
the test sentences (1,000 samples, the mean over seeds in each). A difference is called beyond the
spread where its interval leaves out zero and p is below 0.05, and not claimed otherwise; each pair
is judged by itself, with no allowance for how many there are. In pictures a line is the mean over
seeds, its band reaches from the lowest to the highest.
"""


def main(results: str, workdirs: str, out: str) -> None:
  """The report, or the table of some runs."""
  if workdirs:
    runs.write(workdirs, out)
    return
  try:
    for path in write_all(pathlib.Path(results)):
      print(path)
  except OSError as error:
    raise InputError(f"cannot write into {results} ({error.strerror}): give --results") from error


def write_all(folder: pathlib.Path) -> list[pathlib.Path]:
  """Writes the report of every task that there are records of, and returns the files.

  Raises:
    InputError: there are no records, or a damaged one.
  """
  writers = dict(translation=write, graphs=graphs.write, music=music.write)
  there = [task for task in writers if files_of(task, folder / "runs")]
  return [writers[task](folder) for task in there or ["translation"]]


def write(folder: pathlib.Path) -> pathlib.Path:
  """Writes folder/report.md and its pictures from folder/runs/*.jsonl; returns the former.

  Raises:
    InputError: there are no records, or a damaged one.
  """
  tables = read_tables(folder / "runs")
  (folder / "report").mkdir(exist_ok=True)
  lines = [_INTRO]
  for sweep in paper.in_order(list(tables)):
    lines += section(tables[sweep], folder)
  lines += _without_positions(tables)
  write_whole(folder / "report.md", "\n".join(lines))
  return folder / "report.md"


# k = 0 -------------------------------------------------------------------------------------------


def _without_positions(tables: Mapping[str, Table]) -> list[str]:
  """The check that clipping at 0, where all positions are alike, is no positions."""
  lines = [
    line for table in tables.values() if "k=0" in table.rows for line in _check(table, tables)
  ]
  return ["## A check: k = 0 is no positions", "", *lines, ""] if lines else []


def _check(table: Table, tables: Mapping[str, Table]) -> list[str]:
  for row in ("neither", "none"):
    for other in tables.values():
      if row in other.rows and _all_else(table.rows["k=0"][0]) == _all_else(other.rows[row][0]):
        return [_check_line(table, other, row)]
  return [f"For k=0 of {table.sweep} there is no run without positions in the same setting."]


def _all_else(record: Record) -> tuple[dict, dict]:
  """The setting, and the config but for seed and positions."""
  config = dict(record["config"])
  for name in ("seed", "model.positions", "model.max_distance"):
    config.pop(name, None)
  return setting(record), config


def _check_line(table: Table, other: Table, row: str) -> str:
  difference, p_value = comparison = _compare(table, other, row)
  told = (
    "beyond the spread, which chance does in one of twenty, or a mistake"
    if comparison.is_clear()
    else "inside the spread, as it must be"
  )
  if difference.half_width is None:
    told = "of a single seed, so nothing is said"
  names = f"k=0 of {table.sweep} over {row} of {other.sweep}"
  return f"{names}: {markdown.signed(difference)}, p = {p_value:.3f}: {told}."


def _compare(table: Table, other: Table, row: str) -> Comparison:
  split = main_split(table)
  scores = [score_table(of, [split]).rows for of in (table, other)]
  return compare_scores(scores[0]["k=0"], scores[1][row])


if __name__ == "__main__":
  command.run(main, FLAGS)
