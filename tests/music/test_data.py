"""The chorales; MIDI folders; rows with each piece once per epoch, sliced and moved."""

import json

import mido
import numpy as np
import pytest
from faults import refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.data.tokenizer import BOS, EOS, PAD
from experiments.music import data, performance, voices
from experiments.music.data import MusicRows

codecs = st.sampled_from([voices.CODEC, performance.CODEC])
piece = st.lists(st.integers(3, 131), min_size=1, max_size=40)
some_pieces = st.lists(piece.map(np.array), min_size=1, max_size=6)


def make(pieces, codec=voices.CODEC, longest=12, **changes):
  return MusicRows(pieces, codec, longest=longest, **changes)


def joined(rows) -> list[list[int]]:
  """Returns the pieces of rows."""
  pieces, tokens = [], []
  for row in rows:
    tokens += row.tolist()
    if tokens[-1] == EOS:
      pieces.append(tokens)
      tokens = []
  assert not tokens
  return pieces


def pieces_of(*lengths) -> list[np.ndarray]:
  random = np.random.default_rng(0)
  return [random.integers(40, 80, 4 * length) for length in lengths]


@settings(max_examples=100)
@given(
  some_pieces, codecs, st.booleans(), st.integers(4, 20), st.sampled_from([0, 3, 130])
)
def test_rows_of_an_epoch_are_the_pieces_transposed_and_their_ends(
  pieces, codec, random_slices, longest, semitones
):
  options = dict(random_slices=random_slices, longest=longest, semitones=semitones)
  rows = make(pieces, codec, **options)
  of_epoch = rows.in_epoch(2)
  moves = range(-semitones, semitones + 1)
  for piece, moved in zip(pieces, joined(of_epoch), strict=True):
    assert moved in [[*codec.transpose(piece, by), EOS] for by in moves]
  assert (of_epoch.lengths <= rows.lengths).all()
  assert rows.lengths.max() <= longest
  for row in of_epoch:
    assert len(row) % codec.alignment == 0 or row[-1] == EOS


@settings(max_examples=100)
@given(codecs, st.lists(st.integers(0, 387), max_size=8), st.integers(-60, 60))
def test_transposing_tokens_transposes_the_notes(codec, stream, semitones):
  tokens = np.array([BOS, *(3 + x % (codec.vocab_size - 3) for x in stream), EOS, PAD])
  is_pitch = np.isin(tokens, codec.notes)
  pitches = (tokens[is_pitch] - codec.notes.start) % 128
  # No further than the highest and the lowest key.
  by = int(np.clip(semitones, -pitches.min(initial=60), 127 - pitches.max(initial=60)))
  moved = codec.transpose(tokens, semitones)
  before, after = (codec.decode_score(x).parts for x in (tokens, moved))
  for part, moved_part in zip(before, after, strict=True):
    wanted = [note._replace(pitch=note.pitch + by) for note in part.notes]
    assert sorted(moved_part.notes) == sorted(wanted)
  np.testing.assert_array_equal(moved[~is_pitch], tokens[~is_pitch])


def vary(seed=0, semitones=5, random_slices=True) -> MusicRows:
  options = dict(semitones=semitones, random_slices=random_slices, seed=seed)
  return make(pieces_of(9, 30, 41), longest=40, **options)


def as_lists(rows, epoch):
  return [row.tolist() for row in rows.in_epoch(epoch)]


@pytest.mark.parametrize("changes", [{}, {"semitones": 0}, {"random_slices": False}])
def test_rows_depend_on_the_seed_and_the_epoch_alone(changes):
  rows = vary(**changes)
  first, second = as_lists(rows, 0), as_lists(rows, 1)
  assert first != second
  assert first != as_lists(vary(seed=1, **changes), 0)
  again = vary(**changes)
  assert [as_lists(again, 1), as_lists(again, 0)] == [second, first]


