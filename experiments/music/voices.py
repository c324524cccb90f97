"""Converts music in four voices, such as chorales, to tokens on a grid of 16th notes.

A grid is an array [steps, 4] of MIDI pitches, from soprano to bass; -1 is silence.
Equal pitches in succession are one note, because a grid cannot tell held from repeated
notes.

The tokens are the four voices of each step in turn (Huang et al. 2018, section 4.1).
They are 0 for padding, 1 begin, 2 end, 3 silence, and 4 + p for MIDI pitch p. Chorales
only use pitches 36 to 81, but all 128 have tokens, so that any piece can be encoded and
transposed.
"""

import itertools
import statistics
from collections.abc import Sequence

import numpy as np

from experiments.data.tokenizer import strip_special
from experiments.errors import InputError
from experiments.music.midi_files import Codec, Note, Part, Score
from relpos_jax.typing import Float, Int, Integer

VOICES = ("Soprano", "Alto", "Tenor", "Bass")
SILENCE = 3
FIRST_PITCH = 4
VOCAB_SIZE = FIRST_PITCH + 128

_STEPS_PER_QUARTER = 4
_TICKS_PER_STEP = 120


def encode(grid: Integer[np.ndarray, "steps 4"]) -> Int[np.ndarray, "L"]:
  """Encodes a grid as tokens, four per step.

  >>> encode(np.array([[67, 64, 60, 48], [67, 65, -1, 50]]))
  array([71, 68, 64, 52, 71, 69,  3, 54])
  """
  return np.where(grid < 0, SILENCE, grid + FIRST_PITCH).reshape(-1).astype(int)


def decode(tokens: Sequence[int] | np.ndarray) -> Int[np.ndarray, "steps 4"]:
  """Decodes the tokens that `encode` returns to a grid.

  Begin, end and padding around the piece are skipped, and so is an incomplete last
  step.

  >>> decode([1, 71, 68, 64, 52, 71, 69, 3, 54, 71, 2, 0]).tolist()
  [[67, 64, 60, 48], [67, 65, -1, 50]]
  """
  row = strip_special(tokens)
  num_steps = len(row) // len(VOICES)
  steps = np.resize(row, (num_steps, len(VOICES)))
  return np.where(steps == SILENCE, -1, steps - FIRST_PITCH)


def times(tokens: Sequence[int] | np.ndarray) -> Float[np.ndarray, "L"]:
  """Returns the time of each token, and of a token after the last, in 16th notes.

  >>> times([71, 68, 64, 52, 71]).tolist()
  [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
  """
  return (np.arange(len(tokens) + 1) // len(VOICES)).astype(float)


def score(grid: Integer[np.ndarray, "steps 4"]) -> Score:
  """Makes a score from a grid: four named parts, at 80 quarter notes per minute."""
  parts = [Part(name, []) for name in VOICES]
  for part, pitches in zip(parts, grid.T, strict=True):
    changes = np.flatnonzero(np.diff(pitches, prepend=-2, append=-2)).tolist()
    for start, end in itertools.pairwise(changes):
      pitch = int(pitches[start])
      if pitch >= 0:
        ticks = start * _TICKS_PER_STEP, end * _TICKS_PER_STEP
        part.notes.append(Note(*ticks, pitch, velocity=80))
  return Score(parts, _STEPS_PER_QUARTER * _TICKS_PER_STEP, [(0, 60 / 80)])


def round_to_grid(score: Score, name: str = "the score") -> Int[np.ndarray, "steps 4"]:
  """Converts a score of four parts to a grid, with times rounded to 16th notes.

  It restores the grid from which the function `voices.score` made a score. Only silence
  at the end of the grid is lost.

  Parts with the names in `VOICES` become these voices. If there are all four, other
  parts are ignored. If there are fewer, but no other parts, the missing voices are
  silent. Four parts with other names are ordered by mean pitch, the highest first.

  A note lasts at least one step. If two notes of a voice overlap, the later one counts.

  Raises InputError, with `name` in the message, for any other score.
  """
  notes = []
  for voice, part in enumerate(_choose_parts(score, name)):
    notes += [(*note, voice) for note in sorted(part.notes)]
  steps = np.array(notes)[:, :2] * _STEPS_PER_QUARTER / score.ticks_per_quarter
  starts, ends = np.floor(steps + 0.5).astype(int).T
  ends = np.maximum(ends, starts + 1)
  grid = np.full((ends.max(), len(VOICES)), -1)
  for (*_, pitch, _, voice), start, end in zip(notes, starts, ends, strict=True):
    grid[start:end, voice] = pitch
  return grid


def _choose_parts(score: Score, name: str) -> list[Part]:
  """Chooses the part of each voice, an empty one if it is silent; see `round_to_grid`.

  Raises InputError, with `name` in the message, if the parts do not fit the voices.
  """
  parts = [part for part in score.parts if part.notes]
  names = [part.name.strip().capitalize() for part in parts]
  named_parts = dict(zip(names, parts, strict=True))
  num_named = sum(map(VOICES.count, names))
  is_unique = num_named == len(named_parts.keys() & VOICES)
  if num_named and is_unique and num_named in (len(parts), len(VOICES)):
    return [named_parts.get(voice, Part(voice, [])) for voice in VOICES]
  if len(parts) == len(VOICES):
    return sorted(parts, key=_mean_pitch, reverse=True)
  raise InputError(
    f"{name} has {len(parts)} tracks or channels with notes; want four, one per voice, "
    f"or four of them named {', '.join(VOICES)}; "
    "train on other music with --config.data.midi.codec=events"
  )


def _mean_pitch(part: Part) -> float:
  return statistics.fmean(note.pitch for note in part.notes)


CODEC = Codec(
  VOCAB_SIZE,
  range(FIRST_PITCH, VOCAB_SIZE),
  lambda score, name: encode(round_to_grid(score, name)),
  lambda tokens: score(decode(tokens)),
  times,
  step="16th notes",
  ticks=_TICKS_PER_STEP,
  alignment=len(VOICES),
)
