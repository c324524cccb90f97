"""MIDI files as scores of notes, and codecs between scores and tokens."""

import bisect
import collections
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import mido
import numpy as np

from experiments.errors import InputError
from experiments.files import replace_file, to_path
from relpos_jax.typing import Float, Int

_DRUMS, _PEDAL = 9, 64  # channel and controller, counted from 0
# Seconds, and quarter notes: a damaged file of 44 bytes may last for years.
_LONGEST = 86_400
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

  Parts are in the order of the file, without drums. Tempi are (tick, seconds per
  quarter note from that tick on), and the first is at tick 0.
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
    # Division comes last: rounding to a grid depends on it.
    durations = np.diff(starts) * rates[:-1]
    at_starts = np.append(0.0, np.cumsum(durations)) / self.ticks_per_quarter
    index = np.searchsorted(starts, ticks, side="right") - 1
    since = (np.asarray(ticks) - starts[index]) * rates[index] / self.ticks_per_quarter
    return at_starts[index] + since


# Messages and their ticks; and when a pedal goes down and up again, in order.
_Messages = Sequence[tuple[int, mido.Message | mido.MetaMessage]]
_Pedal = list[tuple[int, int]]


def read_score(path: str | os.PathLike) -> Score:
  """Reads the notes of a MIDI file, without drums (channel 10).

  A part is a channel of a track. Every note in it has its own note off: notes of one
  pitch that overlap end in the order in which they begin. A note without note off ends
  with its track. Notes without length are left out.

  The sustain pedal is the channel's, in whichever tracks its messages are, as in
  General MIDI. A note that ends while it is down, or as it goes down, lasts until it is
  lifted or the part has a note of this pitch again (Oore et al. 2018). A pedal that is
  never lifted holds to the end of the file.

  Raises InputError: the file is missing, not MIDI, damaged, of type 2, too long, or has
  no notes.
  """
  file = _open(path)
  tracks = []
  for track in file.tracks:
    ticks = itertools.accumulate(message.time for message in track)
    tracks.append([*zip(ticks, track, strict=True)])
  messages = [*itertools.chain.from_iterable(tracks)]
  messages.sort(key=lambda message: message[0])  # at one tick they stay in order
  pedals = _pedals(messages)
  parts = []
  for track in tracks:
    parts += _parts(track, pedals)
  if not parts:
    raise InputError(
      f"no notes in {path}: give a MIDI file with notes other than drums"
    )
  score = Score(parts, file.ticks_per_beat, _tempi(messages))
  last = max(note.end for part in parts for note in part.notes)
  if max(last / file.ticks_per_beat, score.seconds([last])[0]) > _LONGEST:
    raise InputError(
      f"{path} lasts more than {_LONGEST:,} seconds or quarter notes: divide it"
    )
  return score


def _open(path: str | os.PathLike) -> mido.MidiFile:
  """Opens a MIDI file. Raises InputError if it cannot be used."""
  try:
    file = mido.MidiFile(path)
  except Exception as error:  # mido raises many kinds for damaged files
    reason = getattr(error, "strerror", None) or str(error)
    reason = reason or "it is truncated or not MIDI"
    raise InputError(
      f"cannot read MIDI file {path}: {reason}; give another file"
    ) from None
  if file.type == 2 or file.ticks_per_beat < 1:
    raise InputError(
      f"{path} is of type 2 or counts time in frames: convert it to type 1"
    )
  return file


def write_score(score: Score, path: str | os.PathLike) -> None:
  """Writes a MIDI file of type 1: tempi, then a track and a channel for each part."""
  tempi = []
  for tick, seconds in score.tempi:
    tempo = round(seconds * 1e6)
    tempi.append(mido.MetaMessage("set_tempo", tempo=tempo, time=tick))
  tracks = [mido.MidiTrack(tempi)]
  channels = [channel for channel in range(16) if channel != _DRUMS]
  for part, channel in zip(score.parts, itertools.cycle(channels), strict=False):
    messages = []
    for start, end, pitch, velocity in part.notes:
      key = dict(channel=channel, note=pitch)
      messages.append(mido.Message("note_on", velocity=velocity, time=start, **key))
      messages.append(mido.Message("note_off", velocity=0, time=end, **key))
    # At one tick, note offs come first.
    messages.sort(key=lambda message: (message.time, message.type == "note_on"))
    name = mido.MetaMessage("track_name", name=part.name)
    tracks.append(mido.MidiTrack([name, *messages]))
  for track in tracks:
    before = 0
    for message in track:
      tick = message.time
      message.time = tick - before
      before = tick
  file = mido.MidiFile(ticks_per_beat=score.ticks_per_quarter, tracks=tracks)
  with replace_file(to_path(path)) as content:
    file.save(file=content)


