"""WMT 2014, the task of the paper: English-German and English-French."""

import functools

import tensorflow_datasets as tfds

from relpos_jax.data.builders import SPLITS, prepare, read_lazily
from relpos_jax.translation.corpus import Corpus

_URL = "http://www.statmt.org/wmt14/"
_REMEDY = "set TFDS_DATA_DIR to a folder with wmt14_translate prepared as array_record"


def load(languages: str = "en-de") -> Corpus:
  """Loads WMT 2014; valid is newstest2013, test is newstest2014.

  `languages` is "en-de", "de-en", "en-fr" or "fr-en". TFDS downloads and prepares the data once
  under TFDS_DATA_DIR (default ~/tensorflow_datasets). That needs TensorFlow, to unpack the archives
  (extra `wmt14`); reading does not. Splits are read from disk item by item.

  Raises:
    InputError: the data are not prepared and there is no TensorFlow or no network, or they are not
      in array_record format.

  >>> len(load(languages="en-de").splits["test"])  # doctest: +SKIP
  3003
  """
  pair = languages.split("-")
  (foreign,) = {*pair} - {"en"}
  # The class, because tfds.builder does not find it by name without TensorFlow.
  make = functools.partial(tfds.translate.Wmt14Translate, config=f"{foreign}-en")
  builder = prepare(make, _REMEDY, url=_URL, tensorflow_extra="wmt14")
  text = lambda item: tuple(item[language].decode() for language in pair)
  return Corpus({split: read_lazily(builder, name, text) for split, name in SPLITS.items()})
