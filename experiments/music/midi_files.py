"""MIDI files as scores of notes, and the interface of codecs between them and tokens."""

import collections
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import mido
import numpy as np

from experiments.data.tokenizer import BOS, EOS, PAD
from experiments.errors import InputError
from experiments.files import whole_file
from relpos_jax.typing import Float, Int

_DRUMS, _PEDAL = 9, 64  # channel and controller, counted from 0
_LONGEST = 86_400  # seconds, and quarter notes: a damaged file of 44 bytes may last for years
_DEFAULT_TEMPO = 500_000  # microseconds per quarter note, by the standard


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

  Parts are in the order of the file, without drums. Tempi are (tick, seconds per quarter note from
  that tick on), and the first is at tick 0.
  """

  parts: list[Part]
  ticks_per_quarter: int
  tempi: list[tuple[int, float]]

  def seconds(self, ticks: Sequence[int] | np.ndarray) -> Float[np.ndarray, "*n"]:
    """Converts ticks to seconds.

    >>> Score([], 100, [(0, 0.5), (200, 1.0)]).seconds([100, 200, 300]).tolist()
    [0.5, 1.0, 2.0]
    """
    starts, rates = np.array(self.tempi, float).T
    at_starts = np.cumsum([0.0, *np.diff(starts) * rates[:-1]]) / self.ticks_per_quarter
    index = np.searchsorted(starts, ticks, side="right") - 1
    since = (np.asarray(ticks) - starts[index]) * rates[index] / self.ticks_per_quarter
    return at_starts[index] + since


def read_score(path: str | os.PathLike) -> Score:
  """Reads the notes of a MIDI file, without drums (channel 10).

  The sustain pedal prolongs notes, as in Oore et al. 2018. A repeated note ends the one before. A
  note without note off ends with its track.

  Raises InputError: the file is missing, not MIDI, damaged, of type 2, too long, or has no notes.
  """
  try:
    file = mido.MidiFile(path)
  except Exception as error:  # mido raises many kinds for damaged files
    reason = getattr(error, "strerror", None) or str(error) or "it is truncated or not MIDI"
    raise InputError(f"cannot read MIDI file {path}: {reason}; give another file") from None
  if file.type == 2 or file.ticks_per_beat < 1:
    raise InputError(f"{path} is of type 2 or counts time in frames: convert it to type 1")
  parts = [part for track in file.tracks for part in _parts(track)]
  if not parts:
    raise InputError(f"no notes in {path}: give a MIDI file with notes other than drums")
  messages = (message for track in file.tracks for message in _with_ticks(track))
  tempi = {tick: message.tempo for tick, message in messages if message.type == "set_tempo"}
  tempi = sorted(({0: _DEFAULT_TEMPO} | tempi).items())
  score = Score(parts, file.ticks_per_beat, [(tick, tempo / 1e6) for tick, tempo in tempi])
  last = max(note.end for part in parts for note in part.notes)
  if last > _LONGEST * file.ticks_per_beat or score.seconds([last])[0] > _LONGEST:
    raise InputError(f"{path} lasts more than {_LONGEST:,} seconds or quarter notes: divide it")
  return score


def write_score(score: Score, path: str | os.PathLike) -> None:
  """Writes a MIDI file of type 1: a track of tempi, then a track and a channel per part."""
  tracks = [
    [mido.MetaMessage("set_tempo", tempo=round(x * 1e6), time=tick) for tick, x in score.tempi]
  ]
  channels = [channel for channel in range(16) if channel != _DRUMS]
  for part, channel in zip(score.parts, itertools.cycle(channels), strict=False):
    messages = []
    for start, end, pitch, velocity in part.notes:
      at = dict(channel=channel, note=pitch)
      messages.append(mido.Message("note_on", velocity=velocity, time=start, **at))
      messages.append(mido.Message("note_off", velocity=0, time=end, **at))
    # At one tick, note offs come first.
    messages.sort(key=lambda message: (message.time, message.type == "note_on"))
    tracks.append([mido.MetaMessage("track_name", name=part.name), *messages])
  file = mido.MidiFile(type=1, ticks_per_beat=score.ticks_per_quarter)
  for track in tracks:
    since = np.diff([message.time for message in track], prepend=0).tolist()
    file.tracks.append(mido.MidiTrack(x.copy(time=t) for x, t in zip(track, since, strict=True)))
  with whole_file(path) as content:
    file.save(file=content)


def _with_ticks(track: mido.MidiTrack) -> Iterator[tuple[int, mido.Message]]:
  return zip(itertools.accumulate(message.time for message in track), track, strict=True)


def _parts(track: mido.MidiTrack) -> Iterator[Part]:
  """Yields a part for each channel with notes in a track."""
  name = next((message.name for message in track if message.type == "track_name"), "")
  by_channel = collections.defaultdict(list)
  for tick, message in _with_ticks(track):
    if not message.is_meta and hasattr(message, "channel"):
      by_channel[message.channel].append((tick, message))
  last_tick = sum(message.time for message in track)
  for channel, messages in sorted(by_channel.items()):
    if channel != _DRUMS and (notes := _notes(messages, last_tick)):
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


# Codecs -------------------------------------------------------------------------------------------


class Codec(NamedTuple):
  """Reads MIDI files as tokens and writes tokens as MIDI files: `performance` and `voices`.

  Attributes:
    vocab_size: V. Tokens 0 to 2 are padding, begin and end.
    notes: the tokens of notes, 128 pitches once or several times.
    encode_score: returns the tokens of a score; takes its name for an InputError too.
    decode_score: returns the score of tokens, a part for each voice, the highest first; skips those
      that have no meaning in their context.
    times: returns the step of each token and of the token after the last.
    step, ticks: the unit of time, in words and in ticks of `decode_score`.
    alignment: a piece may be sliced at multiples of this many tokens.
  """

  vocab_size: int
  notes: range
  encode_score: Callable[[Score, str], Int[np.ndarray, "_"]]
  decode_score: Callable[[Int[np.ndarray, "_"]], Score]
  times: Callable[[Int[np.ndarray, "_"]], Float[np.ndarray, "_"]]
  step: str
  ticks: int
  alignment: int

  def transpose(self, tokens: Sequence[int] | np.ndarray, semitones: int) -> Int[np.ndarray, "L"]:
    """Transposes tokens by semitones, as far as all pitches stay within 0 to 127."""
    row = np.asarray(tokens, int)
    is_note = (row >= self.notes.start) & (row < self.notes.stop)
    pitches = (row[is_note] - self.notes.start) % 128
    lowest, highest = -pitches.min(initial=127), 127 - pitches.max(initial=0)
    return row + is_note * int(np.clip(semitones, lowest, highest))

  def read(self, path: str | os.PathLike) -> Int[np.ndarray, "_"]:
    """Returns the tokens of a MIDI file. Raises InputError."""
    return self.encode_score(read_score(path), str(path))

  def write(self, tokens: Sequence[int] | np.ndarray, path: str | os.PathLike) -> None:
    """Writes tokens to a MIDI file."""
    write_score(self.decode_score(tokens), path)


def strip_special(tokens: Sequence[int] | np.ndarray) -> Int[np.ndarray, "_"]:
  """Returns the tokens of one piece without begin, padding, and the end and all after it."""
  row = np.asarray(tokens, int)
  row = row[np.cumsum(row == EOS) == 0]
  return row[(row != PAD) & (row != BOS)]
