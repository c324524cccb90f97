"""A small English-German corpus that is part of this package."""

import lzma
import pathlib

from relpos_jax.errors import InputError
from relpos_jax.translation.corpus import Corpus

_TRAIN_SIZE = 20_000


def load(train_size: int = _TRAIN_SIZE) -> Corpus:
  """Reads the corpus: train, valid (500), test (500) and long (200 sentences).

  Sentences have 3 to 30 words, those of `long` 31 to 60. No sentence of either language occurs
  twice. `train_size` takes the first pairs of train.

  Raises:
    InputError: train_size is not from 1 to 20,000.

  >>> {name: len(pairs) for name, pairs in load(train_size=10).splits.items()}
  {'train': 10, 'valid': 500, 'test': 500, 'long': 200}
  """
  if not 1 <= train_size <= _TRAIN_SIZE:
    raise InputError(f"train_size {train_size} for embedded: give a number from 1 to {_TRAIN_SIZE}")
  splits = {name: _read(name) for name in ("train", "valid", "test", "long")}
  return Corpus(splits | dict(train=splits["train"][:train_size]))


def _read(split: str) -> list[tuple[str, str]]:
  path = pathlib.Path(__file__).with_name(f"{split}.tsv.xz")
  lines = lzma.decompress(path.read_bytes()).decode().removesuffix("\n").split("\n")
  rows = (line.split("\t") for line in lines)
  return [(source, target) for source, target in rows]
