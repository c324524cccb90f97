"""Translates lines by beam search; a finished line makes room for the next."""

import concurrent.futures
import dataclasses
import functools
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
from experiments.training.environment import count_cores
from experiments.training.programs import cache_programs
from experiments.training.run import Run
from relpos_jax.attention.partitioned import target_platform
from relpos_jax.decoding.beam import Search, begin, extend
from relpos_jax.models.layers import Cache, Memory, decoding_model
from relpos_jax.typing import Array, Bool, Int, PyTree

_SHORTEST = 32
# The states of a sentence. A full one needs more room for its tokens.
_UNFINISHED, _DONE, _FULL = range(3)


class Translator:
  """Translates lines by beam search.

  Lines of similar length share a batch: up to 32 tokens, 64, 128, and so on. There is
  one compilation for each of these lengths. Once an eighth of the rows are finished,
  the next lines take them. A translation that outgrows its batch is searched again in a
  batch of twice the length. On a CPU, two batches run at the same time, because much of
  a step uses only one core.

  Args:
    graphdef, params: the model, as `nnx.split` returns it.
    mesh: the rows of a batch are sharded over all its devices.
    beam_size: hypotheses per sentence; 1 is greedy.
    length_penalty, stop: see `beam_search`.
    extra_length: a translation has at most this many tokens more than its source.
    never_ends: forbids EOS, so that a translation has as many tokens as its limit.
    token_budget: padded source tokens per batch. The default is 2,560 / beam_size on a
      CPU, because more would not fit into its caches, and 16,384 / beam_size elsewhere.
    key: identifies the model, so that its compiled programs can be cached for the next
      process. Without a key they are not.
    track: wraps the iterator of finished lines, for example to show progress. Its
      second argument is the number of lines.
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
    self.params = params
    self.tokenizer = tokenizer
    self._extra_length = extra_length
    self._track = track
    self._num_devices = mesh.size
    self._taking = threading.Lock()
    is_cpu = target_platform() == "cpu"
    has_cores = is_cpu and mesh.size == 1 and (count_cores() or 1) > 1
    self._num_threads = 2 if has_cores else 1
    if token_budget is None:
      token_budget = (2560 if is_cpu else 16_384) // beam_size
    self._token_budget = token_budget
    rules = _Rules(graphdef, beam_size, length_penalty, stop, never_ends)
    self._make_empty, self._advance = _compile(rules, mesh, key)

  def __call__(
    self,
    lines: Sequence[str],
    params: PyTree | None = None,
    limits: Int[np.ndarray, "lines"] | None = None,
  ) -> list[str]:
    """Translates lines, and returns the translations in order; empty lines stay empty.

    `params` replaces the translator's own. `limits` has the largest number of tokens
    of each translation; by default, the tokens of its source plus `extra_length`.
    """
    if params is None:
      params = self.params
    sources = encode(self.tokenizer, map(str.strip, lines))
    if limits is None:
      limits = sources.lengths + self._extra_length
    # Long ones first: a long search that began last would run alone in the end.
    longest_first = np.argsort(-sources.lengths, kind="stable").tolist()
    filled = [i for i in longest_first if lines[i].strip()]
    translations = [""] * len(lines)
    translated = self._translate_all(params, sources, limits, filled)
    for i, tokens in self._track(translated, len(filled)):
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
    """Translates the sources with the indices `waiting`, which begin with the longest.

    The first batches have room for short sources only, the next ones for twice as many
    tokens, and so on. Yields pairs: the index of a source, and the tokens of its
    translation.
    """
    lengths = sources.lengths.tolist()
    length = _SHORTEST
    while waiting:
      # Reversed, because sources are taken from the end.
      short = [i for i in reversed(waiting) if lengths[i] <= length]
      long = [i for i in waiting if lengths[i] > length]
      num_rows = max(1, self._token_budget // length // self._num_devices)
      shape = self._num_devices, num_rows, length
      fits_in_one = len(short) <= num_rows * self._num_devices
      num_streams = 1 if fits_in_one else self._num_threads
      stream = functools.partial(self._translate, params, sources, limits, shape, short)
      for i, tokens in _merge([stream() for _ in range(num_streams)]):
        if tokens is None:
          long.append(i)
        else:
          yield i, tokens
      waiting = long
      length = 2 * length

  def _translate(
    self,
    params: PyTree,
    sources: Ragged,
    limits: Int[np.ndarray, "lines"],
    shape: tuple[int, int, int],
    waiting: list[int],
  ) -> Iterator[list[tuple[int, Int[np.ndarray, "L"] | None]]]:
    """Translates waiting sources in one stream of batches; yields lists of results.

    A result is the index of a source, and the tokens of its translation. The tokens are
    None if the translation needs more room. `waiting` has the indices of sources; they
    are taken from its end, and several streams share it. `shape` is the shape of a
    batch: devices, rows of a device, tokens.
    """
    num_devices, num_rows, length = shape
    new = np.zeros((num_devices, num_rows), int)
    # The index of the source that has each number; see `_take_next`.
    indices = np.full((num_devices, 2 * num_rows), -1)
    source = np.full((new.size, length), PAD, np.int32)
    batch = self._make_empty(params, source)
    while waiting or np.any(indices >= 0):
      with self._taking:
        number = _take_next(waiting, indices, new)
      rows = new.ravel()
      source = sources.pad(rows, source.shape, PAD)
      new_limits = limits[rows].astype(np.int32)
      batch, states, tokens = self._advance(
        params, batch, source, number.ravel(), new_limits, np.bool_(not waiting)
      )
      states, tokens = np.asarray(states), np.asarray(tokens)
      finished = []
      for place in np.flatnonzero(states != _UNFINISHED):
        row = tokens[place] if states[place] == _DONE else None
        finished.append((int(indices.flat[place]), row))
        indices.flat[place] = -1
      yield finished


def _take_next(
  waiting: list[int], indices: Int[np.ndarray, "D numbers"], new: Int[np.ndarray, "D B"]
) -> Int[np.ndarray, "D B"]:
  """Takes sources from the end of `waiting` for each device, and numbers them.

  The devices share the sources equally, but a device takes at most one source for each
  row of its batch and each unused number. The number identifies the source on its
  device, until its translation is returned under this number. `indices` maps each
  number to the index of a source, or to -1 if the number is unused.

  `new` and the returned array have an entry for each device and row. Where a source is
  taken, `new` receives the source's index, and the returned array its number. Elsewhere
  `new` keeps its value, and the returned array is -1.
  """
  number = np.full(new.shape, -1, np.int32)
  num_devices, num_rows = new.shape
  for device in range(num_devices):
    share = -(-len(waiting) // (num_devices - device))
    unused = np.flatnonzero(indices[device] < 0)[: min(num_rows, share)]
    for row, unused_number in enumerate(unused):
      number[device, row] = unused_number
      new[device, row] = indices[device, unused_number] = waiting.pop()
  return number


def _merge(streams: Sequence[Iterator[list]]) -> Iterator:
  """Runs each stream in a thread; yields the items of the lists that streams yield."""
  with concurrent.futures.ThreadPoolExecutor(len(streams)) as threads:
    running = {threads.submit(next, stream, None): stream for stream in streams}
    while running:
      done, _ = concurrent.futures.wait(
        running, return_when=concurrent.futures.FIRST_COMPLETED
      )
      for future in done:
        stream = running.pop(future)
        items = future.result()
        if items is not None:
          running[threads.submit(next, stream, None)] = stream
          yield from items


def make_translator(run: Run, **changes) -> Translator:
  """Makes a translator for a run, with the options of `config.decoding`.

  `changes` replaces some of these options.
  """
  options = run.config.decoding.to_dict() | changes
  del options["average_checkpoints"]
  has_own_positions = ":" in run.config.model.positions
  if not has_own_positions:  # their code may change, and the config stay the same
    model = run.config.model.to_json(sort_keys=True)
    options["key"] = f"{model} {run.vocabulary.get_vocab_size()}"
  return Translator(run.graphdef, run.params, run.vocabulary, run.mesh, **options)


# What runs on the devices
# ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Rules:
  """Holds the structure of a model, and the rules of its search; see `Translator`."""

  graphdef: nnx.GraphDef = dataclasses.field(repr=False)  # the key identifies the model
  beam_size: int
  length_penalty: float
  stop: str
  never_ends: bool


class _Batch(NamedTuple):
  """Holds the sentences that are being translated, one in each row."""

  search: Search
  memories: tuple[Memory, ...]
  number: Int[Array, " B"]  # identifies the sentence; -1: the row is free
  is_full: Bool[Array, " B"]  # the search was stopped because it needs more room

  @property
  def room(self) -> int:
    return self.search.live.tokens.shape[2] - 1


class _Sources(NamedTuple):
  """Holds the sentences that wait for a row of the batch, one in each entry.

  Entries without a sentence come last; their number is -1.
  """

  memories: tuple[Memory, ...]
  number: Int[Array, " B"]
  limits: Int[Array, " B"]


class _Progress(NamedTuple):
  """Holds the batch, the number of sources that got a row, and the results so far.

  `states` and `tokens` have an entry for each number that a sentence may have.
  """

  batch: _Batch
  num_taken: Int[Array, ""]
  states: Int[Array, " numbers"]
  tokens: Int[Array, "numbers L"]


def _compile(rules: _Rules, mesh: Mesh, key: str) -> tuple[Callable, Callable]:
  """Compiles `_make_empty` and `_advance` for the devices of a mesh."""
  mesh = Mesh(mesh.devices, mesh.axis_names)  # makes its axes automatic
  everywhere, by_row = PartitionSpec(), PartitionSpec(mesh.axis_names)
  on_host = NamedSharding(mesh, everywhere)
  # shard_map, so that each device can stop by itself.
  on_devices = functools.partial(
    jax.shard_map, mesh=mesh, out_specs=by_row, check_vma=False
  )
  specs = everywhere, by_row
  sharded = on_devices(functools.partial(_make_empty, rules), in_specs=specs)
  make_empty = jax.jit(sharded)
  specs = everywhere, by_row, by_row, by_row, by_row, everywhere
  sharded = on_devices(functools.partial(_advance, rules), in_specs=specs)
  results = None, on_host, on_host
  advance = jax.jit(sharded, out_shardings=results, donate_argnums=1)
  if not key:
    return make_empty, advance
  cache = functools.partial(cache_programs, devices=mesh.devices.ravel().tolist())
  name = f"{key} {rules} {mesh}"
  return cache(make_empty, f"make_empty {name}"), cache(advance, f"advance {name}")


def _make_empty(rules: _Rules, params: PyTree, source: Int[Array, "B S"]) -> _Batch:
  model = decoding_model(rules.graphdef, params)
  rows, length = source.shape
  memories = model.empty_memory(source)
  nothing = _Sources(memories, jnp.full(rows, -1), jnp.zeros(rows, jnp.int32))
  return _begin(rules, model, nothing, room=length + length // 2)


def _begin(rules: _Rules, model: nnx.Module, sources: _Sources, room: int) -> _Batch:
  """Makes a batch in which each source has a row and the search has not yet begun.

  Each row has room for `room` tokens.
  """
  rows, beam_size = len(sources.limits), rules.beam_size
  cache = model.init_cache(rows, room, beam_size)
  search = begin(
    cache, sources.limits, beam_size=beam_size, max_length=room, bos=BOS, pad=PAD
  )
  return _Batch(search, sources.memories, sources.number, jnp.zeros(rows, bool))


def _advance(
  rules: _Rules,
  params: PyTree,
  batch: _Batch,
  source: Int[Array, "B S"],
  number: Int[Array, " B"],
  limits: Int[Array, " B"],
  is_last: Bool[Array, ""],
) -> tuple[_Batch, Int[Array, " numbers"], Int[Array, "numbers L"]]:
  """Searches until every new source has a row, and an eighth of the rows are finished.

  A row of the batch holds a sentence that is being translated. If `is_last`, searches
  until all sentences are finished.

  Args:
    batch: the sentences of earlier calls.
    source: the token ids of the new sources.
    number: identifies each new source; -1 for an entry without a source.
    limits: the largest number of tokens of each translation.

  Returns:
    The batch, and two arrays with an entry for each number: the state of the sentence
    with this number, and the tokens of its best translation. Both are valid for
    sentences that finished in this call; the other states are _UNFINISHED.
  """
  rows = len(source)
  model = decoding_model(rules.graphdef, params)
  sources = _Sources(model.encode_memory(source), number, limits)
  num_sources = jnp.sum(number >= 0)
  step = functools.partial(_step, rules, model)

  def goes_on(progress: _Progress) -> Array:
    is_any_left = jnp.any(progress.batch.number >= 0)
    return (progress.num_taken < num_sources) | (is_last & is_any_left)

  def search_on(progress: _Progress) -> _Progress:
    progress = _fill(rules, model, sources, progress)
    needs_rows = (progress.num_taken < num_sources) | ~is_last
    num_free = jnp.where(needs_rows, _count_refills(rows), rows)
    batch = jax.lax.while_loop(
      lambda batch: jnp.sum(~batch.search.is_live) < num_free, step, progress.batch
    )
    return _collect(progress._replace(batch=batch))

  nothing = jnp.full(2 * rows, _UNFINISHED), jnp.full((2 * rows, batch.room), PAD)
  start = _Progress(batch, jnp.int32(0), *nothing)
  batch, _, states, tokens = jax.lax.while_loop(goes_on, search_on, start)
  return batch, states, tokens


def _count_refills(rows: int) -> int:
  return max(1, rows // 8)


def _fill(
  rules: _Rules, model: nnx.Module, sources: _Sources, progress: _Progress
) -> _Progress:
  """Puts the next sources into free rows, a few at a time."""
  batch = progress.batch
  rows = len(batch.number)
  few = _count_refills(rows)
  (free,) = jnp.nonzero(batch.number < 0, size=few, fill_value=rows)
  indices = progress.num_taken + jnp.arange(few)
  is_source = indices < jnp.sum(sources.number >= 0)
  free = jnp.where(is_source, free, rows)  # index `rows` is dropped
  pick = functools.partial(jnp.take, indices=indices, axis=0, mode="clip")
  chosen = jax.tree.map(pick, sources)
  new = _begin(rules, model, chosen, batch.room)

  batch = jax.tree.map(lambda x, y: x.at[free].set(y, mode="drop"), batch, new)
  num_taken = progress.num_taken + jnp.sum(free < rows)
  return progress._replace(batch=batch, num_taken=num_taken)


def _step(rules: _Rules, model: nnx.Module, batch: _Batch) -> _Batch:
  """Extends every search by a token; ends a search that needs more room."""

  def decode_step(tokens: Array, cache: PyTree) -> tuple[Array, PyTree]:
    logits, cache = model.decode(tokens, cache, batch.memories)
    if rules.never_ends:
      logits = logits.at[..., EOS].set(-jnp.inf)
    return logits, cache

  search = extend(
    batch.search,
    decode_step,
    Cache.reorder,
    length_penalty=rules.length_penalty,
    stop=rules.stop,
    eos=EOS,
    pad=PAD,
  )
  is_full = search.is_live & (search.length == batch.room)
  scores = jnp.where(is_full[:, None], -jnp.inf, search.live.scores)
  search = search._replace(live=search.live._replace(scores=scores))
  return batch._replace(search=search, is_full=batch.is_full | is_full)


def _collect(progress: _Progress) -> _Progress:
  """Stores the results of finished sentences, and frees their rows."""
  batch = progress.batch
  is_over = ~batch.search.is_live & (batch.number >= 0)
  nowhere = len(progress.states)  # an index too large is dropped
  number = jnp.where(is_over, batch.number, nowhere)
  state = jnp.where(batch.is_full, _FULL, _DONE)
  best = batch.search.ended.tokens[:, 0, 1:]
  return progress._replace(
    batch=batch._replace(number=jnp.where(is_over, -1, batch.number)),
    states=progress.states.at[number].set(state, mode="drop"),
    tokens=progress.tokens.at[number].set(best, mode="drop"),
  )
