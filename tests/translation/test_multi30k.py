"""Multi30k: only upstream's files, in a folder or at an address, become the corpus."""

import gzip
import hashlib
import pathlib
import shutil

import pytest

from experiments.errors import InputError
from experiments.translation import multi30k
from experiments.translation.corpus import LANGUAGES

pytestmark = pytest.mark.usefixtures("data_dir")

_BUILDERS = {False: multi30k.Multi30k, True: multi30k.Multi30kPrepared}
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
def folder(tmp_path, monkeypatch) -> pathlib.Path:
  """Makes a folder with small upstream files of both kinds, and records their checksums."""
  folder = tmp_path / "raw"
  folder.mkdir()
  for builder in _BUILDERS.values():
    for split, name in zip(_SIZES, builder.NAMES.values(), strict=True):
      for language in "en", "de", "fr":
        file = folder / name.format(language)
        text = ("\n".join(_captions(split, language)) + "\n").encode()
        file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    monkeypatch.setattr(builder, "URL", "http://127.0.0.1:9/")
  contents = {file.name: file.read_bytes() for file in folder.iterdir()}
  records = {name: (len(x), hashlib.sha256(x).hexdigest()) for name, x in contents.items()}
  monkeypatch.setattr(multi30k.Multi30k, "FILES", records)
  return folder


@pytest.fixture
def address(folder, serve, monkeypatch):
  """Serves the folder."""
  with serve(folder) as url:
    for builder in _BUILDERS.values():
      monkeypatch.setattr(builder, "URL", url)
    yield


@pytest.fixture
def load(address):
  return lambda: multi30k.load().splits


def _refusal(**options) -> str:
  with pytest.raises(InputError) as caught:
    multi30k.load(**options)
  message = str(caught.value)
  assert "\n" not in message
  return message


def test_recorded_sums_are_upstreams(shared_data):
  folder = shared_data / "multi30k"
  texts = {file.name: file.read_bytes() for file in (folder / "raw").iterdir()}
  for file in (folder / "bpe10k_en-de").glob("*.*.gz"):
    texts[file.stem] = gzip.decompress(file.read_bytes())
  assert len(multi30k._FILES) == 15
  for name, record in multi30k._FILES.items():
    assert record == (len(texts[name]), hashlib.sha256(texts[name]).hexdigest())


@pytest.mark.parametrize("folder, prepared", [("raw", False), ("bpe10k_en-de", True)])
def test_real_captions_are_read_in_order(shared_data, folder, prepared):
  folder = shared_data / "multi30k" / folder
  splits = multi30k.load(path=str(folder), prepared=prepared).splits
  sizes = {name: len(pairs) for name, pairs in splits.items()}
  assert sizes == dict(train=29_000, valid=1_014, test=1_000)
  name = _BUILDERS[prepared].NAMES["test"].format("de").removesuffix(".gz")
  text = gzip.decompress((folder / f"{name}.gz").read_bytes()).decode()
  assert [target for _, target in splits["test"]] == text.removesuffix("\n").split("\n")


@pytest.mark.usefixtures("address")
@pytest.mark.parametrize("languages, prepared", _CASES)
def test_folder_and_address_give_the_pairs_upstream(folder, languages, prepared):
  expected = _expected(languages)
  assert multi30k.load(languages, str(folder), prepared).splits == expected
  assert multi30k.load(languages, prepared=prepared).splits == expected
  shutil.rmtree(folder)  # The prepared data need neither files nor network.
  assert multi30k.load(languages, prepared=prepared).splits == expected


@pytest.mark.parametrize("name, prepared", [("val.de.gz", False), ("valid.de", True)])
def test_wrong_and_missing_files_are_named(folder, data_dir, name, prepared):
  options = dict(path=str(folder), prepared=prepared)
  (folder / name).write_bytes(b"<html>")
  assert f"wrong file {folder / name}: its sha256 is" in _refusal(**options)
  (folder / name).unlink()
  assert f"cannot read {folder / name}: No such file" in _refusal(**options)
  assert not data_dir.exists()


def test_wrong_download_is_refused_and_not_kept(folder, load):
  right = (folder / "val.de.gz").read_bytes()
  (folder / "val.de.gz").write_bytes(b"<html>")
  message = _refusal()
  assert "val.de.gz" in message and "wrong checksum" in message and "path=FOLDER" in message
  (folder / "val.de.gz").write_bytes(right)
  assert load() == _expected("en-de")


@pytest.mark.usefixtures("folder")
def test_no_network_is_refused_at_once_with_the_remedy():
  message = _refusal()
  assert message.startswith("cannot download http://127.0.0.1:9/: no answer")
  assert "path=FOLDER" in message


@pytest.mark.parametrize("left", ["folder", "records", "incomplete"])
def test_what_an_interrupted_preparation_left_is_replaced(load, data_dir, left):
  version = data_dir / "multi30k" / "en-de" / "1.0.0"
  if left == "folder":
    version.mkdir(parents=True)
  else:
    load()
    (version / "dataset_info.json").unlink()
  if left == "incomplete":
    version.rename(version.with_name("incomplete.ABCDEF_1.0.0"))
  assert load() == _expected("en-de")


def test_the_first_of_two_preparations_is_kept(load, monkeypatch):
  inner = multi30k.Multi30k._split_generators

  def slow(self, dl_manager):
    monkeypatch.setattr(multi30k.Multi30k, "_split_generators", inner)
    load()
    return inner(self, dl_manager)

  monkeypatch.setattr(multi30k.Multi30k, "_split_generators", slow)
  assert load() == _expected("en-de")


@pytest.mark.usefixtures("address")
def test_a_data_dir_that_cannot_be_written_is_named(data_dir):
  data_dir.write_text("a file")
  message = _refusal()
  assert f"cannot prepare multi30k in {data_dir}" in message
  assert message.endswith("set TFDS_DATA_DIR to a folder with room that you may write to")
