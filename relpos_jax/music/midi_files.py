"""MIDI files as notes: all that this project knows of the MIDI library, mido."""

import collections
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mido
import numpy as np

from relpos_jax.errors import InputError
from relpos_jax.files import whole_file
from relpos_jax.typing import Float

_DRUMS, _PEDAL = 9, 64  # channel and controller, counted from 0
_DEFAULT_TEMPO = 500_000  # microseconds a quarter, as the standard has it
_MOST_HOURS, _MOST_QUARTERS = 24, 24 * 60 * 120  # a day of music: more of it is damage


class Note(NamedTuple):
  """From `start` to `end`, in ticks; pitch 0 to 127, velocity 1 to 127."""

  start: int
  end: int
  pitch: int
  velocity: int


class Part(NamedTuple):
  """The notes of one channel in one track, and the track's name."""

  name: str
  notes: list[Note]


class Score(NamedTuple):
  """What a MIDI file says.

  Attributes:
    parts: in the order of the file; drums are none.
    ticks_per_quarter: the unit of all times.
    tempi: (tick, seconds a quarter), from that tick on; the first is of tick 0.
  """

  parts: list[Part]
  ticks_per_quarter: int
  tempi: list[tuple[int, float]]

  def seconds(self, ticks: Sequence[int] | np.ndarray) -> Float[np.ndarray, "n"]:
    """When these ticks are.

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
  """The notes of a MIDI file; the sustain pedal makes them longer, as Oore et al. 2018 did.

  A note that is struck again ends there; one that nothing ends, ends with its track. Drums
  (channel 10) are left out.

  Raises InputError, a line that names the file: missing, no MIDI file, damaged, of type 2, numbers
  outside 0 to 127, no notes, music of more than a day.
  """
  file = _open(pathlib.Path(path))
  parts = [part for track in file.tracks for part in _parts(track)]
  if not any(part.notes for part in parts):
    raise InputError(f"no notes in {path}: give a MIDI file with some outside the drums' channel")
  score = Score(parts, file.ticks_per_beat, _tempi(file))
  _check_length(score, path)
  return score


def write_score(score: Score, path: str | os.PathLike) -> None:
  """Writes a MIDI file of type 1: the tempi, then a track and a channel for each part.

  Raises InputError: it cannot be written.
  """
  file = mido.MidiFile(type=1, ticks_per_beat=score.ticks_per_quarter)
  tempo = lambda seconds: mido.MetaMessage("set_tempo", tempo=round(seconds * 1e6))
  file.tracks.append(_track([(tick, tempo(seconds)) for tick, seconds in score.tempi]))
  channels = [channel for channel in range(16) if channel != _DRUMS]
  for number, part in enumerate(score.parts):
    channel = channels[number % len(channels)]
    name = mido.MetaMessage("track_name", name=part.name)
    file.tracks.append(_track([(0, name), *_messages(part.notes, channel)]))
  try:
    with whole_file(path) as content:
      file.save(file=content)
  except OSError as error:
    raise InputError(f"cannot write {path}: {error.strerror}") from None


def _open(path: pathlib.Path) -> mido.MidiFile:
  if not os.path.isfile(path):  # the os says no, where pathlib would raise
    what = "a folder" if os.path.isdir(path) else "not there"
    raise InputError(f"{path} is {what}: name a file")
  try:
    with path.open("rb") as content:
      if content.read(4) != b"MThd":
        raise InputError(f"{path} is no MIDI file: it does not begin with MThd; give another file")
      content.seek(0)
      file = mido.MidiFile(file=content)
  except InputError:
    raise
  except EOFError:
    raise InputError(f"damaged MIDI file {path}: it ends too early; copy it again") from None
  except Exception as error:  # of many kinds, as damage is
    reason = str(error).partition("\n")[0] or type(error).__name__
    raise InputError(f"cannot read {path} as MIDI: {reason}; give another file") from None
  if file.ticks_per_beat < 1:
    raise InputError(f"{path} counts time in frames, not in quarter notes: convert it")
  if file.type == 2:  # its tracks are pieces of their own
    raise InputError(f"{path} is of type 2, one piece a track: give a file of type 0 or 1 for each")
  return file


def _check_length(score: Score, path: str | os.PathLike) -> None:
  """One damaged number can make music of years, whose tokens no memory holds.

  In both units: events are counted by the second, voices on a grid by the quarter.
  """
  end = max(note.end for part in score.parts for note in part.notes)
  hours, quarters = score.seconds([end])[0] / 3600, end / score.ticks_per_quarter
  if hours > _MOST_HOURS or quarters > _MOST_QUARTERS:
    raise InputError(
      f"{path} lasts {hours:,.1f} hours, {quarters:,.0f} quarter notes: give a file of at most "
      f"{_MOST_HOURS} hours, {_MOST_QUARTERS:,} quarter notes; this one may be damaged"
    )


def _parts(track: mido.MidiTrack) -> Iterator[Part]:
  """One for each channel that sounds in a track."""
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
  """The notes of one channel; its messages carry their tick.

  An end at the very tick at which a note is struck again is the older note's: some files tell the
  new start before the old end.
  """
  notes: list[Note] = []
  begun: dict[int, tuple[int, int]] = {}  # by pitch: tick and velocity
  awaited: collections.Counter[int] = collections.Counter()  # by pitch: ends that are to come
  held: set[int] = set()  # of those begun: ended but for the pedal
  is_down = False

  def end(pitch: int, tick: int) -> None:
    held.discard(pitch)
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
        held.add(message.note)
    elif message.type == "control_change" and message.control == _PEDAL:
      is_down = message.value >= 64
    for pitch in () if is_down else sorted(held):
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


def _messages(notes: Sequence[Note], channel: int) -> list[tuple[int, mido.Message]]:
  """Notes' ends and starts by tick, ends first."""
  make = lambda kind, note, velocity: mido.Message(
    kind, channel=channel, note=note.pitch, velocity=velocity
  )
  ends = [(note.end, 0, make("note_off", note, 0)) for note in notes]
  starts = [(note.start, 1, make("note_on", note, note.velocity)) for note in notes]
  ordered = sorted(ends + starts, key=lambda event: event[:2])
  return [(tick, message) for tick, _, message in ordered]


def _track(messages: Sequence[tuple[int, mido.Message | mido.MetaMessage]]) -> mido.MidiTrack:
  """Messages with the ticks since the one before."""
  ticks = [0, *(tick for tick, _ in messages)]
  return mido.MidiTrack(
    message.copy(time=tick - before)
    for before, (tick, message) in zip(ticks, messages, strict=False)
  )