def _tempi(messages: _Messages) -> list[tuple[int, float]]:
  """Returns the seconds per quarter note from each tick on."""
  tempi = {0: _DEFAULT_TEMPO / 1e6}
  for tick, message in messages:
    if message.type == "set_tempo":
      tempi[tick] = message.tempo / 1e6
  return sorted(tempi.items())


def _pedals(messages: _Messages) -> dict[int, _Pedal]:
  """Returns the sustain pedal of each channel; `messages` are those of all tracks."""
  pedals: dict[int, _Pedal] = collections.defaultdict(list)
  down: dict[int, int] = {}  # by channel: since when
  for tick, message in messages:
    if not message.is_cc(_PEDAL):
      continue
    if message.value >= 64:
      down.setdefault(message.channel, tick)
    elif message.channel in down:
      pedals[message.channel].append((down.pop(message.channel), tick))
  for channel, tick in down.items():
    last_tick, _ = messages[-1]
    pedals[channel].append((tick, last_tick))
  return pedals


def _parts(track: _Messages, pedals: Mapping[int, _Pedal]) -> Iterator[Part]:
  """Yields a part for each channel with notes in a track."""
  name = ""
  by_channel = collections.defaultdict(list)
  for tick, message in track:
    if message.type == "track_name":
      name = name or message.name
    elif message.type in ("note_on", "note_off") and message.channel != _DRUMS:
      by_channel[message.channel].append((tick, message))
  for channel, messages in sorted(by_channel.items()):
    last_tick, _ = track[-1]
    notes = _sustained(_notes(messages, last_tick), pedals[channel])
    notes = sorted(note for note in notes if note.start < note.end)
    if notes:
      yield Part(name, notes)


def _notes(messages: _Messages, last_tick: int) -> list[Note]:
  """Returns the notes of one channel, from key down to key up: first in, first out."""
  notes: list[Note] = []
  begun = collections.defaultdict(collections.deque)  # by pitch: ticks and velocities
  for tick, message in messages:
    pitch = message.note
    if message.type == "note_on" and message.velocity:
      begun[pitch].append((tick, message.velocity))
    elif begun[pitch]:
      start, velocity = begun[pitch].popleft()
      notes.append(Note(start, tick, pitch, velocity))
  for pitch, without_off in begun.items():
    for start, velocity in without_off:
      notes.append(Note(start, last_tick, pitch, velocity))
  return notes


def _sustained(notes: Sequence[Note], pedal: _Pedal) -> list[Note]:
  """Prolongs the notes that end while the pedal is down."""
  onsets = collections.defaultdict(list)  # by pitch
  for note in sorted(notes):
    onsets[note.pitch].append(note.start)
  downs = [down for down, _ in pedal]
  sustained = []
  for note in notes:
    presses = bisect.bisect(downs, note.end)  # until the key is up
    _, lifted = pedal[presses - 1] if presses else (0, 0)
    if lifted > note.end:
      again = bisect.bisect_left(onsets[note.pitch], max(note.end, note.start + 1))
      ends = [lifted, *onsets[note.pitch][again : again + 1]]
      note = note._replace(end=min(ends))
    sustained.append(note)
  return sustained


# Codecs
# ----------------------------------------------------------------------------


class Codec(NamedTuple):
  """Reads MIDI files as tokens and writes tokens as MIDI files: `performance` and
  `voices`.

  Attributes:
    vocab_size: V. Tokens 0 to 2 are padding, begin and end.
    notes: the tokens of notes, 128 pitches once or several times.
    encode_score: returns the tokens of a score; takes its name for an InputError too.
    decode_score: returns the score of tokens, a part for each voice, the highest first;
      skips those that have no meaning in their context.
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

  def transpose(
    self, tokens: Sequence[int] | np.ndarray, semitones: int
  ) -> Int[np.ndarray, "L"]:
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
