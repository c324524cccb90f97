"""Graphs are trained and scored by the common commands."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from experiments import command
from experiments.errors import InputError
from experiments.graphs.graph import Graph, GraphData
from experiments.graphs.names import check_names
from experiments.graphs.scores import predict
from experiments.graphs.train import load_data, load_run
from experiments.systems import load_config, parse_config

pytestmark = pytest.mark.usefixtures("in_the_repository")

NUM_GRAPHS, NUM_FOLDS = 48, 4
SMALL = (
  *(
    "model.num_layers=1",
    "model.width=16",
    "model.num_heads=2",
    "model.feed_forward=16",
  ),
  *("batches.tokens=96", "batches.max_length=8", "batches.num_shapes=2", "mesh.data=1"),
  *("training.num_epochs=30", "training.eval_every=30", "training.save_every=60"),
  *("training.warmup_steps=10", "training.learning_rate=0.01", "model.dropout_rate=0"),
  "training.num_microbatches=2",
  f"data.tu.num_folds={NUM_FOLDS}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
  """Writes a folder in TU format: rings of 4 to 6 nodes, whose edge labels are their class."""
  folder = tmp_path_factory.mktemp("rings")
  files = {name: [] for name in ("A", "graph_indicator", "graph_labels", "edge_labels")}
  first = 1
  for graph in range(NUM_GRAPHS):
    size, kind = 4 + graph % 3, graph % 2
    files["graph_labels"].append(str(10 * kind))
    files["graph_indicator"] += size * [str(graph + 1)]
    files["A"] += [f"{first + i}, {first + (i + 1) % size}" for i in range(size)]
    files["edge_labels"] += size * [str(kind)]
    first += size
  for name, lines in files.items():
    (folder / f"RINGS_{name}.txt").write_text("".join(f"{line}\n" for line in lines))
  return folder


@pytest.fixture(scope="module")
def train_graphs(trainer, folder):
  """Runs the command train on the folder: train_graphs(workdir, "--config.seed=1")."""
  data = (f"data.tu.path={folder}", "data.tu.name=RINGS")
  return trainer("configs/graph.py:tu", *SMALL, *data)


@pytest.fixture(scope="module")
def run(train_graphs, tmp_path_factory):
  """Returns the directory of a finished run, read-only, and the output of its command."""
  workdir = tmp_path_factory.mktemp("graphs") / "run"
  answer = train_graphs(workdir, "--config.seed=6")
  assert answer.status == 0, answer.err
  return workdir, answer


def test_labels_that_decide_are_learned_and_every_graph_is_scored(run):
  workdir, answer = run
  results = json.loads((workdir / "results.json").read_text())
  record = json.loads((workdir / "record.json").read_text())
  assert record["config"]["task"] == "graphs" and [*results] == ["valid", "test"]
  for split, of in results.items():
    rows = record["sentences"][split]
    assert of["graphs"] == len(rows) == NUM_GRAPHS / NUM_FOLDS
    assert {size for size, _ in rows} <= {4, 5, 6}
    assert of["accuracy"] == 100 * np.mean([right for _, right in rows]) == 100
    assert next(iter(record["scores"][split])) == "accuracy"
    assert of["majority"] == 50 and of["loss"] < 0.1
  assert record["curve"][-1][::2] == [60, 100.0]
  assert f"of {NUM_FOLDS} folds, 2 is for testing, 3 for validation" in answer.out
  assert (
    sum("train_step" in name for name in answer.compiled) == 2
  )  # for two shapes of batches
  assert (workdir / "learning_curves.png").stat().st_size > 5_000


def test_a_trained_model_is_scored_again(run, call, tmp_path):
  workdir, _ = run
  before = (workdir / "results.json").read_text()
  answer = call("evaluate", f"--workdir={workdir}")
  assert (answer.status, answer.err) == (0, "")
  assert (workdir / "results.json").read_text() == before


def test_the_updates_of_a_run_of_epochs_are_those_of_its_training(run, call, tmp_path):
  """As where it was trained on more devices than it is scored on."""
  shutil.copytree(run[0], tmp_path / "run")
  path, record = tmp_path / "run" / "config.json", tmp_path / "run" / "record.json"
  config = json.loads(path.read_text())
  config["training"]["num_epochs"] *= 2
  path.write_text(json.dumps(config))
  before = json.loads(record.read_text())
  record.write_text("")
  assert call("evaluate", f"--workdir={tmp_path}/run").status == 0
  assert json.loads(record.read_text())["budget"] == before["budget"]


def test_the_fold_follows_from_the_seed_unless_given(folder):
  def test_split(*changes):
    data = f"--config.data.tu.path={folder}", "--config.data.tu.name="
    values = [
      "--config=configs/graph.py:tu",
      *data,
      *(f"--config.{change}" for change in changes),
    ]
    config = command.parse(dict(config=command.CONFIG), values)["config"]
    graphs = load_data(parse_config(config)).splits["test"]
    return [(graph.nodes.tolist(), graph.labels.tolist()) for graph in graphs]

  assert (
    test_split("seed=15")
    == test_split("seed=5")
    == test_split("seed=3", "data.tu.fold=5")
  )
  assert test_split("seed=15") != test_split("seed=16")


def test_predictions_are_in_the_order_of_the_graphs(run):
  loaded = load_run(load_config(run[0]), run[0])
  random = np.random.default_rng(0)
  kinds, sizes = random.integers(0, 2, 30), random.integers(3, 20, 30)
  rings = [
    Graph.from_edges(
      [0] * size, [(i, (i + 1) % size, kind) for i in range(size)], target=0
    )
    for size, kind in zip(sizes, kinds, strict=True)
  ]
  answers, _ = predict(loaded, rings)
  assert answers.tolist() == kinds.tolist()


def test_mistakes_with_graphs_are_one_line(run, call, train_graphs, tmp_path):
  (tmp_path / "empty").mkdir()
  for change, words in (
    (f"data.tu.path={tmp_path}/empty", "empty/RINGS_A.txt No such file NAME_A.txt"),
    ("data.tu.path=", "unknown 'RINGS' MUTAG"),
    ("data.tu.fold=4", "config.data.tu.fold is 4 0 to 3"),
    ("mesh.sequence=2", "config.mesh.sequence is 2 graphs"),
    ("model.sees=nobody", "config.model sees 'nobody' neighbours, all"),
    (
      "model.implementation=edge_list model.sees=all",
      "config.model sees 'all' edge_list",
    ),
  ):
    flags = [f"--config.{word}" for word in change.split()]
    train_graphs(tmp_path / "run", *flags).assert_refused(words)
  assert not (tmp_path / "run").exists()
  call("translate", f"--workdir={run[0]}").assert_refused("graphs")


def test_a_model_is_not_scored_on_graphs_with_other_names(run):
  loaded = load_run(load_config(run[0]), run[0])
  data = load_data(loaded.config)
  other = GraphData(data.splits, data.names._replace(edge_labels=("0", "7")))
  with pytest.raises(
    InputError, match=r"the data have edge_labels .*7.*, the trained model .*1"
  ):
    check_names(loaded.vocabulary, other)
