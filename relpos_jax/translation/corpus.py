"""Sentence pairs by split, from one of four sources."""

import dataclasses
import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from relpos_jax.errors import InputError

SOURCES = ("embedded", "multi30k", "wmt14", "pairs")


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


def load_corpus(source: str, **options: Any) -> Corpus:
  """Loads the sentence pairs of a source, which is "embedded", "multi30k", "wmt14" or "pairs".

  `options` are the keyword arguments of that module's `load`.

  Raises:
    InputError: the source or an option is unknown, or the data are wrong.

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
