"""MIDI files are written and read, other programs' too; damaged ones are refused."""

import mido
import numpy as np
import pytest
from faults import refusal

from experiments.music.midi_files import Note, Part, Score, read_score, write_score


def save(path, *tracks, **options):
  """Saves tracks of messages; their times are ticks since the message before."""
  mido.MidiFile(tracks=[*map(mido.MidiTrack, tracks)], **options).save(path)
  return path


def on(time, note, velocity=64, channel=0):
  options = dict(note=note, velocity=velocity, channel=channel)
  return mido.Message("note_on", time=time, **options)


def off(time, note, channel=0):
  return mido.Message("note_off", time=time, note=note, channel=channel)


def pedal(time, value):
  return mido.Message("control_change", time=time, control=64, value=value)


def change_tempo(time, tempo):
  return mido.MetaMessage("set_tempo", time=time, tempo=tempo)


def test_what_is_written_is_read(tmp_path):
  parts = []
  for number in range(20):  # more parts than channels
    first = Note(0, 5 + number, 60, 1 + number)
    parts.append(Part(f"part {number}", [first, Note(30, 42, 127, 127)]))
  parts[3].notes.append(Note(42, 50, 127, 1))  # repeats the note before
  score = Score(parts, 96, [(0, 0.5), (7, 0.25)])
  write_score(score, tmp_path / "a.mid")
  assert read_score(tmp_path / "a.mid") == score
  # Note off comes before the repeated note on, as synthesizers expect.
  track = mido.MidiFile(tmp_path / "a.mid").tracks[4]
  kinds = [message.type for message in track if getattr(message, "note", 0) == 127]
  assert kinds == ["note_on", "note_off"] * 2


def test_a_part_is_a_channel_of_a_track_and_drums_are_left_out(tmp_path):
  drums = [on(0, 40, channel=9), off(5, 40, channel=9)]
  two = [on(0, 60), on(0, 61, channel=3), off(5, 60), off(0, 61, channel=3)]
  other = [on(0, 62), off(5, 62)]
  parts = read_score(save(tmp_path / "a.mid", drums + two, other)).parts
  assert [[note.pitch for note in part.notes] for part in parts] == [[60], [61], [62]]
  assert "no notes in" in refusal(read_score, save(tmp_path / "b.mid", drums))


def simultaneous(notes, order):
  """Returns a track of (start, end, pitch, channel); sorts messages at one tick."""
  events = []
  for start, end, pitch, channel in notes:
    events.append((start, order(True), on(0, pitch, 1 + start, channel)))
    events.append((end, order(False), off(0, pitch, channel=channel)))
  events.sort(key=lambda event: event[:2])
  before = 0
  for tick, _, message in events:
    message.time, before = tick - before, tick
  return [message for *_, message in events]


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_simultaneous_messages_changes_nothing(tmp_path, seed):
  generator = np.random.default_rng(seed)  # with unisons: two notes of a pitch at once
  start = generator.integers(0, 12, 30)
  end = start + generator.integers(1, 5, 30)
  pitch, channel = generator.integers(60, 63, 30), generator.integers(0, 2, 30)
  notes = np.column_stack([start, end, pitch, channel]).tolist()
  orders = (lambda is_on: is_on, lambda is_on: not is_on, lambda _: generator.random())
  first, second, third = (
    read_score(save(tmp_path / "a.mid", simultaneous(notes, order))) for order in orders
  )
  assert first == second == third


SUSTAIN, LIFT = pedal(0, 127), pedal(5, 0)
END = off(5, 61)  # of the file


@pytest.mark.parametrize(
  "messages, notes",
  [
    # A note ends at velocity 0, at its off and with its track.
    ([on(0, 60), on(5, 60, 0)], [Note(0, 5, 60, 64)]),
    ([on(0, 62), pedal(5, 0)], [Note(0, 5, 62, 64)]),
    # Notes of one pitch that overlap end in the order in which they begin.
    (
      [on(0, 60), on(240, 60), off(240, 60), off(480, 60)],
      [Note(0, 480, 60, 64), Note(240, 960, 60, 64)],
    ),
    # Notes without length are left out.
    ([on(0, 60), off(0, 60), on(0, 61), END], [Note(0, 5, 61, 64)]),
    # The pedal holds notes until it is lifted or they are repeated.
    (
      [SUSTAIN, on(0, 60), on(0, 61), off(5, 60), off(0, 61), on(5, 61), LIFT, END],
      [Note(0, 10, 61, 64), Note(0, 15, 60, 64), Note(10, 20, 61, 64)],
    ),
    # It holds a note released as it goes down, and none released as it is lifted.
    (
      [on(0, 60), on(0, 61), off(5, 60), pedal(0, 127), LIFT, off(0, 61)],
      [Note(0, 10, 60, 64), Note(0, 10, 61, 64)],
    ),
    # Never lifted, it holds notes to the end of the file.
    ([SUSTAIN, on(0, 60), off(5, 60), pedal(5, 127)], [Note(0, 10, 60, 64)]),
  ],
)
def test_messages_become_notes(tmp_path, messages, notes):
  (part,) = read_score(save(tmp_path / "a.mid", messages)).parts
  assert part.notes == notes


def test_the_pedal_is_the_channels_in_all_tracks(tmp_path):
  pedals = [pedal(0, 127), pedal(960, 0)]
  notes = [on(0, 60), off(240, 60), on(960, 62), off(100, 62)]
  other = [on(0, 60, channel=1), off(240, 60, channel=1)]
  path = save(tmp_path / "a.mid", notes, other, pedals)
  first, second = read_score(path).parts
  assert first.notes == [Note(0, 960, 60, 64), Note(1200, 1300, 62, 64)]
  assert second.notes == [Note(0, 240, 60, 64)]


def test_seconds_follow_the_tempo_in_any_track(tmp_path):
  slow = [change_tempo(10, 1_000_000)]
  path = save(tmp_path / "a.mid", slow, [on(5, 60), off(15, 60)], ticks_per_beat=10)
  seconds = read_score(path).seconds([0, 5, 10, 20])
  np.testing.assert_allclose(seconds, [0, 0.25, 0.5, 1.5])


TRACK = [on(0, 60), off(5, 60)]


@pytest.mark.parametrize("tempo, ticks", [(1, 2**28 - 1), (2**24 - 1, 86_400)])
def test_files_that_last_too_long_are_refused(tmp_path, tempo, ticks):
  track = [change_tempo(0, tempo), on(0, 60), off(ticks, 60)]
  path = save(tmp_path / "a.mid", track, ticks_per_beat=1)
  words = "lasts more than 86,400 seconds or quarter notes"
  assert words in refusal(read_score, path)


def test_damaged_files_are_refused(tmp_path):
  path = save(tmp_path / "a.mid", TRACK)
  content = path.read_bytes()
  for end in range(0, len(content), 5):
    path.write_bytes(content[:end])
    assert "it is truncated or not MIDI" in refusal(read_score, path)
  path.write_bytes(content.replace(bytes([0x90, 60]), bytes([0x90, 200])))
  assert "0..127" in refusal(read_score, path)
