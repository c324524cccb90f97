"""Sentence pairs by split, from one of four sources."""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

SOURCES = ("embedded", "multi30k", "wmt14", "pairs")


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Sentence pairs (source, target) by split: train, valid, test and, for some sources, long.

  A split is any random-access sequence, in memory or read from disk item by item. `notes` are lines
  for the log about pairs that were skipped.

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
    InputError: the data are missing or wrong.

  >>> import pathlib, tempfile
  >>> file = pathlib.Path(tempfile.mkdtemp(), "mine.tsv")
  >>> _ = file.write_text("a dog runs\\tein Hund rennt\\n")
  >>> load_corpus("pairs", train=str(file)).splits["train"]
  [('a dog runs', 'ein Hund rennt')]
  """
  # Imported here because importing TFDS takes half a second, which "embedded" does not need.
  return importlib.import_module(f"relpos_jax.translation.{source}").load(**options)
