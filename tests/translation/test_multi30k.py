"""Laws of Multi30k: from a folder or an address, only upstream's files become the corpus."""

import gzip
import hashlib
import pathlib
import shutil

import pytest
from tensorflow_datasets.core.download.checksums import UrlInfo

from relpos_jax.errors import InputError
from relpos_jax.translation import multi30k

pytestmark = pytest.mark.usefixtures("data_dir")

_SIZES = {"train": 5, "val": 3, "test_2016_flickr": 2}


def _captions(stem: str, language: str) -> list[str]:
  return [f"{language} {stem} \u2028 ü {number}" for number in range(_SIZES[stem])]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
  """A small upstream: its files in a folder, their sums recorded."""
  folder = tmp_path / "raw"
  folder.mkdir()
  records = {}
  for stem in _SIZES:
    for language in "en", "de", "fr":
      file = folder / f"{stem}.{language}.gz"
      file.write_bytes(gzip.compress("\n".join(_captions(stem, language)).encode() + b"\n"))
      content = file.read_bytes()
      records[file.name] = len(content), hashlib.sha256(content).hexdigest()
  monkeypatch.setattr(multi30k, "_FILES", records)
  _point_to(multi30k._URL, monkeypatch)
  return folder


@pytest.fixture
def address(folder, serve, monkeypatch):
  """The same files at an address."""
  with serve(folder) as url:
    _point_to(url, monkeypatch)
    yield


def _point_to(url: str, monkeypatch):
  infos = {url + name: UrlInfo(size, sum_, name) for name, (size, sum_) in multi30k._FILES.items()}
  monkeypatch.setattr(multi30k, "_URL", url)
  monkeypatch.setattr(multi30k.Multi30k, "url_infos", infos)


def _expected(languages: str) -> dict[str, list[tuple[str, str]]]:
  stems = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
  return {
    split: list(zip(*(_captions(stem, code) for code in languages.split("-")), strict=True))
    for split, stem in stems.items()
  }


def _refusal(**options) -> str:
  with pytest.raises(InputError) as caught:
    multi30k.load(**options)
  message = str(caught.value)
  assert "\n" not in message
  return message


def test_recorded_sums_are_upstreams(shared_data):
  lines = (shared_data / "multi30k" / "SHA256SUMS").read_text().splitlines()
  upstream = {name: sum_ for sum_, name in map(str.split, lines)}
  assert len(multi30k._FILES) == 9
  for name, (size, sum_) in multi30k._FILES.items():
    assert sum_ == upstream[name]
    assert size == (shared_data / "multi30k" / "raw" / name).stat().st_size


def test_real_captions_are_read_in_order_and_twice_the_same(shared_data):
  raw = shared_data / "multi30k" / "raw"
  corpus = multi30k.load(languages="en-de", path=str(raw))
  assert {split: len(pairs) for split, pairs in corpus.splits.items()} == {
    "train": 29_000,
    "valid": 1_014,
    "test": 1_000,
  }
  for split, stem in ("train", "train"), ("test", "test_2016_flickr"):
    for side, language in enumerate(("en", "de")):
      text = gzip.decompress((raw / f"{stem}.{language}.gz").read_bytes()).decode()
      assert [pair[side] for pair in corpus.splits[split]] == text.removesuffix("\n").split("\n")
  assert multi30k.load() == corpus


@pytest.mark.usefixtures("address")
@pytest.mark.parametrize("languages", multi30k.LANGUAGES)
@pytest.mark.parametrize("local", [False, True])
def test_folder_and_address_give_the_pairs_upstream(folder, languages, local):
  corpus = multi30k.load(languages, path=str(folder) if local else "")
  assert corpus.splits == _expected(languages)


@pytest.mark.usefixtures("address")
def test_prepared_data_need_neither_files_nor_network(folder):
  multi30k.load("en-de")
  shutil.rmtree(folder)
  assert multi30k.load("de-en").splits == _expected("de-en")


@pytest.mark.parametrize("content", [b"<html>", b""])
def test_wrong_file_in_the_folder_is_named(folder, data_dir, content):
  (folder / "val.de.gz").write_bytes(content)
  assert f"wrong file {folder / 'val.de.gz'}" in _refusal(path=str(folder))
  assert not data_dir.exists()
  assert multi30k.load("en-fr", path=str(folder)).splits == _expected("en-fr")


