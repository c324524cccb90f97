"""Batched translation of lines by beam search."""

import itertools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from relpos_jax.data.tokenizer import BOS, EOS, PAD, Tokenizers, decode, encode
from relpos_jax.decoding.beam import beam_search
from relpos_jax.models.layers import decoding_model
from relpos_jax.typing import Array, Int, PyTree

_SHORTEST = 16


class Translator:
  """Translates lines by beam search; compiles once for each power of two of source length.

  Args:
    graphdef, params: the model, split.
    tokenizers: those of source and target.
    mesh: the rows of a batch are sharded over all its devices.
    beam_size: hypotheses per sentence; 1 is greedy.
    length_penalty: alpha of ((5 + length) / 6) ** alpha (Wu et al. 2016), 0.6 in the paper.
    extra_length: a translation has at most this many tokens more than its source.
    token_budget: padded source tokens per batch.
    track: wraps the sequence of batches, for example to show progress.
  """

  def __init__(
    self,
    graphdef: nnx.GraphDef,
    params: PyTree,
    tokenizers: Tokenizers,
    mesh: Mesh,
    *,
    beam_size: int = 4,
    length_penalty: float = 0.6,
    extra_length: int = 50,
    token_budget: int = 2048,
    track: Callable[[Sequence], Iterable] = iter,
  ):
    self.params = params
    self.tokenizers = tokenizers
    self._token_budget, self._num_devices, self._track = token_budget, mesh.size, track

    def search(params: PyTree, source: Int[Array, "B S"]) -> Int[Array, "B L"]:
      """Returns the best translation of each row of tokens."""
      model = decoding_model(graphdef, params)
      batch_size, max_length = source.shape[0], source.shape[1] + extra_length
      lengths = jnp.sum(source != PAD, axis=1)
      repeat = lambda x: jnp.repeat(x, beam_size, axis=0)
      memory = jax.tree.map(repeat, model.encode_memory(source))
      tokens, _ = beam_search(
        lambda tokens, cache: model.decode(tokens, cache, memory),
        model.init_cache(batch_size, max_length),
        beam_size=beam_size,
        max_length=max_length,
        length_limits=jnp.where(lengths > 0, lengths + extra_length, 0),
        length_penalty=length_penalty,
        bos=BOS,
        eos=EOS,
        pad=PAD,
      )
      return tokens[:, 0]

    rows = PartitionSpec(mesh.axis_names)
    search = jax.shard_map(
      search, mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=rows, check_vma=False
    )
    # Each device stops by itself, and results are replicated.
    self._search = jax.jit(search, out_shardings=NamedSharding(mesh, PartitionSpec()))

  def __call__(self, lines: Sequence[str], params: PyTree | None = None) -> list[str]:
    """Translates lines in order, an empty line as empty; `params` replace the translator's."""
    params = self.params if params is None else params
    translations = [""] * len(lines)
    sources = encode(self.tokenizers.source, [line.strip() for line in lines])
    padded_lengths = [max(_SHORTEST, 1 << (n - 1).bit_length()) for n in sources.lengths.tolist()]
    filled = [i for i, line in enumerate(lines) if line.strip()]
    filled.sort(key=padded_lengths.__getitem__)
    batches = []  # Each padded length has one number of rows, so that few shapes are compiled.
    for length, alike in itertools.groupby(filled, padded_lengths.__getitem__):
      while rows := list(itertools.islice(alike, self._num_rows(length))):
        batches.append((length, rows))
    for length, rows in self._track(batches):
      padded = sources.padded(np.array(rows), (self._num_rows(length), length), PAD)
      tokens = np.asarray(self._search(params, padded))
      for i, ids in zip(rows, tokens, strict=False):  # the last rows may be padding
        text = decode(self.tokenizers.target, ids)
        translations[i] = text.replace("\n", " ").replace("\r", " ")
    return translations

  def _num_rows(self, padded_length: int) -> int:
    """Returns the rows of a batch: those within the budget, the same number on each device."""
    return max(1, self._token_budget // padded_length // self._num_devices) * self._num_devices
