"""Scores of a music model: the negative log-likelihood of complete pieces, in nats."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from relpos_jax.data.batching import Batches, bucket_boundaries, prefetch
from relpos_jax.data.ragged import Ragged
from relpos_jax.data.tokenizer import BOS, EOS, PAD
from relpos_jax.typing import Array, Float, Int, PyTree

# Huang et al. 2018, table 2: nats per token on the valid split of the chorales. Quoted second hand,
# not checked against the paper.
PUBLISHED = {"relative": 0.357, "sinusoidal": 0.398}
BASELINE = 0.417
WITH_INSTRUMENTS = 0.37  # sinusoidal, with the voice of each token as input

_NUM_SHAPES = 4  # of batches: each is compiled once


class Likelihood(NamedTuple):
  """The negative log-likelihood of pieces, as sums.

  Attributes:
    nats: of all tokens and the ends of pieces.
    end_nats: of the ends alone.
    num_tokens: without ends.
    num_pieces: the number of pieces, and of ends.
    num_steps: the codec's time steps.
    of_pieces: the nats of each piece, its end included.

  >>> found = Likelihood(nats=43.0, end_nats=3.0, num_tokens=80, num_pieces=6, num_steps=20)
  >>> found.scores()
  {'nll': 0.5, 'without_ends': 0.5, 'per_step': 2.15}
  """

  nats: float
  end_nats: float
  num_tokens: int
  num_pieces: int
  num_steps: float
  of_pieces: tuple[float, ...] = ()

  def scores(self) -> dict[str, float]:
    """Returns nats per token, ends included; per token of the music; and per time step."""
    return dict(
      nll=self.nats / (self.num_tokens + self.num_pieces),
      without_ends=(self.nats - self.end_nats) / self.num_tokens,
      per_step=self.nats / self.num_steps,
    )


def likelihood(
  nats_of: Callable[[Int[Array, "B L"], Int[Array, "B L"]], Float[Array, "B L"]],
  pieces: Sequence[np.ndarray],
  times: Callable[[np.ndarray], np.ndarray],
  *,
  token_budget: int,
) -> Likelihood:
  """Computes the likelihood of complete pieces, summed in float64.

  Args:
    nats_of: from input tokens and target tokens to the nats of the targets, 0 for padding; see
      `make_nats_of`.
    pieces: tokens, without begin and end.
    times: the codec's.
    token_budget: the largest number of tokens per batch, padding included; a longer piece is a
      batch by itself.
  """
  batches = _batches(pieces, token_budget)
  end_nats, of_pieces = 0.0, np.zeros(len(pieces) + 1)
  for source, target, piece in prefetch(batches, 0, batches.num_per_epoch):
    found = np.asarray(nats_of(source, target), np.float64)
    of_pieces[piece[:, 0]] += found.sum(axis=1)
    end_nats += found[target == EOS].sum()
  return Likelihood(
    nats=float(of_pieces[1:].sum()),
    end_nats=float(end_nats),
    num_tokens=sum(map(len, pieces)),
    num_pieces=len(pieces),
    num_steps=float(sum(times(piece)[-1] for piece in pieces)),
    of_pieces=tuple(of_pieces[1:].tolist()),
  )


def _batches(pieces: Sequence[np.ndarray], token_budget: int) -> Batches:
  """Returns batches of inputs, targets and piece numbers from 1; number 0 is padding."""
  source = Ragged.of([np.concatenate([[BOS], piece]) for piece in pieces])
  target = Ragged.of([np.concatenate([piece, [EOS]]) for piece in pieces])
  numbers = Ragged.of([[number] for number in range(1, len(pieces) + 1)])
  boundaries = bucket_boundaries(source.lengths, _NUM_SHAPES, multiple_of=64)
  return Batches(
    *(source, target, numbers),
    kind=lambda *sides: sides,
    boundaries=boundaries,
    token_budget=max(token_budget, boundaries[-1]),
    seed=None,
  )


def make_nats_of(graphdef: nnx.GraphDef, params: PyTree) -> Callable[..., Float[Array, "B L"]]:
  """Returns `nats_of` for a `LanguageModel`: compiled, without dropout."""
  score = jax.jit(
    lambda params, source, target: token_nats(nnx.merge(graphdef, params)(source), target)
  )
  return lambda source, target: score(params, source, target)


def token_nats(logits: Float[Array, "B L V"], targets: Int[Array, "B L"]) -> Float[Array, "B L"]:
  """Computes -log P(target) of each token in float32; 0 for padding.

  >>> nats = token_nats(jnp.zeros((1, 3, 4)), jnp.array([[1, 2, 0]]))  # log 4, log 4, 0
  >>> [round(float(x), 4) for x in nats[0]]
  [1.3863, 1.3863, 0.0]
  """
  log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
  nats = -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
  return jnp.where(targets != PAD, nats, 0.0)


def table(found: Mapping[str, Likelihood], with_published: bool) -> str:
  """Formats scores by split, with the published figures for the chorales if wanted."""
  lines = ["split   pieces    nats a token   without ends   nats a step"]
  for split, of in found.items():
    nll, without_ends, per_step = of.scores().values()
    lines.append(f"{split:8}{of.num_pieces:6,}{nll:15.4f}{without_ends:15.4f}{per_step:14.3f}")
  if with_published:
    figures = dict(baseline=BASELINE) | PUBLISHED | {"with instrument labels": WITH_INSTRUMENTS}
    listed = ", ".join(f"{name} {value}" for name, value in figures.items())
    lines.append(
      f"Huang et al. 2018, table 2, quoted second hand, not checked: {listed}: valid, nats a token"
    )
  return "\n".join(["", *lines, ""])
