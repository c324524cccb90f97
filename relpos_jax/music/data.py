"""Pieces as tokens, by split: Bach's chorales, a folder of MIDI files, and rows for training."""

import functools
import hashlib
import json
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.checksums import UrlInfo
from tensorflow_datasets.core.utils import Size

from relpos_jax.data.builders import SPLITS as TFDS_SPLITS
from relpos_jax.data.builders import prepare, read_split, upstream_content
from relpos_jax.data.tokenizer import EOS, Ragged
from relpos_jax.errors import InputError
from relpos_jax.files import local_path
from relpos_jax.music import performance, voices
from relpos_jax.music.midi_files import Codec
from relpos_jax.typing import Int

CODECS: dict[str, Codec] = {"events": performance.CODEC, "voices": voices.CODEC}
SPLITS = ("train", "valid", "test")

_CHORALES = "Jsb16thSeparated.json"
_URL = (
  "https://raw.githubusercontent.com/czhuang/JSB-Chorales-dataset/"
  f"9a7f733ddb4ed91f48da64ac7f0f621c34aadd4d/{_CHORALES}"
)
_UPSTREAM = "github.com/czhuang/JSB-Chorales-dataset"
_REMEDY = (
  f"to use a local file, give --config.data.chorales.path=FOLDER with {_CHORALES} of {_UPSTREAM}"
)
# The chorales, uncompressed.
_SIZE = 1_666_444
_SHA256 = "79294cc374f9252e95ef4b703161524c1c53dc1f712c236f00f1c1f5d54af5a7"

# Batches are shuffled with the same key: the counter keeps the two random streams apart.
_COUNTER = np.array([0, 0, 0, 1], np.uint64)


class Music(NamedTuple):
  """Pieces by split, as tokens without begin and end, and notes for the log."""

  splits: Mapping[str, Sequence[Int[np.ndarray, "_"]]]
  notes: tuple[str, ...] = ()


def load_chorales(path: str = "") -> Music:
  """Loads 229 chorales for training, 76 valid, 77 test: Boulanger-Lewandowski et al. 2012's splits.

  `relpos_jax.music.voices` writes them as tokens; upstream's order is kept. TFDS prepares them once
  under TFDS_DATA_DIR (default ~/tensorflow_datasets) from the upstream repository, 1.7 MB, or from
  a copy of its file, plain or .gz, in the folder `path`. The sha256 of the file is checked.

  Raises InputError: a file is missing or wrong, or there is no network.

  >>> music = load_chorales("JSB-Chorales-dataset")  # doctest: +SKIP
  >>> music.splits["train"][0][:8]  # doctest: +SKIP
  array([78, 74, 69, 62, 78, 74, 69, 62])
  """
  folder = local_path(path) if path else None
  if folder:
    upstream_content(folder, _CHORALES, _SHA256, _UPSTREAM)
  builder = prepare(JsbChorales, _REMEDY, url="" if folder else _URL, manual_dir=folder)
  tokens = lambda item: voices.encode(item["grid"])
  return Music({split: read_split(builder, name, tokens) for split, name in TFDS_SPLITS.items()})


class JsbChorales(tfds.core.GeneratorBasedBuilder):
  """The TFDS builder of the chorales, from a local folder or from upstream."""

  VERSION = tfds.core.Version("1.0.0")
  MANUAL_DOWNLOAD_INSTRUCTIONS = f"{_CHORALES} of {_UPSTREAM}."
  # TFDS checks size and checksum; a wrong download is not cached.
  url_infos = {_URL: UrlInfo(size=Size(_SIZE), checksum=_SHA256, filename=_CHORALES)}  # noqa: RUF012

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description="Chorales by Bach: MIDI pitches of four voices per 16th note, -1 for silence.",
      features=tfds.features.FeaturesDict(
        {"grid": tfds.features.Tensor(shape=(None, 4), dtype=np.int64)}
      ),
      homepage=f"https://{_UPSTREAM}",
      license="None stated; the scores are in the public domain.",
      citation="Boulanger-Lewandowski et al. 2012, arXiv:1206.6392; Huang et al. 2017, Coconet.",
      # Upstream's order makes scores of single pieces comparable.
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager: tfds.download.DownloadManager):
    folder = pathlib.Path(dl_manager._manual_dir)
    if any(folder.glob(f"{_CHORALES}*")):
      content = upstream_content(folder, _CHORALES, _SHA256, _UPSTREAM)
    else:
      content = pathlib.Path(dl_manager.download(_URL)).read_bytes()
    pieces = json.loads(content)
    names = {split: "valid" if split == "validation" else split for split in TFDS_SPLITS.values()}
    return {split: self._generate_examples(pieces[name]) for split, name in names.items()}

  def _generate_examples(self, grids) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    for index, grid in enumerate(grids):
      yield index, dict(grid=np.array(grid, np.int64))


