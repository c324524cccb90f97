"""The command report: every number of its table is the runs' own."""

import json
import shutil

import pytest

from relpos_jax.training.reporting import read_metrics


@pytest.fixture
def run_copy(workdir, tmp_path):
  """A copy of what report reads of a finished run, to be damaged."""
  folder = tmp_path / "run"
  names = ("config.json", "environment.json", "results.json", "metrics.jsonl")
  folder.mkdir()
  for name in names:
    shutil.copy(workdir / name, folder)
  return folder


def row_of(text: str, name: str) -> dict[str, str]:
  """The cells of a run's row by the names of their columns."""
  lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
  header, _, *rows = lines
  (row,) = [row for row in rows if row[0] == name]
  return dict(zip(header, row, strict=True))


def test_a_row_says_what_the_runs_own_files_say(call, workdir):
  answer = call("report", f"--workdirs={workdir}")
  assert (answer.status, answer.err, answer.num_compilations) == (0, "", 0)
  scores = json.loads((workdir / "results.json").read_text())["test"]
  lines = read_metrics(workdir)
  (valid_loss,) = [x["valid_loss"] for x in lines if "valid_loss" in x and x["step"] == 12]
  row = row_of(answer.out, "tiny")
  speed = row.pop("tokens/s").replace(",", "")
  speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
  assert min(speeds) - 1 <= float(speed) <= max(speeds) + 1
  assert row == {
    "run": "tiny",
    "positions": "relative",
    "updates": "12",
    "minutes": f"{(lines[-1]['time'] - lines[0]['time']) / 60:.1f}",
    "valid loss": f"{valid_loss:.3f}",
    "sacreBLEU": f"{scores['sacrebleu']['value']:.2f}",
    "paper's BLEU": f"{scores['paper_bleu']['value']:.2f}",
  }
  environment = json.loads((workdir / "environment.json").read_text())
  said = (environment["date"][:10], environment["cpu"], environment["packages"]["jax"])
  assert all(word in answer.out for word in said)
  assert all(scores[kind]["signature"] in answer.out for kind in ("sacrebleu", "paper_bleu"))


def test_the_record_of_a_run_is_one_that_the_report_of_sweeps_reads(call, workdir, tmp_path):
  record = json.loads((workdir / "record.json").read_text()) | dict(sweep="mine")
  (tmp_path / "runs").mkdir()
  (tmp_path / "runs" / "mine.jsonl").write_text(json.dumps(record) + "\n")
  answer = call("report", f"--results={tmp_path}")
  assert (answer.status, answer.err) == (0, "")
  text = (tmp_path / "report.md").read_text()
  scores = json.loads((workdir / "results.json").read_text())["test"]
  assert f"| {scores['sacrebleu']['value']:.2f} | {scores['paper_bleu']['value']:.2f} |" in text
  assert "12 updates of 128 tokens" in text and "BLEU of 6 sentences of test" in text


def test_runs_stand_in_the_order_given_and_in_the_file_named(call, workdir, run_copy, tmp_path):
  config = json.loads((run_copy / "config.json").read_text()) | dict(name="other")
  (run_copy / "config.json").write_text(json.dumps(config))
  out = tmp_path / "results" / "table.md"
  answer = call("report", f"--workdirs={run_copy},{workdir}", f"--out={out}")
  assert (answer.status, answer.out) == (0, "")
  names = [line.split(" | ")[0] for line in out.read_text("utf-8").splitlines() if " | " in line]
  assert names == ["| run", "| other", "| tiny"]


@pytest.mark.parametrize("name", ["config.json", "environment.json", "results.json"])
@pytest.mark.parametrize("damage, words", [(None, "no {}"), ("{", "cannot read {}")])
def test_a_run_that_is_not_whole_is_refused(call, run_copy, name, damage, words):
  (run_copy / name).unlink()
  if damage:
    (run_copy / name).write_text(damage)
  refused(call("report", f"--workdirs={run_copy}"), words.format(name), run_copy)


@pytest.mark.parametrize("missing", ["valid_loss", "tokens_per_second", "step"])
def test_metrics_without_a_number_of_the_table_are_refused(call, run_copy, missing):
  lines = [line for line in read_metrics(run_copy) if missing not in line]
  (run_copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  refused(call("report", f"--workdirs={run_copy}"), "metrics.jsonl finished", run_copy)


def test_a_last_loss_that_is_not_finite_is_not_that_of_an_earlier_step(call, run_copy):
  lines = read_metrics(run_copy)
  lines[-1]["valid_loss"] = None
  (run_copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  answer = call("report", f"--workdirs={run_copy}")
  assert row_of(answer.out, "tiny")["valid loss"] == "not finite"


def test_a_file_that_cannot_be_written_is_refused(call, run_copy):
  for out in (run_copy, run_copy / "config.json" / "table.md"):
    refused(call("report", f"--workdirs={run_copy}", f"--out={out}"), "cannot write --out=", out)


def refused(answer, words: str, path) -> None:
  assert (answer.status, answer.err.count("\n")) == (2, 1), answer.err
  assert all(word in answer.err for word in [*words.split(), str(path)]), answer.err
