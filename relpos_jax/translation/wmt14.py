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
_REMEDY = "or set TFDS_DATA_DIR to a folder with wmt14_translate prepared as array_record"


def load(languages: str = "en-de") -> Corpus:
  """Loads WMT 2014; valid is newstest2013, test is newstest2014.

  `languages` is "en-de", "de-en", "en-fr" or "fr-en". TFDS downloads and prepares the data once
  under TFDS_DATA_DIR (default ~/tensorflow_datasets). That needs TensorFlow, to unpack the archives
  (extra `wmt14`); reading does not. Splits are read from disk item by item.

  Raises:
    InputError: the languages are unknown, the data are not prepared and there is no TensorFlow or
      no network, or they are not in array_record format.

  >>> corpus = load(languages="en-de")  # doctest: +SKIP
  >>> len(corpus.splits["test"])  # doctest: +SKIP
  3003
  """
  pair = split_languages(languages, LANGUAGES)
  foreign = pair[1] if pair[0] == "en" else pair[0]

  def make() -> tfds.core.DatasetBuilder:
    # The class, because tfds.builder does not find it by name without TensorFlow.
    return tfds.translate.Wmt14Translate(config=f"{foreign}-en", data_dir=data_dir())

  if importlib.util.find_spec("tensorflow") is None and not is_prepared(make()):
    raise InputError(
      f"wmt14 is not in {data_dir()}; preparing it needs TensorFlow: "
      f"pip install -e '.[wmt14]', {_REMEDY}"
    )
  return Corpus(lazy_splits(prepare(make, f"try again, {_REMEDY}", url=_URL), pair))
