"""Computes the accuracy of graph classification, for each split and length."""

import itertools
import statistics
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.evaluation.pictures import SpreadPanel, spread_curves
from experiments.evaluation.tables import text_table
from experiments.files import Path
from experiments.graphs.graph import (
  Graph,
  GraphBatch,
  GraphBatches,
  GraphData,
  num_nodes,
)
from experiments.training.batches import configure_batches, load_batches
from experiments.training.loop import ScoreFunction
from experiments.training.processes import is_first
from experiments.training.results import Evaluation
from experiments.training.run import Run, copy_to_process
from relpos_jax.typing import PyTree

# Accuracy (%) by length of Conditional Theorem Provers (Minervini et al. 2020), trained
# on chains of 2, 3 and 4 relations. From the README of github.com/uclnlp/ctp, one seed.
CTP = dict(enumerate((100.0, 72.0, 74.0, 97.8, 96.2, 98.1, 97.8, 94.4, 89.3), start=2))
NAME = "CTP, published"
LONGEST_TRAINED = 4  # relations in the longest training chains


def make_score(run: Run, batches: GraphBatches) -> ScoreFunction:
  """Makes a function that computes a model's accuracy, given its parameters."""

  @jax.jit
  def count(params, batch: GraphBatch):
    answers = jnp.argmax(nnx.merge(run.graphdef, params)(batch), -1)
    is_target = batch.target >= 0
    return jnp.sum((answers == batch.target) & is_target), jnp.sum(is_target)

  def score(params: PyTree):
    num_right = num_targets = 0
    for batch in load_batches(batches, run.mesh, 0, batches.num_per_epoch):
      right, targets = count(params, batch)
      # int() waits for each batch: on CPUs, concurrent sums over processes may
      # deadlock.
      num_right += int(right)
      num_targets += int(targets)
    return {"valid_accuracy": 100 * num_right / num_targets}, ""

  return score


def evaluate(run: Run, data: GraphData, workdir: Path) -> Evaluation | None:
  """Scores every split except train.

  The scores include `majority`, the accuracy of a guess: always the class that is most
  frequent in training. Only the first process returns an evaluation; the others return
  None.
  """
  splits = {name: graphs for name, graphs in data.splits.items() if name != "train"}
  answers, nats = predict(run, list(itertools.chain(*splits.values())))
  if not is_first():
    return None
  is_chain = run.config.data.source == "clutrr"
  most_frequent = statistics.mode(int(graph.target) for graph in data.splits["train"])
  scores, results, rows = {}, {}, {}
  start = 0
  for split, graphs in splits.items():
    part = slice(start, start + len(graphs))
    start = part.stop
    targets = np.array([graph.target for graph in graphs])
    is_right = answers[part] == targets
    num_frequent = int(np.sum(targets == most_frequent))
    scores[split] = dict(
      accuracy=100 * float(is_right.mean()),
      loss=statistics.fmean(nats[part]),
      majority=100 * num_frequent / len(graphs),
    )
    results[split] = {"graphs": len(graphs)} | scores[split]
    sizes = [len(graph.senders if is_chain else graph.nodes) for graph in graphs]
    rows[split] = np.column_stack([sizes, is_right]).tolist()
  pictures = (_draw_own_lengths(run, scores, workdir),) if is_chain else ()
  text = text_table("split", results)
  return Evaluation(text, results, scores, rows, pictures)


def _draw_own_lengths(
  run: Run, scores: Mapping[str, Mapping[str, float]], workdir: Path
) -> Path:
  by_length = {k: [scores[f"test_{k}"]["accuracy"]] for k in CTP}
  title = f"{run.config.data.source}, seed {run.config.seed}"
  return draw_lengths({"this model": by_length}, workdir / "lengths.png", title)


def predict(run: Run, graphs: Sequence[Graph]) -> tuple[np.ndarray, np.ndarray]:
  """Returns the predicted class of each graph, and the cross-entropy in nats."""

  @jax.jit
  def classify(params, batch: GraphBatch):
    logits = nnx.merge(run.graphdef, params)(batch)
    targets = jnp.maximum(batch.target, 0)  # the other rows are padding
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.argmax(logits, -1), nats

  sizes = num_nodes(graphs)
  make = configure_batches(run.config, sizes, run.mesh, int(sizes.max()), GraphBatches)
  batches = make(graphs, seed=None)
  params = copy_to_process(run.params)
  answers = np.zeros(len(graphs), int)
  nats = np.zeros(len(graphs))
  for step in range(batches.num_per_epoch):
    batch = batches[step]
    is_graph = batch.target >= 0
    batch_answers, batch_nats = classify(params, batch)
    order = batches.order(step)
    answers[order] = np.asarray(batch_answers)[is_graph]
    nats[order] = np.asarray(batch_nats)[is_graph]
  return answers, nats


def draw_lengths(
  scores: Mapping[str, Mapping[int, Sequence[float]]], path: Path, title: str
) -> Path:
  """Draws accuracy over length for each configuration, and for the published CTP.

  `scores` has the accuracies (%) of all seeds, by configuration and length. Returns the
  path.
  """
  curves = {**scores, NAME: {k: [accuracy] for k, accuracy in CTP.items()}}
  mark = LONGEST_TRAINED + 0.5, "longest in training"
  panel = SpreadPanel(
    "relations in the chain", "accuracy (%)", curves, mark, ticks=[*CTP]
  )
  return spread_curves([panel], path, title=title)