def load_midi_folder(path: str = "", codec: str = "events") -> Music:
  """Loads the .mid and .midi files of a folder and its sub-folders, one piece per file, by name.

  `codec` is "events" (`relpos_jax.music.performance`) for any music, or "voices"
  (`relpos_jax.music.voices`) for four-part music on a grid of 16th notes.

  Sub-folders train, valid and test are the splits. A folder without them is split by a hash of each
  file's name, on average 80, 10 and 10 %: adding or removing files moves no other file to another
  split. Splits without files are left out.

  Raises InputError: the folder is missing or has no file for training, or a file is bad.

  >>> load_midi_folder("maestro").splits["train"][0]  # doctest: +SKIP
  array([372,  67, 265, ...])
  """
  if not path:
    raise InputError("no folder of MIDI files: give --config.data.midi.path")
  folder = local_path(path)
  if not os.path.isdir(folder):
    raise InputError(f"no folder {folder}: check the name")
  midi_files = lambda of: sorted(x for x in of.rglob("*") if x.suffix.lower() in (".mid", ".midi"))
  if any(os.path.isdir(folder / split) for split in SPLITS):
    found = {split: midi_files(folder / split) for split in SPLITS}
  else:
    files = midi_files(folder)
    found = {split: [file for file in files if split_of(file.name) == split] for split in SPLITS}
  if not found["train"]:
    raise InputError(f"no MIDI file to train on: put .mid or .midi files into {folder / 'train'}")
  found = {split: files for split, files in found.items() if files}
  splits = {split: [CODECS[codec].read(file) for file in files] for split, files in found.items()}
  counts = ", ".join(f"{len(files):,} {split}" for split, files in found.items())
  return Music(splits, (f"MIDI files of {path}: {counts}",))


def split_of(name: str) -> str:
  """Returns the split of a file name."""
  percent = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
  return "train" if percent < 80 else "valid" if percent < 90 else "test"


class MusicRows:
  """The rows of each epoch, a function of the seed and the epoch alone: `rows.in_epoch(3)`.

  A piece and its end are sliced into as few rows as possible, at multiples of `alignment`; the rows
  of an epoch, concatenated, are the pieces. Safe to read from several threads.

  Attributes:
    lengths: the largest number of tokens of each row in any epoch.

  >>> rows = MusicRows([np.arange(40, 45)], longest=5, alignment=2, random_slices=True,
  ...                  transpose=np.add, semitones=3, seed=0)
  >>> [[row.tolist() for row in rows.in_epoch(epoch)] for epoch in (0, 1)]
  [[[42, 43], [44, 45, 46, 2]], [[42, 43, 44, 45], [46, 2]]]
  """

  def __init__(
    self,
    pieces: Sequence[Int[np.ndarray, "_"]],
    *,
    longest: int,
    alignment: int,
    random_slices: bool = False,
    transpose: Callable[[np.ndarray, int], np.ndarray] | None = None,
    semitones: int = 0,
    seed: int = 0,
  ):
    """Computes the rows' lengths.

    Args:
      pieces: tokens, without begin and end.
      longest: the largest number of tokens of a row, the end included.
      alignment, transpose: of the codec.
      random_slices: draws other slices of a piece in each epoch, uniformly. Otherwise all rows of a
        piece but the last are full.
      semitones: each epoch transposes a piece by up to this many, up or down, uniformly.
      seed: of slices and transpositions.
    """
    self._pieces, self._seed = pieces, seed
    self._transpose, self._semitones = transpose, semitones
    self._size, self._alignment = longest // alignment * alignment, alignment
    self._random_slices = random_slices
    lengths = [self._slice(len(piece), 0.0) for piece in pieces]
    if random_slices:
      lengths = [np.full(len(row), self._size) if len(row) > 1 else row for row in lengths]
    self.lengths = np.concatenate(lengths)
    self._lock = threading.Lock()
    self._rows = functools.lru_cache(maxsize=2)(self._make)

  def in_epoch(self, epoch: int) -> Ragged:
    """Returns the rows of an epoch; their number is the same in each."""
    with self._lock:
      return self._rows(epoch)

  def _make(self, epoch: int) -> Ragged:
    key = np.array([self._seed % 2**64, epoch], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=_COUNTER))
    moves = generator.integers(-self._semitones, self._semitones + 1, len(self._pieces))
    phases = generator.random(len(self._pieces)) * float(self._random_slices)
    tokens, lengths = [], []
    for piece, semitones, phase in zip(self._pieces, moves.tolist(), phases.tolist(), strict=True):
      moved = self._transpose(piece, semitones) if self._transpose and semitones else piece
      tokens += [moved, [EOS]]
      lengths.append(self._slice(len(piece), phase))
    return Ragged.joined(np.concatenate(tokens).astype(np.int32), np.concatenate(lengths))

  def _slice(self, num_tokens: int, phase: float) -> Int[np.ndarray, "_"]:
    """Returns the lengths of a piece's rows; `phase` in [0, 1) shortens the first row.

    The last row is shorter by what the first one holds more.
    """
    length = num_tokens + 1
    number = -(-length // self._size)
    free = (number * self._size - length) // self._alignment
    shift = int(phase * (free + 1)) * self._alignment
    return np.diff(np.clip(np.arange(number + 1) * self._size - shift, 0, length))
