"""MIDI files as scores of notes. This module alone imports the MIDI library, mido."""

import collections
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mido
import numpy as np

from relpos_jax.errors import InputError
from relpos_jax.files import whole_file
from relpos_jax.typing import Float

_DRUMS, _PEDAL = 9, 64  # channel and controller, counted from 0
_DEFAULT_TEMPO = 500_000  # microseconds per quarter note, by the standard
_MAX_QUARTERS = 24 * 60 * 120  # of a day at 120 per minute


class Note(NamedTuple):
  """A note from `start` to `end`, in ticks; pitch 0 to 127, velocity 1 to 127."""

  start: int
  end: int
  pitch: int
  velocity: int


class Part(NamedTuple):
  """The notes of one channel in one track, and the track's name."""

  name: str
  notes: list[Note]


class Score(NamedTuple):
  """The notes and tempi of a MIDI file.

  Attributes:
    parts: in the order of the file, without drums.
    ticks_per_quarter: ticks per quarter note.
    tempi: (tick, seconds per quarter note from that tick on); the first is at tick 0.
  """

  parts: list[Part]
  ticks_per_quarter: int
  tempi: list[tuple[int, float]]

  def seconds(self, ticks: Sequence[int] | np.ndarray) -> Float[np.ndarray, "n"]:
    """Converts ticks to seconds.

    >>> Score([], 100, [(0, 0.5), (200, 1.0)]).seconds([100, 200, 300]).tolist()
    [0.5, 1.0, 2.0]
    """
    starts, rates = np.array(self.tempi, float).T
    at_starts = np.cumsum([0.0, *np.diff(starts) * rates[:-1]]) / self.ticks_per_quarter
    index = np.searchsorted(starts, ticks, side="right") - 1
    return (
      at_starts[index] + (np.asarray(ticks) - starts[index]) * rates[index] / self.ticks_per_quarter
    )


def read_score(path: str | os.PathLike) -> Score:
  """Reads the notes of a MIDI file, without drums (channel 10).

  The sustain pedal prolongs notes, as in Oore et al. 2018. A repeated note ends the one before. A
  note without note off ends with its track.

  Raises InputError: the file is missing, not MIDI, damaged, of type 2, longer than a day, or has
  no notes.
  """
  try:
    file = mido.MidiFile(path)
  except Exception as error:  # mido raises many kinds for damaged files
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    reason = reason or "it is truncated or not MIDI"
    raise InputError(f"cannot read MIDI file {path}: {reason}; give another file") from None
  if file.ticks_per_beat < 1:
    raise InputError(f"{path} counts time in frames, not in quarter notes: convert it")
  if file.type == 2:
    raise InputError(f"{path} is of type 2, one piece per track: give one file per piece")
  parts = [part for track in file.tracks for part in _parts(track)]
  if not parts:
    raise InputError(f"no notes in {path}: give a MIDI file with notes other than drums")
  score = Score(parts, file.ticks_per_beat, _tempi(file))
  end = max(note.end for part in parts for note in part.notes)
  # A damaged time can last for years, whose tokens fill the memory.
  if score.seconds([end])[0] > 24 * 3600 or end / score.ticks_per_quarter > _MAX_QUARTERS:
    raise InputError(f"{path} lasts longer than a day, it may be damaged: give another file")
  return score


def write_score(score: Score, path: str | os.PathLike) -> None:
  """Writes a MIDI file of type 1: a track of tempi, then a track and a channel per part."""
  file = mido.MidiFile(type=1, ticks_per_beat=score.ticks_per_quarter)
  tempo = functools.partial(mido.MetaMessage, "set_tempo")
  tempi = [tempo(tempo=round(seconds * 1e6), time=tick) for tick, seconds in score.tempi]
  file.tracks.append(_track(tempi))
  channels = [channel for channel in range(16) if channel != _DRUMS]
  for part, channel in zip(score.parts, itertools.cycle(channels), strict=False):
    name = mido.MetaMessage("track_name", name=part.name)
    file.tracks.append(_track([name, *_messages(part.notes, channel)]))
  with whole_file(path) as content:
    file.save(file=content)


def _parts(track: mido.MidiTrack) -> Iterator[Part]:
  """Yields a part for each channel with notes in a track."""
  name = next((message.name for message in track if message.type == "track_name"), "")
  by_channel: dict[int, list[tuple[int, mido.Message]]] = {}
  tick = 0
  for message in track:
    tick += message.time
    if not message.is_meta and hasattr(message, "channel"):
      by_channel.setdefault(message.channel, []).append((tick, message))
  for channel, messages in sorted(by_channel.items()):
    if channel != _DRUMS and (notes := _notes(messages, tick)):
      yield Part(name, notes)


def _notes(messages: Sequence[tuple[int, mido.Message]], last_tick: int) -> list[Note]:
  """Returns the notes of one channel from its messages and their ticks.

  A note off at the tick of a repeated note on ends the earlier note: some files write the new note
  on first.
  """
  notes: list[Note] = []
  begun: dict[int, tuple[int, int]] = {}  # by pitch: tick and velocity
  awaited: collections.Counter[int] = collections.Counter()  # by pitch: note offs to come
  released: set[int] = set()  # pitches that end when the pedal is lifted
  pedal_down = False

  def end(pitch: int, tick: int) -> None:
    released.discard(pitch)
    start, velocity = begun.pop(pitch)
    if start < tick:
      notes.append(Note(start, tick, pitch, velocity))

  for tick, message in messages:
    if message.type == "note_on" and message.velocity:
      if message.note in begun:
        end(message.note, tick)
      begun[message.note] = tick, message.velocity
      awaited[message.note] += 1
    elif message.type in ("note_on", "note_off"):
      awaited[message.note] = max(0, awaited[message.note] - 1)
      if message.note in begun and (begun[message.note][0] < tick or not awaited[message.note]):
        released.add(message.note)
    elif message.type == "control_change" and message.control == _PEDAL:
      pedal_down = message.value >= 64
    if not pedal_down:
      for pitch in sorted(released):
        end(pitch, tick)
  for pitch in sorted(begun):
    end(pitch, last_tick)
  return sorted(notes)


def _tempi(file: mido.MidiFile) -> list[tuple[int, float]]:
  found = {0: _DEFAULT_TEMPO}
  for track in file.tracks:
    tick = 0
    for message in track:
      tick += message.time
      if message.type == "set_tempo":
        found[tick] = message.tempo
  return [(tick, tempo / 1e6) for tick, tempo in sorted(found.items())]


def _messages(notes: Sequence[Note], channel: int) -> list[mido.Message]:
  """Returns messages in order of absolute ticks; at one tick, note offs come first."""
  make = functools.partial(mido.Message, channel=channel)
  offs = [make("note_off", note=note.pitch, velocity=0, time=note.end) for note in notes]
  ons = [
    make("note_on", note=note.pitch, velocity=note.velocity, time=note.start) for note in notes
  ]
  return sorted(offs + ons, key=lambda message: message.time)


def _track(messages: Sequence[mido.Message | mido.MetaMessage]) -> mido.MidiTrack:
  """Returns a track of messages, with times relative to the message before."""
  ticks = [0, *(message.time for message in messages)]
  return mido.MidiTrack(
    message.copy(time=message.time - before)
    for before, message in zip(ticks, messages, strict=False)
  )
