"""Reads and writes MIDI files as scores of notes, and defines codecs to tokens."""

import bisect
import collections
import itertools
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import mido
import numpy as np

from experiments.errors import InputError
from experiments.files import replace_file, to_path
from relpos_jax.typing import Float, Int

_DRUMS, _PEDAL = 9, 64  # the channel and the controller, counted from 0
# In seconds and in quarter notes. A damaged file of 44 bytes may claim to last for
# years.
_LONGEST = 86_400
_DEFAULT_TEMPO = 500_000  # microseconds per quarter note, by the standard


class Note(NamedTuple):
  """Holds a note, with times in ticks, pitch 0 to 127 and velocity 1 to 127."""

  start: int
  end: int
  pitch: int
  velocity: int


class Part(NamedTuple):
  """Holds the notes of one channel in one track, and the track's name."""

  name: str
  notes: list[Note]


class Score(NamedTuple):
  """Holds the notes and tempi of a MIDI file.

  Parts are in the order of the file, without drums. A tempo is a pair: a tick, and the
  seconds per quarter note from then on. The first is at tick 0.
  """

  parts: list[Part]
  ticks_per_quarter: int
  tempi: list[tuple[int, float]]

  @property
  def notes(self) -> list[Note]:
    """Returns the notes of all parts."""
    return list(itertools.chain.from_iterable(part.notes for part in self.parts))

  def seconds(self, ticks: Sequence[int] | np.ndarray) -> Float[np.ndarray, "*n"]:
    """Converts ticks to seconds.

    >>> Score([], 100, [(0, 0.5), (200, 1.0)]).seconds([100, 200, 300]).tolist()
    [0.5, 1.0, 2.0]
    """
    starts, rates = np.array(self.tempi, float).T
    # Divide last: rounding errors would move notes that lie between two grid steps.
    durations = np.diff(starts) * rates[:-1]
    at_starts = np.append(0.0, np.cumsum(durations)) / self.ticks_per_quarter
    index = np.searchsorted(starts, ticks, side="right") - 1
    since = (np.asarray(ticks) - starts[index]) * rates[index] / self.ticks_per_quarter
    return at_starts[index] + since


# Pairs of a tick and a message. Pairs of ticks at which a pedal goes down and up, in
# order.
_Messages = Sequence[tuple[int, mido.Message | mido.MetaMessage]]
_Pedal = list[tuple[int, int]]


def read_score(path: str | os.PathLike) -> Score:
  """Reads the notes of a MIDI file, without drums (channel 10).

  A part is a channel of a track. Each note off ends one note: if notes of one pitch
  overlap, the first to begin is the first to end. A note without note off ends with its
  track. Notes of length zero are left out.

  The sustain pedal acts on its whole channel, in all tracks, as in General MIDI. It
  prolongs notes that end while it is down, or as it goes down. They last until it is
  lifted, or until the part repeats the pitch (Oore et al. 2018). A pedal that is never
  lifted acts to the end of the file.

  Raises InputError if the file is missing, not MIDI, damaged, of type 2, too long, or
  has no notes.
  """
  file = _open(path)
  tracks = list(map(_add_ticks, file.tracks))
  messages = list(itertools.chain.from_iterable(tracks))
  messages.sort(key=operator.itemgetter(0))  # stable: order within a tick stays
  pedals = _read_pedals(messages)
  parts = []
  for track in tracks:
    parts += _read_parts(track, pedals)
  if not parts:
    raise InputError(
      f"no notes in {path}: give a MIDI file with notes other than drums"
    )
  score = Score(parts, file.ticks_per_beat, _read_tempi(messages))
  last = max(note.end for note in score.notes)
  if max(last / file.ticks_per_beat, score.seconds([last])[0]) > _LONGEST:
    raise InputError(
      f"{path} lasts more than {_LONGEST:,} seconds or quarter notes: divide it"
    )
  return score


def _add_ticks(track: mido.MidiTrack) -> _Messages:
  """Returns the messages of a track with their ticks."""
  ticks = itertools.accumulate(message.time for message in track)
  return [*zip(ticks, track, strict=True)]


def _open(path: str | os.PathLike) -> mido.MidiFile:
  """Opens a MIDI file; raises InputError if it cannot be used."""
  try:
    file = mido.MidiFile(path)
  except Exception as error:  # mido raises many kinds of errors for damaged files
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
  """Writes a MIDI file of type 1: a track of tempi, then one for each part."""
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
    # Note offs first within a tick: a repeated pitch must end before it begins again.
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


