"""Multi30k, English and German, as the published baseline had it: Moses tokens in subwords."""

import pathlib
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
  upstream_content,
)
from relpos_jax.files import local_path
from relpos_jax.translation.corpus import Corpus

LANGUAGES = ("en-de", "de-en")

_URL = (
  "https://raw.githubusercontent.com/LividWo/Revisit-MMT/"
  "dc368d0af8d60270b8f4aaa2f3ac58771c551da3/data/multi30k-en-de/"
)
_UPSTREAM = "data/multi30k-en-de of github.com/LividWo/Revisit-MMT"
_REMEDY = f"to use files at hand, give path=FOLDER with {_UPSTREAM}"

# Bytes and sha256 of the files upstream, which are not compressed.
_FILES = {
  "train.en": (1_898_472, "0ffe3e3bac16e6aa33ef0dd6a7dca81587479b0d18dff0db2a92ac3f32b00c86"),
  "train.de": (2_269_411, "b2c74def7ec129f7ea7023a51501c77174c377ef06c6ccc2f031adcfb5cfadbd"),
  "valid.en": (67_101, "193d0d18fef5d1bc9d1cddafa13a644de3c5d6a24b45ac44476dcc5e96bfac6e"),
  "valid.de": (82_295, "eeb95680d6a06eafb13e3494eed9f9fa99783b892f4a3c72dd36e7ce2e000b68"),
  "test.2016.en": (65_416, "13b5fe3f92f78c54446d66afcaaa0a00a33ab653a8411f16812c9c5ca3795d6d"),
  "test.2016.de": (75_949, "375c20d50f4c486149a78dfcfb161a430a04ddabe2b7d150f0c7811dc455ac60"),
}
_STEMS = {"train": "train", "validation": "valid", "test": "test.2016"}


def load(languages: str = "en-de", path: str = "") -> Corpus:
  """The pairs of `multi30k.load`, lower-cased, normalised, in Moses tokens and joint BPE.

  Of 10,000 merges; "@@" ends a subword whose word goes on. `languages` is "en-de" or "de-en".
  Prepared once under TFDS_DATA_DIR from the repository of Wu et al. 2021 (LividWo/Revisit-MMT), 4.5
  MB, or read from the files of the same names, plain or .gz, in the folder `path`; either way the
  sha256 of their text must be the recorded ones.

  Raises InputError for unknown languages, a missing or wrong file, no network.

  >>> load(path="Revisit-MMT/data/multi30k-en-de").splits["test"][0]  # doctest: +SKIP
  ('a man in an orange hat starring at something .', 'ein mann ... anst@@ arr@@ t .')
  """
  pair = split_languages(languages, LANGUAGES)
  if path:
    return _read(local_path(path), pair)
  make = lambda: Multi30kPrepared(data_dir=data_dir())
  builder = prepare(make, _REMEDY, url=f"{_URL}train.en")
  with damage_named(builder):
    return Corpus({split: list(pairs) for split, pairs in lazy_splits(builder, pair).items()})


class Multi30kPrepared(tfds.core.GeneratorBasedBuilder):
  """TFDS builder of the files of the published baseline."""

  VERSION = tfds.core.Version("1.0.0")
  # Where TFDS looks sizes and checksums up: a wrong download is refused and not cached.
  url_infos = {  # noqa: RUF012
    _URL + name: UrlInfo(size=Size(size), checksum=sha256, filename=name)
    for name, (size, sha256) in _FILES.items()
  }

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description="Image captions of Multi30k in Moses tokens, lower case and subwords.",
      features=tfds.features.Translation(languages=["en", "de"]),
      homepage="https://github.com/LividWo/Revisit-MMT",
      license="Research and education, non-commercial.",
      citation="Elliott et al. 2016, arXiv:1605.00459; Wu et al. 2021, arXiv:2105.14462.",
      # Upstream's order, so that outputs can be compared with other people's line by line.
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager: tfds.download.DownloadManager):
    files = dl_manager.download({name: _URL + name for name in _FILES})
    return {
      split: self._generate_examples(files[f"{stem}.en"], files[f"{stem}.de"])
      for split, stem in _STEMS.items()
    }

  def _generate_examples(self, *files) -> Iterator[tuple[int, dict[str, str]]]:
    columns = [_lines(pathlib.Path(file).read_bytes()) for file in files]
    for index, (english, german) in enumerate(zip(*columns, strict=True)):
      yield index, dict(en=english, de=german)


def _read(folder: pathlib.Path, languages) -> Corpus:
  splits = zip(("train", "valid", "test"), _STEMS.values(), strict=True)
  sides = lambda stem: [_lines(_content(folder, f"{stem}.{side}")) for side in languages]
  return Corpus({split: list(zip(*sides(stem), strict=True)) for split, stem in splits})


def _content(folder: pathlib.Path, name: str) -> bytes:
  return upstream_content(folder, name, _FILES[name][1], _UPSTREAM)


def _lines(content: bytes) -> list[str]:
  return content.decode().removesuffix("\n").split("\n")
