"""Loads, normalises and batches the sentence pairs of a config."""

import itertools
import re

import numpy as np
from ml_collections import ConfigDict
from tokenizers import Tokenizer

from experiments.data import tokenizer as tok
from experiments.data.batching import Batch, Batches, pair_lengths
from experiments.errors import InputError
from experiments.evaluation import bleu
from experiments.files import Path
from experiments.training.batches import configure_batches
from experiments.training.sharding import AnyMesh
from experiments.translation import corpus as corpora
from experiments.translation import wmt14
from experiments.translation.corpus import LANGUAGES, Corpus

_LOADERS = dict(
  embedded=corpora.load_embedded,
  multi30k=corpora.load_multi30k,
  pairs=corpora.load_pairs,
  scan=corpora.load_scan,
  wmt14=wmt14.load,
)
_WITH_LANGUAGES = "multi30k", "wmt14"  # sources whose loaders take `languages`


def check(config: ConfigDict) -> None:
  """Raises InputError for wrong languages, or for text that scores would misread."""
  settings = config.data
  known = LANGUAGES[settings.source]
  if is_prepared(config):
    known = known[:2]
  pattern = "|".join(known) or "[a-z]{2,3}-[a-z]{2,3}"
  if not re.fullmatch(pattern, settings.languages):
    raise InputError(
      f"config.data.languages is {settings.languages!r}: give source-target, "
      f"as {', '.join(known) or 'en-de'}"
    )
  if is_prepared(config) and not config.evaluation.subword_mark:
    raise InputError(
      "config.data.multi30k.prepared is text in subwords: "
      "set config.evaluation.subword_mark=@@"
    )
  is_tokenized = settings.moses or is_prepared(config)
  if is_tokenized and config.evaluation.tokenize != "none":
    raise InputError(
      f"config.evaluation.tokenize is {config.evaluation.tokenize!r}, but the text is "
      "in Moses tokens: give none"
    )


def is_prepared(config: ConfigDict) -> bool:
  """Checks whether the data are the published baseline's text, in subwords."""
  return config.data.source == "multi30k" and config.data.multi30k.prepared


def load_data(config: ConfigDict, *, with_train: bool = True) -> Corpus:
  """Loads and normalises the sentence pairs of `config.data`."""
  bleu.check_tokenizer(config.evaluation.tokenize)  # before hours of training
  source = config.data.source
  options = config.data[source].to_dict()
  if source in _WITH_LANGUAGES:
    options["languages"] = config.data.languages
  data = _LOADERS[source](**options)
  if "valid" not in data.splits:
    raise InputError(
      "no validation pairs: give --config.data.pairs.valid=source_file,target_file"
    )
  if not with_train:
    del data.splits["train"]
    return normalize(config.data, data)
  data = normalize(config.data, data)
  _check_mark(config.evaluation.subword_mark, data)
  return data


def _check_mark(mark: str, data: Corpus) -> None:
  """Raises InputError if no training target has a subword that ends in `mark`.

  An empty mark means that the text is not in subwords; then nothing is checked.
  """
  targets = (target for _, target in data.splits["train"])
  if mark and all(bleu.join_subwords(target, mark) == target for target in targets):
    raise InputError(
      f"config.evaluation.subword_mark is {mark!r}, but no training target's subword "
      "ends in it: give the mark of the text, or none; config.data.moses would "
      "separate it from its subword"
    )


def list_tests(data: Corpus) -> list[str]:
  """Lists the names of the test sets; "test" comes first."""
  names = sorted(data.splits.keys() - {"train", "valid"})
  return sorted(names, key=lambda name: name != "test")


def normalize(settings: ConfigDict, data: Corpus) -> Corpus:
  """Normalises the pairs of all splits; `settings` is `config.data`.

  If a split is a list, it is normalised at once. Any other sequence is normalised item
  by item, whenever an item is read.
  """
  if not (settings.moses or settings.lowercase):
    return data

  def normalize_pair(pair: tuple[str, str]) -> tuple[str, str]:
    source, target = pair
    return normalize_line(settings, source), normalize_line(settings, target, side=1)

  splits = {}
  for split, pairs in data.splits.items():
    if isinstance(pairs, list):
      splits[split] = list(map(normalize_pair, pairs))
    else:
      splits[split] = corpora.LazyPairs(pairs, normalize_pair)
  return data._replace(splits=splits)


def normalize_line(settings: ConfigDict, line: str, side: int = 0) -> str:
  """Normalises a line in the source language (side 0) or target language (side 1)."""
  if settings.lowercase:
    line = line.lower()
  if not settings.moses:
    return line
  language = settings.languages.split("-")[side]
  return corpora.tokenize_moses(line, language)


def learn_vocabulary(config: ConfigDict, data: Corpus, workdir: Path) -> Tokenizer:
  """Reads the tokenizer of the run directory, or trains one on the training split.

  Raises InputError if there is a checkpoint, but its tokenizer is missing.
  """
  if (workdir / tok.FILE).exists() or any(workdir.glob("checkpoints/[0-9]*")):
    return tok.load_tokenizer(workdir)
  return learn_tokenizer(config, data)


def learn_tokenizer(config: ConfigDict, data: Corpus) -> Tokenizer:
  """Trains a vocabulary on both sides of the training split."""
  lines = itertools.chain.from_iterable(data.splits["train"])
  return tok.train_tokenizer(lines, **config.vocabulary)


def make_batches(
  config: ConfigDict, data: Corpus, vocabulary: Tokenizer, mesh: AnyMesh
) -> tuple[Batches, Batches]:
  """Makes batches: shuffled ones for training, and ordered ones for validation."""
  train = tok.encode_pairs(vocabulary, data.splits["train"])
  valid = tok.encode_pairs(vocabulary, data.splits["valid"])
  make = configure_batches(config, pair_lengths(*train), mesh)
  return make(*train, seed=config.seed), make(*valid, seed=None)


def empty_batch(shape: tuple[int, ...]) -> Batch:
  """Returns a batch of padding with shape (rows, length)."""
  return Batch(np.zeros(shape, np.int32), np.zeros(shape, np.int32))
