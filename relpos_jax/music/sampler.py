"""From the beginnings of pieces to pieces."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from relpos_jax.data.ragged import Ragged
from relpos_jax.data.tokenizer import BOS, EOS, PAD
from relpos_jax.decoding.sampling import UNCHANGED, SamplingParams, check_sampling, sample
from relpos_jax.errors import InputError
from relpos_jax.models.cached import decoding_model
from relpos_jax.typing import Int, PyTree

_SHORTEST = 16
_MOST_TOKENS = 2**31 - 1  # an int32; no vocabulary has more
_LONGEST = 2**30  # prime and new tokens, each rounded up to a power of two, fit into an int32


class Sampler:
  """Continues pieces, with a cache, all of them in one compiled program.

  A prime gets the begin's token in front; the end's ends a piece, and is not in the result.

  Args:
    graphdef, params: a `LanguageModel`, split.
    context: the most tokens that it reads, begin and prime included.

  >>> from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig
  >>> config = LanguageModelConfig(9, num_layers=1, width=16, num_heads=2, feed_forward=16)
  >>> model = nnx.jit(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))()
  >>> sampler = Sampler(*nnx.split(model), context=32)
  >>> pieces = sampler([[4, 5], []], num_tokens=6, seed=0)
  >>> pieces[0][:2].tolist(), all(len(piece) <= 8 for piece in pieces)
  ([4, 5], True)
  """

  def __init__(self, graphdef: nnx.GraphDef, params: PyTree, *, context: int):
    self.params = params
    self.context = context
    self._draw = jax.jit(functools.partial(_draw, graphdef), static_argnames="max_length")

  def __call__(
    self,
    primes: Sequence[Sequence[int] | np.ndarray],
    *,
    num_tokens: int | Sequence[int],
    seed: int,
    sampling: SamplingParams = UNCHANGED,
  ) -> list[Int[np.ndarray, "_"]]:
    """Each prime and what follows it: `num_tokens` tokens, or fewer where the piece ends.

    Row i of seed s depends on neither the other rows nor how many they are.

    Raises InputError: there is no room in the context for a prime and its new tokens, or a value of
    `sampling` is out of range.
    """
    check_sampling(sampling)
    limits = np.broadcast_to(num_tokens, len(primes))
    begun = Ragged.of([np.concatenate([[BOS], prime]) for prime in primes])
    for prime, limit in zip(primes, limits.tolist(), strict=True):
      check_room(len(prime), limit, self.context)
    # Few shapes, so few compilations: padding takes slots of the cache, and no position.
    shape = (len(primes), _rounded(int(begun.lengths.max())))
    sampling = sampling._replace(top_k=min(sampling.top_k, _MOST_TOKENS))
    tokens = self._draw(
      self.params,
      begun.padded(np.arange(len(primes)), shape, PAD),
      limits.astype(np.int32),  # no context is longer
      jax.random.key(seed),
      jax.tree.map(jnp.asarray, sampling),
      max_length=_rounded(int(limits.max())),
    )
    drawn = [row[~np.isin(row, (PAD, EOS))] for row in np.asarray(tokens)]
    return [
      np.concatenate([np.asarray(prime, int), row])
      for prime, row in zip(primes, drawn, strict=True)
    ]


def check_room(prime: int, num_tokens: int, context: int) -> None:
  """Raises InputError unless the context holds begin, prime and all new tokens but the last.

  No context is above 2**30 tokens, which int32 can count.

  >>> check_room(2000, 48, context=2048)
  >>> check_room(2048, 48, context=2048)
  Traceback (most recent call last):
  ...
  relpos_jax.errors.InputError: the prime has 2048 tokens, the context is 2048 tokens: give ...
  """
  if context < 1:
    raise InputError(f"the context is {context} tokens: give at least 1")
  if context > _LONGEST:
    raise InputError(f"the context is {context} tokens: give at most {_LONGEST}")
  if prime >= context:
    raise InputError(
      f"the prime has {prime} tokens, the context is {context} tokens: give a shorter prime, or a "
      "larger context"
    )
  if num_tokens < 1:
    raise InputError(f"{num_tokens} tokens wanted: want at least 1")
  if prime + num_tokens > context:
    raise InputError(
      f"the prime has {prime} tokens and {num_tokens} are to follow, the context is {context} "
      f"tokens: ask for at most {context - prime}, or give a larger context"
    )


def _rounded(length: int) -> int:
  """A power of two, at least 16.

  >>> _rounded(3), _rounded(65)
  (16, 128)
  """
  return max(_SHORTEST, 1 << (length - 1).bit_length())


def _draw(graphdef, params, primes, limits, key, sampling, *, max_length):
  model = decoding_model(graphdef, params)
  return sample(
    model.decode,
    model.init_cache(len(primes), primes.shape[1] + max_length),
    primes,
    limits,
    key,
    sampling=sampling,
    max_length=max_length,
    eos=EOS,
    pad=PAD,
    never=(BOS,),
  )
