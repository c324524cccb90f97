"""Performances: streams of events, notes and MIDI files hold the same music."""

import collections
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.data.tokenizer import BOS, EOS, PAD
from experiments.music import performance
from experiments.music.midi_files import Note, Part, Score
from experiments.music.performance import (
  NOTE_OFF,
  NOTE_ON,
  TIME_SHIFT,
  VELOCITY,
  VOCAB_SIZE,
)

PITCHES = st.integers(58, 61) | st.integers(0, 127)


@st.composite
def scores(draw) -> Score:
  notes = []
  for _ in range(draw(st.integers(0, 9))):
    start, length = draw(st.integers(0, 400)), draw(st.integers(0, 350))
    velocity = draw(st.integers(1, 127))
    notes.append(Note(start, start + length, draw(PITCHES), velocity))
  return Score([Part("", notes)], 7, [(0, 0.5), (50, 0.3)])


def test_a_stream_has_the_order_that_is_canonical():
  notes = [Note(0, 50, 60, 82), Note(0, 250, 62, 82), Note(50, 60, 60, 2)]
  begin = [VELOCITY + 20, NOTE_ON + 60, NOTE_ON + 62, TIME_SHIFT + 49]
  repeat = [NOTE_OFF + 60, VELOCITY, NOTE_ON + 60, TIME_SHIFT + 9, NOTE_OFF + 60]
  stream = [*begin, *repeat, TIME_SHIFT + 99, TIME_SHIFT + 89, NOTE_OFF + 62]
  assert performance.encode(notes[::-1]).tolist() == stream
  assert performance.decode([BOS, *stream, EOS, PAD]) == notes


@settings(max_examples=40)
@given(scores())
def test_notes_come_back_on_the_grid(score):
  notes = performance.round_to_grid(score)
  assert performance.decode(performance.encode(notes)) == notes
  assert performance.round_to_grid(performance.score(notes)) == notes


@settings(max_examples=40)
@given(scores())
def test_notes_on_the_grid_are_near_and_do_not_overlap(score):
  (part,) = score.parts
  by_pitch = collections.defaultdict(list)
  for note in performance.round_to_grid(score):
    by_pitch[note.pitch].append(note)
  for note in part.notes:
    start, end = 100 * score.seconds([note.start, note.end])
    near = min(by_pitch[note.pitch], key=lambda other: abs(other.start - start))
    assert abs(near.start - start) <= 0.5 + 1e-9
    if len([other for other in part.notes if other.pitch == note.pitch]) == 1:
      assert abs(near.end - max(end, near.start + 1)) <= 0.5 + 1e-9
      assert abs(near.velocity - note.velocity) <= 2
  for notes in by_pitch.values():
    for first, second in itertools.pairwise(notes):
      assert first.start < first.end <= second.start


@settings(max_examples=40)
@given(st.lists(st.integers(NOTE_ON, VOCAB_SIZE - 1), max_size=30))
def test_any_stream_decodes_to_notes(stream):
  notes = performance.decode(stream)
  last = performance.times(stream)[-1]
  assert all(0 <= note.start < note.end <= last for note in notes)
  assert performance.decode(performance.encode(notes)) == notes


def test_notes_that_begin_together_are_the_longest_and_loudest():
  first, loudest = Note(0, 9, 60, 2), Note(0, 5, 60, 98)
  notes = [first, loudest, Note(0, 7, 60, 50), Note(8, 12, 60, 2)]
  found = performance.round_to_grid(performance.score(notes))
  assert found == [Note(0, 8, 60, 98), Note(8, 12, 60, 2)]