def _read_tempi(messages: _Messages) -> list[tuple[int, float]]:
  """Returns the tempi: ticks, and the seconds per quarter note from then on."""
  tempi = {0: _DEFAULT_TEMPO / 1e6}
  for tick, message in messages:
    if message.type == "set_tempo":
      tempi[tick] = message.tempo / 1e6
  return sorted(tempi.items())


def _read_pedals(messages: _Messages) -> dict[int, _Pedal]:
  """Reads the sustain pedal of each channel from the messages of all tracks."""
  pedals: dict[int, _Pedal] = collections.defaultdict(list)
  down: dict[int, int] = {}  # by channel: the tick at which the pedal went down
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


def _read_parts(track: _Messages, pedals: Mapping[int, _Pedal]) -> Iterator[Part]:
  """Yields a part for each channel of a track that has notes."""
  name = ""
  by_channel = collections.defaultdict(list)
  for tick, message in track:
    if message.type == "track_name":
      name = name or message.name
    elif message.type in ("note_on", "note_off") and message.channel != _DRUMS:
      by_channel[message.channel].append((tick, message))
  for channel, messages in sorted(by_channel.items()):
    last_tick, _ = track[-1]
    notes = _sustain(_read_notes(messages, last_tick), pedals[channel])
    notes = sorted(note for note in notes if note.start < note.end)
    if notes:
      yield Part(name, notes)


def _read_notes(messages: _Messages, last_tick: int) -> list[Note]:
  """Reads the notes of one channel.

  Notes of one pitch may overlap. A note off then ends the one that began first. Notes
  without a note off end at `last_tick`.
  """
  notes: list[Note] = []
  # By pitch: ticks and velocities.
  sounding = collections.defaultdict(collections.deque)
  for tick, message in messages:
    pitch = message.note
    if message.type == "note_on" and message.velocity:
      sounding[pitch].append((tick, message.velocity))
    elif sounding[pitch]:
      start, velocity = sounding[pitch].popleft()
      notes.append(Note(start, tick, pitch, velocity))
  for pitch, remaining in sounding.items():
    for start, velocity in remaining:
      notes.append(Note(start, last_tick, pitch, velocity))
  return notes


def _sustain(notes: Sequence[Note], pedal: _Pedal) -> list[Note]:
  """Prolongs notes that end while the pedal is down."""
  onsets = collections.defaultdict(list)  # by pitch
  for note in sorted(notes):
    onsets[note.pitch].append(note.start)
  downs = [down for down, _ in pedal]
  sustained = []
  for note in notes:
    presses = bisect.bisect(downs, note.end)  # how often, up to the end of the note
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
  """Converts between MIDI files and tokens; `performance` and `voices` define codecs.

  Attributes:
    vocab_size: V. Tokens 0 to 2 are padding, begin and end.
    notes: the range of the tokens that stand for pitches. Its length is a multiple of
      128, because a pitch may have several tokens, such as note on and note off.
    encode_score: converts a score to tokens. Its second argument names the score in
      errors.
    decode_score: converts tokens to a score, with a part for each voice, the highest
      first. It skips tokens that have no meaning in their context.
    times: returns the time of each token, and of a token after the last, in steps.
    step: the unit of these times, in words.
    ticks: the length of a step, in ticks of the scores that `decode_score` returns.
    alignment: pieces may only be cut at multiples of this many tokens.
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
    """Moves all pitches by a number of semitones; a negative number moves them down.

    If a pitch would leave the range 0 to 127, all pitches move by fewer semitones, so
    that every pitch stays in the range.
    """
    row = np.asarray(tokens, int)
    is_note = (row >= self.notes.start) & (row < self.notes.stop)
    pitches = (row[is_note] - self.notes.start) % 128
    lowest, highest = -pitches.min(initial=127), 127 - pitches.max(initial=0)
    return row + is_note * int(np.clip(semitones, lowest, highest))

  def read(self, path: str | os.PathLike) -> Int[np.ndarray, "_"]:
    """Returns the tokens of a MIDI file; raises InputError if it cannot be used."""
    return self.encode_score(read_score(path), str(path))

  def write(self, tokens: Sequence[int] | np.ndarray, path: str | os.PathLike) -> None:
    """Writes tokens to a MIDI file."""
    write_score(self.decode_score(tokens), path)
