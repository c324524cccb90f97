"""Trains a classifier of labelled directed graphs, or of pairs of their nodes.

The function `train` says what happens, in order. The command `experiments.train` calls
it.
"""

import functools

import jax
import optax
from flax import nnx
from ml_collections import ConfigDict

from experiments.errors import InputError
from experiments.files import Path
from experiments.graphs import scores
from experiments.graphs.data import HEADS, load_data
from experiments.graphs.graph import (
  PAD,
  GraphBatch,
  GraphBatches,
  GraphData,
  GraphNames,
  num_nodes,
)
from experiments.graphs.graph import empty_batch as empty_batch  # for commands
from experiments.graphs.names import load_names, save_names
from experiments.training import loop, processes, results, start
from experiments.training.batches import configure_batches
from experiments.training.loss import Loss, cross_entropy
from experiments.training.model import model_values
from experiments.training.run import Run, load_average, load_trained
from experiments.training.sharding import AnyMesh, make_mesh
from experiments.training.step import Steps, learning_rate, make_steps
from experiments.training.workdir import (
  check_unchanged,
  data_digests,
  training_digest,
)
from relpos_jax.models.graph_encoder import GraphEncoder, GraphEncoderConfig


def train(config: ConfigDict, workdir: Path, flags: loop.Flags) -> None:
  """Trains from the last checkpoint in the run directory, if any, and evaluates.

  The caller has checked the config. Nothing is written before all other inputs are
  checked. After a signal, saves the state and raises Stopped.
  """
  with processes.fail_together():
    data = load_data(config)
    for note in data.notes:
      print(note)
  names = data.names

  mesh = make_mesh(**config.mesh)
  with jax.set_mesh(mesh):
    steps = build(config, names, mesh)
    run = Run(config, names, mesh, steps.graphdef, steps.shapes.params)
    batches, valid_batches = make_batches(config, data, mesh)
    start.print_sizes(run, batches, valid_batches)
    num_steps = start.count_steps(config.training, batches.num_per_epoch)
    digests = training_digest(batches.examples) | data_digests(data.splits)
    start.check_inputs(workdir, digests)

    with start.open_checkpoints(config.training, workdir) as checkpoints:
      state = start.restore(checkpoints, steps.shapes, workdir)
      save = functools.partial(save_names, names, workdir)
      start.write_start(run, state, workdir, num_steps, digests, save)
      loop.train(
        run,
        steps,
        state,
        batches,
        valid_batches,
        num_steps=num_steps,
        score=scores.make_score(run, valid_batches),
        checkpoints=checkpoints,
        workdir=workdir,
        flags=flags,
      )

  score_run(load_average(run, workdir), data, workdir)
  processes.wait_for_all("evaluated")


def check(config: ConfigDict) -> None:
  """Raises InputError for a wrong fold; reads no data."""
  folds = config.data.tu
  if folds.fold >= folds.num_folds:
    wanted = f"0 to {folds.num_folds - 1}, or -1 for the seed"
    raise InputError(f"config.data.tu.fold is {folds.fold}: give {wanted}")


def mock_vocabulary(config: ConfigDict) -> GraphNames:
  """Makes placeholder names, as many as CLUTRR has, for a model's shapes."""
  del config
  names = tuple(map(str, range(18)))
  return GraphNames(node_labels=names[:1], edge_labels=names[:14], classes=names)


def make_batches(
  config: ConfigDict, data: GraphData, mesh: AnyMesh
) -> tuple[GraphBatches, GraphBatches]:
  """Makes batches: shuffled ones for training, and ordered ones for validation."""
  train, valid = data.splits["train"], data.splits["valid"]
  sizes = num_nodes([*train, *valid])
  make = configure_batches(config, sizes, mesh, kind=GraphBatches)
  return make(train, seed=config.seed), make(valid, seed=None)


def build(config: ConfigDict, names: GraphNames, mesh: AnyMesh) -> Steps:
  """Builds model, optimizer and steps on a mesh, without computing or compiling."""
  schedule = learning_rate(config.training, config.model.width)
  return make_steps(
    functools.partial(make_model, config, names),
    functools.partial(loss, smoothing=config.training.label_smoothing),
    optax.adam(schedule, b2=0.98, eps=1e-9),  # Shaw et al. 2018
    schedule,
    mesh,
    seed=config.seed,
    num_microbatches=config.training.num_microbatches,
    ring=config.mesh.ring,
  )


def make_model(config: ConfigDict, names: GraphNames, rngs: nnx.Rngs) -> GraphEncoder:
  """Makes the model of `config.model`, with random parameters."""
  values = GraphEncoderConfig(
    num_node_labels=len(names.node_labels),
    num_edge_labels=len(names.edge_labels),
    num_classes=len(names.classes),
    num_node_features=names.num_node_features,
    num_edge_features=names.num_edge_features,
    head=HEADS[config.data.source],
    **model_values(config.model, GraphEncoderConfig),
  )
  return GraphEncoder(values, rngs=rngs)


def loss(
  model: GraphEncoder,
  batch: GraphBatch,
  rngs: nnx.Rngs | None = None,
  smoothing: float = 0.0,
) -> Loss:
  """Sums the cross-entropy over targets: graphs, or pairs of nodes."""
  logits = model(batch, rngs)
  return cross_entropy(logits, batch.target, smoothing=smoothing, pad=PAD)


def load_run(config: ConfigDict, workdir: Path) -> Run:
  """Loads the trained model of a run directory; replicates it on all devices."""
  return load_trained(config, load_names(workdir), build, workdir)


def evaluate(config: ConfigDict, workdir: Path) -> None:
  """Scores the trained model of a run directory on the run's own data."""
  data = load_data(config)
  check_unchanged(workdir, data_digests(data.splits))
  score_run(load_run(config, workdir), data, workdir)


def score_run(run: Run, data: GraphData, workdir: Path) -> None:
  """Scores every split except train; writes the scores and the run's record."""
  folder = results.choose_folder(run, workdir)
  evaluation = scores.evaluate(run, data, folder)
  results.report(evaluation, run, workdir, "accuracy")
