"""Tests that the command evaluate repeats the evaluation at the end of training."""

import json
import re
import shutil

import numpy as np
import pytest
from ml_collections import ConfigDict
from test_train import results

from configs import default
from experiments.config import changes
from experiments.evaluation.records import digest
from experiments.training.metrics import read_metrics


def test_the_same_scores_samples_and_files_come_from_the_checkpoint(
  training, call, contents, tmp_path
):
  (workdir, answer), copy = training, tmp_path / "run"
  made = shutil.ignore_patterns(
    "results.json", "record.json", "*.translations.txt", "*.png"
  )
  shutil.copytree(workdir, copy, ignore=made)
  again = call("evaluate", f"--workdir={copy}")
  assert again.status == 0, again.err
  assert again.out == answer.out[answer.out.index("\n\n") + 1 :].replace(
    str(workdir), str(copy)
  )
  before, after = contents(workdir), contents(copy)
  assert before.keys() == after.keys()
  assert {name for name in before if before[name] != after[name]} <= {"results.json"}


def test_the_record_says_what_the_other_files_of_the_run_say(workdir):
  record = json.loads((workdir / "record.json").read_text("utf-8"))
  names = ("config", "environment", "results")
  config, environment, scored = (
    json.loads((workdir / f"{name}.json").read_text("utf-8")) for name in names
  )
  assert (record["sweep"], record["row"], record["seed"]) == ("", "tiny", 0)
  assert record["digest"] == digest(changes(ConfigDict(config), default.get_config()))
  assert record["config"]["model.width"] == 16
  assert not {"name", "model.norm"} & record["config"].keys()
  assert (record["commit"], record["date"]) == (
    environment["git_commit"],
    environment["date"],
  )
  devices, cores, cpu = (environment[name] for name in ("devices", "cpu_cores", "cpu"))
  assert record["hardware"] == f"{devices}, {cores} cores of {cpu}"
  assert record["packages"] == environment["packages"] | dict(
    python=environment["python"]
  )
  assert (
    record["budget"]["updates"] == 12 and record["budget"]["tokens_per_update"] == 128
  )
  for kind in ("sacrebleu", "paper_bleu", "chrf", "exact"):
    assert record["scores"]["test"][kind] == scored["test"][kind]["value"]
    assert (
      record["scores"]["test"]["signatures"][kind] == scored["test"][kind]["signature"]
    )
  lines = read_metrics(workdir)
  minutes = (lines[-1]["time"] - lines[0]["time"]) / 60
  assert record["budget"]["minutes"] == pytest.approx(minutes, abs=0.01)
  speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
  assert record["budget"]["tokens_per_second"] == pytest.approx(
    np.median(speeds), abs=0.1
  )
  column = lambda *names: [
    [x["step"], *(x[n] for n in names)] for x in lines if names[0] in x
  ]
  assert record["curve"] == column("valid_loss", "valid_bleu")
  assert record["exact"] == dict(valid=column("valid_exact"))


def test_results_and_record_say_which_checkpoints_were_scored(longer, call, tmp_path):
  copy = shutil.copytree(longer, tmp_path / "run")
  file, damaged = (
    copy / "record.json",
    copy / "checkpoints" / "15" / "manifest" / "metadata",
  )

  def scored(*flags):
    answer = call("evaluate", f"--workdir={copy}", *flags)
    assert answer.status == 0, answer.err
    (row,) = json.loads((copy / "results.json").read_text()).values()
    return row["checkpoints"], json.loads(file.read_text("utf-8")), answer.err

  steps, record, _ = scored()
  assert (
    steps == record["checkpoints"] == [12, 15] and record["budget"]["updates"] == 15
  )
  steps, last, _ = scored("--average_checkpoints=1")
  assert steps == last["checkpoints"] == [15] and last["digest"] != record["digest"]
  damaged.write_text("{}")
  (copy / "average.npz").unlink()
  steps, kept, err = scored()
  assert steps == [12] and kept == last and "scored step 12, not the last, 15" in err


