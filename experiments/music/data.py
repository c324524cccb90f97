"""Loads chorales and folders of MIDI files as tokens, and slices them for training."""

import dataclasses
import functools
import glob
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.data.tokenizer import EOS, Ragged
from experiments.data.upstream import Corpus, Upstream
from experiments.errors import InputError
from experiments.files import Path, write_lines
from experiments.music import performance, voices
from experiments.music.midi_files import Codec
from relpos_jax.typing import Int

CODECS: dict[str, Codec] = {"events": performance.CODEC, "voices": voices.CODEC}
SPLITS = ("train", "valid", "test")
_SKIPPED = "skipped.txt"  # in a run directory
# This many folders at one depth are pieces or albums. Fewer may be composers or years,
# too few to be divided into splits.
_MANY_FOLDERS = 20

_CHORALES = "Jsb16thSeparated.json"
CHORALES = Upstream(
  "chorales",
  f"{_CHORALES} of github.com/czhuang/JSB-Chorales-dataset",
  "https://raw.githubusercontent.com/czhuang/JSB-Chorales-dataset/"
  "9a7f733ddb4ed91f48da64ac7f0f621c34aadd4d/",
  {_CHORALES: "79294cc374f9252e95ef4b703161524c1c53dc1f712c236f00f1c1f5d54af5a7"},
)

# Batches are shuffled with the same key. The counter selects a different random stream.
_COUNTER = np.array([0, 0, 0, 1], np.uint64)


def load_chorales(path: str = "") -> Corpus:
  """Loads Bach's chorales: 229 for training, 76 for validation, 77 for testing.

  Boulanger-Lewandowski et al. 2012 chose the splits, and the order is upstream's.
  `experiments.music.voices` converts the chorales to tokens. They are downloaded (1.7
  MB), unless the folder `path` holds a copy of the file: see `Upstream`.

  Raises InputError if a file is missing or wrong, or if there is no network.
  """
  grids = json.loads(CHORALES.read(_CHORALES, path))
  splits = {}
  for split in SPLITS:
    splits[split] = [voices.encode(np.array(grid)) for grid in grids[split]]
  return Corpus(splits)


def load_midi_folder(path: str = "", codec: str = "events") -> Corpus:
  """Loads the MIDI files of a folder as tokens; `find_midi_files` chooses the splits.

  The `codec` "events" (`experiments.music.performance`) is for any music. "voices"
  (`experiments.music.voices`) is for four-part music on a grid of 16th notes.
  Unreadable files are skipped. The test split may be empty; it is then left out.

  Raises InputError if the folder is missing, if it has no readable file for training or
  for validation, or if more than half of its files are unreadable.
  """
  folder = _check_folder(path)
  files = find_midi_files(folder)
  _check_splits(files, folder)  # before reading, which may take minutes
  tokens, skipped = _read(files, CODECS[codec], path)
  splits, counts = {}, []
  for split in SPLITS:
    good = [file for file in tokens if file.split == split]
    if good:
      splits[split] = [tokens[file] for file in good]
      counts.append(_count(split, good))
    elif split != "test":
      bad = [file for file in skipped if file.split == split]
      raise InputError(f"no good MIDI file for {split}: {skipped[bad[0]]}")
  notes = [f"MIDI files of {path}: {', '.join(counts)}"]
  reasons = tuple(skipped.values())
  if reasons:
    some = f"{len(reasons):,} of {len(files):,} MIDI files skipped"
    notes.append(f"{some}, see {_SKIPPED}: {reasons[0]}")
  return Corpus(splits, tuple(notes), bad_files=reasons)


def write_skipped(lines: Sequence[str], workdir: Path) -> None:
  """Writes skipped.txt into a run directory, unless `lines` is empty.

  It has a line for each MIDI file that was skipped.
  """
  (workdir / _SKIPPED).unlink(missing_ok=True)  # left by an earlier start of the run
  if lines:
    write_lines(workdir / _SKIPPED, lines)


def _check_folder(path: str) -> pathlib.Path:
  """Returns the folder; raises InputError if there is none."""
  folder = pathlib.Path(path).expanduser()
  if not path:
    raise InputError("no folder of MIDI files: give --config.data.midi.path")
  if folder.is_file():
    raise InputError(f"{folder} is a file: give the folder that it is in")
  if not folder.is_dir():
    raise InputError(f"no folder {folder}: check the name")
  return folder


class MidiFile(NamedTuple):
  """Names a MIDI file, its split, and the piece that it belongs to.

  Several files may belong to one piece. They are all in the same split.
  """

  path: pathlib.Path
  split: str
  piece: str


def find_midi_files(folder: pathlib.Path) -> list[MidiFile]:
  """Finds the .mid and .midi files of a folder and its sub-folders, in order of name.

  Hidden files and folders are ignored. If there is a sub-folder train, valid or test,
  these sub-folders are the splits. Otherwise a hash of each piece's path chooses its
  split, on average 80% train, 10% valid and 10% test. So a piece keeps its split when
  others are added or removed, unless that changes what a piece is.

  A piece is a single file, or all files in a folder. Folders at one depth are pieces:
  the first depth that has at least 20 folders, with some in train and some in valid
  according to the hash. If there is no such depth, each file is a piece.
  """
  names = []
  # Not rglob: it does not follow links to folders. glob leaves out hidden files.
  found = glob.glob("**/*", root_dir=folder, recursive=True)
  for path in sorted(map(pathlib.PurePath, found)):
    if path.suffix.lower() in (".mid", ".midi"):
      names.append(path.parts)
  has_splits = _has_splits(folder)
  depth = _depth_of_pieces(names)
  files = []
  for parts in names:
    piece = "/".join(parts if has_splits else parts[:depth])
    split = parts[0] if has_splits else choose_split(piece)
    if split in SPLITS:
      files.append(MidiFile(folder.joinpath(*parts), split, piece))
  return files


