"""Scores a position scheme in ten CPU minutes.

  python -m experiments.ten_minutes --scheme=kerple

The scheme is one of `configs/ten_minutes.py`, or your own: NAME for a file
results/ten_minutes/NAME.py with a class `Scheme`. The command trains a small
translator from English to German with each seed. Then it prints the mean BLEU and its
95% interval over the seeds, and rewrites the table of results/ten_minutes.md. A scheme
with a record is not trained again: if you change a scheme, give it another NAME.
"""

import pathlib
import statistics
from collections.abc import Sequence

from experiments import command, sweep
from experiments.errors import InputError
from experiments.evaluation.records import Record, Records, group_records, read_records

FLAGS = dict(
  scheme=command.Flag(None, "the scheme, such as t5, or the NAME of your file"),
  seeds=command.Flag(3, "number of seeds", least=2),
  parallel=command.Flag(
    2, "number of runs at a time, each with its share of the cores", least=1
  ),
  out=sweep.OUT,
)
SWEEP = "configs/ten_minutes.py"
FOLDER = pathlib.Path("results/ten_minutes")
BASELINE = "relative"
_COLUMNS = (
  "scheme",
  "seeds",
  "BLEU",
  f"difference from `{BASELINE}`",
  "tokens a second",
  "hardware",
  "date",
  "commit",
)


def main(scheme: str, seeds: int, parallel: int, out: pathlib.Path) -> None:
  """Trains a scheme with each seed; prints its score and rewrites the table."""
  values = command.parse(dict(config=command.SWEEP), [f"--config={SWEEP}"])
  known = [name for name, _ in values["config"].module.sweep()]
  if scheme not in known:
    raise InputError(
      f"--scheme={scheme}: give one of {', '.join(known)}, or write "
      f"{FOLDER}/{scheme}.py with a class Scheme"
    )
  sweep.main(values["config"], seeds, scheme, out, FOLDER, parallel, dry_run=False)
  # Imported here because it loads JAX.
  from experiments.evaluation.tables import mean_and_interval, rewrite_sections

  file = FOLDER / "runs" / "ten-minutes.jsonl"
  records = group_records(file, read_records(file))
  rewrite_sections(FOLDER.with_suffix(".md"), {"schemes": make_table(records)})
  score = mean_and_interval(find_bleu(records[scheme]))
  print(f"{scheme}: BLEU {score}, {len(records[scheme])} seeds")


def find_bleu(runs: Sequence[Record]) -> list[float]:
  """Returns the sacreBLEU of the test split, in the order of the runs."""
  return [run["scores"]["test"]["sacrebleu"] for run in runs]


def make_table(records: Records) -> str:
  """Tabulates the schemes by their mean BLEU, the best first."""
  from experiments.evaluation.tables import (
    format_difference,
    markdown_table,
    mean_and_interval,
  )
  from experiments.training.environment import short_commit

  baseline = find_bleu(records[BASELINE])
  rows = []
  for scheme, runs in records.items():
    bleu = find_bleu(runs)
    last = max(runs, key=lambda run: run["date"])
    speed = statistics.median(run["budget"]["tokens_per_second"] for run in runs)
    cells = [
      scheme,
      str(len(runs)),
      mean_and_interval(bleu),
      "-" if scheme == BASELINE else format_difference(bleu, baseline),
      f"{speed:,.0f}",
      last["hardware"],
      last["date"][:10],
      short_commit(last["commit"]),
    ]
    rows.append((statistics.mean(bleu), cells))
  rows.sort(key=lambda row: row[0], reverse=True)
  return markdown_table(_COLUMNS, [cells for _, cells in rows])


if __name__ == "__main__":
  command.run(main, FLAGS)
