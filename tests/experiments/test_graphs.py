"""Graphs are trained and scored by the common commands."""

import json
import pathlib

import numpy as np
import pytest
from run_files import read_json

from experiments import command
from experiments.errors import InputError
from experiments.graphs import train
from experiments.graphs.graph import Graph
from experiments.graphs.scores import predict
from experiments.graphs.train import load_data, load_run
from experiments.systems import load_config

pytestmark = pytest.mark.usefixtures("in_the_repository")

NUM_GRAPHS, NUM_FOLDS = 48, 4
SMALL = f"""
model.num_layers=1 model.width=16 model.num_heads=2 model.feed_forward=16
model.dropout_rate=0 batches.tokens=96 batches.max_length=8 batches.num_shapes=2
training.num_epochs=30 training.eval_every=30 training.save_every=60
training.warmup_steps=10 training.learning_rate=0.01 training.num_microbatches=2
mesh.data=1 data.tu.num_folds={NUM_FOLDS}
"""


@pytest.fixture(scope="module")
def rings(tmp_path_factory) -> pathlib.Path:
  """Writes a file of rings of 4 to 6 nodes; the labels of edges are their class."""
  lines = []
  for number in range(NUM_GRAPHS):
    size, kind = 4 + number % 3, number % 2
    edges = [(i, (i + 1) % size, kind) for i in range(size)]
    row = {"class": 10 * kind, "nodes": size * [0], "edges": edges}
    lines.append(json.dumps(row))
  file = tmp_path_factory.mktemp("rings") / "rings.jsonl"
  file.write_text("\n".join(lines))
  return file


@pytest.fixture(scope="module")
def train_graphs(trainer, rings):
  """Runs the command train on the file: train_graphs(workdir, "--config.seed=1")."""
  data = f"data.tu.path={rings}", "data.tu.name=RINGS"
  return trainer("configs/graph.py:tu", *SMALL.split(), *data)


@pytest.fixture(scope="module")
def run(train_graphs, finish):
  """Returns a finished run's folder, read-only, and the command's answer."""
  return finish(train_graphs, "--config.seed=6")


def test_labels_that_decide_are_learned_and_every_graph_is_scored(run):
  workdir, answer = run
  results = read_json(workdir / "results.json")
  record = read_json(workdir / "record.json")
  assert record["config"]["task"] == "graphs"
  for split in ("valid", "test"):
    sizes, answers = zip(*record["sentences"][split], strict=True)
    assert len(sizes) == NUM_GRAPHS / NUM_FOLDS
    assert {*sizes} <= {4, 5, 6}
    assert results[split]["accuracy"] == 100 * np.mean(answers) == 100
    assert results[split]["majority"] == 50
    assert results[split]["loss"] < 0.1
  step, _, accuracy = record["curve"][-1]
  assert (step, accuracy) == (60, 100.0)
  assert f"of {NUM_FOLDS} folds, 2 is for testing, 3 for validation" in answer.out
  steps = [name for name in answer.compiled if "train_step" in name]
  assert len(steps) == 2  # for two shapes of batches


def test_a_trained_model_is_scored_again(run, check_evaluate):
  check_evaluate(run[0])


def test_the_fold_follows_from_the_seed_unless_given(rings):
  def test_set(*changes):
    changes = f"data.tu.path={rings}", "data.tu.name=", *changes
    words = [f"--config.{change}" for change in changes]
    words = ["--config=configs/graph.py:tu", *words]
    config = command.parse({"config": command.CONFIG}, words)["config"]
    return [x.labels.tolist() for x in load_data(config).splits["test"]]

  fifth = test_set("seed=3", "data.tu.fold=5")
  assert test_set("seed=15") == fifth
  assert test_set("seed=16") != fifth


def test_predictions_are_in_the_order_of_the_graphs(run):
  loaded = load_run(load_config(run[0]), run[0])
  random = np.random.default_rng(0)
  rings, kinds = [], random.integers(0, 2, 30)
  for kind, size in zip(kinds, random.integers(3, 20, 30), strict=True):
    edges = [(i, (i + 1) % size, kind) for i in range(size)]
    rings.append(Graph.from_edges(size * [0], edges, target=0))
  answers, _ = predict(loaded, rings)
  assert answers.tolist() == kinds.tolist()


@pytest.mark.parametrize(
  "change, words",
  [
    ("data.tu.path=", "unknown 'RINGS' MUTAG"),
    ("data.tu.name=MUTAG", "config.data.tu.path no MUTAG.zip data.tu.name="),
    ("data.clutrr.path=FOLDER", "data.clutrr.path source 'tu' data.source=clutrr"),
    ("data.tu.fold=4", "config.data.tu.fold is 4 0 to 3"),
    ("mesh.sequence=-1", "config.mesh.sequence is -1 give 1"),
    ("model.sees=nobody", "config.model sees 'nobody' neighbours, all"),
  ],
)
def test_mistakes_with_graphs_are_one_line(train_graphs, tmp_path, change, words):
  train_graphs(tmp_path / "run", f"--config.{change}").assert_refused(words)
  assert not (tmp_path / "run").exists()


def test_a_model_is_not_scored_on_other_graphs(run, monkeypatch):
  workdir, _ = run
  config = load_config(workdir)
  data = load_data(config)
  one, *others = data.splits["test"]
  changed = data.splits | {"test": [one._replace(labels=one.labels + 1), *others]}
  monkeypatch.setattr(train, "load_data", lambda _: data._replace(splits=changed))
  with pytest.raises(InputError, match=r"the test data of .* changed"):
    train.evaluate(config, workdir)
