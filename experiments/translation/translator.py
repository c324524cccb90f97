"""Translation of lines by beam search, where a line that is done makes room for the next."""

import concurrent.futures
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tokenizers import Tokenizer

from experiments.data.tokenizer import BOS, EOS, PAD, Ragged, decode, encode
from experiments.training.programs import kept
from experiments.training.run import Run
from relpos_jax.attention.partitioned import target_platform
from relpos_jax.decoding.beam import Search, begin, extend
from relpos_jax.models.layers import Cache, Memory, decoding_model
from relpos_jax.typing import Array, Bool, Int, PyTree

_SHORTEST = 32
_NOT_YET, _DONE, _FULL = range(
  3
)  # a sentence's state: full if it needs more room for its tokens


class _Batch(NamedTuple):
  """The sentences that are being translated, one in each row."""

  search: Search
  memories: tuple[Memory, ...]
  number: Int[Array, " B"]  # of the sentence; -1: none
  is_full: Bool[Array, " B"]  # the search was given up, since it needs more room


class Translator:
  """Translates lines by beam search.

  Lines of about the same length, up to 32 tokens, 64, 128, ..., share a batch, which
  compiles once for each of these lengths. Once an eighth of its rows are done, the next
  lines take them. A translation that outgrows its batch is searched again in a batch of
  twice the length. On a CPU two batches take turns with its cores, since much of a step
  uses only one.

  Args:
    graphdef, params: the model, split.
    mesh: the rows of a batch are sharded over all its devices, whatever the types of
      its axes.
    beam_size: hypotheses per sentence; 1 is greedy.
    length_penalty, stop: see `beam_search`.
    extra_length: a translation has at most this many tokens more than its source.
    never_ends: no token ends a translation, which has as many tokens as its limit.
    token_budget: padded source tokens per batch; by default 2,560 / beam_size on a CPU,
      whose caches hold no more, and 16,384 / beam_size elsewhere.
    key: names the model for the programs that are kept for the next process; without
      one, none is.
    track: wraps the lines as they are done, given their number, for example to show
      progress.
  """

  def __init__(
    self,
    graphdef: nnx.GraphDef,
    params: PyTree,
    tokenizer: Tokenizer,
    mesh: Mesh,
    *,
    beam_size: int = 4,
    length_penalty: float = 0.6,
    stop: str = "present",
    extra_length: int = 50,
    never_ends: bool = False,
    token_budget: int | None = None,
    key: str = "",
    track: Callable[[Iterable, int], Iterable] = lambda lines, number: lines,
  ):
    mesh = Mesh(mesh.devices, mesh.axis_names)  # of automatic axes
    self.params = params
    self.tokenizer = tokenizer
    self._num_devices, self._track, self._extra_length = mesh.size, track, extra_length
    is_cpu = target_platform() == "cpu"
    self._taking = threading.Lock()
    self._num_threads = (
      2 if is_cpu and mesh.size == 1 and (os.cpu_count() or 1) > 1 else 1
    )
    default = (2560 if is_cpu else 16_384) // beam_size
    self._token_budget = default if token_budget is None else token_budget

    def start(model: nnx.Module, limits: Array, room: int) -> Search:
      cache = model.init_cache(len(limits), room, beam_size)
      return begin(
        cache, limits, beam_size=beam_size, max_length=room, bos=BOS, pad=PAD
      )

    def make_empty(params: PyTree, source: Array) -> _Batch:
      model, (rows, length) = decoding_model(graphdef, params), source.shape
      search = start(model, jnp.zeros(rows, jnp.int32), room=length + length // 2)
      none = jnp.full(rows, -1), jnp.zeros(rows, bool)
      return _Batch(search, model.empty_memory(source), *none)

    def advance(
      params: PyTree,
      batch: _Batch,
      source: Array,
      number: Array,
      limits: Array,
      is_last: Array,
    ) -> tuple[_Batch, Array, Array]:
      """Searches until all new sources, those with a number, have a row and a few rows
      are free.

      If `is_last`, it searches until all are done. Takes sources (B, S), numbers and
      limits (B,). Also returns the states (2 B,) and the best translations (2 B, L) of
      the sentences by number.
      """
      rows, room = len(source), batch.search.live.tokens.shape[2] - 1
      few = max(1, rows // 8)
      model = decoding_model(graphdef, params)
      memories = model.encode_memory(source)
      num_new = jnp.sum(number >= 0)

      def fill(batch: _Batch, taken: Array) -> tuple[_Batch, Array]:
        """Gives the next sources to a few of the rows that are free."""
        (free,) = jnp.nonzero(batch.number < 0, size=few, fill_value=rows)
        new = taken + jnp.arange(few)
        free = jnp.where(new < num_new, free, rows)  # no row: nothing is put there
        pick = functools.partial(jnp.take, indices=new, axis=0, mode="clip")
        search = start(model, pick(limits), room)
        new = _Batch(
          search, jax.tree.map(pick, memories), pick(number), jnp.zeros(few, bool)
        )
        batch = jax.tree.map(lambda x, y: x.at[free].set(y, mode="drop"), batch, new)
        return batch, taken + jnp.sum(free < rows)

      def step(batch: _Batch) -> _Batch:
        def decode(tokens, cache):
          logits, cache = model.decode(tokens, cache, batch.memories)
          return logits.at[..., EOS].set(-jnp.inf) if never_ends else logits, cache

        rules = dict(length_penalty=length_penalty, stop=stop, eos=EOS, pad=PAD)
        search = extend(batch.search, decode, Cache.reorder, **rules)
        is_full = search.is_live & (search.length == room)
        scores = jnp.where(is_full[:, None], -jnp.inf, search.live.scores)
        search = search._replace(live=search.live._replace(scores=scores))
        return batch._replace(search=search, is_full=batch.is_full | is_full)

      def search_on(carry):
        batch, taken, states, found = carry
        batch, taken = fill(batch, taken)
        wanted = jnp.where((taken < num_new) | ~is_last, few, rows)
        batch = jax.lax.while_loop(
          lambda x: jnp.sum(~x.search.is_live) < wanted, step, batch
        )
        is_over = ~batch.search.is_live & (batch.number >= 0)
        at = jnp.where(is_over, batch.number, 2 * rows)
        states = states.at[at].set(jnp.where(batch.is_full, _FULL, _DONE), mode="drop")
        found = found.at[at].set(batch.search.ended.tokens[:, 0, 1:], mode="drop")
        batch = batch._replace(number=jnp.where(is_over, -1, batch.number))
        return batch, taken, states, found

      def goes_on(carry):
        batch, taken, *_ = carry
        return (taken < num_new) | (is_last & jnp.any(batch.number >= 0))

      nothing = jnp.full(2 * rows, _NOT_YET), jnp.full((2 * rows, room), PAD)
      batch, _, *found = jax.lax.while_loop(goes_on, search_on, (batch, 0, *nothing))
      return batch, *found

    everywhere, by_row = PartitionSpec(), PartitionSpec(mesh.axis_names)
    # Each device stops by itself.
    on_devices = functools.partial(
      jax.shard_map, mesh=mesh, out_specs=by_row, check_vma=False
    )
    for_host, on_device = (NamedSharding(mesh, spec) for spec in (everywhere, by_row))
    make_empty_jit = jax.jit(
      on_devices(make_empty, in_specs=(everywhere, by_row)), out_shardings=on_device
    )
    advance_jit = jax.jit(
      on_devices(advance, in_specs=(everywhere, *4 * [by_row], everywhere)),
      out_shardings=(on_device, for_host, for_host),
      donate_argnums=1,
    )
    options = beam_size, length_penalty, stop, never_ends, mesh
    key, devices = key and f"{key} {options}", [*mesh.devices.flat]
    self._make_empty = kept(make_empty_jit, key and f"make_empty {key}", devices)
    self._advance = kept(advance_jit, key and f"advance {key}", devices)

  def __call__(
    self,
    lines: Sequence[str],
    params: PyTree | None = None,
    limits: Int[np.ndarray, "lines"] | None = None,
  ) -> list[str]:
    """Translates lines in order, an empty line as empty.

    `params` replace the translator's; `limits` are the most tokens of each translation,
    in place of those of its source and `extra_length`.
    """
    params = self.params if params is None else params
    translations = [""] * len(lines)
    sources = encode(self.tokenizer, [line.strip() for line in lines])
    lengths = sources.lengths.tolist()
    limits = sources.lengths + self._extra_length if limits is None else limits
    # The longest of a batch come first, so that none is left to be searched for alone.
    filled = sorted(
      (i for i, line in enumerate(lines) if line.strip()), key=lambda i: -lengths[i]
    )
    for i, tokens in self._track(
      self._translate_all(params, sources, limits, filled), len(filled)
    ):
      text = decode(self.tokenizer, tokens)
      translations[i] = text.replace("\n", " ").replace("\r", " ")
    return translations

  def _translate_all(
    self,
    params: PyTree,
    sources: Ragged,
    limits: Int[np.ndarray, "lines"],
    waiting: list[int],
  ) -> Iterator[tuple[int, Int[np.ndarray, "L"]]]:
    """Yields which of the waiting sources are done, and their tokens, short ones first."""
    lengths, length = sources.lengths.tolist(), _SHORTEST
    while waiting:
      alike = [i for i in reversed(waiting) if lengths[i] <= length]
      longer = [i for i in waiting if lengths[i] > length]
      num_rows = max(
        1, self._token_budget // length // self._num_devices
      )  # of a device
      num_streams = (
        1 if len(alike) <= num_rows * self._num_devices else self._num_threads
      )
      stream = functools.partial(
        self._translate, params, sources, limits, length, num_rows, alike
      )
      for i, tokens in _merged([stream() for _ in range(num_streams)]):
        if tokens is None:
          longer.append(i)
        else:
          yield i, tokens
      waiting, length = longer, 2 * length

  def _translate(
    self,
    params: PyTree,
    sources: Ragged,
    limits,
    length: int,
    num_rows: int,
    waiting: list[int],
  ) -> Iterator[list[tuple[int, Int[np.ndarray, "L"] | None]]]:
    """Yields the sources, from the end of those waiting, that are done at once, and
    their tokens.

    In place of the tokens of a translation that needs more room there is None.
    """
    numbered = np.full(
      (self._num_devices, 2 * num_rows), -1
    )  # the source of each number, if any
    new = np.zeros((self._num_devices, num_rows), int)
    batch = self._make_empty(params, np.full((new.size, length), PAD, np.int32))
    while waiting or np.any(numbered >= 0):
      number = np.full(new.shape, -1, np.int32)
      with self._taking:
        for device, unused in enumerate(numbered < 0):
          share = min(num_rows, -(-len(waiting) // (self._num_devices - device)))
          for n, free in enumerate(np.flatnonzero(unused)[:share].tolist()):
            number[device, n] = free
            new[device, n] = numbered[device, free] = waiting.pop()
      source = sources.padded(new.ravel(), (new.size, length), PAD)
      rows = number.ravel(), limits[new.ravel()].astype(np.int32)
      batch, *found = self._advance(params, batch, source, *rows, np.bool_(not waiting))
      states, tokens = (
        np.asarray(x).reshape(*numbered.shape, *x.shape[1:]) for x in found
      )
      is_over = states != _NOT_YET
      is_done = states[is_over] == _DONE
      texts = [
        x if done else None for x, done in zip(tokens[is_over], is_done, strict=True)
      ]
      yield list(zip(numbered[is_over].tolist(), texts, strict=True))
      numbered[is_over] = -1


def _merged(streams: Sequence[Iterator[list]]) -> Iterator:
  """Yields what is in the lists of all streams; each runs in a thread of its own."""
  with concurrent.futures.ThreadPoolExecutor(len(streams)) as threads:
    running = {threads.submit(next, stream, None): stream for stream in streams}
    while running:
      done, _ = concurrent.futures.wait(
        running, return_when=concurrent.futures.FIRST_COMPLETED
      )
      for future in done:
        stream = running.pop(future)
        if (found := future.result()) is not None:
          running[threads.submit(next, stream, None)] = stream
          yield from found


def make_translator(run: Run, **changes) -> Translator:
  """Makes a translator on the run's devices from `config.decoding` and changes to it."""
  size = run.vocabulary.get_vocab_size()
  options = run.config.decoding.to_dict() | changes
  del options["average_checkpoints"]
  key = f"{run.config.model.to_json(sort_keys=True)} {size}"
  parts = run.graphdef, run.params, run.vocabulary, run.mesh
  return Translator(*parts, key=key, **options)
