"""Writes scores as WAV files: each note is a decaying tone with overtones."""

import os

import numpy as np
from scipy.io import wavfile

from experiments.files import replace_file, to_path
from experiments.music.midi_files import Score
from relpos_jax.typing import Float

RATE = 22_050  # samples a second
_PARTIALS = 4
# Seconds; without attack and release, tones click.
_ATTACK, _DECAY, _RELEASE = 0.01, 1.5, 0.08
_PEAK = 0.9  # samples would be clipped at 1


def synthesize(score: Score) -> Float[np.ndarray, "_"]:
  """Synthesizes a score; returns samples between -1 and 1, `RATE` a second."""
  notes = score.notes
  seconds = score.seconds(np.array(notes).reshape(-1, 4)[:, :2])
  length = seconds.max(initial=0) + _RELEASE
  sound = np.zeros(int(length * RATE) + 2)
  for note, (start, end) in zip(notes, seconds, strict=True):
    tone = note.velocity * _tone(note.pitch, end - start)
    first = int(start * RATE)
    sound[first : first + len(tone)] += tone
  return _PEAK * sound / max(np.abs(sound).max(), 1)


def _tone(pitch: int, seconds: float) -> Float[np.ndarray, "_"]:
  """Synthesizes a MIDI pitch that is held for some seconds and then fades."""
  length = seconds + _RELEASE
  time = np.arange(int(length * RATE)) / RATE
  frequency = 440 * 2 ** ((pitch - 69) / 12)
  tone = np.zeros(len(time))
  for partial in range(1, _PARTIALS + 1):
    overtone = partial * frequency
    if overtone < RATE / 2:  # higher ones would alias to wrong pitches
      tone += np.sin(2 * np.pi * overtone * time) / partial**2
  attack = np.minimum(1, time / _ATTACK)
  release = np.minimum(1, (length - time) / _RELEASE)
  return tone * attack * release * np.exp(-time / _DECAY)


def write_wav(score: Score, path: str | os.PathLike) -> None:
  """Writes the sound of a score as a WAV file, with one channel of 16 bits."""
  samples = np.round(32_767 * synthesize(score)).astype("<i2")
  with replace_file(to_path(path)) as content:
    wavfile.write(content, RATE, samples)
