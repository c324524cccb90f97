"""Computes the accuracy by length, for trained lengths and for longer ones."""

import statistics
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from experiments.data.batching import round_up
from experiments.evaluation.tables import text_table
from experiments.length_tasks.tasks import TaskBatch, TaskBatches
from experiments.training.batches import load_batches
from experiments.training.loop import ScoreFunction
from experiments.training.processes import is_first
from experiments.training.results import Evaluation
from experiments.training.run import Run
from experiments.training.sharding import batch_multiples
from relpos_jax.typing import PyTree

# The longer inputs: every ninth length, from 41 to 500 by default, so that even and odd
# ones take turns. Ruoss et al. score each length.
_STEP = 9
_ROWS = 8  # inputs of a batch: at 1,001 tokens their attention weights take 256 MB


def make_score(run: Run, batches: TaskBatches) -> ScoreFunction:
  """Makes a function that computes a model's mean accuracy, given its parameters."""
  count = _make_count(run)

  def score(params: PyTree) -> tuple[dict[str, float], str]:
    shares = _score_batches(count, params, run, batches)
    return {"valid_accuracy": 100 * statistics.fmean(shares)}, ""

  return score


def _make_count(run: Run) -> Callable[[PyTree, TaskBatch], jax.Array]:
  @jax.jit
  def count(params, batch: TaskBatch):
    answers = jnp.argmax(nnx.merge(run.graphdef, params)(batch), -1)
    is_right = (answers == batch.targets) & batch.counts
    return jnp.sum(is_right) / jnp.sum(batch.counts)

  return count


def _score_batches(
  count: Callable, params: PyTree, run: Run, batches: TaskBatches
) -> list[float]:
  """Returns the share of right answers in each batch."""
  shares = []
  for batch in load_batches(batches, run.mesh, 0, batches.num_per_epoch):
    shares.append(round(float(count(params, batch)), 4))
  return shares


def evaluate(run: Run) -> Evaluation | None:
  """Computes the accuracy by length, for lengths as in training and for longer ones.

  Only the first process returns an evaluation; the others return None.
  """
  count = _make_count(run)
  scores, results, rows = {}, {}, {}
  for split, lengths in choose_lengths(run.config).items():
    batches = make_test_batches(run, lengths)
    shares = _score_batches(count, run.params, run, batches)
    rows[split] = [list(row) for row in zip(batches.lengths, shares, strict=True)]
    scores[split] = dict(accuracy=100 * statistics.fmean(shares))
    results[split] = dict(lengths=len(lengths)) | scores[split]
  if not is_first():
    return None
  return Evaluation(text_table("split", results), results, scores, rows)


def choose_lengths(config: ConfigDict) -> Mapping[str, Sequence[int]]:
  """Returns the input lengths of two splits.

  `within` has the lengths that occur in training, and `longer` has longer ones.
  """
  longest_trained = config.batches.max_length
  longer = range(longest_trained + 1, config.evaluation.longest + 1, _STEP)
  return dict(longer=longer, within=range(1, longest_trained + 1))


def make_test_batches(run: Run, lengths: Sequence[int]) -> TaskBatches:
  """Makes batches in order of length, with the same number of inputs of each length.

  The number is `evaluation.num_inputs`, rounded up to full batches.
  """
  config = run.config
  num_batches = -(-config.evaluation.num_inputs // _ROWS)
  row_shards, _ = batch_multiples(run.mesh.shape, config.mesh.ring)
  return TaskBatches(
    run.vocabulary,
    sorted([*lengths] * num_batches),
    rows=_ROWS,
    padded_rows=round_up(_ROWS, row_shards),
    num_shapes=config.batches.num_shapes,
    drawn_from=config.model.random_positions,
    seed=None,
  )
