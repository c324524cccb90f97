"""The chorales; MIDI folders; rows with each piece once per epoch, sliced and moved at random."""

import itertools
import json

import mido
import numpy as np
from faults import refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.data.batching import Batches
from experiments.data.tokenizer import BOS, EOS, PAD
from experiments.music import data, performance, voices
from experiments.music.data import MusicRows

codecs = st.sampled_from([voices.CODEC, performance.CODEC])
some_pieces = st.lists(
  st.integers(1, 40).flatmap(
    lambda n: st.lists(st.integers(3, 131), min_size=n, max_size=n)
  ),
  min_size=1,
  max_size=6,
).map(lambda pieces: [np.array(piece) for piece in pieces])


def make(pieces, codec=voices.CODEC, **changes):
  return MusicRows(pieces, codec, **dict(longest=12) | changes)


def joined(rows) -> list[list[int]]:
  """Returns the pieces of rows."""
  found = [[]]
  for token in itertools.chain.from_iterable(row.tolist() for row in rows):
    found[-1].append(token)
    if token == EOS:
      found.append([])
  assert not found.pop()
  return found


def pieces_of(*lengths) -> list[np.ndarray]:
  random = np.random.default_rng(0)
  return [random.integers(40, 80, 4 * length) for length in lengths]


semitone_ranges = st.sampled_from([0, 3, 130])


@settings(max_examples=100)
@given(
  some_pieces,
  codecs,
  st.booleans(),
  st.integers(4, 20),
  st.integers(0, 3),
  semitone_ranges,
)
def test_rows_of_an_epoch_are_the_pieces_transposed_and_their_ends(
  pieces, codec, random_slices, longest, epoch, semitones
):
  rows = make(
    pieces, codec, random_slices=random_slices, longest=longest, semitones=semitones
  )
  of_epoch = rows.in_epoch(epoch)
  for piece, (*moved, end) in zip(pieces, joined(of_epoch), strict=True):
    possible = [
      codec.transpose(piece, by).tolist() for by in range(-semitones, semitones + 1)
    ]
    assert moved in possible and end == EOS
  assert len(of_epoch) == len(rows.lengths)
  assert (of_epoch.lengths <= rows.lengths).all() and rows.lengths.max() <= longest
  assert all(len(row) % codec.alignment == 0 or row[-1] == EOS for row in of_epoch)


@settings(max_examples=100)
@given(codecs, st.lists(st.integers(0, 387), max_size=8), st.integers(-60, 60))
def test_transposing_tokens_transposes_the_notes(codec, stream, semitones):
  tokens = np.array([BOS, *(3 + x % (codec.vocab_size - 3) for x in stream), EOS, PAD])
  first = 4 if codec is voices.CODEC else 3
  is_pitch = (tokens >= first) & (tokens < performance.TIME_SHIFT)
  pitches, by = (tokens[is_pitch] - first) % 128, semitones
  while len(pitches) and not 0 <= pitches.min() + by <= pitches.max() + by <= 127:
    by -= np.sign(by)
  moved = codec.transpose(tokens, semitones)
  for before, after in zip(
    codec.decode_score(tokens).parts, codec.decode_score(moved).parts, strict=True
  ):
    wanted = [note._replace(pitch=note.pitch + by) for note in before.notes]
    assert sorted(after.notes) == sorted(wanted)
  np.testing.assert_array_equal(moved[~is_pitch], tokens[~is_pitch])


def test_rows_depend_on_the_seed_and_the_epoch_alone():
  pieces = pieces_of(9, 30, 41)
  rows_of = lambda rows, epoch: [row.tolist() for row in rows.in_epoch(epoch)]
  vary = lambda seed=0, semitones=5, random_slices=True: make(
    pieces, longest=40, semitones=semitones, random_slices=random_slices, seed=seed
  )
  assert rows_of(vary(), 2) == rows_of(vary(), 2)
  for changes in (dict(), dict(semitones=0), dict(random_slices=False)):
    rows = vary(**changes)
    assert rows_of(rows, 0) != rows_of(rows, 1)
    assert rows_of(rows, 0) != rows_of(vary(seed=1, **changes), 0)
    assert rows_of(rows, 0) == rows_of(
      vary(**changes), 0
    )  # after another epoch was read
  still = vary(semitones=0, random_slices=False)
  assert rows_of(still, 0) == rows_of(still, 1)


