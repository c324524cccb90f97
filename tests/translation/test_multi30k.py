"""Multi30k: upstream's files become the corpus. `test_upstream` checks downloads."""

import gzip
import pathlib

import pytest

from experiments.translation import corpus
from experiments.translation.corpus import LANGUAGES, load_multi30k

_SIZES = {"train": 5, "valid": 3, "test": 2}
_CASES = [(languages, False) for languages in LANGUAGES["multi30k"]]
_CASES += [("en-de", True), ("de-en", True)]


def _captions(split: str, language: str) -> list[str]:
  return [f"{language}@@ {split} \u2028 ü {number}" for number in range(_SIZES[split])]


def _expected(languages: str) -> dict[str, list[tuple[str, str]]]:
  return {
    split: list(zip(*(_captions(split, code) for code in languages.split("-")), strict=True))
    for split in _SIZES
  }


@pytest.fixture
def folder(tmp_path, publish) -> pathlib.Path:
  """Makes a folder with small files of both kinds in place of the published ones."""
  folder = tmp_path / "raw"
  folder.mkdir()
  for names in (corpus._CAPTIONS, corpus._PREPARED):
    for split, name in names.items():
      for language in "en", "de", "fr":
        file = folder / name.format(language)
        text = ("\n".join(_captions(split, language)) + "\n").encode()
        file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
  for name in ("CAPTIONS", "PREPARED"):
    publish(corpus, name, folder)
  return folder


@pytest.mark.parametrize("languages, prepared", _CASES)
def test_a_folder_gives_the_pairs_upstream(folder, languages, prepared):
  assert load_multi30k(languages, str(folder), prepared).splits == _expected(languages)
