"""A folder of MIDI files: its splits, and what is wrong with it."""

import numpy as np
import pytest

from relpos_jax.errors import InputError
from relpos_jax.music import midi_folder, performance, voices

GRID = np.array([[67, 64, 60, 48], [67, 65, -1, 50]])


def write(path, grid=GRID):
  path.parent.mkdir(parents=True, exist_ok=True)
  voices.write(voices.encode(grid), path)


def refusal(*arguments, **options) -> str:
  with pytest.raises(InputError) as caught:
    midi_folder.load(*arguments, **options)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def test_sub_folders_are_splits_and_their_files_pieces_by_name(tmp_path):
  for number, name in enumerate(
    ["train/b.mid", "train/more/c.MIDI", "train/a.midi", "valid/a.mid"]
  ):
    write(tmp_path / name, GRID + np.array([number, 0, 0, 0]))
  write(tmp_path / "elsewhere.mid")
  (tmp_path / "test").mkdir()  # without music: no split
  (tmp_path / "train" / "readme.txt").write_text("no music")
  music = midi_folder.load(str(tmp_path), codec="voices")
  sopranos = {
    split: [voices.decode(x)[0, 0] - 67 for x in pieces] for split, pieces in music.splits.items()
  }
  assert sopranos == {"train": [2, 0, 1], "valid": [3]}
  assert music.notes == (f"MIDI files of {tmp_path}: 3 train, 1 valid",)


def test_events_are_those_of_the_files(tmp_path):
  write(tmp_path / "train" / "a.mid")
  (piece,) = midi_folder.load(str(tmp_path)).splits["train"]
  np.testing.assert_array_equal(piece, performance.read(tmp_path / "train" / "a.mid"))


def test_names_say_the_split_whatever_else_there_is(tmp_path):
  names = [f"{number}.mid" for number in range(24, 60)]
  for name in names:
    (tmp_path / name).touch()
  files = midi_folder.split_files(str(tmp_path))
  assert {file.name for found in files.values() for file in found} == {*names}
  for name in names[::2]:
    (tmp_path / name).unlink()
  fewer = midi_folder.split_files(str(tmp_path))
  for split, found in fewer.items():
    assert {*found} <= {*files[split]}


def test_pieces_come_by_name_however_the_disk_lists_them(tmp_path, monkeypatch):
  for name in ("b.mid", "a.mid", "c.mid"):
    (tmp_path / name).touch()
  listed = sorted(tmp_path.iterdir(), reverse=True)
  monkeypatch.setattr(midi_folder.pathlib.Path, "rglob", lambda *_: iter(listed))
  monkeypatch.setattr(midi_folder, "split_of", lambda name: "train")
  assert [file.name for file in midi_folder.split_files(str(tmp_path))["train"]] == [
    *("a.mid", "b.mid", "c.mid")
  ]


def test_shares_are_those_promised():
  splits = [midi_folder.split_of(f"{number}.mid") for number in range(2000)]
  shares = [splits.count(split) / 2000 for split in midi_folder.SPLITS]
  np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.03)


def test_bad_folders_and_files_are_named(tmp_path):
  assert refusal("") == "no folder of MIDI files: give --config.data.midi.path"
  assert refusal(str(tmp_path / "none")) == f"no folder {tmp_path / 'none'}: check the name"
  assert refusal("/" + "x" * 300).startswith("no folder /xxx")
  assert refusal(str(tmp_path)).startswith(f"no MIDI file in {tmp_path}")
  assert (
    refusal(str(tmp_path), codec="abc") == "unknown codec 'abc': the known ones are events, voices"
  )
  write(tmp_path / "24.mid")  # which is for valid
  no_training = f"no MIDI file to train on: put some into {tmp_path / 'train'}"
  assert refusal(str(tmp_path)) == no_training
  write(tmp_path / "valid" / "a.mid")
  assert refusal(str(tmp_path)) == no_training
  write(tmp_path / "train" / "a.mid")
  (tmp_path / "train" / "b.mid").write_bytes(b"MThd")
  assert f"damaged MIDI file {tmp_path / 'train' / 'b.mid'}" in refusal(str(tmp_path))
