"""Laws of the published baseline's files: only those of upstream, packed or not, become pairs."""

import gzip
import hashlib
import pathlib

import pytest
from tensorflow_datasets.core.download.checksums import UrlInfo

from relpos_jax.errors import InputError
from relpos_jax.translation import multi30k

_SIZES = {"train": 5, "valid": 3, "test.2016": 2}


def _lines(stem: str, language: str) -> list[str]:
  return [f"{language}@@ {stem} \u2028 ü {number}" for number in range(_SIZES[stem])]


@pytest.fixture(autouse=True)
def upstream(tmp_path, monkeypatch) -> pathlib.Path:
  """A small upstream: its files in a folder, their sums recorded, and nothing at its address."""
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
  folder, records = tmp_path / "upstream", {}
  folder.mkdir()
  for stem in _SIZES:
    for language in "en", "de":
      content = ("\n".join(_lines(stem, language)) + "\n").encode()
      (folder / f"{stem}.{language}").write_bytes(content)
      records[f"{stem}.{language}"] = len(content), hashlib.sha256(content).hexdigest()
  monkeypatch.setattr(multi30k, "_PREPARED_FILES", records)
  _point_to("http://127.0.0.1:9/", monkeypatch)
  return folder


@pytest.fixture
def address(upstream, serve, monkeypatch):
  """The same files at an address."""
  with serve(upstream) as url:
    _point_to(url, monkeypatch)
    yield


def _point_to(url: str, monkeypatch):
  files = multi30k._PREPARED_FILES.items()
  infos = {url + name: UrlInfo(size, sum_, name) for name, (size, sum_) in files}
  monkeypatch.setattr(multi30k, "_PREPARED_URL", url)
  monkeypatch.setattr(multi30k.Multi30kPrepared, "url_infos", infos)


def _expected(languages: str) -> dict[str, list[tuple[str, str]]]:
  stems = dict(train="train", valid="valid", test="test.2016")
  return {
    split: list(zip(*(_lines(stem, code) for code in languages.split("-")), strict=True))
    for split, stem in stems.items()
  }


def _pack(folder: pathlib.Path) -> None:
  for file in [*folder.iterdir()]:
    file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    file.unlink()


def _refusal(**options) -> str:
  with pytest.raises(InputError) as caught:
    multi30k.load(prepared=True, **options)
  message = str(caught.value)
  assert "\n" not in message
  return message


def test_the_recorded_sums_are_those_of_the_published_files(shared_data, monkeypatch):
  monkeypatch.undo()
  folder = shared_data / "multi30k" / "bpe10k_en-de"
  texts = {path.stem: gzip.decompress(path.read_bytes()) for path in folder.glob("*.*.gz")}
  assert {
    name: (len(text), hashlib.sha256(text).hexdigest()) for name, text in texts.items()
  } == multi30k._PREPARED_FILES
  splits = multi30k.load(path=str(folder), prepared=True).splits
  assert {name: len(pairs) for name, pairs in splits.items()} == dict(
    train=29_000, valid=1_014, test=1_000
  )
  assert [target for _, target in splits["test"]] == texts["test.2016.de"].decode().splitlines()


@pytest.mark.parametrize("languages", multi30k.PREPARED_LANGUAGES)
@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_gives_the_pairs_upstream(upstream, languages, packed):
  if packed:
    _pack(upstream)
  corpus = multi30k.load(languages, str(upstream), prepared=True)
  assert corpus.splits == _expected(languages)


@pytest.mark.usefixtures("address")
def test_an_address_gives_the_pairs_upstream_and_is_asked_once(upstream):
  assert multi30k.load("en-de", prepared=True).splits == _expected("en-de")
  for file in upstream.iterdir():
    file.unlink()
  assert multi30k.load("de-en", prepared=True).splits == _expected("de-en")


@pytest.mark.usefixtures("address")
def test_a_wrong_download_is_refused(upstream):
  (upstream / "valid.de").write_bytes(b"<html>")
  message = _refusal()
  assert "valid.de" in message and "wrong checksum" in message and "path=FOLDER" in message


def test_no_network_is_said_with_the_remedy():
  message = _refusal()
  assert message.startswith("cannot download http://127.0.0.1:9/train.en: no answer")
  assert "path=FOLDER with data/multi30k-en-de of github.com/LividWo/Revisit-MMT" in message


@pytest.mark.parametrize("packed", [False, True])
def test_wrong_and_missing_files_in_the_folder_are_named(upstream, packed):
  (upstream / "valid.de").write_bytes(b"<html>")
  if packed:
    _pack(upstream)
  wrong = upstream / ("valid.de.gz" if packed else "valid.de")
  assert f"wrong file {wrong}: the sha256 of its text is" in _refusal(path=str(upstream))
  wrong.unlink()
  assert f"no file {upstream / 'valid.de'}" in _refusal(path=str(upstream))


def test_unknown_languages_name_the_known_ones():
  assert "'en-fr': the known ones are en-de, de-en" in _refusal(languages="en-fr")
