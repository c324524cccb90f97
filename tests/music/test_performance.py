"""Performances: streams of events, notes and MIDI files hold the same music."""

import itertools

import mido
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.data.tokenizer import BOS, EOS, PAD
from experiments.music import performance
from experiments.music.midi_files import Note, Part, Score, read_score
from experiments.music.performance import (
  NOTE_OFF,
  NOTE_ON,
  TIME_SHIFT,
  VELOCITY,
  VOCAB_SIZE,
)

_PITCHES = st.integers(58, 61) | st.integers(0, 127)
scores = st.lists(
  st.builds(
    lambda start, length, pitch, velocity: Note(start, start + length, pitch, velocity),
    st.integers(0, 400),
    st.integers(0, 350),
    _PITCHES,
    st.integers(1, 127),
  ),
  max_size=9,
).map(lambda notes: Score([Part("", notes)], 7, [(0, 0.5), (50, 0.3)]))


def test_a_stream_has_the_order_that_is_canonical():
  notes = [Note(0, 50, 60, 82), Note(0, 250, 62, 82), Note(50, 60, 60, 2)]
  begin = [VELOCITY + 20, NOTE_ON + 60, NOTE_ON + 62, TIME_SHIFT + 49]
  repeat = [NOTE_OFF + 60, VELOCITY, NOTE_ON + 60, TIME_SHIFT + 9, NOTE_OFF + 60]
  stream = [*begin, *repeat, TIME_SHIFT + 99, TIME_SHIFT + 89, NOTE_OFF + 62]
  assert performance.encode(notes[::-1]).tolist() == stream
  assert performance.decode([BOS, *stream, EOS, PAD]) == notes


@settings(max_examples=40)
@given(scores)
def test_notes_come_back_on_the_grid(score):
  notes = performance.round_to_grid(score)
  assert performance.decode(performance.encode(notes)) == notes
  assert performance.round_to_grid(performance.score(notes)) == notes


@settings(max_examples=40)
@given(scores)
def test_notes_on_the_grid_are_near_and_do_not_overlap(score):
  given, notes = score.parts[0].notes, performance.round_to_grid(score)
  by_pitch = {pitch: [n for n in notes if n.pitch == pitch] for _, _, pitch, _ in given}
  for note in given:
    start, end = 100 * score.seconds([note.start, note.end])
    near = [n for n in by_pitch[note.pitch] if abs(n.start - start) <= 0.5 + 1e-9]
    assert near
    if [n.pitch for n in given].count(note.pitch) == 1:
      assert abs(near[0].end - max(end, near[0].start + 1)) <= 0.5 + 1e-9
      assert abs(near[0].velocity - note.velocity) <= 2
  for alike in by_pitch.values():
    assert all(a.start < a.end <= b.start for a, b in itertools.pairwise(alike))


@settings(max_examples=40)
@given(st.lists(st.integers(NOTE_ON, VOCAB_SIZE - 1), max_size=30))
def test_any_stream_decodes_to_notes(stream):
  notes = performance.decode(stream)
  assert all(
    0 <= note.start < note.end <= performance.times(stream)[-1] for note in notes
  )
  assert performance.decode(performance.encode(notes)) == notes


def test_notes_that_begin_together_are_the_longest_and_loudest():
  notes = [
    Note(0, 9, 60, 2),
    Note(0, 5, 60, 98),
    Note(0, 7, 60, 50),
    Note(8, 12, 60, 2),
  ]
  found = performance.round_to_grid(performance.score(notes))
  assert found == [Note(0, 8, 60, 98), Note(8, 12, 60, 2)]


def test_notes_of_a_file_that_begin_together_are_the_longest_and_loudest(tmp_path):
  offs = [mido.Message("note_off", note=60, time=ticks) for ticks in (240, 720)]
  ons = [mido.Message("note_on", note=60, velocity=velocity) for velocity in (100, 40)]
  mido.MidiFile(tracks=[mido.MidiTrack([*ons, *offs])]).save(tmp_path / "a.mid")
  found = performance.round_to_grid(read_score(tmp_path / "a.mid"))
  assert found == [Note(0, 100, 60, 98)]  # 960 ticks, at 480 for half a second


def test_a_midi_file_holds_the_stream(tmp_path):
  drawn = (
    np.random.default_rng(0).integers([0, 1, 0], [999, 300, 128], (200, 3)).tolist()
  )
  notes = [Note(start, start + length, pitch, 64) for start, length, pitch in drawn]
  stream = performance.encode(performance.round_to_grid(performance.score(notes)))
  performance.CODEC.write([BOS, *stream.tolist(), EOS], tmp_path / "a.mid")
  np.testing.assert_array_equal(performance.CODEC.read(tmp_path / "a.mid"), stream)