@pytest.mark.parametrize("num_lines, num_steps", [(-1, 12), (None, 1000)])
def test_only_a_finished_run_has_a_record(call, run_copy, num_lines, num_steps):
  config = json.loads((run_copy / "config.json").read_text("utf-8"))
  config["training"]["num_steps"] = num_steps
  (run_copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
  environment = json.loads((run_copy / "environment.json").read_text("utf-8"))
  updates = json.dumps(environment | dict(updates=num_steps))
  (run_copy / "environment.json").write_text(updates, encoding="utf-8")
  (run_copy / "digests.json").unlink()  # as of an old run
  lines = (run_copy / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
  (run_copy / "metrics.jsonl").write_text("".join(lines[:num_lines]), encoding="utf-8")
  assert call("evaluate", f"--workdir={run_copy}").status == 0
  assert not (run_copy / "record.json").exists()


def test_named_test_sets_are_scored_beside_the_first(workdir, train, data, run_copy):
  """As where the run was started without them."""
  copy = run_copy
  first = f"{data}/test.en,{data}/test.de"
  more = f"--config.data.pairs.test={first};unseen={data}/valid.en,{data}/valid.de"
  answer = train(copy, more)
  assert answer.status == 0, answer.err
  before, after = (
    json.loads((x / "record.json").read_text("utf-8")) for x in (workdir, copy)
  )
  assert [*after["scores"]] == [*after["sentences"]] == ["test", "unseen"]
  assert after["scores"]["test"] == before["scores"]["test"]
  assert before["config"]["data.pairs.test"] == first
  assert (
    after["scores"]["unseen"]["exact"]
    == 100 * np.mean(after["sentences"]["unseen"], 0)[-1]
  )
  assert re.search(r"^test +6 .*\nunseen +6 ", answer.out, re.MULTILINE)
  assert train(copy, more).status == 0  # its config.json has names


def test_other_pairs_and_given_translations_are_scored_as_a_test_set(
  workdir, call, data, tmp_path, contents
):
  copy = shutil.copytree(workdir, tmp_path / "run")
  before, table = contents(copy), results(workdir)
  english, german = (
    (data / f"test.{x}").read_text("utf-8").splitlines() for x in ("en", "de")
  )
  lines = [f"{a}\t{b}\n" for a, b in zip(english, german, strict=True)]
  lines.insert(1, "nothing\t\n")
  (pairs := tmp_path / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
  files = f"--workdir={copy}", f"--pairs={pairs}"
  answer = call("evaluate", *files)
  assert answer.status == 0, answer.err
  note = "pairs with an empty side skipped in pairs: 1 (lines: 2)\n"
  assert note in answer.out
  assert results(copy / "pairs") == dict(pairs=table["test"])
  after = contents(copy)
  assert {
    name: x for name, x in after.items() if not name.startswith("pairs")
  } == before
  # The translations have a line for each pair, also for the one that is skipped.
  ours = copy / "pairs" / "pairs.translations.txt"
  test = (workdir / "test.translations.txt").read_text("utf-8").split("\n")
  assert ours.read_text("utf-8").split("\n") == [test[0], "", *test[1:]]
  shutil.rmtree(copy / "checkpoints")
  scored = call("evaluate", *files, f"--hypotheses={ours}")
  assert (scored.status, scored.compiled) == (0, []), scored.err
  assert scored.out.startswith(note)
  scores = scored.out.removeprefix(note).strip()
  assert scores and scores in answer.out


@pytest.mark.parametrize("kind", ["link", "broken link", "file"])
def test_nothing_is_written_where_a_link_in_a_run_points_to(
  run_copy, call, data, tmp_path, contents, kind
):
  (tmp_path / "elsewhere").mkdir()
  (tmp_path / "elsewhere" / "results.json").write_text("mine")
  if kind == "file":
    (run_copy / "pairs").write_text("")
  else:
    (run_copy / "pairs").symlink_to(
      tmp_path / ("elsewhere" if kind == "link" else "nowhere")
    )
  before = contents(tmp_path)
  answer = call(
    "evaluate", f"--workdir={run_copy}", f"--pairs={data}/test.en,{data}/test.de"
  )
  answer.assert_refused(f"{run_copy}/pairs is a link or a file: delete it")
  assert contents(tmp_path) == before


@pytest.mark.parametrize(
  "flags, words",
  [
    ("--hypotheses={data}/test.de", "--pairs source_file,target_file"),
    (
      "--hypotheses={data}/test.de --pairs={data}/train.en,{data}/train.de",
      "test.de 6 53",
    ),
    ("--pairs={data}/test.en,{data}/gone.de", "no file gone.de"),
  ],
)
def test_wrong_files_are_named(workdir, call, data, flags, words):
  answer = call("evaluate", f"--workdir={workdir}", *flags.format(data=data).split())
  answer.assert_refused(words)
