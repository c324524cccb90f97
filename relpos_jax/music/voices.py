"""Four voices on a grid of 16th notes, as tokens and as MIDI.

A grid is [steps, 4]: MIDI pitches, soprano to bass, -1 where a voice is silent. Held and repeated
notes are not told apart: equal pitches one after the other are one note.

Its tokens are the four voices of a step, then those of the next one (Huang et al. 2018, section
4.1): 0 padding, 1 begin, 2 end, 3 silence, and 4 + p the MIDI pitch p. All 128 pitches have tokens,
not just those of the chorales (36 to 81), so that any voice can be written and transposed.
"""

import itertools
import os
from collections.abc import Sequence

import numpy as np

from relpos_jax.errors import InputError
from relpos_jax.music.codec import Codec, Span, content, possible
from relpos_jax.music.midi_files import Note, Part, Score, read_score, write_score
from relpos_jax.typing import Float, Int, Integer

VOICES = ("Soprano", "Alto", "Tenor", "Bass")
SILENCE = 3
FIRST_PITCH = 4
VOCAB_SIZE = FIRST_PITCH + 128

_STEPS_PER_QUARTER = 4
_TICKS_PER_STEP = 120
_VELOCITY = 80


def encode(grid: Integer[np.ndarray, "steps 4"]) -> Int[np.ndarray, "L"]:
  """The tokens of a grid, four a step.

  Raises InputError: a number is neither a MIDI pitch nor -1.

  >>> encode(np.array([[67, 64, 60, 48], [67, 65, -1, 50]]))
  array([71, 68, 64, 52, 71, 69,  3, 54])
  """
  wrong = np.argwhere((grid < -1) | (grid > 127))
  if len(wrong):
    step, voice = map(int, wrong[0])
    raise InputError(
      f"pitch {grid[step, voice]} of voice {voice + 1} in step {step}: want 0 to 127, or -1 for "
      "silence"
    )
  return np.where(grid < 0, SILENCE, grid + FIRST_PITCH).reshape(-1).astype(int)


