"""Graphs: labelled directed edges, a graph encoder, accuracy."""

import collections
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from relpos_jax.config import at_least, check_values
from relpos_jax.data.batching import bucket_boundaries, prefetch
from relpos_jax.errors import InputError
from relpos_jax.graphs import dataset, scores
from relpos_jax.graphs.batching import PAD, GraphBatch, GraphBatches, empty_batch
from relpos_jax.graphs.graph import Graph, GraphData, GraphNames
from relpos_jax.models.graph_encoder import GraphEncoder, GraphEncoderConfig
from relpos_jax.training import task as tasks
from relpos_jax.training.loss import Loss, cross_entropy
from relpos_jax.training.processes import is_first
from relpos_jax.training.sharding import AnyMesh, num_rows_together, put_batch
from relpos_jax.training.task import (
  Evaluation,
  Run,
  check_model,
  model_choices,
  model_values,
  own_copies,
)
from relpos_jax.typing import Array, Float, Int, PyTree

_HEADS = dict(clutrr="pair", tu="graph")  # what is asked of the graphs of a source
_CHOICES = {"data.source": (*_HEADS,)} | {
  name: choices
  for name, choices in model_choices(GraphEncoderConfig).items()
  if name in ("model.readout", "model.sees", "model.reverse_edges", "model.norm", "model.dtype")
}
_NUMBERS = (
  *tasks.LAYER_CHECKS,
  ("above 0 and below 1", lambda x: 0 < x < 1, ("data.clutrr.valid_share",)),
  at_least(3, "data.tu.num_folds"),
  at_least(-1, "data.tu.fold"),
)


