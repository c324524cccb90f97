"""Scores of music: the negative log-likelihood of complete pieces in nats."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.data.batching import Batches, bucket_boundaries, prefetch
from experiments.data.tokenizer import BOS, EOS, PAD, Ragged
from experiments.evaluation.records import Metric
from experiments.training.metrics import track
from relpos_jax.typing import Array, Float, Int, PyTree, Shaped

# Huang et al. 2018, table 2: nats per token on the valid split of the chorales. Quoted second hand,
# not checked against the paper.
PUBLISHED = {"relative": 0.357, "sinusoidal": 0.398}
BASELINE = 0.417
WITH_INSTRUMENTS = 0.37  # sinusoidal, with the voice of each token as input

_NUM_SHAPES = 4  # of batches: each is compiled once


class Likelihood(NamedTuple):
  """The negative log-likelihood of pieces.

  Attributes:
    scores: nats per token, ends included; per token of the music; and per time step.
    of_pieces: the nats of each piece, its end included.
  """

  scores: dict[str, float]
  of_pieces: Float[np.ndarray, "pieces"]


def likelihood(
  nats_of: Callable[[Int[Array, "B L"], Int[Array, "B L"]], Float[Array, "B L"]],
  pieces: Sequence[np.ndarray],
  times: Callable[[np.ndarray], np.ndarray],
  *,
  token_budget: int,
) -> Likelihood:
  """Computes the likelihood of complete pieces, summed in float64.

  Args:
    nats_of: returns the nats of target tokens given input tokens, as `make_nats_of` does.
    pieces: tokens, without begin and end.
    times: the codec's.
    token_budget: the largest number of tokens per batch, padding included; a longer piece is a
      batch by itself.
  """
  source = Ragged.of([np.concatenate([[BOS], piece]) for piece in pieces])
  target = Ragged.of([np.concatenate([piece, [EOS]]) for piece in pieces])
  numbers = Ragged.of([[number] for number in range(1, len(pieces) + 1)])  # 0 is padding
  boundaries = bucket_boundaries(source.lengths, _NUM_SHAPES, multiple_of=64)
  batches = Batches(
    *(source, target, numbers),
    kind=lambda *sides: sides,
    boundaries=boundaries,
    token_budget=max(token_budget, boundaries[-1]),
    seed=None,
  )
  end_nats, of_pieces = 0.0, np.zeros(len(pieces) + 1)
  number = batches.num_per_epoch
  numbered = prefetch(batches, 0, number)
  for source, target, piece in track(numbered, number, "batches scored"):
    found = np.asarray(nats_of(source, target), np.float64)
    of_pieces[piece[:, 0]] += found.sum(axis=1)
    end_nats += found[target == EOS].sum()
  of_pieces = of_pieces[1:]
  nats, num_tokens = float(of_pieces.sum()), sum(map(len, pieces))
  scores = dict(
    nll=nats / (num_tokens + len(pieces)),
    without_ends=(nats - float(end_nats)) / num_tokens,
    per_step=nats / float(sum(times(piece)[-1] for piece in pieces)),
  )
  return Likelihood(scores, of_pieces)


def make_nats_of(graphdef: nnx.GraphDef, params: PyTree) -> Callable[..., Float[Array, "B L"]]:
  """Returns `nats_of` for a `LanguageModel`: compiled, without dropout."""

  @jax.jit
  def score(params, source, target):
    return token_nats(nnx.merge(graphdef, params)(source), target)

  return functools.partial(score, params)


def token_nats(logits: Float[Array, "B L V"], targets: Int[Array, "B L"]) -> Float[Array, "B L"]:
  """Computes -log P(target) of each token in float32; 0 for padding."""
  nats = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
  return jnp.where(targets != PAD, nats, 0.0)


def table(found: Mapping[str, Likelihood], with_published: bool) -> str:
  """Formats scores by split, with the published figures for the chorales if wanted."""
  lines = ["split   pieces    nats a token   without ends   nats a step"]
  for split, of in found.items():
    nll, without_ends, per_step = of.scores.values()
    lines.append(f"{split:8}{len(of.of_pieces):6,}{nll:15.4f}{without_ends:15.4f}{per_step:14.3f}")
  if with_published:
    figures = dict(baseline=BASELINE) | PUBLISHED | {"with instrument labels": WITH_INSTRUMENTS}
    listed = ", ".join(f"{name} {value}" for name, value in figures.items())
    lines.append(
      f"Huang et al. 2018, table 2, quoted second hand, not checked: {listed}: valid, nats a token"
    )
  return "\n".join(["", *lines, ""])


def nats_per_token(
  pieces: Float[np.ndarray, "pieces 2"], draws: Shaped[np.ndarray, "draws pieces"]
) -> Float[np.ndarray, "draws"]:
  """Computes nats per token, ends included, of each draw of pieces, rows of tokens and nats."""
  return draws @ pieces[:, 1] / (draws @ (pieces[:, 0] + 1))


METRIC = Metric(
  "nll",
  lambda pieces: float(nats_per_token(pieces, np.ones((1, len(pieces))))[0]),
  tolerance=1e-4,
  fixed=(0,),
)
