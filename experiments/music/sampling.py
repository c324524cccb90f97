"""Samples pieces from a language model."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.data.tokenizer import BOS, EOS, PAD, Ragged
from relpos_jax.decoding.sampling import UNCHANGED, SamplingParams, sample
from relpos_jax.models.layers import decoding_model
from relpos_jax.typing import Int, PyTree


def sample_pieces(
  graphdef: nnx.GraphDef,
  params: PyTree,
  primes: Sequence[Sequence[int] | np.ndarray],
  *,
  num_tokens: int | Sequence[int],
  seed: int,
  sampling: SamplingParams = UNCHANGED,
) -> list[Int[np.ndarray, "_"]]:
  """Returns each prime with up to `num_tokens` new tokens, fewer if the end token is
  drawn.

  Row i depends on the seed, not on the other rows or their number. The model, a
  `LanguageModel`, decodes all of them in one compiled program with a key-value cache.
  """
  sampling.check()
  limits = np.broadcast_to(num_tokens, len(primes)).astype(np.int32)
  begun = Ragged.from_rows([np.concatenate([[BOS], prime]) for prime in primes])
  # Rounding lengths saves compilations: padding takes slots of the cache, but no
  # position.
  shape = (len(primes), _round_up(int(begun.lengths.max())))
  padded = begun.pad(np.arange(len(primes)), shape, PAD)
  key, sampling = jax.random.key(seed), jax.tree.map(jnp.asarray, sampling)
  max_length = _round_up(int(limits.max()))
  tokens = _draw(graphdef, params, padded, limits, key, sampling, max_length=max_length)
  return [
    np.concatenate([np.asarray(prime, int), row[~np.isin(row, (PAD, EOS))]])
    for prime, row in zip(primes, np.asarray(tokens), strict=True)
  ]


@functools.partial(jax.jit, static_argnames=("graphdef", "max_length"))
def _draw(graphdef, params, primes, limits, key, sampling, *, max_length):
  model = decoding_model(graphdef, params)
  cache = model.init_cache(len(primes), primes.shape[1] + max_length)
  options = dict(
    sampling=sampling, max_length=max_length, eos=EOS, pad=PAD, never=(BOS,)
  )
  return sample(model.decode, cache, primes, limits, key, **options)


def _round_up(length: int) -> int:
  """Rounds up to a power of two, at least 16."""
  return max(16, 1 << (length - 1).bit_length())