def test_missing_file_and_folder_are_named(folder):
  (folder / "val.de.gz").unlink()
  assert f"cannot read {folder / 'val.de.gz'}: No such file" in _refusal(path=str(folder))
  assert "cannot read /no/train.en.gz: No such file" in _refusal(path="/no")
  assert "/train.en.gz: File name too long" in _refusal(path="/" + "x" * 300)


@pytest.mark.usefixtures("address")
def test_wrong_download_is_refused_and_not_kept(folder):
  right = (folder / "val.de.gz").read_bytes()
  (folder / "val.de.gz").write_bytes(b"<html>")
  message = _refusal()
  assert "val.de.gz" in message and "wrong checksum" in message and "path=FOLDER" in message
  (folder / "val.de.gz").write_bytes(right)
  assert multi30k.load().splits == _expected("en-de")


@pytest.mark.usefixtures("address")
def test_file_gone_upstream_is_named(folder):
  (folder / "val.de.gz").unlink()
  message = _refusal()
  assert "val.de.gz" in message and "404" in message and "path=FOLDER" in message


@pytest.mark.usefixtures("folder")
def test_no_network_is_said_at_once_with_the_remedy(monkeypatch):
  _point_to("http://127.0.0.1:9/", monkeypatch)
  message = _refusal()
  assert message.startswith("cannot download http://127.0.0.1:9/train.en.gz: no answer")
  assert "path=FOLDER" in message


@pytest.mark.usefixtures("address")
def test_download_damaged_on_disk_is_named(folder, data_dir):
  multi30k.load()
  shutil.rmtree(data_dir / "multi30k")
  (damaged,) = data_dir.glob("downloads/**/*val.de*.gz")
  damaged.write_bytes(damaged.read_bytes()[:-9])
  assert f"damaged download {damaged}: delete it" in _refusal()
  damaged.unlink()
  assert multi30k.load().splits == _expected("en-de")


@pytest.mark.parametrize("left", ["folder", "records", "incomplete"])
def test_what_an_interrupted_preparation_left_is_replaced(folder, data_dir, left):
  version = data_dir / "multi30k" / "en-de" / "1.0.0"
  if left == "folder":
    version.mkdir(parents=True)
  else:
    multi30k.load(path=str(folder))
    (version / "dataset_info.json").unlink()
  if left == "incomplete":
    version.rename(version.with_name("incomplete.ABCDEF_1.0.0"))
  assert multi30k.load(path=str(folder)).splits == _expected("en-de")


def test_damaged_records_are_named_and_made_again(folder, data_dir):
  multi30k.load(path=str(folder))
  version = data_dir / "multi30k" / "en-de" / "1.0.0"
  (records,) = version.glob("*train*")
  records.write_bytes(records.read_bytes()[:-100])
  assert f"damaged data: delete {version}" in _refusal()
  shutil.rmtree(version)
  assert multi30k.load(path=str(folder)).splits == _expected("en-de")


def test_the_first_of_two_preparations_is_kept(folder, monkeypatch):
  """A second process finishes while this one prepares: its data are there when this one ends."""
  inner = multi30k.Multi30k._split_generators

  def slow(self, dl_manager):
    monkeypatch.setattr(multi30k.Multi30k, "_split_generators", inner)
    multi30k.load(path=str(folder))
    return inner(self, dl_manager)

  monkeypatch.setattr(multi30k.Multi30k, "_split_generators", slow)
  assert multi30k.load(path=str(folder)).splits == _expected("en-de")


def test_a_data_dir_that_cannot_be_written_is_named(folder, data_dir):
  data_dir.write_text("a file")
  message = _refusal(path=str(folder))
  assert f"cannot prepare multi30k in {data_dir}" in message
  assert message.endswith("set TFDS_DATA_DIR to a folder with room that you may write to")


def test_unknown_languages_name_the_known_ones():
  assert "'de-fr': the known ones are en-de, de-en, en-fr, fr-en" in _refusal(languages="de-fr")
