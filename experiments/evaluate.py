r"""Scores a trained model on every test split, or on other sentence pairs.

  python -m experiments.evaluate --workdir=runs/quickstart
  python -m experiments.evaluate --workdir=runs/quickstart --pairs=news.en,news.de
  python -m experiments.evaluate --workdir=runs/quickstart --pairs=news.tsv \
      --hypotheses=theirs.de

Prints a table and samples, and draws the learning curves. Translation has four scores:
BLEU by sacreBLEU, BLEU as in the paper, chrF, and the percentage of translations that
equal the reference. It also draws an attention map. The run directory receives
results.json, the pictures and the translations of each split. Once the training is
finished and its last checkpoint is intact, it also receives record.json, the run's line
in the results of a sweep. With another --average_checkpoints N than the run's config
has, the files are in the folder `average-N` of the run directory, without a record.

--pairs writes into the folder `pairs` of the run directory, and writes no record.
--hypotheses scores a file of translations, one line for each pair, and writes nothing.
Pairs with an empty side are skipped. The translations must have the same form as those
of the run: Moses tokens or lower case, if `config.data` says so.

The test data must not have changed since the run was started: digests.json holds their
digests. --pairs are not checked.
"""

import os

from experiments import command
from experiments.errors import InputError
from experiments.files import Path, check_writable

FLAGS = dict(
  workdir=command.WORKDIR,
  pairs=command.Flag("", "other pairs to score: source_file,target_file or file.tsv"),
  hypotheses=command.Flag(
    "", "a file of translations of --pairs, tokenised as the run's own", is_path=True
  ),
  average_checkpoints=command.AVERAGE,
)


def main(
  workdir: Path, pairs: str, hypotheses: Path | str, average_checkpoints: int
) -> None:
  """Scores a run's test splits, as training does at its end.

  If `pairs` are given, scores the model's translations of these sentence pairs instead.
  If `hypotheses` are also given, scores the translations in that file.
  """
  from experiments.systems import find_system, load_config

  if hypotheses:
    print(_score_hypotheses(workdir, pairs, hypotheses))
    return
  if workdir.exists():
    check_writable(workdir)
  if pairs:
    _score_pairs(workdir, pairs, average_checkpoints)
    return
  config = load_config(workdir, average_checkpoints=average_checkpoints)
  find_system(config.task).evaluate(config, workdir)


def _score_pairs(workdir: Path, pairs: str, average_checkpoints: int) -> None:
  """Translates and scores other pairs; writes into the folder `pairs` of the run."""
  from experiments.systems import load_config
  from experiments.training.results import print_scores
  from experiments.translation.corpus import read_splits
  from experiments.translation.data import normalize
  from experiments.translation.scores import evaluate, translate_tests
  from experiments.translation.train import load_run

  folder = workdir / "pairs"
  is_other = os.path.islink(folder) or (folder.exists() and not folder.is_dir())
  if is_other:  # another user's link may lead to files that are not theirs
    raise InputError(f"{folder} is a link or a file: delete it")
  corpus = read_splits(dict(pairs=pairs))
  config = load_config(workdir, "translation", average_checkpoints)
  run = load_run(config, workdir)
  folder.mkdir(exist_ok=True)
  for note in corpus.notes:
    print(note)
  translated = translate_tests(run, normalize(config.data, corpus))
  print_scores(evaluate(run, translated, folder), run, folder)


def _score_hypotheses(workdir: Path, pairs: str, hypotheses: Path) -> str:
  """Scores a file of translations with the settings of a run; returns a score table."""
  from experiments.systems import load_config
  from experiments.translation.corpus import read_lines, read_splits
  from experiments.translation.data import normalize
  from experiments.translation.scores import score_lines, score_table

  if not pairs:
    raise InputError(
      "--hypotheses are translations of --pairs: give source_file,target_file"
    )
  corpus, lines = read_splits(dict(pairs=pairs)), read_lines(hypotheses)
  skipped = corpus.skipped["pairs"]
  number = len(corpus.splits["pairs"]) + len(skipped)
  if len(lines) != number:
    raise InputError(
      f"{hypotheses} has {len(lines)} lines and {pairs} {number}: "
      "give a translation of each"
    )
  for index in reversed(skipped):
    del lines[index]
  for note in corpus.notes:
    print(note)
  config = load_config(workdir, "translation")
  references = [target for _, target in normalize(config.data, corpus).splits["pairs"]]
  scores, _ = score_lines(config, lines, references)
  return score_table(dict(pairs=dict(sentences=len(lines)) | scores))


if __name__ == "__main__":
  command.run(main, FLAGS)
