"""Scores a trained model on every test split.

  python -m experiments.evaluate --workdir=runs/quickstart

Prints a table and samples, and draws the learning curves. For translation, the scores are BLEU by
sacreBLEU and as in the paper, and an attention map is drawn. Writes results.json, the pictures and
the translations of each split into the run directory. If the training is finished, also writes
record.json, the run's line in the results of a sweep.
"""

import json
import pathlib
from typing import Any

from experiments import command
from experiments.config import own_values
from experiments.run import load_run, read_config
from relpos_jax.evaluation.pictures import learning_curves
from relpos_jax.evaluation.records import make_record, to_line
from relpos_jax.training.metrics import read_metrics
from relpos_jax.training.task import Evaluation, Run
from relpos_jax.training.workdir import check_writable, read_json, write_whole

FLAGS = dict(workdir=command.Flag(None, "the folder of a training run"))


def main(workdir: str) -> None:
  """Repeats the evaluation at the end of training."""
  folder = pathlib.Path(workdir)
  if folder.is_dir():
    check_writable(folder)
  run = load_run(folder)
  evaluate(run, run.task.load_data(), folder)


def evaluate(run: Run, data: Any, workdir: pathlib.Path) -> None:
  """Prints scores, samples and the paths of pictures; writes the results and the record."""
  found = run.task.evaluate(run, data, workdir)
  if found is None:  # in all processes but the first
    return
  print(found.text)
  print("pictures:", _draw_curves(run, workdir), *found.pictures)
  if found.results:
    write_whole(workdir / "results.json", json.dumps(found.results, indent=2) + "\n")
    _write_record(workdir, found)


def _draw_curves(run: Run, workdir: pathlib.Path) -> pathlib.Path:
  path = workdir / "learning_curves.png"
  return learning_curves(read_metrics(workdir), path, run.task.score)


def _write_record(workdir: pathlib.Path, found: Evaluation) -> None:
  """Writes record.json, which marks a finished run for sweeps; an unfinished run has none."""
  config = read_config(workdir)
  metrics = read_metrics(workdir)
  last = metrics[-1] if metrics else {}  # finished training ends with an evaluation
  step, num_steps = last.get("step"), config.training.num_steps
  if step != num_steps or "valid_loss" not in last:
    if step and step <= num_steps:
      (workdir / "record.json").unlink(missing_ok=True)  # of a shorter training
    return
  record = make_record(
    config.to_dict(),
    own_values(config),
    read_json(workdir / "environment.json"),
    metrics,
    found.scores,
    found.sentences,
  )
  write_whole(workdir / "record.json", to_line(record))


if __name__ == "__main__":
  command.run(main, FLAGS)
