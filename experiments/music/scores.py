"""Computes the likelihood of pieces."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.data.batching import Batches, bucket_boundaries
from experiments.data.tokenizer import BOS, EOS, PAD, Ragged
from experiments.data.upstream import Corpus
from experiments.evaluation.tables import text_table
from experiments.files import Path
from experiments.music.piano_roll import draw
from experiments.training.loss import shift_right
from experiments.training.metrics import track
from experiments.training.processes import is_first
from experiments.training.results import Evaluation
from experiments.training.run import Run, copy_to_process
from relpos_jax.typing import Array, Float, Int, PyTree

_TOKENS_DRAWN = 512  # more of a piece would be too dense in a picture
_NUM_SHAPES = 4  # shapes of batches; each is compiled once

# Huang et al. 2018, table 2: nats per token on the validation split of the chorales.
# Quoted second hand, not checked against the paper.
PUBLISHED = {"relative": 0.357, "sinusoidal": 0.398}


def evaluate(run: Run, data: Corpus, workdir: Path) -> Evaluation | None:
  """Computes the likelihood of complete pieces, and draws a piano roll of one.

  Only the first process returns an evaluation; the others return None.
  """
  compute_nats = make_nats_function(run.graphdef, copy_to_process(run.params))
  scores, results, rows = {}, {}, {}
  for split in ("valid", "test"):
    if split not in data.splits:
      continue
    pieces = data.splits[split]
    scores[split], nats = likelihood(
      compute_nats,
      pieces,
      times=run.vocabulary.times,
      token_budget=run.config.batches.tokens,
    )
    num_tokens = sum(map(len, pieces))
    results[split] = {"pieces": len(pieces), "tokens": num_tokens} | scores[split]
    rows[split] = []
    for piece, piece_nats in zip(pieces, nats.tolist(), strict=True):
      rows[split].append([len(piece), round(piece_nats, 3)])
  if not is_first():
    return None
  piece = data.splits["valid"][0][:_TOKENS_DRAWN]
  picture = draw(run, piece, workdir / "piano_roll.png")
  text = text_table("split", results)
  return Evaluation(text, results, scores, rows, (picture,))


def likelihood(
  compute_nats: Callable[[Int[Array, "B L"]], Float[Array, "B L"]],
  pieces: Sequence[np.ndarray],
  times: Callable[[np.ndarray], np.ndarray],
  *,
  token_budget: int,
) -> tuple[dict[str, float], Float[np.ndarray, "pieces"]]:
  """Computes the negative log-likelihood of complete pieces, summed in float64.

  Returns scores by name, and the nats of each piece, including its end token. The
  scores are `nll`, the mean nats per token; `without_ends`, the same without end
  tokens; and `per_step`, the mean nats per time step.

  Args:
    compute_nats: see `make_nats_function`.
    times: see `Codec`.
    token_budget: the largest number of tokens in a batch, including padding. A longer
      piece gets a batch of its own.
  """
  rows = Ragged.from_rows(np.append(piece, EOS) for piece in pieces)
  boundaries = bucket_boundaries(rows.lengths, _NUM_SHAPES, multiple_of=64)
  budget = max(token_budget, boundaries[-1])
  batches = Batches(rows, boundaries=boundaries, budget=budget, seed=None)
  num_batches = batches.num_per_epoch
  end_nats = 0.0
  piece_nats = np.zeros(len(pieces))
  for step in track(range(num_batches), num_batches, "batches scored"):
    (tokens,) = batches[step]
    order = batches.order(step)
    nats = np.asarray(compute_nats(tokens), np.float64)
    piece_nats[order] = nats.sum(axis=1)[: len(order)]
    end_nats += float(nats[tokens == EOS].sum())
  total = float(piece_nats.sum())
  num_tokens = sum(map(len, pieces))
  num_steps = float(sum(times(piece)[-1] for piece in pieces))
  scores = dict(
    nll=total / (num_tokens + len(pieces)),
    without_ends=(total - end_nats) / num_tokens,
    per_step=total / num_steps,
  )
  return scores, piece_nats


def make_nats_function(
  graphdef: nnx.GraphDef, params: PyTree
) -> Callable[..., Float[Array, "B L"]]:
  """Makes the jitted `compute_nats(tokens)`, which returns the nats of each token.

  The model is a `LanguageModel`, without dropout.
  """

  @jax.jit
  def score(params, tokens):
    return token_nats(nnx.merge(graphdef, params)(shift_right(tokens, BOS)), tokens)

  return functools.partial(score, params)


def token_nats(
  logits: Float[Array, "B L V"], targets: Int[Array, "B L"]
) -> Float[Array, "B L"]:
  """Computes -log P(target) of each token in float32, and 0 for padding."""
  nats = optax.softmax_cross_entropy_with_integer_labels(
    logits.astype(jnp.float32), targets
  )
  return jnp.where(targets != PAD, nats, 0.0)
