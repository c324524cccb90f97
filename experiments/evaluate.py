"""Scores a trained model on every test split.

  python -m experiments.evaluate --workdir=runs/quickstart

Prints a table and samples, and draws the learning curves. For translation, the scores are BLEU by
sacreBLEU and as in the paper, and an attention map is drawn. Writes results.json, the pictures and
the translations of each split into the run directory. If the training is finished and its last
checkpoint is good, also writes record.json, the run's line in the results of a sweep.
"""

import json
import sys
from typing import TYPE_CHECKING, Any

from experiments import command
from experiments.files import Path, check_writable, write_whole

if TYPE_CHECKING:
  from experiments.training.task import Run

FLAGS = dict(
  workdir=command.WORKDIR,
  average_checkpoints=command.AVERAGE,
)


def main(workdir: Path, average_checkpoints: int) -> None:
  """Repeats the evaluation at the end of training."""
  from experiments.run import load_run  # takes a second, after which a mistake is told too late

  if workdir.exists():
    check_writable(workdir)
  run = load_run(workdir, average_checkpoints=average_checkpoints)
  evaluate(run, run.task.load_data(), workdir)


def evaluate(run: "Run", data: Any, workdir: Path) -> None:
  """Prints scores, samples and the paths of pictures; writes the results and the record."""
  from experiments.evaluation.pictures import learning_curves
  from experiments.evaluation.records import make_record, to_line
  from experiments.run import own_values
  from experiments.training.metrics import read_metrics
  from experiments.training.workdir import read_json

  found = run.task.evaluate(run, data, workdir)
  if found is None:  # in all processes but the first
    return
  metrics = read_metrics(workdir)
  curves = learning_curves(metrics, workdir / "learning_curves.png", run.task.score)
  print(found.text)
  print("pictures:", curves, *found.pictures)
  if not found.results:
    return
  results = {split: dict(row, checkpoints=run.steps) for split, row in found.results.items()}
  write_whole(workdir / "results.json", json.dumps(results, indent=2) + "\n")
  config, last = run.config, metrics[-1] if metrics else {}
  num_steps = config.training.num_steps
  # A finished training ends with an evaluation.
  if last.get("step") == num_steps and "valid_loss" in last:
    if run.steps[-1] != num_steps:
      print(
        f"scored is step {run.steps[-1]}, not {num_steps}: record.json is left as it is; train "
        "with the same command to make the last checkpoint again",
        file=sys.stderr,
      )
      return
    environment = read_json(workdir / "environment.json")
    values = config.to_dict(), own_values(config), environment, metrics
    record = make_record(*values, found.scores, found.sentences, run.steps)
    write_whole(workdir / "record.json", to_line(record))
  elif last.get("step", 0) <= num_steps:
    (workdir / "record.json").unlink(missing_ok=True)  # of a shorter training


if __name__ == "__main__":
  command.run(main, FLAGS)