def test_transpositions_and_slices_are_uniform():
  piece = np.full(20 * 4, 60)
  rows = make([piece], longest=12 * 4, semitones=2, random_slices=True)
  drawn = [rows.in_epoch(epoch) for epoch in range(600)]
  moves = [row[0][0] - 60 for row in drawn]
  firsts = [len(row[0]) // 4 for row in drawn]
  for found, wanted in ((moves, range(-2, 3)), (firsts, range(9, 13))):
    numbers, counts = np.unique(found, return_counts=True)
    assert numbers.tolist() == [*wanted]
    assert counts.min() > 0.7 * 600 / len(wanted)
  assert abs(np.corrcoef(moves, firsts)[0, 1]) < 0.15


def test_the_batches_of_an_epoch_hold_its_rows():
  rows = make(
    pieces_of(2, 5, 9, 14, 20), longest=24, semitones=3, random_slices=True, seed=7
  )
  options = dict(boundaries=(16, 24), budget=48, seed=7)
  batches = Batches(rows, **options)
  for epoch in range(4):
    steps = range(epoch * batches.num_per_epoch, (epoch + 1) * batches.num_per_epoch)
    found = [row[row != PAD].tolist() for step in steps for row in batches[step].tokens]
    assert sorted(filter(None, found)) == sorted(
      row.tolist() for row in rows.in_epoch(epoch)
    )


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
  (tmp_path / "train" / "readme.txt").write_text("no music")
  music = data.load_midi_folder(str(tmp_path), codec="voices")
  sopranos = {
    split: [x[0] - 4 - 67 for x in pieces] for split, pieces in music.splits.items()
  }
  assert sopranos == {"train": [2, 0, 1], "valid": [3]}
  assert music.notes == (f"MIDI files of {tmp_path}: 3 train, 1 valid",)
  first, *_ = data.load_midi_folder(str(tmp_path)).splits[
    "train"
  ]  # as events by default
  np.testing.assert_array_equal(
    first, performance.CODEC.read(tmp_path / "train" / "a.midi")
  )


DRUMS = mido.MidiTrack(
  [mido.Message("note_on", channel=9, note=36), mido.MetaMessage("marker")]
)


def test_bad_files_are_skipped_and_named_and_hidden_ones_ignored(tmp_path):
  for name in ("train/a.mid", "train/b.mid", "valid/a.mid", "test/c.mid"):
    write(tmp_path / name)
  mido.MidiFile(tracks=[DRUMS]).save(tmp_path / "train" / "drums.mid")
  (tmp_path / "test" / "c.mid").write_bytes(b"MThd")
  (tmp_path / "train" / "._a.mid").write_bytes(b"of macOS")
  (tmp_path / "train" / ".trash").mkdir()
  (tmp_path / "train" / ".trash" / "a.mid").write_bytes(b"gone")
  music = data.load_midi_folder(str(tmp_path))
  assert {split: len(pieces) for split, pieces in music.splits.items()} == dict(
    train=2, valid=1
  )
  damaged, drums = music.bad_files
  assert drums.startswith(f"no notes in {tmp_path / 'train' / 'drums.mid'}")
  assert damaged.startswith(f"cannot read MIDI file {tmp_path / 'test' / 'c.mid'}")
  files, skipped = music.notes
  assert files == f"MIDI files of {tmp_path}: 2 train, 1 valid"
  assert skipped == f"2 of 5 MIDI files skipped, see skipped.txt: {damaged}"
  write(tmp_path / "train" / ".b.mid")  # hidden, and good
  (tmp_path / "train" / "b.mid").write_bytes(b"MThd")
  most = f"3 of 5 MIDI files of {tmp_path} cannot be used, such as this: cannot read MIDI file"
  assert refusal(data.load_midi_folder, str(tmp_path)).startswith(most)
  for name in "bcdef":
    write(tmp_path / "train" / f"{name}.mid")
  (tmp_path / "valid" / "a.mid").write_bytes(b"MThd")
  no_valid = (
    f"no good MIDI file for valid: cannot read MIDI file {tmp_path / 'valid' / 'a.mid'}"
  )
  assert refusal(data.load_midi_folder, str(tmp_path)).startswith(no_valid)


def split_by_file(folder, *names) -> dict[str, str]:
  """Returns the split of each file, of which only the name counts."""
  for name in names:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
  found = data.find_midi_files(folder)
  return {file.path.relative_to(folder).as_posix(): file.split for file in found}


def test_files_are_split_by_the_first_depth_with_twenty_folders(tmp_path):
  versions = ("original.mid", "versions/1.mid", "versions/2.mid")
  pieces = [f"{piece:03}" for piece in range(1, 21)]
  for folder, prefix in (
    (tmp_path / "a", ""),
    (tmp_path / "b", "bach/"),
    (tmp_path / "c", "x/y/"),
  ):
    names = [f"{prefix}{piece}/{version}" for piece in pieces for version in versions]
    choose_split = split_by_file(folder, *names, f"{prefix}readme.mid")
    for piece in pieces:
      splits = {choose_split[f"{prefix}{piece}/{version}"] for version in versions}
      assert splits == {data.choose_split(f"{prefix}{piece}")}
    assert choose_split[f"{prefix}readme.mid"] == data.choose_split(
      f"{prefix}readme.mid"
    )
    assert len({*choose_split.values()}) > 1


def test_files_in_fewer_folders_are_split_by_their_path(tmp_path):
  names = [f"{year}/{name}.mid" for year in range(2000, 2019) for name in "abcdef"]
  assert split_by_file(tmp_path / "years", *names) == {
    x: data.choose_split(x) for x in names
  }
  flat = [f"{number}.mid" for number in range(40)]  # a path is a name
  assert split_by_file(tmp_path / "flat", *flat) == {
    x: data.choose_split(x) for x in flat
  }


def test_the_pieces_of_each_split_are_counted(tmp_path):
  names = [f"{piece}/{version}.mid" for piece in range(20) for version in "ab"]
  for name in names:
    write(tmp_path / name)
  pieces = [data.choose_split(str(piece)) for piece in range(20)]
  counts = {split: pieces.count(split) for split in data.SPLITS}
  assert counts["train"] and counts["valid"]
  said = [f"{2 * n} {split} ({n} pieces)" for split, n in counts.items() if n]
  (note,) = data.load_midi_folder(str(tmp_path), codec="voices").notes
  assert note == f"MIDI files of {tmp_path}: {', '.join(said)}"


def test_splits_have_80_10_and_10_percent():
  splits = [data.choose_split(f"{number}.mid") for number in range(2000)]
  shares = [splits.count(split) / 2000 for split in data.SPLITS]
  np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.03)


