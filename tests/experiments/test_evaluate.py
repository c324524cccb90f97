"""The command evaluate repeats what the end of the training found."""

import json
import shutil

import jax
import numpy as np
import PIL.Image
import pytest

from experiments.run import load_run
from relpos_jax.evaluation.bleu import corpus_bleu


@pytest.fixture(scope="module")
def evaluated(workdir, call, tmp_path_factory):
  """A copy of the run's folder without its results, and what the command said of it."""
  copy = tmp_path_factory.mktemp("evaluated") / "run"
  made = shutil.ignore_patterns("results.json", "*.translations.txt", "*.png")
  shutil.copytree(workdir, copy, ignore=made)
  return copy, call("evaluate", f"--workdir={copy}")


def test_the_same_scores_and_samples_come_from_the_checkpoint(training, evaluated):
  _, answer = training
  copy, again = evaluated
  assert again.status == 0, again.err
  assert again.out == answer.out[answer.out.index("\n\n") + 1 :].replace(
    str(training[0]), str(copy)
  )


def test_results_are_the_scores_of_the_translations(workdir, evaluated, data):
  copy, _ = evaluated
  translations = (copy / "test.translations.txt").read_text(encoding="utf-8").splitlines()
  references = (data / "test.de").read_text(encoding="utf-8").splitlines()
  assert translations == (workdir / "test.translations.txt").read_text("utf-8").splitlines()
  (row,) = json.loads((copy / "results.json").read_text()).values()
  assert row["sentences"] == len(translations) == len(references) == 6 and row["seconds"] > 0
  assert row["sacrebleu"] == corpus_bleu(translations, references)._asdict()
  assert "tok:moses-de+hyphens" in row["paper_bleu"]["signature"]


def test_only_results_and_pictures_are_written(workdir, evaluated, contents):
  copy, _ = evaluated
  before, after = contents(workdir), contents(copy)
  assert before.keys() == after.keys()
  assert {name for name in before if before[name] != after[name]} <= {"results.json"}
  for name in ("learning_curves.png", "attention.png"):
    with PIL.Image.open(copy / name) as picture:
      assert picture.format == "PNG"


def test_the_mean_of_the_last_checkpoints_is_scored(workdir, parameters):
  mean = load_run(workdir).params
  last_two = zip(parameters(workdir, 9), parameters(workdir, 12), strict=True)
  for ours, (a, b) in zip(jax.tree.leaves(mean), last_two, strict=True):
    np.testing.assert_allclose(ours, (a + b) / 2, rtol=1e-6, atol=1e-8)
    assert not np.array_equal(a, b)
