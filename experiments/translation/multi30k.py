"""Multi30k: 29,000 image captions in English, German and French, as TFDS data sets."""

import gzip
from collections.abc import Callable

import tensorflow_datasets as tfds

from experiments.data.builders import FilesBuilder, load_files
from experiments.translation.corpus import Corpus

# Names, bytes and sha256 of the upstream files: the captions, and the text of the baseline.
_SUMS = """
train.en.gz 568929 d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f
train.de.gz 637044 726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6
train.fr.gz 604242 622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c
val.en.gz 21650 14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28
val.de.gz 24681 f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a
val.fr.gz 23001 ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9
test_2016_flickr.en.gz 21077 611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9
test_2016_flickr.de.gz 22890 9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8
test_2016_flickr.fr.gz 22310 6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90
train.en 1898472 0ffe3e3bac16e6aa33ef0dd6a7dca81587479b0d18dff0db2a92ac3f32b00c86
train.de 2269411 b2c74def7ec129f7ea7023a51501c77174c377ef06c6ccc2f031adcfb5cfadbd
valid.en 67101 193d0d18fef5d1bc9d1cddafa13a644de3c5d6a24b45ac44476dcc5e96bfac6e
valid.de 82295 eeb95680d6a06eafb13e3494eed9f9fa99783b892f4a3c72dd36e7ce2e000b68
test.2016.en 65416 13b5fe3f92f78c54446d66afcaaa0a00a33ab653a8411f16812c9c5ca3795d6d
test.2016.de 75949 375c20d50f4c486149a78dfcfb161a430a04ddabe2b7d150f0c7811dc455ac60
"""
_FILES = {
  name: (int(size), sha256) for name, size, sha256 in map(str.split, _SUMS.strip().split("\n"))
}


def load(languages: str = "en-de", path: str = "", prepared: bool = False) -> Corpus:
  """Loads the captions: 29,000 pairs in train, 1,014 in valid, 1,000 in test (test_2016_flickr).

  They are cased, not tokenised, and in upstream's order (Elliott et al. 2016, 2017).

  Args:
    languages: "en-de", "de-en", "en-fr" or "fr-en".
    path: a folder with the upstream files; their sha256 must be the recorded ones. If empty, they
      are downloaded (1.3 MB) and prepared once under TFDS_DATA_DIR (default ~/tensorflow_datasets).
    prepared: loads the text of the published baseline instead (Wu et al. 2021, LividWo/Revisit-MMT,
      4.5 MB; English and German): lower case, normalised, in Moses tokens and joint BPE of 10,000
      merges, where "@@" ends a subword inside a word. Files in `path` may be compressed (.gz).

  Raises:
    InputError: a file is missing or wrong, or there is no network.

  >>> load(languages="en-de", path="data/task1/raw").splits["valid"][0]  # doctest: +SKIP
  ('A group of men are loading cotton onto a truck', 'Eine Gruppe von Männern lädt ...')
  """
  kind, pair = Multi30kPrepared if prepared else Multi30k, languages.split("-")
  config = "" if prepared else languages if pair[0] == "en" else "-".join(pair[::-1])

  def text(line):
    return line if isinstance(line, str) else line.decode()

  return Corpus(load_files(kind, path, lambda row: tuple(text(row[x]) for x in pair), config))


class Multi30k(FilesBuilder):
  """TFDS builder of Multi30k, task 1; configs "en-de" and "en-fr"."""

  BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name) for name in ("en-de", "en-fr")]  # noqa: RUF012
  KEY = "multi30k"
  UPSTREAM = "data/task1/raw of github.com/multi30k/dataset"
  URL = (
    "https://raw.githubusercontent.com/multi30k/dataset/"
    "a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw/"
  )
  FILES = _FILES
  NAMES = {"train": "train.{}.gz", "validation": "val.{}.gz", "test": "test_2016_flickr.{}.gz"}  # noqa: RUF012

  def _info(self) -> tfds.core.DatasetInfo:
    config = self.builder_config.name if self.builder_config else "en-de"
    return self._about(
      features=tfds.features.Translation(languages=config.split("-")),
      license="Research and education, non-commercial.",
      citation="Elliott et al. 2016, arXiv:1605.00459; Elliott et al. 2017, arXiv:1710.07177.",
    )

  @classmethod
  def read(cls, content: Callable[[str], bytes], config: str) -> dict[str, list[dict[str, str]]]:
    languages = (config or "en-de").split("-")

    def rows(name: str) -> list[dict[str, str]]:
      columns = [_lines(content(name.format(language))) for language in languages]
      return [dict(zip(languages, row, strict=True)) for row in zip(*columns, strict=True)]

    return {split: rows(name) for split, name in cls.NAMES.items()}


class Multi30kPrepared(Multi30k):
  """TFDS builder of the published baseline's text (Wu et al. 2021, arXiv:2105.14462)."""

  BUILDER_CONFIGS = []  # noqa: RUF012
  UPSTREAM = "data/multi30k-en-de of github.com/LividWo/Revisit-MMT"
  URL = (
    "https://raw.githubusercontent.com/LividWo/Revisit-MMT/"
    "dc368d0af8d60270b8f4aaa2f3ac58771c551da3/data/multi30k-en-de/"
  )
  NAMES = {"train": "train.{}", "validation": "valid.{}", "test": "test.2016.{}"}  # noqa: RUF012


def _lines(content: bytes) -> list[str]:
  """Splits text, plain or gzip, at newlines alone; str.splitlines also splits at U+2028."""
  text = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
  return text.decode().removesuffix("\n").split("\n")
