"""Translation of lines by beam search, where a line that is done makes room for the next."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.data.tokenizer import BOS, EOS, PAD, Ragged, Tokenizers, decode, encode
from experiments.training.programs import kept
from relpos_jax.attention.partitioned import target_platform
from relpos_jax.decoding.beam import Search, begin, extend
from relpos_jax.models.layers import Cache, Memory, decoding_model
from relpos_jax.typing import Array, Bool, Int, PyTree

_SHORTEST = 16


class _Batch(NamedTuple):
  """The sentences that are being translated, one in each row."""

  search: Search
  memories: tuple[Memory, ...]


class Translator:
  """Translates lines by beam search.

  Lines of about the same length share a batch, which compiles once for each length of
  `_padded_length`. Once an eighth of its rows are done, the next lines take them.

  Args:
    graphdef, params: the model, split.
    tokenizers: those of source and target.
    mesh: the rows of a batch are sharded over all its devices, whatever the types of its axes.
    beam_size: hypotheses per sentence; 1 is greedy.
    length_penalty: alpha of ((5 + length) / 6) ** alpha (Wu et al. 2016), 0.6 in the paper.
    stop: when the search for a sentence ends, "count" or "bound": see `beam_search`.
    extra_length: a translation has at most this many tokens more than its source.
    token_budget: padded source tokens per batch; by default 2,560 / beam_size on a CPU, whose
      caches hold no more, and 16,384 / beam_size elsewhere.
    key: names the model for the programs that are kept for the next process; without one, none is.
    track: wraps the lines as they are done, given their number, for example to show progress.
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
    stop: str = "count",
    extra_length: int = 50,
    token_budget: int | None = None,
    key: str = "",
    track: Callable[[Iterable, int], Iterable] = lambda lines, number: lines,
  ):
    automatic = (AxisType.Auto,) * len(mesh.axis_names)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=automatic)
    self.params = params
    self.tokenizers = tokenizers
    self._num_devices, self._track = mesh.size, track
    default = (2560 if target_platform() == "cpu" else 16_384) // beam_size
    self._token_budget = default if token_budget is None else token_budget

    def start(model: nnx.Module, source: Int[Array, "B S"], room: int) -> Search:
      lengths = jnp.sum(source != PAD, axis=1)
      cache = model.init_cache(len(source), room, beam_size)
      limits = jnp.where(lengths > 0, lengths + extra_length, 0)
      return begin(cache, limits, beam_size=beam_size, max_length=room, bos=BOS, pad=PAD)

    def make_empty(params: PyTree, source: Int[Array, "B S"], room: int) -> _Batch:
      model = decoding_model(graphdef, params)
      return _Batch(start(model, source, room), model.empty_memory(source))

    def advance(
      params: PyTree,
      batch: _Batch,
      source: Int[Array, "New S"],
      rows: Int[Array, " New"],
      most_done: Int[Array, ""],
    ) -> tuple[_Batch, Bool[Array, " B"], Bool[Array, " B"], Int[Array, "B L"]]:
      """Puts new sources into rows, and searches until more than `most_done` are done or one full.

      Also returns which are done, which have no room for a token, and the best translations.
      """
      room = batch.search.live.tokens.shape[2] - 1

      def put(x, new):
        return x.at[rows].set(new, mode="drop")

      model = decoding_model(graphdef, params)
      new = _Batch(start(model, source, room), model.encode_memory(source))
      search, memories = jax.tree.map(put, batch, new)

      def step(search):
        return extend(
          search,
          lambda tokens, cache: model.decode(tokens, cache, memories),
          Cache.reorder,
          length_penalty=length_penalty,
          stop=stop,
          eos=EOS,
          pad=PAD,
        )

      def is_full(search):
        return search.is_live & (search.length == room)

      def goes_on(search):
        return (jnp.sum(~search.is_live) <= most_done) & ~is_full(search).any()

      search = jax.lax.while_loop(goes_on, step, search)
      found = ~search.is_live, is_full(search), search.ended.tokens[:, 0, 1:]
      return _Batch(search, memories), *found

    everywhere, by_row = PartitionSpec(), PartitionSpec(mesh.axis_names)
    # Each device stops by itself.
    on_devices = functools.partial(jax.shard_map, mesh=mesh, out_specs=by_row, check_vma=False)
    for_host, on_device = (NamedSharding(mesh, spec) for spec in (everywhere, by_row))
    make_empty_jit = jax.jit(
      lambda *arrays, room: on_devices(
        functools.partial(make_empty, room=room), in_specs=(everywhere, by_row)
      )(*arrays),
      static_argnames="room",
      out_shardings=on_device,
    )
    advance_jit = jax.jit(
      on_devices(advance, in_specs=(everywhere, by_row, by_row, by_row, everywhere)),
      out_shardings=(on_device, for_host, for_host, for_host),
      donate_argnums=1,
    )
    options = beam_size, length_penalty, stop, extra_length, mesh
    key, devices = key and f"{key} {options}", [*mesh.devices.flat]
    self._make_empty = kept(make_empty_jit, key and f"make_empty {key}", devices)
    self._advance = kept(advance_jit, key and f"advance {key}", devices)

  def __call__(self, lines: Sequence[str], params: PyTree | None = None) -> list[str]:
    """Translates lines in order, an empty line as empty; `params` replace the translator's."""
    params = self.params if params is None else params
    translations = [""] * len(lines)
    sources = encode(self.tokenizers.source, [line.strip() for line in lines])
    lengths = sources.lengths.tolist()

    def padded_length(i):
      return _padded_length(lengths[i])

    filled = [i for i, line in enumerate(lines) if line.strip()]
    # The longest of a batch come first, so that none is left to be searched for alone.
    filled.sort(key=lambda i: (padded_length(i), -lengths[i]))
    done = (
      pair
      for length, alike in itertools.groupby(filled, padded_length)
      for pair in self._translate(params, sources, length, list(alike))
    )
    for i, tokens in self._track(done, len(filled)):
      text = decode(self.tokenizers.target, tokens)
      translations[i] = text.replace("\n", " ").replace("\r", " ")
    return translations

  def _translate(
    self, params: PyTree, sources: Ragged, length: int, waiting: list[int]
  ) -> Iterator[tuple[int, Int[np.ndarray, "L"]]]:
    """Yields which of the waiting sources are done, and the tokens of their translations."""
    num_rows = max(1, self._token_budget // length // self._num_devices)  # of a device
    num_new = max(1, num_rows // 8)
    in_row = np.full((self._num_devices, num_rows), -1)  # the source in each row, if any
    make_empty = functools.partial(
      self._make_empty, params, np.full((in_row.size, length), PAD, np.int32)
    )
    room = length + max(_SHORTEST, length // 2)  # for the tokens of a translation
    batch, waiting = make_empty(room=room), waiting[::-1]
    while waiting or np.any(in_row >= 0):
      new = np.zeros((self._num_devices, num_new), int)
      rows = np.full(new.shape, num_rows, np.int32)  # no row: nothing is put there
      for device, free in enumerate(in_row < 0):
        for n, row in enumerate(np.flatnonzero(free)[: min(num_new, len(waiting))].tolist()):
          rows[device, n] = row
          new[device, n] = in_row[device, row] = waiting.pop()
      source = sources.padded(new.ravel(), (new.size, length), PAD)
      most_done = np.int32(num_new - 1 if waiting else num_rows - 1)
      batch, *found = self._advance(params, batch, source, rows.ravel(), most_done)
      is_done, is_full, tokens = map(np.asarray, found)
      is_done = is_done.reshape(in_row.shape) & (in_row >= 0)
      yield from zip(in_row[is_done].tolist(), tokens[is_done.ravel()], strict=True)
      in_row[is_done] = -1
      if is_full.any():
        room *= 2
        batch = _move(batch, make_empty(room=room))


def _padded_length(length: int) -> int:
  """Returns the least of 16, 32, 48, 64, 96, 128, 192, ... that is not below a length."""
  power = max(_SHORTEST, 1 << (length - 1).bit_length())
  between = power * 3 // 4
  return between if length <= between and between > 2 * _SHORTEST else power


@jax.jit
def _move(arrays: PyTree, into: PyTree) -> PyTree:
  """Returns the larger arrays with the others in their corner."""
  return jax.tree.map(lambda x, y: y.at[tuple(map(slice, x.shape))].set(x), arrays, into)
