"""The task of classifying labelled directed graphs, or pairs of their nodes, and its scores."""

import itertools
import json
import operator
import statistics
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.config import LARGEST, between, check_values
from experiments.data.batching import prefetch
from experiments.errors import InputError
from experiments.evaluation.pictures import SpreadPanel, spread_curves
from experiments.files import Path, write_whole
from experiments.graphs import graph as graph_module
from experiments.graphs.data import load_clutrr, load_tu, split_folds
from experiments.graphs.graph import (
  Graph,
  GraphBatch,
  GraphBatches,
  GraphData,
  GraphNames,
)
from experiments.training import task as tasks
from experiments.training.processes import is_first
from experiments.training.sharding import AnyMesh, put_batch
from experiments.training.task import Evaluation, Loss, Run, cross_entropy
from experiments.training.workdir import read_json
from relpos_jax.models.graph_encoder import GraphEncoder, GraphEncoderConfig
from relpos_jax.typing import PyTree

_HEADS = dict(clutrr="pair", tu="graph")  # the encoder's head for each data source
_NAMES_FILE = "graphs.json"
_NUMBERS = (
  *tasks.LAYER_CHECKS,
  ("above 0 and below 1", lambda x: 0 < x < 1, ("data.clutrr.valid_share",)),
  between(3, LARGEST, "data.tu.num_folds"),
  between(-1, LARGEST, "data.tu.fold"),
)

# Conditional Theorem Provers (Minervini et al. 2020), trained on chains of 2, 3 and 4
# relations: accuracy in percent by length, one seed, from the README of
# github.com/uclnlp/ctp.
CTP = dict(
  zip(
    range(2, 11), (100.0, 72.0, 74.0, 97.8, 96.2, 98.1, 97.8, 94.4, 89.3), strict=True
  )
)
NAME = "CTP, published"
LONGEST_TRAINED = 4  # relations of a chain