def test_transpositions_and_slices_are_uniform():
  rows = make([np.full(80, 60)], longest=48, semitones=2, random_slices=True)
  drawn = [rows.in_epoch(epoch)[0] for epoch in range(600)]
  moves, firsts = [row[0] - 60 for row in drawn], [len(row) // 4 for row in drawn]
  for found, wanted in ((moves, range(-2, 3)), (firsts, range(9, 13))):
    numbers, counts = np.unique(found, return_counts=True)
    assert numbers.tolist() == [*wanted]
    assert counts.min() > 0.7 * 600 / len(wanted)
  assert abs(np.corrcoef(moves, firsts)[0, 1]) < 0.15


GRID = np.array([[67, 64, 60, 48], [67, 65, -1, 50]])


def write(path, grid=GRID):
  path.parent.mkdir(parents=True, exist_ok=True)
  voices.CODEC.write(voices.encode(grid), path)


def test_sub_folders_are_splits_and_their_files_pieces_by_name(tmp_path):
  names = ["train/b.mid", "train/more/c.MIDI", "train/a.midi", "valid/a.mid"]
  for number, name in enumerate(names):
    write(tmp_path / name, GRID + np.array([number, 0, 0, 0]))
  write(tmp_path / "elsewhere.mid")
  (tmp_path / "test").mkdir()  # empty: no split
  music = data.load_midi_folder(str(tmp_path), codec="voices")
  assert music.splits.keys() == {"train", "valid"}
  train, valid = ([x[0] - 71 for x in pieces] for pieces in music.splits.values())
  assert (train, valid) == ([2, 0, 1], [3])
  assert music.notes == (f"MIDI files of {tmp_path}: 3 train, 1 valid",)


def test_links_to_folders_are_followed(tmp_path):
  for name in ("a", "b"):
    write(tmp_path / "elsewhere" / f"{name}.mid")
  for split in ("train", "valid"):
    (tmp_path / "music").mkdir(exist_ok=True)
    (tmp_path / "music" / split).symlink_to(tmp_path / "elsewhere")
  music = data.load_midi_folder(str(tmp_path / "music"), codec="voices")
  assert music.notes == (f"MIDI files of {tmp_path}/music: 2 train, 2 valid",)


DRUM = mido.Message("note_on", channel=9, note=36)
DRUMS = mido.MidiTrack([DRUM, mido.MetaMessage("marker")])


def test_bad_files_are_skipped_and_named_and_hidden_ones_ignored(tmp_path):
  for name in ("train/a.mid", "train/b.mid", "valid/a.mid"):
    write(tmp_path / name)
  mido.MidiFile(tracks=[DRUMS]).save(tmp_path / "train" / "drums.mid")
  (tmp_path / "train" / "bad.mid").write_bytes(b"MThd")
  (tmp_path / "train" / "._a.mid").write_bytes(b"of macOS")
  music = data.load_midi_folder(str(tmp_path))
  sizes = {split: len(pieces) for split, pieces in music.splits.items()}
  assert sizes == dict(train=2, valid=1)
  damaged, drums = music.bad_files
  assert drums.startswith(f"no notes in {tmp_path / 'train' / 'drums.mid'}")
  assert damaged.startswith(f"cannot read MIDI file {tmp_path / 'train' / 'bad.mid'}")
  skipped = f"2 of 5 MIDI files skipped, see skipped.txt: {damaged}"
  assert music.notes[1] == skipped


def test_a_folder_of_mostly_bad_files_is_refused(tmp_path):
  for name in ("train/a.mid", "valid/a.mid", "train/.hidden.mid"):
    write(tmp_path / name)
  for name in "bcd":
    (tmp_path / "train" / f"{name}.mid").write_bytes(b"MThd")
  words = f"3 of 5 MIDI files of {tmp_path} cannot be used, such as this: cannot read"
  assert refusal(data.load_midi_folder, str(tmp_path)).startswith(words)


def split_by_file(folder, *names) -> dict[str, str]:
  """Returns the split of each file, of which only the name counts."""
  for name in names:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
  found = data.find_midi_files(folder)
  return {file.path.relative_to(folder).as_posix(): file.split for file in found}


@pytest.mark.parametrize("prefix", ["", "bach/"])
def test_files_are_split_by_the_first_depth_with_twenty_folders(tmp_path, prefix):
  pieces = [f"{prefix}{number:03}" for number in range(1, 21)]
  versions = ("original.mid", "versions/1.mid")
  names = [f"{piece}/{version}" for piece in pieces for version in versions]
  splits = split_by_file(tmp_path, *names, f"{prefix}readme.mid")
  for piece in pieces:
    for version in versions:
      assert splits[f"{piece}/{version}"] == data.choose_split(piece)
  assert len({*splits.values()}) > 1


def test_bad_folders_are_named(tmp_path):
  load, gone = data.load_midi_folder, tmp_path / "a"
  assert refusal(load, str(gone)) == f"no folder {gone}: check the name"
  write(tmp_path / "24.mid")  # its hash is in valid
  none = f"no MIDI file for train: put .mid or .midi files into {tmp_path}/train, or"
  assert refusal(load, str(tmp_path)).startswith(none)
  (tmp_path / "train").mkdir()
  (tmp_path / "train" / "a.mid").write_bytes(b"MThd")  # files are not read before
  none = f"no MIDI file for valid: put .mid or .midi files into {tmp_path}/valid"
  assert refusal(load, str(tmp_path)) == none


PIECES = {
  split: np.random.default_rng(number).integers(-1, 128, (number, 5, 4)).tolist()
  for number, split in enumerate(["valid", "test", "train"], 1)
}


def test_a_folder_gives_the_chorales_upstream(tmp_path, publish):
  (name,) = data.CHORALES.files
  (tmp_path / name).write_text(json.dumps(PIECES))
  publish(data, "CHORALES", tmp_path)
  splits = data.load_chorales(str(tmp_path)).splits
  assert splits.keys() == PIECES.keys()
  for split, pieces in splits.items():
    assert [voices.decode(piece).tolist() for piece in pieces] == PIECES[split]
