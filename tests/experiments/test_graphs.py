"""Graphs are trained and scored by the common commands."""

import itertools
import json
import pathlib
import shutil

import numpy as np
import pytest

from configs import default
from experiments import command
from experiments.config import make_task
from experiments.run import load_run
from experiments.sweep import plan_cells
from relpos_jax.errors import InputError
from relpos_jax.evaluation.records import from_line
from relpos_jax.graphs.graph import Graph, GraphData, GraphNames
from relpos_jax.graphs.task import Graphs, _split_folds, encoder_config

pytestmark = pytest.mark.usefixtures("in_the_repository")

NUM_GRAPHS, NUM_FOLDS = 48, 4
SMALL = (
  *("model.num_layers=1", "model.width=16", "model.num_heads=2", "model.feed_forward=16"),
  *("batches.tokens=96", "batches.max_length=8", "batches.num_shapes=1", "mesh.data=1"),
  *("training.num_steps=60", "training.eval_every=30", "training.save_every=60"),
  *("training.warmup_steps=10", "training.learning_rate=0.01", "model.dropout_rate=0"),
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


def test_decisive_labels_are_learned_and_every_graph_is_scored(run):
  workdir, answer = run
  results = json.loads((workdir / "results.json").read_text())
  record = from_line((workdir / "record.json").read_text())
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
  for name in ("classes.png", "learning_curves.png"):
    assert (workdir / name).stat().st_size > 5_000 and name in answer.out


def test_a_trained_model_is_scored_again(run, call, tmp_path):
  workdir, _ = run
  before = (workdir / "results.json").read_text()
  answer = call("evaluate", f"--workdir={workdir}")
  assert (answer.status, answer.err) == (0, "")
  assert (workdir / "results.json").read_text() == before


def test_a_run_does_not_go_on_with_other_graphs(run, train_graphs, folder, tmp_path):
  workdir, file = shutil.copytree(run[0], tmp_path / "run"), folder / "RINGS_edge_labels.txt"
  before = file.read_text()
  try:
    file.write_text(before.replace("0", "2").replace("1", "0").replace("2", "1"))
    answer = train_graphs(workdir, "--config.seed=6")
  finally:
    file.write_text(before)
  assert (answer.status, answer.err.count("\n")) == (2, 1), answer
  assert f"training data of {workdir} changed" in answer.err


def make(**values) -> Graphs:
  config = default.get_config("graphs")
  config.data.source = "tu"
  config.update(values)
  return make_task(config)


def graphs(number: int) -> GraphData:
  of = [Graph.of([0] * (1 + i % 5), [], target=i % 3) for i in range(number)]
  return GraphData(dict(all=of), GraphNames(("x",), (), ("a", "b", "c")))


def test_the_model_has_the_widths_of_the_attributes(tmp_path):
  files = dict(
    A="1, 2\n3, 4\n5, 6\n",
    graph_indicator="1\n1\n2\n2\n3\n3\n",
    graph_labels="0\n1\n0\n",
    node_attributes="1, 2\n" * 6,
    edge_attributes="3, 4, 5\n" * 3,
  )
  for kind, text in files.items():
    (tmp_path / f"MINE_{kind}.txt").write_text(text)
  task = make(data=dict(tu=dict(path=str(tmp_path), name="", num_folds=3)))
  model = encoder_config(task.config, task.load_data().names)
  assert (model.num_node_features, model.num_edge_features) == (2, 3)


def test_the_seeds_cover_every_graph_once(monkeypatch):
  from relpos_jax.graphs import tu

  data = graphs(97)
  monkeypatch.setattr(tu, "load", lambda name, path: data)
  splits = [make(seed=seed).load_data().splits for seed in range(10)]
  everything = [id(graph) for graph in data.splits["all"]]
  ids = lambda fold, *names: [id(graph) for name in names for graph in splits[fold][name]]
  assert sorted(itertools.chain(*(ids(fold, "test") for fold in range(10)))) == sorted(everything)
  for fold in range(10):
    assert sorted(ids(fold, "train", "valid", "test")) == sorted(everything)
    assert ids(fold, "valid") == ids((fold + 1) % 10, "test")
  fixed = make(seed=5, data=dict(tu=dict(fold=9))).load_data().splits["test"]
  assert [*map(id, fixed)] == ids(9, "test")


@pytest.mark.parametrize("packed", [False, True])
def test_predictions_are_in_the_order_of_the_graphs(run, packed):
  loaded = load_run(run[0])
  loaded.config.batches.packed = packed
  random = np.random.default_rng(0)
  ring = lambda size, kind: [(i, (i + 1) % size, kind) for i in range(size)]
  kinds, sizes = random.integers(0, 2, 30), random.integers(3, 20, 30)
  rings = [
    Graph.of([0] * size, ring(size, kind), target=0)
    for size, kind in zip(sizes, kinds, strict=True)
  ]
  answers = [answer for answer, _ in loaded.task._predict(loaded, rings)]
  assert answers == kinds.tolist()


def test_fewer_graphs_than_folds_are_refused():
  with pytest.raises(InputError, match=r"num_folds is 10, and the data set has 2 graphs"):
    _split_folds(graphs(2), 0, 10)


def test_mistakes_with_graphs_are_one_line(run, call, train_graphs, tmp_path):
  (tmp_path / "empty").mkdir()
  for change, words in (
    (f"data.tu.path={tmp_path}/empty", "empty/RINGS_A.txt No such file NAME_A.txt"),
    ("data.tu.path=", "unknown 'RINGS' MUTAG"),
    ("data.source=multi30k", "config.data.source clutrr, tu"),
    ("data.tu.fold=4", "config.data.tu.fold is 4 0 to 3"),
    ("data.tu.num_folds=2", "config.data.tu.num_folds is 2 at least 3"),
    ("data.tu.num_folds=49", "config.data.tu.num_folds is 49 48 graphs"),
    ("data.clutrr.valid_share=1", "config.data.clutrr.valid_share is 1"),
    ("batches.max_length=3", "config.batches.max_length is 3 smallest graph has 4 nodes"),
    ("batches.tokens=7", "config.batches.tokens is 7 0 rows 8"),
    ("mesh.sequence=2", "config.mesh.sequence is 2 graphs"),
    ("model.sees=nobody", "config.model.sees 'nobody' neighbours, all"),
    ("model.implementation=edge_list model.sees=all", "config.model sees 'all' edge_list"),
    ("model.num_heads=3", "config.model width num_heads, 3"),
  ):
    flags = [f"--config.{word}" for word in change.split()]
    answer = train_graphs(tmp_path / "run", *flags)
    found = (answer.status, answer.err.count("\n"), answer.num_compilations)
    assert found == (2, 1, 0), (change, answer)
    assert not [word for word in words.split() if word not in answer.err], answer.err
  assert not (tmp_path / "run").exists()
  answer = call("translate", f"--workdir={run[0]}")
  assert answer.status == 2 and "graphs" in answer.err


def test_a_model_is_not_scored_on_graphs_with_other_names(run):
  loaded = load_run(run[0])
  data = loaded.task.load_data()
  other = GraphData(data.splits, data.names._replace(edge_labels=("0", "7")))
  with pytest.raises(ValueError, match=r"the data have edge_labels .*7.*, the trained model .*1"):
    loaded.task.make_batches(other, loaded.vocabulary, loaded.mesh)


@pytest.mark.parametrize("source", ["clutrr", "tu", "mutagenicity"])
def test_the_rows_of_a_sweep_differ_only_in_their_use_of_edges(source):
  file = command.parse(dict(config=command.SWEEP), [f"--config=configs/graph.py:{source}"])
  cells = plan_cells(file["config"], 2, pathlib.Path("runs"))
  assert len({cell.digest for cell in cells}) == 12
  wanted = ("sees", "reverse_edges", "relative_keys", "relative_values")
  for cell in cells:
    changed = [word for word in cell.command if word.startswith("--config.")]
    assert all(word.split("=")[0] == "--config.seed" or any(key in word for key in wanted)
               for word in changed), changed  # fmt: skip
  assert [cell.row for cell in cells[:6]] == [
    *("keys and values", "keys", "values", "none", "undirected", "unstructured")
  ]
