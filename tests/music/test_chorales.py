"""The chorales are upstream's, from a folder or an address; other files are refused."""

import gzip
import hashlib
import json
import pathlib

import numpy as np
import pytest

from experiments.errors import InputError
from experiments.music import data as music_data
from experiments.music import voices

pytestmark = pytest.mark.usefixtures("data_dir")

PIECES = {
  split: np.random.default_rng(number).integers(-1, 128, (number, 5, 4)).tolist()
  for number, split in enumerate(["valid", "test", "train"], 1)
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
  """Returns a folder with a small upstream file whose sha256 is the recorded one."""
  folder = tmp_path / "jsb"
  folder.mkdir()
  content = json.dumps(PIECES).encode()
  (folder / music_data._CHORALES).write_bytes(content)
  files = {music_data._CHORALES: (len(content), hashlib.sha256(content).hexdigest())}
  monkeypatch.setattr(music_data.JsbChorales, "FILES", files)
  monkeypatch.setattr(music_data.JsbChorales, "URL", "http://127.0.0.1:9/")
  return folder


def check(music):
  assert {*music.splits} == {"train", "valid", "test"}
  for split, pieces in music.splits.items():
    assert [voices.decode(tokens).tolist() for tokens in pieces] == PIECES[split]


def refusal(*arguments) -> str:
  with pytest.raises(InputError) as caught:
    music_data.load_chorales(*arguments)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def test_the_real_chorales_are_those_upstream(shared_data):
  music = music_data.load_chorales(str(shared_data / "jsb"))
  assert [len(music.splits[split]) for split in ("train", "valid", "test")] == [229, 76, 77]
  file = shared_data / "jsb" / "Jsb16thSeparated.json.gz"
  upstream = json.loads(gzip.decompress(file.read_bytes()))
  for split, pieces in music.splits.items():
    assert [voices.decode(tokens).tolist() for tokens in pieces] == upstream[split]


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_holds_the_pieces_upstream(folder, packed):
  if packed:
    plain = folder / music_data._CHORALES
    (folder / f"{music_data._CHORALES}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
  check(music_data.load_chorales(str(folder)))


def test_a_download_is_checked_and_a_wrong_one_not_kept(folder, serve, monkeypatch):
  file = folder / music_data._CHORALES
  right = file.read_bytes()
  file.write_bytes(b"{}")
  with serve(folder) as url:
    monkeypatch.setattr(music_data.JsbChorales, "URL", url)
    message = refusal()
    assert "wrong checksum" in message and "path=FOLDER" in message
    file.write_bytes(right)
    check(music_data.load_chorales())
  check(music_data.load_chorales())  # The prepared data need no network.


def test_wrong_and_missing_files_and_networks_are_named(folder, data_dir):
  message = refusal()
  assert message.startswith("cannot download http://127.0.0.1:9/: no answer")
  assert "path=FOLDER" in message
  assert refusal("/no").startswith(f"cannot read /no/{music_data._CHORALES}: No such file")
  (folder / music_data._CHORALES).write_text("{}")
  assert f"wrong file {folder / music_data._CHORALES}" in refusal(str(folder))
  assert not data_dir.exists()
