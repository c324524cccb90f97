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
  prompts: Sequence[Sequence[int] | np.ndarray],
  *,
  num_tokens: int | Sequence[int],
  seed: int,
  sampling: SamplingParams = UNCHANGED,
) -> list[Int[np.ndarray, "_"]]:
  """Continues each prompt by up to `num_tokens`, or until the end token is drawn.

  A sample depends on the seed and its index, not on the other samples. The model, a
  `LanguageModel`, decodes all of them in one compiled program with a key-value cache.
  """
  sampling.check()
  limits = np.broadcast_to(num_tokens, len(prompts)).astype(np.int32)
  rows = Ragged.from_rows([BOS, *prompt] for prompt in prompts)
  # Rounded lengths save compilations. Padding takes slots of the cache, but no
  # positions.
  shape = (len(prompts), _round_up(int(rows.lengths.max())))
  padded = rows.pad(np.arange(len(prompts)), shape, PAD)
  key, sampling = jax.random.key(seed), jax.tree.map(jnp.asarray, sampling)
  max_length = _round_up(int(limits.max()))
  tokens = _sample_tokens(
    graphdef, params, padded, limits, key, sampling, max_length=max_length
  )
  pieces = []
  for prompt, row in zip(prompts, np.asarray(tokens), strict=True):
    new = row[~np.isin(row, (PAD, EOS))]
    pieces.append(np.concatenate([np.asarray(prompt, int), new]))
  return pieces


@functools.partial(jax.jit, static_argnames=("graphdef", "max_length"))
def _sample_tokens(graphdef, params, prompts, limits, key, sampling, *, max_length):
  model = decoding_model(graphdef, params)
  cache = model.init_cache(len(prompts), prompts.shape[1] + max_length)
  options = dict(
    sampling=sampling, max_length=max_length, eos=EOS, pad=PAD, never=(BOS,)
  )
  return sample(model.decode, cache, prompts, limits, key, **options)


def _round_up(length: int) -> int:
  """Rounds a length up to a power of two, at least 16."""
  return max(16, 1 << (length - 1).bit_length())
