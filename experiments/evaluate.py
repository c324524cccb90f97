"""Scores a trained model on every test split, or on other pairs of files.

  python -m experiments.evaluate --workdir=runs/quickstart
  python -m experiments.evaluate --workdir=runs/quickstart --pairs=news.en,news.de
  python -m experiments.evaluate --workdir=runs/quickstart --pairs=news.tsv --hypotheses=theirs.de

Prints a table and samples, and draws the learning curves. For translation, the scores are BLEU by
sacreBLEU and as in the paper, chrF, and the percentage of translations that equal the reference; an
attention map is drawn. Writes results.json, the pictures and the translations of each split into
the run directory. If the training is finished and its last checkpoint is good, also writes
record.json, the run's line in the results of a sweep.

With --pairs, writes into the folder `pairs` of the run directory, and no record. With --hypotheses,
scores a file of translations instead, a line for each pair, and writes nothing. The lines of pairs
with an empty side are skipped. Translations must be in the form of the run's own, in Moses tokens
or lower case where `config.data` says so.

The data must be those that the run was started with, by their digests in digests.json;
--pairs are not compared.
"""

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from experiments import command
from experiments.errors import InputError
from experiments.files import Path, check_writable, write_whole

if TYPE_CHECKING:
  from experiments.training.task import Evaluation, Run

FLAGS = dict(
  workdir=command.WORKDIR,
  pairs=command.Flag("", "other pairs to score: source_file,target_file or file.tsv"),
  hypotheses=command.Flag(
    "", "a file of translations of --pairs, in the form of the run's own", is_path=True
  ),
  average_checkpoints=command.AVERAGE,
)


def main(
  workdir: Path, pairs: str, hypotheses: Path | str, average_checkpoints: int
) -> None:
  """Repeats the evaluation at the end of training, or scores other files."""
  from experiments.run import load_run, load_task
  from experiments.training.workdir import check_unchanged, data_digests

  if hypotheses:
    print(_score_hypotheses(workdir, pairs, hypotheses))
    return
  if workdir.exists():
    check_writable(workdir)
  if not pairs:
    task = load_task(workdir)
    data = task.load_data()
    check_unchanged(workdir, data_digests(data, task.name_split))
    run = load_run(workdir, average_checkpoints=average_checkpoints)
    evaluate(run, data, workdir)
    return
  from experiments.translation.corpus import read_splits

  folder = workdir / "pairs"
  is_other = os.path.islink(folder) or (folder.exists() and not folder.is_dir())
  if is_other:  # others may have put a link there, to what is not theirs
    raise InputError(f"{folder} is a link or a file: delete it")
  corpus = read_splits(dict(pairs=pairs))
  run = load_run(workdir, "translation", average_checkpoints)
  folder.mkdir(exist_ok=True)
  for note in corpus.notes:
    print(note)
  if found := run.task.evaluate(run, run.task.normalize(corpus), folder):
    _print(found, run, folder)


def _score_hypotheses(workdir: Path, pairs: str, hypotheses: Path) -> str:
  """Returns the table of the scores of a file of translations, as those of a run are scored."""
  from experiments.run import load_task
  from experiments.translation.corpus import read_lines, read_splits
  from experiments.translation.scores import score_table

  if not pairs:
    raise InputError(
      "--hypotheses are translations of --pairs: give source_file,target_file"
    )
  corpus, lines = read_splits(dict(pairs=pairs)), read_lines(hypotheses)
  skipped = corpus.skipped["pairs"]
  number = len(corpus.splits["pairs"]) + len(skipped)
  if len(lines) != number:
    raise InputError(
      f"{hypotheses} has {len(lines)} lines and {pairs} {number}: give a translation of each"
    )
  for index in reversed(skipped):
    del lines[index]
  for note in corpus.notes:
    print(note)
  task = load_task(workdir, "translation")
  references = [target for _, target in task.normalize(corpus).splits["pairs"]]
  scores, _ = task.score_lines(lines, references)
  return score_table(dict(pairs=dict(sentences=len(lines)) | scores))


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
  config, last = run.config, metrics[-1] if metrics else {}
  title = f"{config.data.source}, seed {config.seed}"
  picture = workdir / "learning_curves.png"
  _print(found, run, workdir, learning_curves(metrics, picture, run.task.score, title))
  if not found.results:
    return
  environment = read_json(workdir / "environment.json")
  # 0 if it is unknown: in runs of epochs by older code.
  num_steps = environment.get("updates", config.training.num_steps)
  # A finished training ends with an evaluation.
  if last.get("step") == num_steps and "valid_loss" in last:
    if run.steps[-1] != num_steps:
      print(
        f"scored step {run.steps[-1]}, not the last, {num_steps}: record.json is unchanged; run "
        "the training command again to make the last checkpoint again",
        file=sys.stderr,
      )
      return
    values = config.to_dict(), own_values(config), environment, metrics
    record = make_record(*values, found.scores, found.sentences, run.steps)
    write_whole(workdir / "record.json", to_line(record))
  elif last.get("step", 0) <= num_steps:
    (workdir / "record.json").unlink(missing_ok=True)  # of a shorter training


def _print(found: "Evaluation", run: "Run", folder: Path, *pictures: Path) -> None:
  """Prints scores, samples and the paths of pictures; writes results.json into a folder."""
  print(found.text)
  print("pictures:", *pictures, *found.pictures)
  if found.results:
    results = {
      split: dict(row, checkpoints=run.steps) for split, row in found.results.items()
    }
    write_whole(folder / "results.json", json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
  command.run(main, FLAGS)
