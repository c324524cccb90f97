"""Multi30k: only upstream's files, in a folder or at an address, become the corpus."""

import gzip
import hashlib
import pathlib
import shutil

import pytest
from tensorflow_datasets.core.download.checksums import UrlInfo

from relpos_jax.errors import InputError
from relpos_jax.translation import multi30k

pytestmark = pytest.mark.usefixtures("data_dir")

_STEMS = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
_PREPARED_STEMS = {"train": "train", "valid": "valid", "test": "test.2016"}
_SIZES = {"train": 5, "valid": 3, "test": 2}


def _captions(split: str, language: str) -> list[str]:
  return [f"{language}@@ {split} \u2028 ü {number}" for number in range(_SIZES[split])]


def _expected(languages: str) -> dict[str, list[tuple[str, str]]]:
  return {
    split: list(zip(*(_captions(split, code) for code in languages.split("-")), strict=True))
    for split in _SIZES
  }


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
  """Makes a folder with small upstream files, and records their checksums."""
  folder = tmp_path / "raw"
  folder.mkdir()
  for split, stem in _STEMS.items():
    for language in "en", "de", "fr":
      text = "\n".join(_captions(split, language)) + "\n"
      (folder / f"{stem}.{language}.gz").write_bytes(gzip.compress(text.encode()))
  _record(folder, "_FILES", monkeypatch)
  _set_url(multi30k._URL, monkeypatch)
  return folder


@pytest.fixture
def prepared_folder(tmp_path, monkeypatch) -> pathlib.Path:
  """Makes the same for the files of the published baseline."""
  folder = tmp_path / "prepared"
  folder.mkdir()
  for split, stem in _PREPARED_STEMS.items():
    for language in "en", "de":
      text = "\n".join(_captions(split, language)) + "\n"
      (folder / f"{stem}.{language}").write_bytes(text.encode())
  _record(folder, "_PREPARED_FILES", monkeypatch)
  return folder


@pytest.fixture
def address(folder, serve, monkeypatch):
  """Serves the folder."""
  with serve(folder) as url:
    _set_url(url, monkeypatch)
    yield


def _record(folder: pathlib.Path, name: str, monkeypatch):
  contents = {file.name: file.read_bytes() for file in folder.iterdir()}
  records = {name: (len(x), hashlib.sha256(x).hexdigest()) for name, x in contents.items()}
  monkeypatch.setattr(multi30k, name, records)


def _set_url(url: str, monkeypatch, prefix: str = "", builder: type = multi30k.Multi30k):
  files = getattr(multi30k, f"{prefix}_FILES").items()
  infos = {url + name: UrlInfo(size, checksum, name) for name, (size, checksum) in files}
  monkeypatch.setattr(multi30k, f"{prefix}_URL", url)
  monkeypatch.setattr(builder, "url_infos", infos)


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


@pytest.mark.usefixtures("address")
def test_wrong_download_is_refused_and_not_kept(folder):
  right = (folder / "val.de.gz").read_bytes()
  (folder / "val.de.gz").write_bytes(b"<html>")
  message = _refusal()
  assert "val.de.gz" in message and "wrong checksum" in message and "path=FOLDER" in message
  (folder / "val.de.gz").write_bytes(right)
  assert multi30k.load().splits == _expected("en-de")


@pytest.mark.usefixtures("folder")
def test_no_network_is_said_at_once_with_the_remedy(monkeypatch):
  _set_url("http://127.0.0.1:9/", monkeypatch)
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


@pytest.mark.parametrize("prepared", [False, True])
def test_unknown_languages_name_the_known_ones(prepared):
  known = "en-de, de-en" if prepared else "en-de, de-en, en-fr, fr-en"
  assert f"'de-fr': the known ones are {known}" in _refusal(languages="de-fr", prepared=prepared)


def test_recorded_checksums_are_those_of_the_prepared_files(shared_data):
  folder = shared_data / "multi30k" / "bpe10k_en-de"
  texts = {path.stem: gzip.decompress(path.read_bytes()) for path in folder.glob("*.*.gz")}
  assert {
    name: (len(text), hashlib.sha256(text).hexdigest()) for name, text in texts.items()
  } == multi30k._PREPARED_FILES
  splits = multi30k.load(path=str(folder), prepared=True).splits
  sizes = {name: len(pairs) for name, pairs in splits.items()}
  assert sizes == dict(train=29_000, valid=1_014, test=1_000)
  assert [target for _, target in splits["test"]] == texts["test.2016.de"].decode().splitlines()


def _pack(folder: pathlib.Path) -> None:
  for file in [*folder.iterdir()]:
    file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    file.unlink()


@pytest.mark.parametrize("packed", [False, True])
def test_prepared_files_in_a_folder_may_be_compressed(prepared_folder, packed):
  if packed:
    _pack(prepared_folder)
  load = lambda languages: multi30k.load(languages, str(prepared_folder), prepared=True).splits
  assert load("en-de") == _expected("en-de") and load("de-en") == _expected("de-en")


def test_prepared_files_are_downloaded_once(prepared_folder, serve, monkeypatch):
  with serve(prepared_folder) as url:
    _set_url(url, monkeypatch, "_PREPARED", multi30k.Multi30kPrepared)
    assert multi30k.load("en-de", prepared=True).splits == _expected("en-de")
  assert multi30k.load("de-en", prepared=True).splits == _expected("de-en")


@pytest.mark.parametrize("packed", [False, True])
def test_wrong_and_missing_prepared_files_are_named(prepared_folder, packed):
  (prepared_folder / "valid.de").write_bytes(b"<html>")
  if packed:
    _pack(prepared_folder)
  wrong = prepared_folder / ("valid.de.gz" if packed else "valid.de")
  options = dict(path=str(prepared_folder), prepared=True)
  assert f"wrong file {wrong}: the sha256 of its text is" in _refusal(**options)
  wrong.unlink()
  assert f"no file {prepared_folder / 'valid.de'}" in _refusal(**options)