def test_bad_folders_are_named(tmp_path):
  load = data.load_midi_folder
  none = "no MIDI file for {0}: put .mid or .midi files into {1}/{0}"
  assert (
    refusal(load, str(tmp_path / "a")) == f"no folder {tmp_path / 'a'}: check the name"
  )
  write(tmp_path / "24.mid")  # its hash is in valid
  more = f", or more into {tmp_path}, whose pieces are split by name"
  assert refusal(load, str(tmp_path)) == none.format("train", tmp_path) + more
  file = tmp_path / "24.mid"
  assert refusal(load, str(file)) == f"{file} is a file: give the folder that it is in"
  write(tmp_path / "train" / "a.mid")
  assert refusal(load, str(tmp_path)) == none.format("valid", tmp_path)


PIECES = {
  split: np.random.default_rng(number).integers(-1, 128, (number, 5, 4)).tolist()
  for number, split in enumerate(["valid", "test", "train"], 1)
}


def test_a_folder_gives_the_chorales_upstream(tmp_path, publish):
  (tmp_path / "jsb").mkdir()
  (tmp_path / "jsb" / data._CHORALES).write_text(json.dumps(PIECES))
  publish(data, "CHORALES", tmp_path / "jsb")
  splits = data.load_chorales(str(tmp_path / "jsb")).splits
  grids = {
    split: [voices.decode(x).tolist() for x in pieces]
    for split, pieces in splits.items()
  }
  assert grids == PIECES
