"""Batched translation of lines by beam search."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from relpos_jax.data.tokenizer import BOS, EOS, PAD, Tokenizers, decode, encode
from relpos_jax.decoding.beam import beam_search
from relpos_jax.errors import InputError
from relpos_jax.models.layers import decoding_model
from relpos_jax.typing import Array, Int, PyTree

_SHORTEST = 16


class Translator:
  """Translates lines by beam search; compiles once for each power of two of source length.

  Args:
    graphdef, params: the model, split.
    tokenizers: those of source and target.
    beam_size: hypotheses per sentence; 1 is greedy.
    length_penalty: alpha of ((5 + length) / 6) ** alpha (Wu et al. 2016), 0.6 in the paper.
    extra_length: a translation has at most this many tokens more than its source.
    token_budget: padded source tokens per batch.
    mesh: shards the rows of a batch over all its devices; None uses one device.
    track: wraps the sequence of batches, for example to show progress.
  """

  def __init__(
    self,
    graphdef: nnx.GraphDef,
    params: PyTree,
    tokenizers: Tokenizers,
    *,
    beam_size: int = 4,
    length_penalty: float = 0.6,
    extra_length: int = 50,
    token_budget: int = 2048,
    mesh: Mesh | None = None,
    track: Callable[[Sequence], Iterable] = iter,
  ):
    self.params = params
    self.tokenizers = tokenizers
    self._token_budget, self._track, self._beam_size = token_budget, track, beam_size
    self._num_devices = mesh.size if mesh else 1
    search = functools.partial(
      _search,
      graphdef,
      beam_size=beam_size,
      length_penalty=length_penalty,
      extra_length=extra_length,
    )
    self._search = jax.jit(_over_devices(search, mesh) if mesh else search)

  def __call__(self, lines: Sequence[str], params: PyTree | None = None) -> list[str]:
    """Translates lines in order; the translation of an empty line is empty.

    `params` replace those of the translator.

    Raises:
      InputError: the beam does not fit into the devices' memory.
    """
    params = self.params if params is None else params
    translations = [""] * len(lines)
    sources = encode(self.tokenizers.source, [line.strip() for line in lines])
    filled = [i for i, line in enumerate(lines) if line.strip()]
    batches = [*_by_length(filled, sources.lengths.tolist(), self._num_rows)]
    for length, rows in self._track(batches):
      # Each padded length has one number of rows, so that few shapes are compiled.
      padded = sources.padded(np.array(rows), (self._num_rows(length), length), PAD)
      with _check_memory(self._beam_size, padded.shape):
        tokens = np.asarray(self._search(params, padded))
      for i, ids in zip(rows, tokens, strict=False):  # the last rows may be padding
        text = decode(self.tokenizers.target, ids)
        translations[i] = text.replace("\n", " ").replace("\r", " ")
    return translations

  def _num_rows(self, padded_length: int) -> int:
    """Returns the rows of a batch: those within the budget, the same number on each device."""
    return max(1, self._token_budget // padded_length // self._num_devices) * self._num_devices


@contextlib.contextmanager
def _check_memory(beam_size: int, shape: tuple[int, ...]) -> Iterator[None]:
  """Raises InputError if a beam wider than one runs out of memory."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if beam_size == 1 or "RESOURCE_EXHAUSTED" not in str(error):
      raise
    rows, length = shape
    raise InputError(
      f"no memory for beams of {beam_size} with {rows} sentences of {length} tokens: give a "
      "smaller --beam_size (config.decoding.beam_size)"
    ) from error


def _over_devices(search: Callable, mesh: Mesh) -> Callable:
  """Shards the search by rows; each device stops on its own, and results are replicated."""
  sharded = jax.shard_map(
    search,
    mesh=mesh,
    in_specs=(PartitionSpec(), PartitionSpec(mesh.axis_names)),
    out_specs=PartitionSpec(mesh.axis_names),
    check_vma=False,
  )
  gather = NamedSharding(mesh, PartitionSpec())
  return lambda params, source: jax.lax.with_sharding_constraint(sharded(params, source), gather)


def _by_length(
  rows: Sequence[int], lengths: Sequence[int], num_rows: Callable[[int], int]
) -> Iterator[tuple[int, list[int]]]:
  """Yields batches as a padded length, a power of two, and their rows."""
  padded_length = lambda row: max(_SHORTEST, 1 << (lengths[row] - 1).bit_length())
  rows = sorted(rows, key=padded_length)
  for length, alike in itertools.groupby(rows, key=padded_length):
    while batch := list(itertools.islice(alike, num_rows(length))):
      yield length, batch


def _search(
  graphdef: nnx.GraphDef,
  params: PyTree,
  source: Int[Array, "B S"],
  *,
  beam_size: int,
  length_penalty: float,
  extra_length: int,
) -> Int[Array, "B L"]:
  """Returns the best translation of each row of tokens."""
  model = decoding_model(graphdef, params)
  batch_size, max_length = source.shape[0], source.shape[1] + extra_length
  lengths = jnp.sum(source != PAD, axis=1)
  memory = jax.tree.map(lambda x: jnp.repeat(x, beam_size, axis=0), model.encode_memory(source))
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
