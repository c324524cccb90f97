"""The command evaluate repeats the evaluation at the end of training."""

import json
import math
import shutil
import types

import jax
import numpy as np
import PIL.Image
import pytest
import sacrebleu
from ml_collections import ConfigDict

from configs import default
from experiments import evaluate
from experiments.config import changes
from experiments.run import load_run
from relpos_jax.data.tokenizer import encode, load_tokenizers
from relpos_jax.evaluation.bleu import corpus_bleu
from relpos_jax.evaluation.records import digest, from_line
from relpos_jax.training.metrics import read_metrics
from relpos_jax.training.task import Evaluation


@pytest.fixture(scope="module")
def evaluated(workdir, call, tmp_path_factory):
  """Runs the command on a copy of the run directory without its results."""
  copy = tmp_path_factory.mktemp("evaluated") / "run"
  made = shutil.ignore_patterns("results.json", "record.json", "*.translations.txt", "*.png")
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


def test_no_link_in_the_folder_is_followed(workdir, call, tmp_path):
  copy, victim = shutil.copytree(workdir, tmp_path / "run"), tmp_path / "victim"
  victim.write_text("years of work")
  names = ("results.json", "record.json", "test.translations.txt")
  for name in (*names, "learning_curves.png", "attention.png"):
    (copy / name).unlink()
    for link in (name, f".{name}.new"):
      (copy / link).symlink_to(victim)
  assert call("evaluate", f"--workdir={copy}").status == 0
  assert victim.read_text() == "years of work"
  assert {path.name for path in copy.iterdir()} == {path.name for path in workdir.iterdir()}
  assert not any(path.is_symlink() for path in copy.iterdir())


def test_the_mean_of_the_last_checkpoints_is_scored(workdir, parameters):
  mean = load_run(workdir).params
  last_two = zip(parameters(workdir, 9), parameters(workdir, 12), strict=True)
  for ours, (a, b) in zip(jax.tree.leaves(mean), last_two, strict=True):
    np.testing.assert_allclose(ours, (a + b) / 2, rtol=1e-6, atol=1e-8)
    assert not np.array_equal(a, b)


def test_the_record_says_what_the_other_files_of_the_run_say(workdir):
  record = from_line((workdir / "record.json").read_text("utf-8"))
  names = ("config", "environment", "results")
  config, environment, results = (
    json.loads((workdir / f"{name}.json").read_text("utf-8")) for name in names
  )
  assert (record["sweep"], record["row"], record["seed"]) == ("", "tiny", 0)
  assert record["digest"] == digest(changes(ConfigDict(config), default.get_config()))
  assert record["config"]["model.width"] == 16 and "model.norm" not in record["config"]
  assert (record["commit"], record["date"]) == (environment["git_commit"], environment["date"])
  assert record["budget"]["updates"] == 12 and record["budget"]["tokens_per_update"] == 128
  for kind in ("sacrebleu", "paper_bleu"):
    assert record["scores"]["test"][kind] == results["test"][kind]["value"]
    assert record["scores"]["test"]["signatures"][kind] == results["test"][kind]["signature"]
  assert record["curve"] == [
    [line["step"], line["valid_loss"], line["valid_bleu"]]
    for line in read_metrics(workdir)
    if "valid_loss" in line
  ]


def test_the_records_sentences_are_those_of_the_test_split(workdir, data):
  record = from_line((workdir / "record.json").read_text("utf-8"))
  rows = np.array(record["sentences"]["test"])
  tokenizers = load_tokenizers(workdir)
  lines = [(data / f"test.{side}").read_text("utf-8").splitlines() for side in ("en", "de")]
  sides = [encode(t, text).lengths for t, text in zip(tokenizers, lines, strict=True)]
  assert rows[:, 0].tolist() == [max(pair) - 1 for pair in zip(*sides, strict=True)]
  lengths, counts = rows[:, 1:3].sum(0), rows[:, 3:].sum(0)
  totals = np.maximum(0, rows[:, 1:2] - np.arange(4)).sum(0)
  bleu = sacrebleu.BLEU.compute_bleu(
    counts.tolist(), totals.tolist(), *lengths.tolist(), smooth_method="exp"
  )
  assert math.isclose(bleu.score, record["scores"]["test"]["sacrebleu"])


def test_a_run_that_stopped_on_the_way_gets_no_record(workdir, call, tmp_path):
  copy = shutil.copytree(workdir, tmp_path / "run")
  config = json.loads((copy / "config.json").read_text("utf-8"))
  config["training"]["num_steps"] = 1000
  (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
  assert call("evaluate", f"--workdir={copy}").status == 0
  assert not (copy / "record.json").exists() and (copy / "results.json").exists()


def test_the_record_of_more_updates_or_of_a_run_without_its_metrics_stays(
  workdir, tmp_path, monkeypatch
):
  monkeypatch.setattr(evaluate, "_draw_curves", lambda run, workdir: None)
  for name in ("config.json", "environment.json", "metrics.jsonl", "record.json"):
    shutil.copy(workdir / name, tmp_path)
  config = json.loads((tmp_path / "config.json").read_text("utf-8"))
  config["training"]["num_steps"] -= 1
  (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
  for missing in ("", "metrics.jsonl"):
    if missing:
      (tmp_path / missing).unlink()
    _evaluate(tmp_path)
    assert (tmp_path / "record.json").read_bytes() == (workdir / "record.json").read_bytes()


@pytest.mark.parametrize("num_kept, is_finished", [(None, True), (-1, False)])
def test_nor_does_one_that_stopped_before_its_last_evaluation(
  workdir, tmp_path, monkeypatch, num_kept, is_finished
):
  monkeypatch.setattr(evaluate, "_draw_curves", lambda run, workdir: None)
  for name in ("config.json", "environment.json"):
    shutil.copy(workdir / name, tmp_path)
  lines = (workdir / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
  (tmp_path / "metrics.jsonl").write_text("".join(lines[:num_kept]), encoding="utf-8")
  _evaluate(tmp_path)
  assert (tmp_path / "record.json").exists() == is_finished


def _evaluate(workdir):
  """Calls evaluate with an empty result instead of a model."""
  found = Evaluation("", dict(test={}), scores={}, sentences={}, pictures=())
  task = types.SimpleNamespace(evaluate=lambda *_: found)
  evaluate.evaluate(types.SimpleNamespace(task=task), None, workdir)
