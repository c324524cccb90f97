"""Prints, draws and records the scores of a trained model."""

import collections
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.config import defaults, flatten, own_values
from experiments.evaluation.pictures import learning_curves
from experiments.evaluation.records import (
  digest,
  hardware,
  to_line,
  without_folders,
)
from experiments.files import Path, write_whole
from experiments.training.metrics import read_metrics
from experiments.training.run import Run
from experiments.training.workdir import read_config, read_environment, write_json

Metrics = Sequence[Mapping[str, Any]]  # the lines of metrics.jsonl


class Evaluation(NamedTuple):
  """Holds the scores of a trained model."""

  text: str  # tables and samples to print
  results: Mapping[str, Any]  # by split, for results.json
  scores: Mapping[str, Any]  # by split, for `experiments.evaluation.records`
  sentences: Mapping[str, list[list[int | float]]]  # by split, for the same module
  pictures: tuple[Path, ...] = ()  # image files


def choose_folder(run: Run, workdir: Path) -> Path:
  """Returns the folder for a run's scores: the run directory, or `average-N` in it.

  The second one is for scores of another average than the run's own, so that all files
  in the run directory are of the same average.
  """
  num_averaged = run.config.decoding.average_checkpoints
  own_config = flatten(defaults(run.config)) | read_config(workdir)
  if num_averaged == own_config["decoding.average_checkpoints"]:
    return workdir
  folder = workdir / f"average-{num_averaged}"
  folder.mkdir(exist_ok=True)
  return folder


def report(evaluation: Evaluation | None, run: Run, workdir: Path, score: str) -> None:
  """Prints scores, draws the learning curves, and writes the results and the record.

  `score` names the main score, such as BLEU; its metric during training is then
  `valid_bleu`. Another average than the run's own has no curves and no record. Nothing
  happens if `evaluation` is None, as in all processes except the first.
  """
  if evaluation is None:
    return
  folder = choose_folder(run, workdir)
  if folder != workdir:
    print_scores(evaluation, run, folder)
    return
  metrics = read_metrics(workdir)
  title = f"{run.config.data.source}, seed {run.config.seed}"
  curves = learning_curves(metrics, workdir / "learning_curves.png", score, title)
  print_scores(evaluation, run, workdir, curves)
  if evaluation.results:
    _write_record(evaluation, run, workdir, metrics, f"valid_{score.lower()}")


def print_scores(
  evaluation: Evaluation, run: Run, folder: Path, *pictures: Path
) -> None:
  """Prints scores, samples and the paths of pictures; writes results.json."""
  print(f"\n{evaluation.text}\n")
  print("pictures:", *pictures, *evaluation.pictures)
  if not evaluation.results:
    return
  results = {}
  for split, values in evaluation.results.items():
    results[split] = dict(values, checkpoints=run.averaged)
  write_json(folder / "results.json", results)


def _write_record(
  evaluation: Evaluation,
  run: Run,
  workdir: Path,
  metrics: Metrics,
  score: str,
) -> None:
  """Writes record.json if the run is finished; deletes an outdated one."""
  file = workdir / "record.json"
  environment = read_environment(workdir)
  # Runs of epochs by older code have no "updates": num_steps is then 0, for unknown.
  num_steps = environment.get("updates", run.config.training.num_steps)
  last = metrics[-1] if metrics else {}
  last_step = last.get("step", 0)
  # A finished run ends with an evaluation.
  is_finished = last_step == num_steps and "valid_loss" in last
  if is_finished and run.averaged[-1] != num_steps:
    print(
      f"scored step {run.averaged[-1]}, not the last, {num_steps}: record.json is "
      "unchanged; run the training command again to make the last checkpoint again",
      file=sys.stderr,
    )
  elif is_finished:
    record = _make_record(evaluation, run, environment, metrics, score)
    write_whole(file, to_line(record))
  elif last_step <= num_steps:
    file.unlink(missing_ok=True)


def _make_record(
  evaluation: Evaluation,
  run: Run,
  environment: Mapping[str, Any],
  metrics: Metrics,
  score: str,
) -> dict[str, Any]:
  """Makes the record of a run; `experiments.evaluation.records` says what it holds."""
  changes = own_values(run.config)
  seconds = metrics[-1]["time"] - metrics[0]["time"]  # includes pauses
  speeds, curve = [], []
  exact = collections.defaultdict(list)
  for line in metrics:
    step, speed = line["step"], line.get("tokens_per_second")
    if speed:
      speeds.append(speed)
    if "valid_loss" in line:
      curve.append([step, line["valid_loss"], line.get(score)])
    for name, value in line.items():
      if name.endswith("_exact"):
        exact[name.removesuffix("_exact")].append([step, value])
  budget = dict(
    updates=run.averaged[-1],
    tokens_per_update=run.config.batches.tokens,
    minutes=round(seconds / 60, 2),
    tokens_per_second=round(statistics.median(speeds), 1) if speeds else None,
  )
  identity = dict(
    sweep="",
    row=run.config.name,
    seed=run.config.seed,
    digest=digest(changes, environment["recipe"]),
    recipe=environment["recipe"],
    config=without_folders(changes),
  )
  origin = dict(
    commit=environment["git_commit"],
    date=environment["date"],
    hardware=hardware(environment),
    packages={"python": environment["python"], **environment["packages"]},
  )
  outcome = dict(
    budget=budget,
    checkpoints=[*run.averaged],
    scores=evaluation.scores,
    sentences=evaluation.sentences,
    curve=curve,
    exact=exact,
  )
  return identity | origin | outcome