def decode(tokens: Sequence[int] | np.ndarray) -> Int[np.ndarray, "steps 4"]:
  """The grid of tokens: `decode(encode(grid))` is `grid`.

  Begin, end and padding may stand around them; a last step that is not whole is left out.

  Raises ValueError: a token is none of the vocabulary.

  >>> decode([1, 71, 68, 64, 52, 71, 69, 3, 54, 71, 2, 0]).tolist()
  [[67, 64, 60, 48], [67, 65, -1, 50]]
  """
  row = content(tokens)
  if len(row) and not SILENCE <= row.min() <= row.max() < VOCAB_SIZE:
    raise ValueError(
      f"tokens go from {row.min()} to {row.max()}; want {SILENCE} to {VOCAB_SIZE - 1}"
    )
  steps = row[: len(row) // len(VOICES) * len(VOICES)].reshape(-1, len(VOICES))
  return np.where(steps == SILENCE, -1, steps - FIRST_PITCH)


def spans(tokens: Sequence[int] | np.ndarray) -> list[Span]:
  """The notes of tokens, voice by voice, in 16ths.

  >>> spans([71, 68, 64, 52, 71, 69, 3, 54])[:3]  # doctest: +NORMALIZE_WHITESPACE
  [Span(start=0, end=2, pitch=67, voice=0), Span(start=0, end=1, pitch=64, voice=1),
   Span(start=1, end=2, pitch=65, voice=1)]
  """
  return [
    Span(start, end, pitch, voice)
    for voice, pitches in enumerate(decode(tokens).T)
    for start, end, pitch in _runs(pitches.tolist())
  ]


def _runs(pitches: list[int]) -> list[tuple[int, int, int]]:
  """Start, end and pitch of equal pitches one after the other; silence left out."""
  found, start = [], 0
  for pitch, run in itertools.groupby(pitches):
    end = start + len(list(run))
    if pitch >= 0:
      found.append((start, end, pitch))
    start = end
  return found


def times(tokens: Sequence[int] | np.ndarray) -> Float[np.ndarray, "L"]:
  """The step of each token and of the one to come, in 16ths: four to a step.

  >>> times([71, 68, 64, 52, 71]).tolist()
  [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
  """
  return (np.arange(len(tokens) + 1) // len(VOICES)).astype(float)


def transpose(tokens: Sequence[int] | np.ndarray, semitones: int) -> Int[np.ndarray, "L"]:
  """Tokens so many semitones higher, or as far as all pitches stay within 0 to 127.

  >>> transpose([1, 71, 68, 3, 52, 2, 0], -2).tolist()
  [1, 69, 66, 3, 50, 2, 0]
  """
  row = np.asarray(tokens, int)
  is_pitch = row >= FIRST_PITCH
  return row + is_pitch * possible(semitones, row[is_pitch] - FIRST_PITCH)


def score(grid: Integer[np.ndarray, "steps 4"], quarters_a_minute: float = 80.0) -> Score:
  """A grid as four named parts."""
  note = lambda start, end, pitch: Note(
    start * _TICKS_PER_STEP, end * _TICKS_PER_STEP, pitch, _VELOCITY
  )
  parts = [
    Part(name, [note(*run) for run in _runs(pitches.tolist())])
    for name, pitches in zip(VOICES, grid.T, strict=True)
  ]
  return Score(parts, _STEPS_PER_QUARTER * _TICKS_PER_STEP, [(0, 60 / quarters_a_minute)])


def grid_of(score: Score, name: str = "the score") -> Int[np.ndarray, "steps 4"]:
  """The grid nearest to a score of four parts: `grid_of(score(grid))` is `grid`.

  But for silence at its end. Parts with notes are taken for voices by their names, of `VOICES` (one
  that is missing is silent), or else four by their mean pitch, highest first. A note takes a step
  at least; where two of a voice sound together, it is the one begun last.

  Raises InputError, about the score of this name: parts with notes are none, or without such names
  not four.
  """
  parts = _voices(score.parts, name)
  ticks = score.ticks_per_quarter / _STEPS_PER_QUARTER
  steps = lambda tick: int(np.floor(tick / ticks + 0.5))
  placed = [
    (voice, steps(note.start), max(steps(note.end), steps(note.start) + 1), note.pitch)
    for voice, part in enumerate(parts)
    for note in sorted(part.notes)
  ]
  grid = np.full((max(end for _, _, end, _ in placed), len(VOICES)), -1)
  for voice, start, end, pitch in placed:
    grid[start:end, voice] = pitch
  return grid


def _voices(parts: Sequence[Part], name: str) -> list[Part]:
  """The parts of the four voices, soprano to bass."""
  sounding = [part for part in parts if part.notes]
  by_name = {part.name.strip().capitalize(): part for part in sounding}
  if sounding and set(by_name) <= set(VOICES) and len(by_name) == len(sounding):
    return [by_name.get(voice, Part(voice, [])) for voice in VOICES]
  if len(sounding) != len(VOICES):
    raise InputError(
      f"{name} has {len(sounding)} tracks or channels with notes; want four, a voice each"
    )
  return sorted(sounding, key=lambda part: -np.mean([note.pitch for note in part.notes]))


def read(path: str | os.PathLike) -> Int[np.ndarray, "L"]:
  """The tokens of a MIDI file of four voices, on the nearest grid.

  Raises InputError: see `read_score` and `grid_of`.
  """
  return encode(grid_of(read_score(path), str(path)))


def write(tokens: Sequence[int] | np.ndarray, path: str | os.PathLike) -> None:
  """Writes the MIDI file of tokens: a track for each voice. Raises InputError: it cannot."""
  write_score(score(decode(tokens)), path)


CODEC = Codec(VOCAB_SIZE, read, write, spans, times, "16th notes", len(VOICES), transpose)