def _has_splits(folder: pathlib.Path) -> bool:
  return any((folder / split).is_dir() for split in SPLITS)


def _check_splits(files: Sequence[MidiFile], folder: pathlib.Path) -> None:
  """Raises InputError unless there are files for training and for validation."""
  splits = {file.split for file in files}
  for split in ("train", "valid"):
    if split in splits:
      continue
    remedy = f"put .mid or .midi files into {folder / split}"
    if not _has_splits(folder):
      remedy += f", or more into {folder}, whose pieces are split by name"
    raise InputError(f"no MIDI file for {split}: {remedy}")


def _read(
  files: Sequence[MidiFile], codec: Codec, folder: str
) -> tuple[dict[MidiFile, np.ndarray], dict[MidiFile, str]]:
  """Reads files; returns the tokens of the good ones, and the errors of the others."""
  tokens, skipped = {}, {}
  for file in files:
    try:
      tokens[file] = codec.read(file.path)
    except InputError as error:
      skipped[file] = str(error)
  if len(skipped) > len(tokens):
    first, *_ = skipped.values()
    some = f"{len(skipped):,} of {len(files):,} MIDI files of {folder} cannot be used"
    raise InputError(f"{some}, such as this: {first}")
  return tokens, skipped


def _depth_of_pieces(names: Sequence[tuple[str, ...]]) -> int | None:
  """Finds the depth at which folders are pieces; None if each file is a piece.

  `names` are the parts of each file's path; see `find_midi_files`.
  """
  for depth in range(1, max(map(len, names), default=1)):
    folders = {parts[:depth] for parts in names if len(parts) > depth}
    splits = {choose_split("/".join(folder)) for folder in folders}
    if len(folders) >= _MANY_FOLDERS and {"train", "valid"} <= splits:
      return depth
  return None


def _count(split: str, files: Sequence[MidiFile]) -> str:
  """Describes how many files a split has, and how many pieces if they are fewer."""
  count = f"{len(files):,} {split}"
  num_pieces = len({file.piece for file in files})
  if num_pieces < len(files):
    count += f" ({num_pieces:,} pieces)"
  return count


def choose_split(name: str) -> str:
  """Chooses the split of a piece from a hash of its name."""
  digest = hashlib.sha256(name.encode()).digest()
  percent = int.from_bytes(digest[:8], "big") % 100
  if percent < 80:
    return "train"
  return "valid" if percent < 90 else "test"


@dataclasses.dataclass(eq=False)
class MusicRows:
  """Slices and transposes pieces into rows, anew in each epoch: `rows.in_epoch(3)`.

  The rows depend on the seed and the epoch alone. A piece, with the end token, becomes
  as few rows as possible. It is cut only at multiples of the codec's alignment. Joined
  together, the rows of an epoch are the transposed pieces. Several threads may read the
  rows.

  Attributes:
    pieces: tokens of the codec, without begin and end tokens.
    longest: the largest number of tokens in a row, including the end token.
    random_slices: cuts a piece at other places in each epoch, chosen uniformly.
      Otherwise all rows of a piece except the last are full.
    semitones: transposes a piece in each epoch by up to this many semitones, up or
      down, chosen uniformly.
    seed: determines slices and transpositions.
    lengths: the largest number of tokens that each row has in any epoch.

  >>> rows = MusicRows([np.arange(40, 45)], performance.CODEC, longest=4,
  ...                  random_slices=True, semitones=3, seed=0)
  >>> [[row.tolist() for row in rows.in_epoch(epoch)] for epoch in (0, 1)]
  [[[42, 43, 44], [45, 46, 2]], [[42, 43, 44, 45], [46, 2]]]
  """

  pieces: Sequence[Int[np.ndarray, "_"]]
  codec: Codec
  _: dataclasses.KW_ONLY
  longest: int
  random_slices: bool = False
  semitones: int = 0
  seed: int = 0

  def __post_init__(self):
    self._size = self.longest // self.codec.alignment * self.codec.alignment
    lengths = []
    for piece in self.pieces:
      rows = self._slice(len(piece), 0.0)
      if self.random_slices and len(rows) > 1:
        rows[:] = self._size
      lengths.append(rows)
    self.lengths = np.concatenate(lengths)
    # Two: the thread that prepares batches may be in the next epoch.
    self.in_epoch = functools.lru_cache(maxsize=2)(self.in_epoch)

  def in_epoch(self, epoch: int) -> Ragged:
    """Returns the rows of an epoch; every epoch has the same number of rows."""
    key = np.array([self.seed % 2**64, epoch], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=_COUNTER))
    moves = generator.integers(-self.semitones, self.semitones + 1, len(self.pieces))
    phases = generator.random(len(self.pieces)) * self.random_slices
    tokens, lengths = [], []
    for piece, semitones, phase in zip(self.pieces, moves, phases, strict=True):
      tokens += [self.codec.transpose(piece, int(semitones)), [EOS]]
      lengths.append(self._slice(len(piece), float(phase)))
    values = np.concatenate(tokens).astype(np.int32)
    return Ragged.from_lengths(values, np.concatenate(lengths))

  def _slice(self, num_tokens: int, phase: float) -> Int[np.ndarray, "_"]:
    """Returns the lengths of a piece's rows.

    `phase` in [0, 1) moves the cuts: 0 fills all rows except the last, and larger
    values shorten the first row and lengthen the last.
    """
    length = num_tokens + 1
    number = -(-length // self._size)
    free = (number * self._size - length) // self.codec.alignment
    shift = int(phase * (free + 1)) * self.codec.alignment
    return np.diff(np.clip(np.arange(number + 1) * self._size - shift, 0, length))