class Graphs(tasks.Task):
  """The `Task` of classifying graphs, or pairs of their nodes."""

  score = "accuracy"

  def check(self, sizes: Mapping[str, int]) -> None:
    choices = tasks.model_choices(GraphEncoderConfig) | {"data.source": (*_HEADS,)}
    check_values(self.config, choices, _NUMBERS)
    folds = self.config.data.tu
    if folds.fold >= folds.num_folds:
      wanted = f"0 to {folds.num_folds - 1}, or -1 for the seed"
      raise InputError(f"config.data.tu.fold is {folds.fold}: give {wanted}")
    if sizes["sequence"] > 1:
      raise InputError(
        f"config.mesh.sequence is {sizes['sequence']}: give 1 for graphs"
      )
    tasks.check_batches(self.config, sizes)

  def load_data(self) -> GraphData:
    """Loads the graphs of `config.data`: splits train and valid, and one or more test splits."""
    data = self.config.data
    if data.source == "clutrr":
      return load_clutrr(**data.clutrr)
    fold = self.config.seed % data.tu.num_folds if data.tu.fold == -1 else data.tu.fold
    return split_folds(load_tu(data.tu.name, data.tu.path), fold, data.tu.num_folds)

  def learn_vocabulary(self, data: GraphData, workdir: Path) -> GraphNames:
    return (
      self.load_vocabulary(workdir) if (workdir / _NAMES_FILE).exists() else data.names
    )

  def load_vocabulary(self, workdir: Path) -> GraphNames:
    values = read_json(workdir / _NAMES_FILE).items()
    return GraphNames(**{k: tuple(x) if isinstance(x, list) else x for k, x in values})

  def save_vocabulary(self, vocabulary: GraphNames, workdir: Path) -> None:
    path = workdir / _NAMES_FILE
    if not path.exists():
      write_whole(path, json.dumps(vocabulary._asdict(), indent=2) + "\n")

  def mock_vocabulary(self) -> GraphNames:
    """Returns as many names as CLUTRR has."""
    return GraphNames(*(tuple(map(str, range(number))) for number in (1, 14, 18)))

  def make_batches(
    self, data: GraphData, vocabulary: GraphNames, mesh: AnyMesh
  ) -> tuple[GraphBatches, GraphBatches]:
    _check_names(vocabulary, data)
    train, valid = data.splits["train"], data.splits["valid"]
    make = self._batch_maker([*train, *valid], mesh)
    return make(train, seed=self.config.seed), make(valid, seed=None)

  def _batch_maker(
    self, graphs: Sequence[Graph], mesh: AnyMesh, max_length: int | None = None
  ):
    sizes = graph_module.num_nodes(graphs)
    return tasks.batch_maker(self.config, sizes, mesh, max_length, GraphBatches)

  def empty_batch(self, shape: tuple[int, ...]) -> GraphBatch:
    rows, nodes, *others = shape
    return graph_module.empty_batch((rows, nodes, *(others or (nodes,))))

  def make_model(self, vocabulary: GraphNames, rngs: nnx.Rngs) -> GraphEncoder:
    config = GraphEncoderConfig(
      num_node_labels=len(vocabulary.node_labels),
      num_edge_labels=len(vocabulary.edge_labels),
      num_classes=len(vocabulary.classes),
      num_node_features=vocabulary.num_node_features,
      num_edge_features=vocabulary.num_edge_features,
      head=_HEADS[self.config.data.source],
      **tasks.model_values(self.config),
    )
    return GraphEncoder(config, rngs=rngs)

  def loss(
    self, model: GraphEncoder, batch: GraphBatch, rngs: nnx.Rngs | None = None
  ) -> Loss:
    """Computes the cross entropy summed over targets: graphs or pairs of nodes."""
    options = dict(smoothing=self.config.training.label_smoothing, pad=graph_module.PAD)
    return cross_entropy(model(batch, rngs), batch.target, **options)

  def make_report(self, run: Run, data: GraphData, batches: GraphBatches):
    """Returns a function of the parameters that computes the accuracy on the valid split."""

    @jax.jit
    def count(params, batch: GraphBatch):
      answers, is_target = (
        jnp.argmax(nnx.merge(run.graphdef, params)(batch), -1),
        batch.target >= 0,
      )
      return jnp.sum((answers == batch.target) & is_target), jnp.sum(is_target)

    def compute(params: PyTree) -> tuple[dict[str, float], str]:
      # Wait for each batch: on CPUs, concurrent sums over processes may deadlock.
      counts = [
        jax.block_until_ready(count(params, put_batch(batch, mesh=run.mesh)))
        for batch in prefetch(batches, 0, batches.num_per_epoch)
      ]
      right, number = np.sum(counts, axis=0)
      return dict(valid_accuracy=float(100 * right / number)), ""

    return compute

  def evaluate(self, run: Run, data: GraphData, workdir: Path) -> Evaluation | None:
    """Scores every split but train, and always predicting the most frequent class."""
    _check_names(run.vocabulary, data)
    splits = {name: of for name, of in data.splits.items() if name != "train"}
    found = iter(self._predict(run, [graph for of in splits.values() for graph in of]))
    if not is_first():
      return None
    is_chain = self.config.data.source == "clutrr"
    most_frequent = statistics.mode(int(graph.target) for graph in data.splits["train"])
    scores, results, sentences, pictures = {}, {}, {}, ()
    lines = ["split      graphs   accuracy (%)   most frequent class (%)    loss"]
    for split, graphs in splits.items():
      answers, nats = zip(*itertools.islice(found, len(graphs)), strict=True)
      targets = [int(graph.target) for graph in graphs]
      is_right = [*map(operator.eq, answers, targets)]
      scores[split] = dict(
        accuracy=100 * statistics.fmean(is_right),
        loss=statistics.fmean(nats),
        majority=100 * targets.count(most_frequent) / len(targets),
      )
      results[split] = dict(graphs=len(graphs), **scores[split])
      sizes = (len(graph.senders if is_chain else graph.nodes) for graph in graphs)
      sentences[split] = [[*row] for row in zip(sizes, map(int, is_right), strict=True)]
      accuracy, loss, majority = scores[split].values()
      lines.append(
        f"{split:9}{len(graphs):8,}{accuracy:15.1f}{majority:26.1f}{loss:8.3f}"
      )
    if is_chain:
      tests = {k: [scores[f"test_{k}"]["accuracy"]] for k in CTP}
      title = f"{self.config.data.source}, seed {self.config.seed}"
      pictures = (draw_lengths({"this model": tests}, workdir / "lengths.png", title),)
    return Evaluation("\n".join(["", *lines, ""]), results, scores, sentences, pictures)

  def _predict(self, run: Run, graphs: Sequence[Graph]) -> list[tuple[int, float]]:
    """Returns the predicted class of each graph, and the cross entropy of its target in nats."""

    @jax.jit
    def predict(params, batch: GraphBatch):
      logits = nnx.merge(run.graphdef, params)(batch)
      cross_entropies = optax.softmax_cross_entropy_with_integer_labels
      return jnp.argmax(logits, -1), cross_entropies(
        logits, jnp.maximum(batch.target, 0)
      )

    longest = int(graph_module.num_nodes(graphs).max())
    batches = self._batch_maker(graphs, run.mesh, longest)(graphs, seed=None)
    params, found = tasks.own_copies(run.params), {}
    for step in range(batches.num_per_epoch):
      batch = batches[step]
      found_in_batch = (
        np.asarray(x)[batch.target >= 0].tolist() for x in predict(params, batch)
      )
      found |= zip(
        batches.order(step).tolist(), zip(*found_in_batch, strict=True), strict=True
      )
    return [found[number] for number in range(len(graphs))]


def _check_names(names: GraphNames, data: GraphData) -> None:
  """Raises InputError if the data have other labels or classes than the trained model."""
  for kind, ours, theirs in zip(GraphNames._fields, names, data.names, strict=True):
    if ours != theirs:
      remedy = "give the data it was trained on, or another --workdir"
      raise InputError(
        f"the data have {kind} {theirs}, the trained model {ours}: {remedy}"
      )


# Scores
# -------------------------------------------------------------------------------------------


def draw_lengths(
  scores: Mapping[str, Mapping[int, Sequence[float]]], path: Path, title: str
) -> Path:
  """Draws accuracies by row and length, over the runs, beside those of CTP."""
  curves = {**scores, NAME: {k: [accuracy] for k, accuracy in CTP.items()}}
  mark = LONGEST_TRAINED + 0.5, "longest in training"
  panel = SpreadPanel(
    "relations in the chain", "accuracy (%)", curves, mark, ticks=[*CTP]
  )
  return spread_curves([panel], path, title=title)
