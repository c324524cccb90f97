"""Data sets that TFDS prepares on disk and reads without TensorFlow."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import requests
import tensorflow_datasets as tfds
from tensorflow_datasets.core.constants import get_default_data_dir
from tensorflow_datasets.core.dataset_info import json_format
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError
from tensorflow_datasets.core.download.extractor import ExtractError

from relpos_jax.errors import InputError
from relpos_jax.files import read_content

_DOWNLOAD_FAILURES = (
  requests.RequestException,
  tfds.download.DownloadError,
  ExtractError,
  NonMatchingChecksumError,
)
# Raised for damaged metadata.
_UNREADABLE = json_format.ParseError, json.JSONDecodeError, UnicodeDecodeError

_READ_AHEAD = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class LazyPairs(Sequence):
  """A sequence of `function(item)`, computed each time an item is read.

  For data sets that do not fit into memory. Iteration reads in bulk if `items` has `__getitems__`,
  as data sources of TFDS do, which is several times faster.

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


def data_dir() -> str:
  """Returns the folder of prepared data sets: TFDS_DATA_DIR, or ~/tensorflow_datasets."""
  return get_default_data_dir()


def is_prepared(builder: tfds.core.DatasetBuilder) -> bool:
  """Returns whether the data are complete on disk."""
  return builder.data_path.exists() and builder.is_prepared()


def prepare(
  make: Callable[[], tfds.core.DatasetBuilder], remedy: str, *, url: str = "", **download_config
) -> tfds.core.DatasetBuilder:
  """Returns `make()`, after downloading and preparing its data unless they are on disk.

  Replaces the files of an interrupted preparation. If several processes prepare the same data,
  those of the first are kept.

  Args:
    make: makes the builder.
    remedy: the end of error messages.
    url: an address that must answer before downloading.
    **download_config: further options of `tfds.download.DownloadConfig`.

  Raises:
    InputError: the data cannot be downloaded or written, or those on disk are damaged.
  """
  try:
    builder = make()
  except _UNREADABLE as error:
    raise InputError(
      f"damaged data in {data_dir()}: delete the data set's folder there and run again ({error})"
    ) from None
  if is_prepared(builder):
    return builder
  if url:
    check_reachable(url, remedy)
  mode = tfds.GenerateMode
  config = tfds.download.DownloadConfig(
    try_download_gcs=False,
    # TFDS takes a folder without metadata for prepared data.
    download_mode=mode.REUSE_CACHE_IF_EXISTS
    if builder.data_path.exists()
    else mode.REUSE_DATASET_IF_EXISTS,
    **download_config,
  )
  try:
    builder.download_and_prepare(download_config=config, file_format="array_record")
  except (OSError, *_DOWNLOAD_FAILURES) as error:
    if is_prepared(again := make()):
      return again
    if not isinstance(error, _DOWNLOAD_FAILURES):
      remedy = "set TFDS_DATA_DIR to a folder with room that you may write to"
    reason = str(error).partition("\n")[0].removesuffix(":")
    raise InputError(
      f"cannot prepare {builder.name} in {data_dir()}: {reason}; {remedy}"
    ) from error
  return builder


def check_reachable(url: str, remedy: str) -> None:
  """Raises InputError in seconds if nothing answers at the address; TFDS retries for minutes."""
  try:
    requests.head(url, timeout=20)
  except requests.RequestException as error:
    raise InputError(
      f"cannot download {url}: no answer from {urlsplit(url).hostname} "
      f"({type(error).__name__}); {remedy}"
    ) from None


def upstream_content(folder: pathlib.Path, name: str, sha256: str, upstream: str) -> bytes:
  """Reads a local copy of an upstream file, `name` or `name`.gz.

  Raises:
    InputError: the file is missing or damaged, or the sha256 of its content is wrong.
  """
  packed = folder / f"{name}.gz"
  # pathlib would raise for a folder without permission.
  file = packed if os.path.exists(packed) else folder / name
  content = read_content(file)
  _check_sha256(file, "the sha256 of its text", content, sha256, upstream)
  return content


def verify(file: pathlib.Path, sha256: str, upstream: str, wanted: str) -> None:
  """Raises InputError unless a user's file equals the upstream file of its name.

  `wanted` describes the folder in the message.
  """
  try:
    content = file.read_bytes()
  except OSError as error:
    raise InputError(
      f"cannot read {file}: {error.strerror}; path must be {wanted}, or empty to download it"
    ) from None
  _check_sha256(file, "its sha256", content, sha256, upstream)


def _check_sha256(
  file: pathlib.Path, what: str, content: bytes, wanted: str, upstream: str
) -> None:
  found = hashlib.sha256(content).hexdigest()
  if found != wanted:
    raise InputError(
      f"wrong file {file}: {what} is {found[:12]}..., upstream's is {wanted[:12]}...; copy it "
      f"again from {upstream}, or leave path empty to download it"
    )


def split_languages(languages: str, known: tuple[str, ...]) -> tuple[str, str]:
  """Splits "en-de" into ("en", "de").

  >>> split_languages("de-en", known=("en-de", "de-en"))
  ('de', 'en')
  """
  if languages not in known:
    raise InputError(f"unknown languages {languages!r}: the known ones are {', '.join(known)}")
  source, target = languages.split("-")
  return source, target


def lazy_splits(
  builder: tfds.core.DatasetBuilder, languages: tuple[str, str]
) -> dict[str, LazyPairs]:
  """Returns train, valid and test of a data set of translations, read from disk item by item.

  Raises:
    InputError: the data on disk are not in array_record format.
  """
  text = lambda value: value.decode() if isinstance(value, bytes) else value
  pair = lambda item: tuple(text(item[language]) for language in languages)
  return read_splits(builder, pair)


def read_splits(
  builder: tfds.core.DatasetBuilder, function: Callable[[Any], Any]
) -> dict[str, LazyPairs]:
  """Applies `function` lazily to the items of train, valid and test; see `read_split`."""
  names = {"train": "train", "valid": "validation", "test": "test"}
  return {split: read_split(builder, name, function) for split, name in names.items()}


def read_split(
  builder: tfds.core.DatasetBuilder, name: str, function: Callable[[Any], Any]
) -> LazyPairs:
  """Applies `function` lazily to the items of the split that TFDS calls `name`.

  Raises:
    InputError: the data on disk are not in array_record format.
  """
  try:
    return LazyPairs(builder.as_data_source(name), function)
  except NotImplementedError:
    raise InputError(
      f"{builder.data_path} is not in array_record format: set TFDS_DATA_DIR to another folder"
    ) from None


@contextlib.contextmanager
def damage_named(builder: tfds.core.DatasetBuilder) -> Iterator[None]:
  """Raises InputError with the folder's name if prepared data cannot be read.

  TFDS may return None as items of a truncated file, and raises KeyError for missing names.
  """
  try:
    yield
  except (RuntimeError, TypeError, KeyError, *_UNREADABLE) as error:
    raise InputError(f"damaged data: delete {builder.data_path} and run again ({error})") from None
