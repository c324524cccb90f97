"""Generated tasks are trained, scored and collected by the common commands."""

import re

import pytest
from run_files import read_json

from experiments import sections
from experiments.evaluation.records import to_line

pytestmark = pytest.mark.usefixtures("in_the_repository")

CONFIG = "configs/length_tasks.py:missing_duplicate,sinusoidal"
SMALL = """
model.num_layers=1 model.width=16 model.num_heads=2 model.feed_forward=16
batches.tokens=64 batches.max_length=8 batches.num_shapes=1
training.num_steps=12 training.eval_every=6 training.save_every=6
evaluation.longest=40 evaluation.num_inputs=8
mesh.data=3 training.num_microbatches=2
"""  # 3 devices with 2 microbatches do not divide a batch of 8 rows


@pytest.fixture(scope="module")
def train_task(trainer):
  """Runs the command train: train_task(workdir, "--config.seed=1")."""
  return trainer(CONFIG, *SMALL.split())


@pytest.fixture(scope="module")
def run(train_task, finish):
  """Returns a finished run's folder, read-only, and the command's answer."""
  return finish(train_task)


def test_a_record_has_the_accuracy_of_each_length(run):
  workdir, answer = run
  record = read_json(workdir / "record.json")
  assert record["config"]["task"] == "length_tasks"
  lengths = {split: [n for n, _ in rows] for split, rows in record["sentences"].items()}
  assert lengths == {"within": [*range(1, 9)], "longer": [9, 18, 27, 36]}
  for split, rows in record["sentences"].items():
    shares = [share for _, share in rows]
    assert all(0 <= share <= 1 for share in shares)
    mean = 100 * sum(shares) / len(shares)
    assert abs(record["scores"][split]["accuracy"] - mean) < 0.01
  assert [step for step, *_ in record["curve"]] == [6, 12]
  assert "8 inputs of one length a batch, from 1 to 8" in answer.out


def test_a_stopped_training_goes_on_to_the_same_record(run, train_task, tmp_path):
  workdir, _ = run
  first = train_task(tmp_path / "run", "--config.training.num_steps=6")
  assert first.status == 0, first.err
  second = train_task(tmp_path / "run")
  assert f"{tmp_path / 'run'} is trained to step 6" in second.out
  whole, resumed = (read_json(x / "record.json") for x in (workdir, tmp_path / "run"))
  assert resumed["sentences"] == whole["sentences"]
  assert resumed["curve"] == whole["curve"]


def test_a_trained_model_is_scored_again(run, check_evaluate):
  check_evaluate(run[0])


@pytest.mark.parametrize(
  "changes, words",
  [
    (["model.random_positions=40"], "random_positions is 40 41 tokens"),
    (["model.table_stddev=1"], "table_stddev is 1.0 Shaw's tables give 0"),
    (["evaluation.longest=8"], "evaluation.longest is 8 batches.max_length 8 give 9"),
    (["mesh.data=1", "mesh.sequence=-1"], "config.mesh.sequence is -1 give 1"),
    (["data.source=sort"], "config.data.source is 'sort' reverse_string"),
  ],
)
def test_mistakes_are_one_line(train_task, tmp_path, changes, words):
  flags = [f"--config.{change}" for change in changes]
  train_task(tmp_path / "run", *flags).assert_refused(words)
  assert not (tmp_path / "run").exists()


def test_a_page_compares_plain_with_random_positions(run, tmp_path, call):
  # Three seeds and two tasks; a difference has an interval by Welch's t.
  record = read_json(run[0] / "record.json")
  record["config"] |= {"batches.max_length": 40, "evaluation.longest": 500}
  accuracy = {"xl": 60.0, "xl, random": 80.0, "fire": 50.0}
  longer = [[n, 0.75 if n > 200 else 0.5] for n in range(41, 501, 9)]
  sentences = {"longer": longer, "within": [[n, 1.0] for n in range(1, 41)]}
  (tmp_path / "runs").mkdir()
  for task, shift in (("tasks-a", 0.0), ("tasks-b", 6.0)):
    lines = []
    for row, level in accuracy.items():
      for seed in range(3):
        score = level + seed + (shift if "random" in row else 0)
        scores = {"longer": {"accuracy": score}, "within": {"accuracy": 99.0}}
        values = dict(sweep=task, row=row, seed=seed, scores=scores)
        values["sentences"] = sentences
        values["config"] = record["config"] | {"data.source": task[-1]}
        lines.append(to_line({**record, **values}))
    (tmp_path / "runs" / f"{task}.jsonl").write_text("".join(lines))
  answer = call("report", f"--results={tmp_path}")
  assert answer.status == 0, answer.err
  page = (tmp_path / "length_tasks.md").read_text()
  assert "| accuracy (%), longer than in training | a | b |" in page
  assert "| xl, random | 81.0 ± 2.5 | 87.0 ± 2.5 |" in page
  assert "| fire | 51.0 ± 2.5 | 51.0 ± 2.5 |" in page
  assert (
    "| 50.0 ± 0.0 | 50.0 ± 0.0 | 75.0 ± 0.0 | 81.0 ± 2.5 | **+20.0 ± 2.3** |" in page
  )
  pictures = {path.name for path in (tmp_path / "length_tasks").iterdir()}
  assert {"tasks-a.png", "tasks-a-learning.png"} <= pictures


def test_a_page_has_the_lengths_of_the_config(run, tmp_path, call, monkeypatch):
  record = read_json(run[0] / "record.json")
  # Of trained lengths, all answers are right, and of longer ones none.
  record["sentences"] = {
    "within": [[n, 1.0] for n in range(1, 9)],
    "longer": [[n, 0.0] for n in range(9, 41, 9)],
  }
  (tmp_path / "runs").mkdir()
  lines = [to_line({**record, "row": row}) for row in ("xl", "xl, random")]
  (tmp_path / "runs" / "tasks-a.jsonl").write_text("".join(lines))
  drawn = []

  def draw(panels, *_):
    drawn.extend(panels)

  monkeypatch.setattr(sections, "spread_curves", draw)
  answer = call("report", f"--results={tmp_path}")
  assert (answer.status, answer.err) == (0, "")
  # Lengths and updates, plain and at random: curves of a scheme would look too alike.
  assert [[*panel.curves] for panel in drawn] == [["xl"]] * 4
  curve = drawn[0].curves["xl"]
  right = {length: values for length, values in curve.items() if values != [0.0]}
  assert right == {length: [100.0] for length in range(1, 9)}
  assert [*curve][8:] == [9, 18, 27, 36]
  page = (tmp_path / "length_tasks.md").read_text()
  assert "| valid loss | 1 to 8 | 9 to 40 | random - plain |" in page
  assert not re.search(r"\b(40|41|500) ", page.replace("to 40 ", ""))
