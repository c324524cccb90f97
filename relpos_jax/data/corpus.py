"""Sentence pairs by split, from one of four sources."""

import dataclasses
from collections.abc import Mapping, Sequence


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
