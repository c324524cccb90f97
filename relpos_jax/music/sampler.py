"""Sampling of pieces that continue a prime."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from relpos_jax.data.tokenizer import BOS, EOS, PAD, Ragged
from relpos_jax.decoding.sampling import UNCHANGED, SamplingParams, check_sampling, sample
from relpos_jax.errors import InputError
from relpos_jax.models.layers import decoding_model
from relpos_jax.typing import Int, PyTree


class Sampler:
  """Continues pieces with a key-value cache, all of them in one compiled program.

  Args:
    graphdef, params: a `LanguageModel`, split.
    context: the largest number of input tokens, begin and prime included.
  """

  def __init__(self, graphdef: nnx.GraphDef, params: PyTree, *, context: int):
    self.params = params
    self.context = context

    @functools.partial(jax.jit, static_argnames="max_length")
    def draw(params, primes, limits, key, sampling, *, max_length):
      model = decoding_model(graphdef, params)
      cache = model.init_cache(len(primes), primes.shape[1] + max_length)
      options = dict(sampling=sampling, max_length=max_length, eos=EOS, pad=PAD, never=(BOS,))
      return sample(model.decode, cache, primes, limits, key, **options)

    self._draw = draw

  def __call__(
    self,
    primes: Sequence[Sequence[int] | np.ndarray],
    *,
    num_tokens: int | Sequence[int],
    seed: int,
    sampling: SamplingParams = UNCHANGED,
  ) -> list[Int[np.ndarray, "_"]]:
    """Returns each prime with up to `num_tokens` new tokens, fewer if the end token is drawn.

    Row i depends on the seed, not on the other rows or their number. Raises InputError: a prime and
    its new tokens exceed the context, or a value of `sampling` is out of range.
    """
    check_sampling(sampling)
    limits = np.broadcast_to(num_tokens, len(primes))
    begun = Ragged.of([np.concatenate([[BOS], prime]) for prime in primes])
    for prime, limit in zip(primes, limits.tolist(), strict=True):
      check_room(len(prime), limit, self.context)
    # Rounding lengths saves compilations: padding takes slots of the cache, but no position.
    shape = (len(primes), _round_up(int(begun.lengths.max())))
    tokens = self._draw(
      self.params,
      begun.padded(np.arange(len(primes)), shape, PAD),
      limits.astype(np.int32),
      jax.random.key(seed),
      jax.tree.map(jnp.asarray, sampling),
      max_length=_round_up(int(limits.max())),
    )
    return [
      np.concatenate([np.asarray(prime, int), row[~np.isin(row, (PAD, EOS))]])
      for prime, row in zip(primes, np.asarray(tokens), strict=True)
    ]


def check_room(prime: int, num_tokens: int, context: int) -> None:
  """Raises InputError unless the context holds begin, prime and all new tokens but the last."""
  if num_tokens < 1:
    raise InputError(f"{num_tokens} tokens wanted: give at least 1")
  if prime + num_tokens > context:
    raise InputError(
      f"the prime has {prime} tokens and {num_tokens} are to follow, the context is {context} "
      "tokens: ask for fewer, give a shorter prime, or a larger context"
    )


def _round_up(length: int) -> int:
  """Rounds up to a power of two, at least 16."""
  return max(16, 1 << (length - 1).bit_length())
