"""Multi30k: 29,000 image captions in English, German and French, as TFDS data sets."""

import gzip
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping

import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.checksums import UrlInfo
from tensorflow_datasets.core.utils import Size

from relpos_jax.data.builders import (
  damage_named,
  data_dir,
  lazy_splits,
  prepare,
  split_languages,
  upstream_content,
  verify,
)
from relpos_jax.errors import InputError
from relpos_jax.files import local_path
from relpos_jax.translation.corpus import Corpus

LANGUAGES = ("en-de", "de-en", "en-fr", "fr-en")
PREPARED_LANGUAGES = ("en-de", "de-en")

_URL = (
  "https://raw.githubusercontent.com/multi30k/dataset/"
  "a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw/"
)
_UPSTREAM = "data/task1/raw of github.com/multi30k/dataset"
_PREPARED_URL = (
  "https://raw.githubusercontent.com/LividWo/Revisit-MMT/"
  "dc368d0af8d60270b8f4aaa2f3ac58771c551da3/data/multi30k-en-de/"
)
_PREPARED_UPSTREAM = "data/multi30k-en-de of github.com/LividWo/Revisit-MMT"
_REMEDY = "to use local files, give path=FOLDER with {}"

# Bytes and sha256 of the upstream files.
_FILES = {
  "train.en.gz": (568_929, "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f"),
  "train.de.gz": (637_044, "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6"),
  "train.fr.gz": (604_242, "622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c"),
  "val.en.gz": (21_650, "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28"),
  "val.de.gz": (24_681, "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a"),
  "val.fr.gz": (23_001, "ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9"),
  "test_2016_flickr.en.gz": (
    21_077,
    "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
  ),
  "test_2016_flickr.de.gz": (
    22_890,
    "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
  ),
  "test_2016_flickr.fr.gz": (
    22_310,
    "6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90",
  ),
}
# The prepared files are not compressed.
_PREPARED_FILES = {
  "train.en": (1_898_472, "0ffe3e3bac16e6aa33ef0dd6a7dca81587479b0d18dff0db2a92ac3f32b00c86"),
  "train.de": (2_269_411, "b2c74def7ec129f7ea7023a51501c77174c377ef06c6ccc2f031adcfb5cfadbd"),
  "valid.en": (67_101, "193d0d18fef5d1bc9d1cddafa13a644de3c5d6a24b45ac44476dcc5e96bfac6e"),
  "valid.de": (82_295, "eeb95680d6a06eafb13e3494eed9f9fa99783b892f4a3c72dd36e7ce2e000b68"),
  "test.2016.en": (65_416, "13b5fe3f92f78c54446d66afcaaa0a00a33ab653a8411f16812c9c5ca3795d6d"),
  "test.2016.de": (75_949, "375c20d50f4c486149a78dfcfb161a430a04ddabe2b7d150f0c7811dc455ac60"),
}
_STEMS = {"train": "train", "validation": "val", "test": "test_2016_flickr"}
_PREPARED_STEMS = {"train": "train", "validation": "valid", "test": "test.2016"}


def load(languages: str = "en-de", path: str = "", prepared: bool = False) -> Corpus:
  """Loads the captions: 29,000 pairs in train, 1,014 in valid, 1,000 in test (test_2016_flickr).

  They are cased, not tokenised, and in upstream's order. Elliott et al. 2016 (German), 2017
  (French). TFDS prepares them once under TFDS_DATA_DIR (default ~/tensorflow_datasets).

  Args:
    languages: "en-de", "de-en", "en-fr" or "fr-en".
    path: a folder with the upstream files; their sha256 must be the recorded ones. If empty, they
      are downloaded (1.3 MB).
    prepared: loads the text of the published baseline instead (Wu et al. 2021, LividWo/Revisit-MMT,
      4.5 MB; English and German): lower case, normalised, in Moses tokens and joint BPE of 10,000
      merges, where "@@" ends a subword inside a word. Files in `path` may be compressed (.gz).

  Raises:
    InputError: the languages are unknown, a file is missing or wrong, or there is no network.

  >>> corpus = load(languages="en-de", path="multi30k/data/task1/raw")  # doctest: +SKIP
  >>> corpus.splits["valid"][0]  # doctest: +SKIP
  ('A group of men are loading cotton onto a truck', 'Eine Gruppe von Männern lädt ...')
  """
  pair = split_languages(languages, PREPARED_LANGUAGES if prepared else LANGUAGES)
  folder = local_path(path) if path else None
  if prepared and folder:
    return _read_prepared(folder, pair)
  if prepared:
    make = lambda: Multi30kPrepared(data_dir=data_dir())
    return _load(make, pair, _PREPARED_UPSTREAM, f"{_PREPARED_URL}train.en")
  if folder:
    for name in _file_names(pair):
      verify(folder / name, _FILES[name][1], _UPSTREAM, f"a folder with {_UPSTREAM}")
  config = languages if pair[0] == "en" else f"{pair[1]}-{pair[0]}"
  make = lambda: Multi30k(config=config, data_dir=data_dir())
  return _load(make, pair, _UPSTREAM, "" if folder else f"{_URL}train.en.gz", manual_dir=folder)


