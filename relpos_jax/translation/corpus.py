"""Sentence pairs by split, from one of four sources."""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from relpos_jax.errors import InputError

SOURCES = ("embedded", "multi30k", "wmt14", "pairs")

_READ_AHEAD = 4096


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Sentence pairs (source, target) by split: train, valid, test and, for some sources, long.

  A split is any random-access sequence, held in memory or read from disk item by item. `notes` are
  for the log, a line each: what was left out and why.

  >>> corpus = Corpus({"train": [("a dog runs", "ein Hund rennt")]})
  >>> corpus.splits["train"][0]
  ('a dog runs', 'ein Hund rennt')
  """

  splits: Mapping[str, Sequence[tuple[str, str]]]
  notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class LazyPairs(Sequence):
  """`function` of every item of a random-access sequence, computed each time it is read.

  For data sets that do not fit into memory. Iterating reads ahead in bulk where `items` has
  `__getitems__`, as data sources of TFDS do: several times faster than one by one.

  >>> pairs = LazyPairs(["Ja", "Nein"], lambda word: (word, word.lower()))
  >>> pairs[-1], list(pairs)
  (('Nein', 'nein'), [('Ja', 'ja'), ('Nein', 'nein')])
  """

  items: Sequence[Any]
  function: Callable[[Any], Any]

  def __len__(self) -> int:
    return len(self.items)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.__getitems__(range(len(self))[index])
    return self.function(self.items[range(len(self))[index]])

  def __getitems__(self, indices: Sequence[int]) -> list[Any]:
    in_bulk = getattr(self.items, "__getitems__", None)
    items = in_bulk(list(indices)) if in_bulk else [self.items[index] for index in indices]
    return [self.function(item) for item in items]

  def __iter__(self) -> Iterator[Any]:
    for start in range(0, len(self), _READ_AHEAD):
      yield from self.__getitems__(range(start, min(start + _READ_AHEAD, len(self))))


def load_corpus(source: str, **options: Any) -> Corpus:
  """The sentence pairs of a source, which is "embedded", "multi30k", "wmt14" or "pairs".

  `options` are the keyword arguments of that module's `load`. Raises InputError for an unknown source
  or option, and for whatever is wrong with the data.

  >>> import pathlib, tempfile
  >>> file = pathlib.Path(tempfile.mkdtemp(), "mine.tsv")
  >>> _ = file.write_text("a dog runs\\tein Hund rennt\\n")
  >>> load_corpus("pairs", train=str(file)).splits["train"]
  [('a dog runs', 'ein Hund rennt')]
  """
  if source not in SOURCES:
    raise InputError(f"unknown source {source!r}: the known ones are {', '.join(SOURCES)}")
  # Imported here: the corpus of a first run does without TFDS, half a second of importing.
  load = importlib.import_module(f"relpos_jax.translation.{source}").load
  known = inspect.signature(load).parameters
  for name in options:
    if name not in known:
      raise InputError(
        f"source {source!r} has no option {name!r}: its options are {', '.join(known)}"
      )
  return load(**options)
