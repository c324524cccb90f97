"""The chorales are upstream's, from a folder or an address."""

import gzip
import json
import pathlib

import numpy as np
import pytest

from experiments.music import data as music_data
from experiments.music import voices

PIECES = {
  split: np.random.default_rng(number).integers(-1, 128, (number, 5, 4)).tolist()
  for number, split in enumerate(["valid", "test", "train"], 1)
}


@pytest.fixture
def folder(tmp_path, publish) -> pathlib.Path:
  """Returns a folder with a small file in place of the published one."""
  folder = tmp_path / "jsb"
  folder.mkdir()
  (folder / music_data._CHORALES).write_text(json.dumps(PIECES))
  publish(music_data, "CHORALES", folder)
  return folder


def check(music):
  assert {*music.splits} == {"train", "valid", "test"}
  for split, pieces in music.splits.items():
    assert [voices.decode(tokens).tolist() for tokens in pieces] == PIECES[split]


def test_the_real_chorales_are_those_upstream(shared_data):
  music = music_data.load_chorales(str(shared_data / "jsb"))
  assert [len(music.splits[split]) for split in ("train", "valid", "test")] == [229, 76, 77]
  file = shared_data / "jsb" / "Jsb16thSeparated.json.gz"
  upstream = json.loads(gzip.decompress(file.read_bytes()))
  for split, pieces in music.splits.items():
    assert [voices.decode(tokens).tolist() for tokens in pieces] == upstream[split]


def test_a_folder_and_an_address_give_the_pieces_upstream(folder, serve, publish):
  check(music_data.load_chorales(str(folder)))
  with serve(folder) as url:
    publish(music_data, "CHORALES", folder, url)
    check(music_data.load_chorales())
