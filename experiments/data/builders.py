"""Data sets that TFDS prepares on disk and reads without TensorFlow."""

import dataclasses
import functools
import hashlib
import importlib.util
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import requests
import tensorflow_datasets as tfds
from tensorflow_datasets.core.constants import get_default_data_dir
from tensorflow_datasets.core.download.checksums import UrlInfo
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError
from tensorflow_datasets.core.download.extractor import ExtractError
from tensorflow_datasets.core.utils import Size

from experiments.errors import InputError
from experiments.files import read_content

SPLITS = {"train": "train", "valid": "validation", "test": "test"}  # our name, and that of TFDS
_DOWNLOAD_FAILURES = (
  requests.RequestException,
  tfds.download.DownloadError,
  ExtractError,
  NonMatchingChecksumError,
)
_READ_AHEAD = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class LazyPairs(Sequence):
  """A sequence of `function(item)`, computed each time an item is read.

  For data sets that do not fit into memory. Iteration and slices read in bulk if `items` has
  `__getitems__`, as data sources of TFDS do, which is several times faster.

  >>> pairs = LazyPairs(["Ja", "Nein"], lambda word: (word, word.lower()))
  >>> pairs[1], list(pairs)
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
    items = in_bulk(list(indices)) if in_bulk else map(self.items.__getitem__, indices)
    return [self.function(item) for item in items]

  def __iter__(self) -> Iterator[Any]:
    for start in range(0, len(self), _READ_AHEAD):
      yield from self[start : start + _READ_AHEAD]


class FilesBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """The base of TFDS builders of small data sets: upstream files with known checksums.

  Attributes:
    KEY: of the data set in `config.data`, whose `path` may be a folder with the files.
    UPSTREAM, URL: the folder of the files, in words and as an address.
    FILES: bytes and SHA-256 by name; TFDS refuses other downloads, and does not cache them.
  """

  VERSION = tfds.core.Version("1.0.0")
  KEY: str
  UPSTREAM: str
  URL: str
  FILES: Mapping[str, tuple[int, str]]

  @classmethod
  def read(cls, content: Callable[[str], bytes], config: str) -> Mapping[str, Iterable[Any]]:
    """Returns the examples by split, as TFDS names it; `content` reads a file by its name."""
    raise NotImplementedError

  @property
  def url_infos(self) -> dict[str, UrlInfo]:
    files = self.FILES.items()
    return {self.URL + name: UrlInfo(Size(size), digest, name) for name, (size, digest) in files}

  def _about(self, **options) -> tfds.core.DatasetInfo:
    # Upstream's order makes scores of single examples comparable.
    return tfds.core.DatasetInfo(builder=self, disable_shuffling=True, **options)

  def _split_generators(self, dl_manager: tfds.download.DownloadManager):
    def content(name):
      return pathlib.Path(dl_manager.download(self.URL + name)).read_bytes()

    config = self.builder_config.name if self.builder_config else ""
    return {split: enumerate(of) for split, of in self.read(content, config).items()}

  def _generate_examples(self):
    raise NotImplementedError("`read` returns the examples")


def load_files(
  kind: type[FilesBuilder], path: str, function: Callable[[Any], Any], config: str = ""
) -> dict[str, list[Any]]:
  """Returns function(example) for the examples of each split.

  They are read from the files in the folder `path`, plain or .gz; if it is empty, they are
  downloaded and prepared once under TFDS_DATA_DIR (default ~/tensorflow_datasets).

  Raises:
    InputError: a file is missing or wrong, or there is no network.
  """
  if path:
    content = functools.partial(upstream_content, kind, path)
    found = {split: map(function, of) for split, of in kind.read(content, config).items()}
  else:
    builder = prepare_files(kind, config)
    found = {split: read_lazily(builder, split, function) for split in builder.info.splits}
  return {dict(validation="valid").get(split, split): [*of] for split, of in found.items()}


def prepare_files(kind: type[FilesBuilder], config: str = "") -> tfds.core.DatasetBuilder:
  """Returns a prepared builder; see `prepare`."""
  remedy = f"to use local files, give --config.data.{kind.KEY}.path=FOLDER with {kind.UPSTREAM}"
  return prepare(functools.partial(kind, config=config or None), remedy, url=kind.URL)


def prepare(
  make: Callable[..., tfds.core.DatasetBuilder],
  remedy: str,
  *,
  url: str = "",
  tensorflow_extra: str = "",
) -> tfds.core.DatasetBuilder:
  """Returns a builder, after downloading and preparing its data unless they are on disk.

  Replaces the files of an interrupted preparation. If several processes prepare the same data,
  those of the first are kept.

  Args:
    make: makes the builder from `data_dir`, which is TFDS_DATA_DIR or ~/tensorflow_datasets.
    remedy: the end of error messages.
    url: an address that must answer before downloading; TFDS retries for minutes.
    tensorflow_extra: the extra that installs TensorFlow, if TFDS needs it to unpack the archives.

  Raises:
    InputError: the data cannot be downloaded or written.
  """
  data_dir = get_default_data_dir()
  builder = make(data_dir=data_dir)
  # TFDS logs a warning if the folder is missing.
  if builder.data_path.exists() and builder.is_prepared():
    return builder
  if tensorflow_extra and importlib.util.find_spec("tensorflow") is None:
    raise InputError(
      f"{builder.name} is not in {data_dir}; preparing it needs TensorFlow: "
      f"pip install -e '.[{tensorflow_extra}]', or {remedy}"
    )
  try:
    if url:
      requests.head(url, timeout=20)
  except requests.RequestException as error:
    raise InputError(
      f"cannot download {url}: no answer from {urlsplit(url).hostname} "
      f"({type(error).__name__}); {remedy}"
    ) from None
  # TFDS takes a folder without metadata for prepared data.
  is_partial, mode = builder.data_path.exists(), tfds.GenerateMode
  config = tfds.download.DownloadConfig(
    try_download_gcs=False,
    download_mode=mode.REUSE_CACHE_IF_EXISTS if is_partial else mode.REUSE_DATASET_IF_EXISTS,
  )
  try:
    builder.download_and_prepare(download_config=config, file_format="array_record")
  except (OSError, *_DOWNLOAD_FAILURES) as error:
    if (again := make(data_dir=data_dir)).is_prepared():
      return again
    if not isinstance(error, _DOWNLOAD_FAILURES):
      remedy = "set TFDS_DATA_DIR to a folder with room that you may write to"
    reason = str(error).partition("\n")[0].removesuffix(":")
    raise InputError(f"cannot prepare {builder.name} in {data_dir}: {reason}; {remedy}") from error
  return builder


def upstream_content(kind: type[FilesBuilder], path: str, name: str) -> bytes:
  """Reads a user's copy of an upstream file: `name`, or that packed as `name`.gz.

  Raises:
    InputError: the file is missing or damaged, or is not that of upstream.
  """
  file, read = pathlib.Path(path, name).expanduser(), pathlib.Path.read_bytes
  if os.path.exists(packed := file.with_name(f"{name}.gz")):
    file, read = packed, read_content
  try:
    content = read(file)
  except OSError as error:
    raise InputError(
      f"cannot read {file}: {error.strerror}; path must be a folder with files of {kind.UPSTREAM}, "
      "or empty to download them"
    ) from None
  found, sha256 = hashlib.sha256(content).hexdigest(), kind.FILES[name][1]
  if found != sha256:
    raise InputError(
      f"wrong file {file}: its sha256 is {found[:12]}..., upstream's is {sha256[:12]}...; copy it "
      f"again from {kind.UPSTREAM}, or leave path empty to download it"
    )
  return content


def read_lazily(
  builder: tfds.core.DatasetBuilder, split: str, function: Callable[[Any], Any]
) -> LazyPairs:
  """Applies `function` lazily to the items of the split that TFDS calls `split`.

  Raises:
    InputError: the data on disk are not in array_record format.
  """
  try:
    return LazyPairs(builder.as_data_source(split), function)
  except NotImplementedError:
    raise InputError(
      f"{builder.data_path} is not in array_record format: set TFDS_DATA_DIR to another folder"
    ) from None
