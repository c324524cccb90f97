"""Codec of performances as events: note on, note off, time shift and velocity.

Oore et al. 2018, section 2.1, and Huang et al. 2018, section 4.2. Tokens: 0 padding, 1 begin, 2
end, then 128 note on, 128 note off, 100 time shifts of 10 ms to 1 s, and 32 velocities, each for
four MIDI velocities. Notes lie on a grid of 10 ms.

A performance has one canonical stream. At one time, note offs come before note ons, both ordered by
pitch. A velocity precedes a note on only if it differs from the last one. A silence longer than a
second is written as full seconds, then the rest. `decode` accepts any stream and skips tokens that
have no meaning in their context.
"""

import itertools
import operator
from collections.abc import Sequence

import numpy as np

from experiments.music.midi_files import Codec, Note, Part, Score, strip_special
from relpos_jax.typing import Float, Int

STEPS_PER_SECOND = 100
NOTE_ON = 3
NOTE_OFF = NOTE_ON + 128
TIME_SHIFT = NOTE_OFF + 128  # by one step; the longest shift is LONGEST steps
LONGEST = 100
VELOCITY = TIME_SHIFT + LONGEST
VOCAB_SIZE = VELOCITY + 32
_by_start_and_pitch = operator.attrgetter("start", "pitch")


def _bin(velocity: int) -> int:
  return (velocity - 1) // 4


def _middle(velocity_bin: int) -> int:
  return 4 * velocity_bin + 2


def on_grid(score: Score) -> list[Note]:
  """Rounds the notes of a score to steps of 10 ms, and velocities to the middle of their bin.

  A note lasts at least one step and ends where the next note of its pitch begins. Notes of one
  pitch that begin together become one, with the longest duration and the highest velocity.
  """
  notes = np.array([note for part in score.parts for note in part.notes]).reshape(-1, 4)
  steps = np.floor(score.seconds(notes[:, :2]) * STEPS_PER_SECOND + 0.5).astype(int)
  merged: dict[tuple[int, int], Note] = {}
  for (start, end), (pitch, velocity) in zip(steps.tolist(), notes[:, 2:].tolist(), strict=True):
    note = Note(start, max(end, start + 1), pitch, _middle(_bin(velocity)))
    other = merged.get((pitch, start), note)
    longest, loudest = max(note.end, other.end), max(note.velocity, other.velocity)
    merged[pitch, start] = Note(start, longest, pitch, loudest)
  ordered = [merged[key] for key in sorted(merged)]
  for index, (note, after) in enumerate(itertools.pairwise(ordered)):
    if note.pitch == after.pitch:
      ordered[index] = note._replace(end=min(note.end, after.start))
  return sorted(ordered, key=_by_start_and_pitch)


def encode(notes: Sequence[Note]) -> Int[np.ndarray, "L"]:
  """Returns the canonical stream of notes in steps of 10 ms, as `on_grid` returns them.

  >>> encode([Note(0, 150, pitch=60, velocity=82)]).tolist()  # velocity, on, 1 s, 0.5 s, off
  [379, 63, 358, 308, 191]
  """
  events = sorted(
    [(note.end, NOTE_OFF, note.pitch, 0) for note in notes]
    + [(note.start, NOTE_ON, note.pitch, _bin(note.velocity)) for note in notes],
    key=lambda event: (event[0], event[1] == NOTE_ON, event[2]),
  )
  tokens, now, last_velocity = [], 0, None
  for step, kind, pitch, velocity in events:
    seconds, rest = divmod(step - now, LONGEST)
    tokens += [TIME_SHIFT + LONGEST - 1] * seconds + [TIME_SHIFT + rest - 1] * bool(rest)
    now = step
    if kind == NOTE_ON and velocity != last_velocity:
      tokens.append(VELOCITY + velocity)
      last_velocity = velocity
    tokens.append(kind + pitch)
  return np.array(tokens, int)


def decode(tokens: Sequence[int] | np.ndarray) -> list[Note]:
  """Returns the notes of any stream; `decode(encode(notes))` equals `notes` on the grid.

  A repeated note on ends the note before; a note without note off ends with the stream. A note off
  of a silent pitch and notes without length are skipped. The velocity is 64 until one is given.
  """
  notes: list[Note] = []
  begun: dict[int, tuple[int, int]] = {}

  def end(pitch: int, step: int) -> None:
    start, velocity = begun.pop(pitch, (step, 0))
    if start < step:
      notes.append(Note(start, step, pitch, velocity))

  now, velocity = 0, _middle(_bin(64))
  for token in strip_special(tokens).tolist():
    if token >= VELOCITY:
      velocity = _middle(token - VELOCITY)
    elif token >= TIME_SHIFT:
      now += token - TIME_SHIFT + 1
    else:
      pitch = (token - NOTE_ON) % 128
      end(pitch, now)
      if token < NOTE_OFF:
        begun[pitch] = now, velocity
  for pitch in list(begun):
    end(pitch, now)
  return sorted(notes, key=_by_start_and_pitch)


def times(tokens: Sequence[int] | np.ndarray) -> Float[np.ndarray, "L"]:
  """Returns the step of each token and of the token after the last.

  >>> times([379, 63, 358, 308, 191]).tolist()
  [0.0, 0.0, 0.0, 100.0, 150.0, 150.0]
  """
  row = np.asarray(tokens, int)
  shifts = np.where((row >= TIME_SHIFT) & (row < VELOCITY), row - TIME_SHIFT + 1, 0)
  return np.concatenate([[0], np.cumsum(shifts)]).astype(float)


def score(notes: Sequence[Note]) -> Score:
  """Returns notes in steps of 10 ms as a score of one part, one tick per step."""
  return Score([Part("Piano", list(notes))], STEPS_PER_SECOND // 2, [(0, 0.5)])


CODEC = Codec(
  VOCAB_SIZE,
  range(NOTE_ON, TIME_SHIFT),
  lambda score, name: encode(on_grid(score)),
  lambda tokens: score(decode(tokens)),
  times,
  step="steps of 10 ms",
  ticks=1,
  alignment=1,
)
