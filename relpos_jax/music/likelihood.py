"""How probable a language model finds pieces: negative log-likelihood in nats."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from relpos_jax.data.batching import Batches, bucket_boundaries, prefetch
from relpos_jax.data.ragged import Ragged
from relpos_jax.data.tokenizer import BOS, EOS, PAD
from relpos_jax.typing import Array, Float, Int, PyTree

_NUM_SHAPES = 4  # of batches: each is compiled once


class Likelihood(NamedTuple):
  """The negative log-likelihood of pieces, as sums.

  Attributes:
    nats: of all tokens, the pieces' ends included.
    end_nats: of the ends alone.
    num_tokens, num_pieces, num_steps: in them; a piece's end is no token here.
    of_pieces: the nats of each, its end included.

  >>> found = Likelihood(nats=43.0, end_nats=3.0, num_tokens=80, num_pieces=6, num_steps=20)
  >>> found.per_token, found.per_token_without_ends, found.per_step
  (0.5, 0.5, 2.15)
  """

  nats: float
  end_nats: float
  num_tokens: int
  num_pieces: int
  num_steps: float
  of_pieces: tuple[float, ...] = ()

  @property
  def per_token(self) -> float:
    """Nats per prediction, as a model is trained: the end of a piece is one too."""
    return self.nats / (self.num_tokens + self.num_pieces)

  @property
  def per_token_without_ends(self) -> float:
    """Nats per token of the music."""
    return (self.nats - self.end_nats) / self.num_tokens

  @property
  def per_step(self) -> float:
    """Nats per time step, the ends included."""
    return self.nats / self.num_steps


def likelihood(
  nats_of: Callable[[Int[Array, "B L"], Int[Array, "B L"]], Float[Array, "B L"]],
  pieces: Sequence[np.ndarray],
  times: Callable[[np.ndarray], np.ndarray],
  *,
  token_budget: int,
) -> Likelihood:
  """The likelihood of whole pieces, each token given all before it; summed in float64.

  Args:
    nats_of: from tokens read and those that follow each to the nats of these, 0 of padding; see
      `token_nats` and `make_nats_of`.
    pieces: tokens, without begin and end.
    times: the codec's: the step of each token and of the one to come.
    token_budget: tokens a batch, padding included, at most; a longer piece is a batch of its own.
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
    num_tokens=int(sum(map(len, pieces))),
    num_pieces=len(pieces),
    num_steps=float(sum(times(piece)[-1] for piece in pieces)),
    of_pieces=tuple(of_pieces[1:].tolist()),
  )


def _batches(pieces: Sequence[np.ndarray], token_budget: int) -> Batches:
  """Tokens read, those that follow each, and the pieces' numbers from 1; 0 is no piece."""
  read = Ragged.of([np.concatenate([[BOS], piece]) for piece in pieces])
  follow = Ragged.of([np.concatenate([piece, [EOS]]) for piece in pieces])
  numbers = Ragged.of([[number] for number in range(1, len(pieces) + 1)])
  boundaries = bucket_boundaries(read.lengths, _NUM_SHAPES, multiple_of=64)
  return Batches(
    *(read, follow, numbers),
    kind=lambda *sides: sides,
    boundaries=boundaries,
    token_budget=max(token_budget, boundaries[-1]),
    seed=None,
  )


def make_nats_of(graphdef: nnx.GraphDef, params: PyTree) -> Callable[..., Float[Array, "B L"]]:
  """`nats_of` of a `LanguageModel`, compiled, without dropout."""
  score = jax.jit(
    lambda params, source, target: token_nats(nnx.merge(graphdef, params)(source), target)
  )
  return lambda source, target: score(params, source, target)


def token_nats(logits: Float[Array, "B L V"], targets: Int[Array, "B L"]) -> Float[Array, "B L"]:
  """-log P(target) of each token, in float32; 0 of padding.

  >>> nats = token_nats(jnp.zeros((1, 3, 4)), jnp.array([[1, 2, 0]]))  # log 4, log 4, 0
  >>> [round(float(x), 4) for x in nats[0]]
  [1.3863, 1.3863, 0.0]
  """
  log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
  nats = -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
  return jnp.where(targets != PAD, nats, 0.0)
