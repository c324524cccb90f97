"""Performances as events: note on, note off, time shift and velocity.

Oore et al. 2018, section 2.1, and Huang et al. 2018, section 4.2. Tokens: 0 padding, 1 begin, 2
end, then 128 note on, 128 note off, 100 time shifts of 10 ms to 1 s, and 32 velocities, each of
four of MIDI's. Notes lie on a grid of 10 ms.

Each performance has one stream: at one time, first the notes that end, then those that begin, both
by pitch; a velocity only where it differs from that of the note begun before; a silence longer than
a second in whole seconds, then the rest. Any other stream can be decoded too: what means nothing
where it stands is left out.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from relpos_jax.errors import InputError
from relpos_jax.music.codec import Codec, Span, content, possible
from relpos_jax.music.midi_files import Note, Part, Score, read_score, write_score
from relpos_jax.typing import Float, Int

STEPS_PER_SECOND = 100
NOTE_ON = 3
NOTE_OFF = NOTE_ON + 128
TIME_SHIFT = NOTE_OFF + 128  # of one step; the longest is of LONGEST
LONGEST = 100
VELOCITY = TIME_SHIFT + LONGEST
VOCAB_SIZE = VELOCITY + 32

_PER_BIN = 4


def on_grid(score: Score) -> list[Note]:
  """All notes of a score in steps of 10 ms, by start and pitch; velocities 4 b + 2 of bin b.

  A note lasts a step at least. Of notes of one pitch the earlier ends where the next begins, and
  of those that begin together one is left, the longest, as loud as the loudest.
  """
  notes = [note for part in score.parts for note in part.notes]
  steps = np.floor(
    score.seconds([tick for note in notes for tick in note[:2]]) * STEPS_PER_SECOND + 0.5
  ).astype(int)
  ends = np.maximum(steps[1::2], steps[::2] + 1)
  placed = [
    Note(start, end, note.pitch, _velocity(_bin(note.velocity)))
    for start, end, note in zip(steps[::2].tolist(), ends.tolist(), notes, strict=True)
  ]
  return _apart(placed)


def _apart(notes: Iterable[Note]) -> list[Note]:
  """Notes of one pitch, one after the other."""
  found: dict[tuple[int, int], Note] = {}
  for note in notes:
    other = found.setdefault((note.pitch, note.start), note)
    longest, loudest = max(note.end, other.end), max(note.velocity, other.velocity)
    found[note.pitch, note.start] = note._replace(end=longest, velocity=loudest)
  ordered = [found[place] for place in sorted(found)]
  cut = [
    note._replace(end=min(note.end, after.start)) if note.pitch == after.pitch else note
    for note, after in itertools.pairwise(ordered)
  ]
  return sorted([*cut, *ordered[-1:]], key=lambda note: (note.start, note.pitch))


def encode(notes: Sequence[Note]) -> Int[np.ndarray, "L"]:
  """The stream of notes in steps of 10 ms, such as `on_grid` gives.

  Raises InputError: a pitch outside 0 to 127, a velocity outside 1 to 127.

  >>> encode([Note(0, 150, pitch=60, velocity=82)]).tolist()  # velocity, on, 1 s, 0.5 s, off
  [379, 63, 358, 308, 191]
  """
  for note in notes:
    if not (0 <= note.pitch <= 127 and 1 <= note.velocity <= 127):
      seconds = note.start / STEPS_PER_SECOND
      raise InputError(
        f"pitch {note.pitch}, velocity {note.velocity} of the note at {seconds} s: want 0 to 127, "
        "and 1 to 127"
      )
  events = sorted(
    [(note.end, NOTE_OFF, note.pitch, 0) for note in notes]
    + [(note.start, NOTE_ON, note.pitch, _bin(note.velocity)) for note in notes],
    key=lambda event: (event[0], event[1] == NOTE_ON, event[2]),
  )
  return np.array([*_stream(events)], int)


def _stream(events: Iterable[tuple[int, int, int, int]]) -> Iterator[int]:
  """The tokens of (step, kind, pitch, velocity bin)."""
  now, loud = 0, None
  for step, kind, pitch, velocity in events:
    while now < step:
      shift = min(step - now, LONGEST)
      yield TIME_SHIFT + shift - 1
      now += shift
    if kind == NOTE_ON and velocity != loud:
      yield VELOCITY + velocity
      loud = velocity
    yield kind + pitch


def decode(tokens: Sequence[int] | np.ndarray) -> list[Note]:
  """The notes of any stream: `decode(encode(notes))` is `notes` where they are on the grid.

  A note that is begun again ends there, one that nothing ends, with the stream; a note off of what
  does not sound is left out, and so is a note without length. Before the first velocity it is 64.

  Raises ValueError: a token is none of the vocabulary.

  >>> decode([1, 379, 63, 358, 308, 191, 2])
  [Note(start=0, end=150, pitch=60, velocity=82)]
  """
  row = content(tokens)
  if len(row) and not NOTE_ON <= row.min() <= row.max() < VOCAB_SIZE:
    raise ValueError(
      f"tokens go from {row.min()} to {row.max()}; want {NOTE_ON} to {VOCAB_SIZE - 1}"
    )
  notes: list[Note] = []
  begun: dict[int, tuple[int, int]] = {}

  def end(pitch: int, step: int) -> None:
    start, velocity = begun.pop(pitch, (step, 0))
    if start < step:
      notes.append(Note(start, step, pitch, velocity))

  now, loud = 0, _velocity(_bin(64))
  for token in row.tolist():
    if token >= VELOCITY:
      loud = _velocity(token - VELOCITY)
    elif token >= TIME_SHIFT:
      now += token - TIME_SHIFT + 1
    else:
      pitch = (token - NOTE_ON) % 128
      end(pitch, now)
      if token < NOTE_OFF:
        begun[pitch] = now, loud
  for pitch in list(begun):
    end(pitch, now)
  return sorted(notes, key=lambda note: (note.start, note.pitch))


def _bin(velocity: int) -> int:
  return (velocity - 1) // _PER_BIN


def _velocity(number: int) -> int:
  """The middle of a bin."""
  return number * _PER_BIN + 2


def spans(tokens: Sequence[int] | np.ndarray) -> list[Span]:
  """The notes of a stream, as a picture shows them."""
  return [Span(note.start, note.end, note.pitch, 0) for note in decode(tokens)]


def times(tokens: Sequence[int] | np.ndarray) -> Float[np.ndarray, "L"]:
  """The step of each token and of the one to come.

  >>> times([379, 63, 358, 308, 191]).tolist()
  [0.0, 0.0, 0.0, 100.0, 150.0, 150.0]
  """
  row = np.asarray(tokens, int)
  shifts = np.where((row >= TIME_SHIFT) & (row < VELOCITY), row - TIME_SHIFT + 1, 0)
  return np.concatenate([[0], np.cumsum(shifts)]).astype(float)


def transpose(tokens: Sequence[int] | np.ndarray, semitones: int) -> Int[np.ndarray, "L"]:
  """Tokens so many semitones higher, or as far as all pitches stay within 0 to 127.

  >>> transpose([379, 63, 358, 308, 191], 2).tolist()
  [379, 65, 358, 308, 193]
  """
  row = np.asarray(tokens, int)
  is_note = (row >= NOTE_ON) & (row < TIME_SHIFT)
  return row + is_note * possible(semitones, (row[is_note] - NOTE_ON) % 128)


def score(notes: Sequence[Note]) -> Score:
  """Notes in steps of 10 ms as a score of one part, a tick a step."""
  return Score([Part("Piano", list(notes))], STEPS_PER_SECOND // 2, [(0, 0.5)])


def read(path: str | os.PathLike) -> Int[np.ndarray, "L"]:
  """The stream of a MIDI file. Raises InputError: see `read_score`."""
  return encode(on_grid(read_score(path)))


def write(tokens: Sequence[int] | np.ndarray, path: str | os.PathLike) -> None:
  """Writes the MIDI file of a stream. Raises InputError: it cannot."""
  write_score(score(decode(tokens)), path)


CODEC = Codec(VOCAB_SIZE, read, write, spans, times, "steps of 10 ms", 1, transpose)
