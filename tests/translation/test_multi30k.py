"""Multi30k: only upstream's files, in a folder or at an address, become the corpus."""

import gzip
import hashlib
import pathlib

import pytest

from experiments.translation import multi30k
from experiments.translation.corpus import LANGUAGES

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
  for names in (multi30k._CAPTIONS, multi30k._PREPARED):
    for split, name in names.items():
      for language in "en", "de", "fr":
        file = folder / name.format(language)
        text = ("\n".join(_captions(split, language)) + "\n").encode()
        file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
  for name in ("CAPTIONS", "PREPARED"):
    publish(multi30k, name, folder)
  return folder


def test_recorded_sums_are_upstreams(shared_data):
  folder = shared_data / "multi30k"
  texts = {file.name: file.read_bytes() for file in (folder / "raw").iterdir()}
  for file in (folder / "bpe10k_en-de").glob("*.*.gz"):
    texts[file.stem] = gzip.decompress(file.read_bytes())
  assert len(multi30k._FILES) == 15
  for name, sha256 in multi30k._FILES.items():
    assert sha256 == hashlib.sha256(texts[name]).hexdigest()


@pytest.mark.parametrize("folder, prepared", [("raw", False), ("bpe10k_en-de", True)])
def test_real_captions_are_read_in_order(shared_data, folder, prepared):
  folder = shared_data / "multi30k" / folder
  splits = multi30k.load(path=str(folder), prepared=prepared).splits
  sizes = {name: len(pairs) for name, pairs in splits.items()}
  assert sizes == dict(train=29_000, valid=1_014, test=1_000)
  name = "test.2016.de" if prepared else "test_2016_flickr.de"
  text = gzip.decompress((folder / f"{name}.gz").read_bytes()).decode()
  assert [target for _, target in splits["test"]] == text.removesuffix("\n").split("\n")


@pytest.mark.parametrize("languages, prepared", _CASES)
def test_folder_and_address_give_the_pairs_upstream(folder, serve, publish, languages, prepared):
  expected = _expected(languages)
  assert multi30k.load(languages, str(folder), prepared).splits == expected
  with serve(folder) as url:
    publish(multi30k, "PREPARED" if prepared else "CAPTIONS", folder, url)
    assert multi30k.load(languages, prepared=prepared).splits == expected
