"""WMT 2014, the task of the paper: English-German and English-French."""

import importlib.util

import tensorflow_datasets as tfds

from relpos_jax.data.builders import (
  data_dir,
  is_prepared,
  lazy_splits,
  prepare,
  split_languages,
)
from relpos_jax.errors import InputError
from relpos_jax.translation.corpus import Corpus

LANGUAGES = ("en-de", "de-en", "en-fr", "fr-en")

_URL = "http://www.statmt.org/wmt14/"
_REMEDY = "or set TFDS_DATA_DIR to a folder with wmt14_translate prepared as array_record elsewhere"


def load(languages: str = "en-de") -> Corpus:
  """Pairs of WMT 2014; valid is newstest2013, test is newstest2014, as TFDS has them.

  `languages` is "en-de", "de-en", "en-fr" or "fr-en". TFDS downloads and prepares the data once
  under TFDS_DATA_DIR (default ~/tensorflow_datasets), which needs the extra `wmt14` (TensorFlow
  unpacks the archives); reading needs nothing. Splits are read from disk item by item.

  Raises InputError for unknown languages, no TensorFlow, no network, another format than
  array_record on disk.

  >>> corpus = load(languages="en-de")  # doctest: +SKIP
  >>> len(corpus.splits["test"])  # doctest: +SKIP
  3003
  """
  pair = split_languages(languages, LANGUAGES)
  foreign = pair[1] if pair[0] == "en" else pair[0]

  def make() -> tfds.core.DatasetBuilder:
    # Touching the class registers it: without TensorFlow tfds.builder does not find it by name.
    return tfds.translate.Wmt14Translate(config=f"{foreign}-en", data_dir=data_dir())

  if importlib.util.find_spec("tensorflow") is None and not is_prepared(make()):
    raise InputError(
      f"wmt14 is not in {data_dir()} and needs TensorFlow to be prepared: "
      f"pip install -e '.[wmt14]', {_REMEDY}"
    )
  return Corpus(lazy_splits(prepare(make, f"try again, {_REMEDY}", url=_URL), pair))