def _load(
  make: Callable[[], tfds.core.DatasetBuilder],
  pair: tuple[str, str],
  upstream: str,
  url: str,
  **download_config,
) -> Corpus:
  builder = prepare(make, _REMEDY.format(upstream), url=url, **download_config)
  with damage_named(builder):
    # Lists: the data fit into memory, where reading them is faster than from disk.
    return Corpus({split: list(pairs) for split, pairs in lazy_splits(builder, pair).items()})


class _Captions(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """What the two builders have in common."""

  VERSION = tfds.core.Version("1.0.0")

  def _make_info(self, languages: list[str], description: str, homepage: str, citation: str):
    return tfds.core.DatasetInfo(
      builder=self,
      description=description,
      features=tfds.features.Translation(languages=languages),
      homepage=homepage,
      license="Research and education, non-commercial.",
      citation=f"Elliott et al. 2016, arXiv:1605.00459; {citation}",
      # Keeps upstream's order, so that outputs can be compared line by line with those of others.
      disable_shuffling=True,
    )

  def _generate_examples(
    self, files: Mapping[str, os.PathLike]
  ) -> Iterator[tuple[int, dict[str, str]]]:
    columns = [_lines(pathlib.Path(file)) for file in files.values()]
    for index, row in enumerate(zip(*columns, strict=True)):
      yield index, dict(zip(files, row, strict=True))


class Multi30k(_Captions):
  """TFDS builder of Multi30k, task 1; configs "en-de" and "en-fr"."""

  BUILDER_CONFIGS = [  # noqa: RUF012
    tfds.core.BuilderConfig(name="en-de", description="English and German"),
    tfds.core.BuilderConfig(name="en-fr", description="English and French"),
  ]
  MANUAL_DOWNLOAD_INSTRUCTIONS = f"The files of {_UPSTREAM}."
  # TFDS refuses downloads of other sizes or checksums, and does not cache them.
  url_infos = {  # noqa: RUF012
    _URL + name: UrlInfo(size=Size(size), checksum=sha256, filename=name)
    for name, (size, sha256) in _FILES.items()
  }

  def _info(self) -> tfds.core.DatasetInfo:
    return self._make_info(
      self._languages,
      "Image captions of Flickr30k in English, German and French, translated by hand.",
      "https://github.com/multi30k/dataset",
      "Elliott et al. 2017, arXiv:1710.07177.",
    )

  def _split_generators(self, dl_manager: tfds.download.DownloadManager):
    files = dl_manager.download({name: _URL + name for name in _file_names(self._languages)})
    return {
      split: self._generate_examples(
        {language: files[f"{stem}.{language}.gz"] for language in self._languages}
      )
      for split, stem in _STEMS.items()
    }

  @property
  def _languages(self) -> list[str]:
    assert self.builder_config is not None
    return self.builder_config.name.split("-")


class Multi30kPrepared(_Captions):
  """TFDS builder of the files of the published baseline."""

  url_infos = {  # noqa: RUF012
    _PREPARED_URL + name: UrlInfo(size=Size(size), checksum=sha256, filename=name)
    for name, (size, sha256) in _PREPARED_FILES.items()
  }

  def _info(self) -> tfds.core.DatasetInfo:
    return self._make_info(
      ["en", "de"],
      "Image captions of Multi30k in Moses tokens, lower case and subwords.",
      "https://github.com/LividWo/Revisit-MMT",
      "Wu et al. 2021, arXiv:2105.14462.",
    )

  def _split_generators(self, dl_manager: tfds.download.DownloadManager):
    files = dl_manager.download({name: _PREPARED_URL + name for name in _PREPARED_FILES})
    return {
      split: self._generate_examples(
        {language: files[f"{stem}.{language}"] for language in ("en", "de")}
      )
      for split, stem in _PREPARED_STEMS.items()
    }


def _read_prepared(folder: pathlib.Path, pair: tuple[str, str]) -> Corpus:
  """Reads the files of a folder, without TFDS."""
  splits = {}
  for split, stem in zip(("train", "valid", "test"), _PREPARED_STEMS.values(), strict=True):
    names = [f"{stem}.{language}" for language in pair]
    sides = [
      upstream_content(folder, name, _PREPARED_FILES[name][1], _PREPARED_UPSTREAM).decode()
      for name in names
    ]
    splits[split] = list(zip(*map(_split_lines, sides), strict=True))
  return Corpus(splits)


def _file_names(languages) -> list[str]:
  return [f"{stem}.{language}.gz" for stem in _STEMS.values() for language in languages]


def _lines(file: pathlib.Path) -> list[str]:
  content = file.read_bytes()
  try:
    text = gzip.decompress(content) if file.suffix == ".gz" else content
  except (EOFError, zlib.error, gzip.BadGzipFile):
    raise InputError(f"damaged download {file}: delete it and run again") from None
  return _split_lines(text.decode())


def _split_lines(text: str) -> list[str]:
  """Splits at newlines alone; str.splitlines would also split at U+2028."""
  return text.removesuffix("\n").split("\n")
