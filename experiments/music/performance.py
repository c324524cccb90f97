"""Converts performances to events: note on, note off, time shift and velocity.

Oore et al. 2018, section 2.1, and Huang et al. 2018, section 4.2, define the events.
Tokens 0 to 2 are padding, begin and end. Then come 128 note ons, 128 note offs, 100
time shifts of 10 ms to 1 s, and 32 velocities, each for four MIDI velocities. Notes lie
on a grid of 10 ms.

`encode` gives each performance a single canonical stream. Of events at the same time,
note offs come first, and both kinds are ordered by pitch. A velocity comes before a
note on only if it differs from the last one. A silence longer than a second is written
as full seconds, then the rest. `decode` accepts any stream. It skips tokens that have
no meaning in their context.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from experiments.data.tokenizer import strip_special
from experiments.music.midi_files import Codec, Note, Part, Score
from relpos_jax.typing import Float, Int

STEPS_PER_SECOND = 100
NOTE_ON = 3
NOTE_OFF = NOTE_ON + 128
TIME_SHIFT = NOTE_OFF + 128  # shifts by one step; the last one by LONGEST steps
LONGEST = 100
VELOCITY = TIME_SHIFT + LONGEST
VOCAB_SIZE = VELOCITY + 32


def round_to_grid(score: Score) -> list[Note]:
  """Rounds times to steps of 10 ms, and velocities to the middle of their bin.

  A note lasts at least one step. It ends, at the latest, where the next note of its
  pitch begins. Notes of one pitch that begin together become one note, with the longest
  duration and the highest velocity.
  """
  notes = np.array(score.notes).reshape(-1, 4)
  steps = np.floor(score.seconds(notes[:, :2]) * STEPS_PER_SECOND + 0.5).astype(int)
  rows = sorted(np.column_stack([notes[:, 2], steps, notes[:, 3]]).tolist())
  rounded: list[Note] = []
  for (pitch, start), together in itertools.groupby(rows, lambda row: row[:2]):
    if rounded and rounded[-1].pitch == pitch:
      rounded[-1] = rounded[-1]._replace(end=min(rounded[-1].end, start))
    _, _, ends, velocities = zip(*together, strict=True)
    middle = (max(velocities) - 1) // 4 * 4 + 2
    rounded.append(Note(start, max(start + 1, *ends), pitch, middle))
  return sorted(rounded)


def encode(notes: Sequence[Note]) -> Int[np.ndarray, "L"]:
  """Encodes notes on the grid of `round_to_grid` as their canonical stream.

  This example gives velocity, note on, shifts of 1 s and 0.5 s, and note off:

  >>> encode([Note(0, 150, pitch=60, velocity=82)]).tolist()
  [379, 63, 358, 308, 191]
  """
  events = []
  for start, end, pitch, velocity in notes:
    events.append((start, True, pitch, VELOCITY + (velocity - 1) // 4))
    events.append((end, False, pitch, None))
  tokens, now, last_velocity = [], 0, None
  for step, is_on, pitch, velocity in sorted(events):
    seconds, rest = divmod(step - now, LONGEST)
    now = step
    tokens += [TIME_SHIFT + LONGEST - 1] * seconds
    if rest:
      tokens.append(TIME_SHIFT + rest - 1)
    if not is_on:
      tokens.append(NOTE_OFF + pitch)
      continue
    if velocity != last_velocity:
      tokens.append(velocity)
    tokens.append(NOTE_ON + pitch)
    last_velocity = velocity
  return np.array(tokens, int)


def decode(tokens: Sequence[int] | np.ndarray) -> list[Note]:
  """Decodes any stream to notes; restores the notes that `encode` was given.

  A repeated note on ends the note before. A note without note off ends with the stream.
  A note off for a silent pitch, and notes of length zero, are skipped. The velocity is
  62 until the stream sets one.
  """
  notes: list[Note] = []
  sounding: dict[int, tuple[int, int]] = {}
  now, velocity = 0, 62
  for token in strip_special(tokens).tolist():
    if token >= VELOCITY:
      velocity = 4 * (token - VELOCITY) + 2
    elif token >= TIME_SHIFT:
      now += token - TIME_SHIFT + 1
    else:
      pitch = (token - NOTE_ON) % 128
      start, last_velocity = sounding.pop(pitch, (now, 0))
      if start < now:
        notes.append(Note(start, now, pitch, last_velocity))
      if token < NOTE_OFF:
        sounding[pitch] = now, velocity
  for pitch, (start, last_velocity) in sounding.items():
    if start < now:
      notes.append(Note(start, now, pitch, last_velocity))
  return sorted(notes)


def times(tokens: Sequence[int] | np.ndarray) -> Float[np.ndarray, "L"]:
  """Returns the time of each token, and of a token after the last, in steps.

  >>> times([379, 63, 358, 308, 191]).tolist()
  [0.0, 0.0, 0.0, 100.0, 150.0, 150.0]
  """
  row = np.asarray(tokens, int)
  shifts = np.where((row >= TIME_SHIFT) & (row < VELOCITY), row - TIME_SHIFT + 1, 0)
  return np.concatenate([[0], np.cumsum(shifts)]).astype(float)


def score(notes: Sequence[Note]) -> Score:
  """Makes a score with one part, "Piano", from notes on the grid of `round_to_grid`.

  A tick of the score is a step of the grid, 10 ms.
  """
  return Score([Part("Piano", list(notes))], STEPS_PER_SECOND // 2, [(0, 0.5)])


CODEC = Codec(
  VOCAB_SIZE,
  range(NOTE_ON, TIME_SHIFT),
  lambda score, name: encode(round_to_grid(score)),
  lambda tokens: score(decode(tokens)),
  times,
  step="steps of 10 ms",
  ticks=1,
  alignment=1,
)
