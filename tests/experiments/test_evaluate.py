"""Tests that the command evaluate repeats the evaluation at the end of training."""

import re
import shutil

import pytest
from ml_collections import ConfigDict
from run_files import read_json, results

from experiments.config import own_values
from experiments.evaluation.records import digest
from experiments.systems import load_config

SCORES = ("results.json", "record.json", "*.translations.txt", "*.png")
KINDS = ("sacrebleu", "paper_bleu", "chrf", "exact")


def test_the_same_scores_samples_and_files_come_from_the_checkpoint(
  training, call, contents, tmp_path
):
  (workdir, answer), copy = training, tmp_path / "run"
  shutil.copytree(workdir, copy, ignore=shutil.ignore_patterns(*SCORES))
  again = call("evaluate", f"--workdir={copy}")
  assert again.status == 0, again.err
  _, _, scores = answer.out.partition("\n\n")
  assert again.out == "\n" + scores.replace(str(workdir), str(copy))
  before, after = contents(workdir), contents(copy)
  assert before.keys() == after.keys()
  assert {name for name in before if before[name] != after[name]} <= {"results.json"}


def test_the_record_says_what_the_other_files_of_the_run_say(workdir):
  record, config, environment, scored = (
    read_json(workdir / f"{name}.json")
    for name in ("record", "config", "environment", "results")
  )
  assert (record["sweep"], record["row"], record["seed"]) == ("", "tiny", 0)
  assert record["digest"] == digest(own_values(ConfigDict(config)))
  assert record["config"]["model.width"] == 16
  assert not {"name", "model.norm"} & record["config"].keys()
  assert record["commit"] == environment["git_commit"]
  for kind in KINDS:
    assert record["scores"]["test"][kind] == scored["test"][kind]["value"]
  budget = record["budget"]
  assert (budget["updates"], budget["tokens_per_update"]) == (15, 128)
  steps = [step for step, *_ in record["curve"]]
  assert steps == [step for step, _ in record["exact"]["valid"]] == [6, 12, 15]


def test_results_and_record_say_which_checkpoints_were_scored(run_copy, call):
  def scored():
    (row,) = read_json(run_copy / "results.json").values()
    return row["checkpoints"], read_json(run_copy / "record.json")

  steps, record = scored()
  assert steps == record["checkpoints"] == [12, 15]

  (run_copy / "checkpoints" / "15" / "manifest" / "metadata").write_text("{}")
  (run_copy / "average.npz").unlink()
  answer = call("evaluate", f"--workdir={run_copy}")
  assert scored() == ([12], record)
  assert "scored step 12, not the last, 15" in answer.err


def test_scores_of_another_average_have_a_folder_and_no_record(
  run_copy, call, contents
):
  # A sweep finds the record of a run by the digest of the run's own config.
  before = contents(run_copy)
  answer = call("evaluate", f"--workdir={run_copy}", "--average_checkpoints=1")
  assert answer.status == 0, answer.err
  assert re.search(r"^test +6 ", answer.out, re.MULTILINE)
  after = contents(run_copy)
  own = {name: after[name] for name in after if not name.startswith("average-1")}
  assert own.keys() == before.keys()
  assert {name for name in own if own[name] != before[name]} <= {"average.npz"}
  names = "attention.png", "results.json", "test.translations.txt"
  new = sorted(after.keys() - own.keys())
  assert new == ["average-1", *(f"average-1/{name}" for name in names)]
  assert read_json(run_copy / "average-1/results.json")["test"]["checkpoints"] == [15]
  assert load_config(run_copy, average_checkpoints=3) == load_config(run_copy)


def test_only_a_finished_run_has_a_record(call, run_copy):
  (run_copy / "digests.json").unlink()  # as of an old run
  lines = (run_copy / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
  (run_copy / "metrics.jsonl").write_text("".join(lines[:-1]), encoding="utf-8")
  assert call("evaluate", f"--workdir={run_copy}").status == 0
  assert not (run_copy / "record.json").exists()


def test_named_test_sets_are_scored_beside_the_first(workdir, train, data, run_copy):
  """As where the run was started without them."""
  first = f"{data}/test.en,{data}/test.de"
  more = f"--config.data.pairs.test={first};unseen={data}/valid.en,{data}/valid.de"
  answer = train(run_copy, more)
  assert answer.status == 0, answer.err
  before, after = (read_json(x / "record.json") for x in (workdir, run_copy))
  assert [*after["scores"]] == [*after["sentences"]] == ["test", "unseen"]
  assert after["scores"]["test"] == before["scores"]["test"]
  assert re.search(r"^test +6 .*\nunseen +6 ", answer.out, re.MULTILINE)
  assert train(run_copy, more).status == 0  # its config.json has names


def test_other_pairs_and_given_translations_are_scored_as_a_test_set(
  run_copy, call, data, tmp_path, contents
):
  before, table = contents(run_copy), results(run_copy)
  sides = [(data / f"test.{x}").read_text("utf-8").splitlines() for x in ("en", "de")]
  lines = ["\t".join(pair) for pair in zip(*sides, strict=True)]
  lines.insert(1, "nothing\t")
  (tmp_path / "pairs.tsv").write_text("\n".join(lines), encoding="utf-8")
  files = f"--workdir={run_copy}", f"--pairs={tmp_path}/pairs.tsv"
  note = "pairs with an empty side skipped in pairs: 1 (lines: 2)\n"

  answer = call("evaluate", *files)

  assert note in answer.out, answer.err
  assert results(run_copy / "pairs") == {"pairs": table["test"]}
  after = contents(run_copy)
  assert {x: after[x] for x in after if not x.startswith("pairs")} == before
  # The translations have a line for each pair, also for the one that is skipped.
  translations = run_copy / "pairs" / "pairs.translations.txt"
  test = (run_copy / "test.translations.txt").read_text("utf-8").split("\n")
  assert translations.read_text("utf-8").split("\n") == [test[0], "", *test[1:]]

  shutil.rmtree(run_copy / "checkpoints")
  scored = call("evaluate", *files, f"--hypotheses={translations}")

  assert (scored.status, scored.compiled) == (0, []), scored.err
  scores = scored.out.removeprefix(note).strip()
  assert scores in answer.out


def test_nothing_is_written_where_a_link_in_a_run_points_to(
  run_copy, call, data, tmp_path, contents
):
  (tmp_path / "elsewhere").mkdir()
  (tmp_path / "elsewhere" / "results.json").write_text("mine")
  (run_copy / "pairs").symlink_to(tmp_path / "elsewhere")
  before = contents(tmp_path)
  pairs = f"--pairs={data}/test.en,{data}/test.de"
  answer = call("evaluate", f"--workdir={run_copy}", pairs)
  answer.assert_refused(f"{run_copy}/pairs is a link or a file: delete it")
  assert contents(tmp_path) == before


OTHER_SIZE = "--hypotheses={data}/test.de --pairs={data}/train.en,{data}/train.de"


@pytest.mark.parametrize(
  "flags, words",
  [
    ("--hypotheses={data}/test.de", "--pairs source_file,target_file"),
    (OTHER_SIZE, "test.de 6 53"),
  ],
)
def test_wrong_files_are_named(workdir, call, data, flags, words):
  words_of_flags = flags.format(data=data).split()
  call("evaluate", f"--workdir={workdir}", *words_of_flags).assert_refused(words)