class Graphs:
  """The `Task` of classifying graphs, or pairs of their nodes."""

  score = "accuracy"

  def __init__(self, config: ConfigDict):
    self.config = config

  def check(self, sizes: Mapping[str, int]) -> None:
    check_values(self.config, _CHOICES, _NUMBERS)
    tu = self.config.data.tu
    if tu.fold >= tu.num_folds:
      raise InputError(
        f"config.data.tu.fold is {tu.fold}: give 0 to {tu.num_folds - 1}, or -1 for the seed's"
      )
    if sizes["sequence"] > 1:
      raise InputError(f"config.mesh.sequence is {sizes['sequence']}: give 1, graphs are not cut")
    tasks.check_batches(self.config, sizes)
    make_config = lambda: encoder_config(self.config, self.mock_vocabulary())
    check_model(GraphEncoder, make_config, empty_batch((1, 4, 4, 1)))

  def load_data(self) -> GraphData:
    """The graphs of `config.data`: splits train and valid, and all others to test on."""
    return dataset.load(self.config)

  def learn_vocabulary(self, data: GraphData, workdir: pathlib.Path) -> GraphNames:
    """The names of labels and classes, which are the data's."""
    return dataset.learn_names(data, workdir)

  def load_vocabulary(self, workdir: pathlib.Path) -> GraphNames:
    return dataset.read_names(workdir)

  def save_vocabulary(self, vocabulary: GraphNames, workdir: pathlib.Path) -> None:
    dataset.write_names(vocabulary, workdir)

  def mock_vocabulary(self) -> GraphNames:
    """As many names as CLUTRR has."""
    names = lambda number: tuple(map(str, range(number)))
    return GraphNames(names(1), names(14), names(18))

  def make_batches(
    self, data: GraphData, vocabulary: GraphNames, mesh: AnyMesh
  ) -> tuple[GraphBatches, GraphBatches]:
    dataset.known(vocabulary, data)
    train, valid = data.splits["train"], data.splits["valid"]
    boundaries = self._boundaries([*train, *valid], self.config.batches.max_length)
    make = functools.partial(self._batches, boundaries=boundaries, mesh=mesh)
    return make(train, seed=self.config.seed), make(valid, seed=None)

  def _boundaries(self, graphs: Sequence[Graph], longest: int | None = None) -> tuple[int, ...]:
    sizes = np.array([len(graph.nodes) for graph in graphs])
    if longest and sizes.min() > longest:
      raise InputError(
        f"config.batches.max_length is {longest}, and the smallest graph has {sizes.min()} nodes"
      )
    return bucket_boundaries(sizes, self.config.batches.num_shapes, max_length=longest)

  def _batches(self, graphs: Sequence[Graph], boundaries, mesh: AnyMesh, seed) -> GraphBatches:
    budget, together = self.config.batches.tokens, num_rows_together(mesh.shape)
    together *= self.config.training.num_microbatches
    return GraphBatches(
      graphs,
      boundaries=boundaries,
      node_budget=max(budget, boundaries[-1] * together),
      multiple_of=together,
      packed=self.config.batches.packed,
      seed=seed,
    )

  def mock_batches(self, mesh: AnyMesh) -> GraphBatches:
    """Of chains as long as a graph may be."""
    longest = self.config.batches.max_length
    edges = [(node, node + 1, 0) for node in range(longest - 1)]
    graph = Graph.of([0] * longest, edges, target=0, query=(0, longest - 1))
    graphs = [graph] * max(1, self.config.batches.tokens // longest)
    return self._batches(graphs, (longest,), mesh, self.config.seed)

  def empty_batch(self, shape: tuple[int, ...]) -> GraphBatch:
    rows, nodes, edges, graphs = shape
    return empty_batch((rows, nodes, edges, graphs))

  def make_model(self, vocabulary: GraphNames, rngs: nnx.Rngs) -> GraphEncoder:
    return GraphEncoder(encoder_config(self.config, vocabulary), rngs=rngs)

  def loss(self, model: GraphEncoder, batch: GraphBatch, rngs: nnx.Rngs | None = None) -> Loss:
    smoothing = self.config.training.label_smoothing
    return graph_loss(model, batch, rngs, label_smoothing=smoothing)

  def make_report(self, run: Run, data: GraphData, batches: GraphBatches):
    """The share of the valid split's graphs that are told right, in percent."""
    count = jax.jit(lambda params, batch: _count_right(run.graphdef, params, batch))
    place = functools.partial(put_batch, mesh=run.mesh)

    def report(params: PyTree) -> tuple[dict[str, float], str]:
      counts = [  # each waited for: on CPUs, sums over processes may block each other
        jax.block_until_ready(count(params, place(batch)))
        for batch in prefetch(batches, 0, batches.num_per_epoch)
      ]
      right, number = np.sum(counts, axis=0)
      return dict(valid_accuracy=float(100 * right / number)), ""

    return report

  def evaluate(self, run: Run, data: GraphData, workdir: pathlib.Path) -> Evaluation | None:
    """Accuracy and loss of every split but train, and a picture."""
    dataset.known(run.vocabulary, data)
    graphs = [(name, graph) for name, of in data.splits.items() if name != "train" for graph in of]
    told = self._tell(run, [graph for _, graph in graphs])
    if not is_first():
      return None
    rows: dict[str, list[scores.Row]] = collections.defaultdict(list)
    for (name, graph), (answer, nats) in zip(graphs, told, strict=True):
      size = len(graph.senders if self.config.data.source == "clutrr" else graph.nodes)
      rows[name].append(scores.Row(size, int(graph.target), int(answer), float(nats)))
    guess = collections.Counter(int(graph.target) for graph in data.splits["train"])
    return scores.evaluation(
      run.config.data.source, rows, guess.most_common(1)[0][0], run.vocabulary.classes, workdir
    )

  def _tell(self, run: Run, graphs: Sequence[Graph]) -> list[tuple[int, float]]:
    """Of each graph: the answer, and the nats that the right one costs. None is left out."""
    batches = self._batches(graphs, self._boundaries(graphs), run.mesh, seed=None)
    answer = make_answer(run.graphdef, own_copies(run.params))
    told: dict[int, tuple[int, float]] = {}
    for step in range(batches.num_per_epoch):
      batch = batches[step]
      answers, nats = (np.asarray(x)[batch.target >= 0].tolist() for x in answer(batch))
      told |= zip(batches.order(step), zip(answers, nats, strict=True), strict=True)
    return [told[number] for number in range(len(graphs))]


def graph_loss(
  model: GraphEncoder,
  batch: GraphBatch,
  rngs: nnx.Rngs | None = None,
  *,
  label_smoothing: float = 0.0,
) -> Loss:
  """The loss of every class that is asked: of graphs, of nodes, or of pairs; each is a token."""
  logits = model(batch, rngs)
  return cross_entropy(logits, batch.target, smoothing=label_smoothing, pad=PAD)


def make_answer(
  graphdef: nnx.GraphDef, params: PyTree
) -> Callable[[GraphBatch], tuple[Int[Array, "B X"], Float[Array, "B X"]]]:
  """`answer(batch)`: the likeliest class, and the nats that the right one costs; compiled.

  Of each target: X is G for graphs and for queries, T for nodes. Those of padding mean nothing.
  """

  @jax.jit
  def answer(params, batch: GraphBatch) -> tuple[Int[Array, "B X"], Float[Array, "B X"]]:
    logits = nnx.merge(graphdef, params)(batch)
    target = jnp.maximum(batch.target, 0)[..., None]
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), target, axis=-1)[..., 0]
    return jnp.argmax(logits, -1), nats

  return functools.partial(answer, params)


def encoder_config(config: ConfigDict, names: GraphNames) -> GraphEncoderConfig:
  """The model's own config, of `config.model` and what the graphs are made of."""
  return GraphEncoderConfig(
    num_node_labels=len(names.node_labels),
    num_edge_labels=len(names.edge_labels),
    num_classes=len(names.classes),
    num_node_features=names.num_node_features,
    num_edge_features=names.num_edge_features,
    head=_HEADS[config.data.source],
    **model_values(config),
  )


def _count_right(graphdef: nnx.GraphDef, params: PyTree, batch: GraphBatch):
  """Graphs that are told right, and all."""
  answers, there = jnp.argmax(nnx.merge(graphdef, params)(batch), -1), batch.target >= 0
  return jnp.sum((answers == batch.target) & there), jnp.sum(there)
