"""Loads WMT 2014 with TFDS; preparing it needs TensorFlow, but reading it does not."""

import importlib.util
from typing import Any

from experiments.data.upstream import Corpus
from experiments.errors import InputError
from experiments.translation.corpus import LazyPairs

_URL = "http://www.statmt.org/wmt14/"


def load(languages: str = "en-de") -> Corpus:
  """Loads WMT 2014, the task of the paper; valid is newstest2013, test is newstest2014.

  `languages` is "en-de", "de-en", "en-fr" or "fr-en". The first time, TFDS downloads
  and prepares the data under TFDS_DATA_DIR (default ~/tensorflow_datasets). That needs
  TensorFlow, to unpack the archives (extra `wmt14`). Splits are read from disk item by
  item.

  Raises InputError if the data are not in array_record format. If they are not prepared
  yet, also raises InputError if there is no TensorFlow or no network.
  """
  pair = languages.split("-")
  (foreign,) = {*pair} - {"en"}
  builder = _prepare(f"{foreign}-en")

  def text(item):
    return tuple(item[language].decode() for language in pair)

  try:
    train, valid, test = map(builder.as_data_source, ("train", "validation", "test"))
  except NotImplementedError:
    raise InputError(
      f"{builder.data_path} is not in array_record format: "
      "set TFDS_DATA_DIR to another folder"
    ) from None
  splits = dict(train=train, valid=valid, test=test)
  return Corpus({split: LazyPairs(source, text) for split, source in splits.items()})


def _prepare(config: str) -> Any:
  """Returns a TFDS builder; downloads and prepares its data unless they are on disk.

  Replaces the files of an interrupted preparation. If several processes prepare the
  same data, the files of the first one to finish stay.
  """
  import requests
  import tensorflow_datasets as tfds
  from tensorflow_datasets.core.constants import get_default_data_dir

  def make() -> tfds.core.DatasetBuilder:
    # Not tfds.builder, which needs TensorFlow to find the class by its name.
    return tfds.translate.Wmt14Translate(config=config, data_dir=data_dir)

  data_dir = get_default_data_dir()
  builder = make()
  remedy = f"set TFDS_DATA_DIR to a folder with {builder.name} prepared as array_record"
  # exists() first, because is_prepared() warns about a missing folder.
  if builder.data_path.exists() and builder.is_prepared():
    return builder
  if importlib.util.find_spec("tensorflow") is None:
    raise InputError(
      f"{builder.name} is not in {data_dir}; preparing it needs TensorFlow: "
      f"pip install -e '.[wmt14]', or {remedy}"
    )
  try:
    requests.head(_URL, timeout=20)  # without a network, TFDS retries for minutes
  except requests.RequestException as error:
    reason = f"no answer ({type(error).__name__})"
    raise InputError(f"cannot download {_URL}: {reason}; {remedy}") from None
  mode = tfds.GenerateMode.REUSE_DATASET_IF_EXISTS
  if builder.data_path.exists():
    # TFDS would mistake a folder without metadata for prepared data.
    mode = tfds.GenerateMode.REUSE_CACHE_IF_EXISTS
  options = tfds.download.DownloadConfig(try_download_gcs=False, download_mode=mode)
  try:
    builder.download_and_prepare(download_config=options, file_format="array_record")
  except Exception as error:  # TFDS raises many kinds of errors
    again = make()
    if again.is_prepared():
      return again
    if isinstance(error, OSError) and not isinstance(error, requests.RequestException):
      remedy = "set TFDS_DATA_DIR to a folder with room that you may write to"
    reason = str(error).partition("\n")[0].removesuffix(":")
    raise InputError(
      f"cannot prepare {builder.name} in {data_dir}: {reason}; {remedy}"
    ) from error
  return builder
