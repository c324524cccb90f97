"""A folder of MIDI files of the user's as music to train on."""

import hashlib
import os
import pathlib

from relpos_jax.errors import InputError
from relpos_jax.files import local_path
from relpos_jax.music import performance, voices
from relpos_jax.music.codec import Codec, Music

CODECS: dict[str, Codec] = {"events": performance.CODEC, "voices": voices.CODEC}
SPLITS = ("train", "valid", "test")
_SUFFIXES = (".mid", ".midi")
_SHARES = {"train": 80, "valid": 10, "test": 10}  # in percent


def load(path: str = "", codec: str = "events") -> Music:
  """The .mid and .midi files of a folder and its sub-folders, a piece each, by name.

  `codec` is "events" (`relpos_jax.music.performance`) for any music, or "voices"
  (`relpos_jax.music.voices`) for four-part music on a grid of 16th notes.

  Where the folder has sub-folders train, valid or test, those are the splits. Where it has not,
  the hash of a file's name says its split: 80, 10 and 10 % on average, and a file stays where it is
  whatever other files come and go. A split without files is not there; train must be.

  Raises InputError, a line that names file or folder: no folder, no MIDI file in it, none for
  training, a file that cannot be read or has no notes, another codec.

  >>> load("maestro").splits["train"][0]  # doctest: +SKIP
  array([372,  67, 265, ...])
  """
  if codec not in CODECS:
    raise InputError(f"unknown codec {codec!r}: the known ones are {', '.join(CODECS)}")
  files = split_files(path)
  read = CODECS[codec].read
  splits = {split: [read(file) for file in found] for split, found in files.items()}
  counts = ", ".join(f"{len(found):,} {split}" for split, found in files.items())
  return Music(splits, (f"MIDI files of {path}: {counts}",))


def split_files(path: str) -> dict[str, list[pathlib.Path]]:
  """The MIDI files of a folder by split, those splits alone that have any."""
  if not path:
    raise InputError("no folder of MIDI files: give --config.data.midi.path")
  folder = local_path(path)
  # The os says no, where pathlib would raise, of a folder that may not be looked into.
  if not os.path.isdir(folder):
    raise InputError(f"no folder {folder}: check the name")
  named = [split for split in SPLITS if os.path.isdir(folder / split)]
  if named:
    found = {split: _midi_files(folder / split) for split in named}
  else:
    files = _midi_files(folder)
    found = {split: [file for file in files if split_of(file.name) == split] for split in SPLITS}
  if not any(found.values()):
    raise InputError(f"no MIDI file in {folder}: give a folder with .mid or .midi files")
  if not found.get("train"):
    raise InputError(f"no MIDI file to train on: put some into {folder / 'train'}")
  return {split: files for split, files in found.items() if files}


def split_of(name: str) -> str:
  """The split of a file of this name.

  >>> [split_of(name) for name in ("23.mid", "24.mid")]
  ['train', 'valid']
  """
  place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
  for split, share in _SHARES.items():
    if place < share:
      return split
    place -= share
  raise AssertionError("shares add up to less than 100")


def _midi_files(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(
    path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES and os.path.isfile(path)
  )
