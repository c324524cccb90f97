"""Multi30k: 29,000 image captions in English, German and French, as a TFDS data set."""

import gzip
import pathlib
import zlib
from collections.abc import Iterator

import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.checksums import UrlInfo
from tensorflow_datasets.core.utils import Size

from relpos_jax.data.builders import (
  damage_named,
  data_dir,
  lazy_splits,
  prepare,
  split_languages,
  verify,
)
from relpos_jax.errors import InputError
from relpos_jax.files import local_path
from relpos_jax.translation import multi30k_prepared
from relpos_jax.translation.corpus import Corpus

LANGUAGES = ("en-de", "de-en", "en-fr", "fr-en")

_URL = (
  "https://raw.githubusercontent.com/multi30k/dataset/"
  "a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw/"
)
_UPSTREAM = "data/task1/raw of github.com/multi30k/dataset"
_REMEDY = f"to use files at hand, give path=FOLDER with {_UPSTREAM}"

# Bytes and sha256 of the files upstream.
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
_STEMS = {"train": "train", "validation": "val", "test": "test_2016_flickr"}


def load(languages: str = "en-de", path: str = "", prepared: bool = False) -> Corpus:
  """Captions of Multi30k: 29,000 pairs to train, 1,014 valid, 1,000 test (test_2016_flickr).

  Cased and untokenised, in upstream's order. Elliott et al. 2016 (German), 2017 (French).
  `languages` is "en-de", "de-en", "en-fr" or "fr-en". Prepared once under TFDS_DATA_DIR (default
  ~/tensorflow_datasets) from the upstream repository, 1.3 MB, or from the files of the same names
  in the folder `path`; either way their sha256 must be the recorded ones. `prepared` gives the text
  of the published baseline instead: see `relpos_jax.translation.multi30k_prepared`.

  Raises InputError for unknown languages, a missing or wrong file, no network.

  >>> corpus = load(languages="en-de", path="multi30k/data/task1/raw")  # doctest: +SKIP
  >>> corpus.splits["valid"][0]  # doctest: +SKIP
  ('A group of men are loading cotton onto a truck', 'Eine Gruppe von Männern lädt ...')
  """
  if prepared:
    return multi30k_prepared.load(languages, path)
  pair = split_languages(languages, LANGUAGES)
  folder = local_path(path) if path else None
  if folder:
    for name in _file_names(pair):
      verify(folder / name, _FILES[name][1], _UPSTREAM, f"a folder with {_UPSTREAM}")

  def make() -> Multi30k:
    config = languages if pair[0] == "en" else f"{pair[1]}-{pair[0]}"
    return Multi30k(config=config, data_dir=data_dir())

  builder = prepare(make, _REMEDY, url="" if folder else f"{_URL}train.en.gz", manual_dir=folder)
  with damage_named(builder):
    # Small enough for memory, where epochs and tokenizers read it faster than from disk.
    return Corpus({split: list(pairs) for split, pairs in lazy_splits(builder, pair).items()})


class Multi30k(tfds.core.GeneratorBasedBuilder):
  """TFDS builder of Multi30k, task 1; configs "en-de" and "en-fr"."""

  VERSION = tfds.core.Version("1.0.0")
  BUILDER_CONFIGS = [  # noqa: RUF012
    tfds.core.BuilderConfig(name="en-de", description="English and German"),
    tfds.core.BuilderConfig(name="en-fr", description="English and French"),
  ]
  MANUAL_DOWNLOAD_INSTRUCTIONS = f"The files of {_UPSTREAM}."
  # Where TFDS looks sizes and checksums up: a wrong download is refused and not cached.
  url_infos = {  # noqa: RUF012
    _URL + name: UrlInfo(size=Size(size), checksum=sha256, filename=name)
    for name, (size, sha256) in _FILES.items()
  }

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description="Image captions of Flickr30k in English, German and French, translated by hand.",
      features=tfds.features.Translation(languages=self._languages),
      homepage="https://github.com/multi30k/dataset",
      license="Research and education, non-commercial.",
      citation="Elliott et al. 2016, arXiv:1605.00459; Elliott et al. 2017, arXiv:1710.07177.",
      # Upstream's order, so that outputs can be compared with other people's line by line.
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager: tfds.download.DownloadManager):
    files = dl_manager.download({name: _URL + name for name in _file_names(self._languages)})
    return {
      split: self._generate_examples(
        {language: files[f"{stem}.{language}.gz"] for language in self._languages}
      )
      for split, stem in _STEMS.items()
    }

  def _generate_examples(self, files) -> Iterator[tuple[int, dict[str, str]]]:
    columns = [_lines(pathlib.Path(file)) for file in files.values()]
    for index, row in enumerate(zip(*columns, strict=True)):
      yield index, dict(zip(files, row, strict=True))

  @property
  def _languages(self) -> list[str]:
    assert self.builder_config is not None  # It has a default.
    return self.builder_config.name.split("-")


def _file_names(languages) -> list[str]:
  """The files upstream of all splits in these languages."""
  return [f"{stem}.{language}.gz" for stem in _STEMS.values() for language in languages]


def _lines(file: pathlib.Path) -> list[str]:
  try:
    text = gzip.decompress(file.read_bytes()).decode()
  except (EOFError, zlib.error, gzip.BadGzipFile):
    raise InputError(f"damaged download {file}: delete it and run again") from None
  return text.removesuffix("\n").split("\n")
