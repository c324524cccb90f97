"""The sound of a score has the pitches, the times and the loudness of its notes."""

import wave

import numpy as np

from experiments.music.midi_files import Note, Part, Score
from experiments.music.sound import RATE, synthesize, write_wav

# An a' and a silence of a second each, and an a for half of one, at 120 a minute.
NOTES = [Note(0, 200, pitch=69, velocity=80), Note(400, 500, pitch=57, velocity=40)]
SCORE = Score([Part("Piano", NOTES)], ticks_per_quarter=100, tempi=[(0, 0.5)])


def frequency_of(samples) -> float:
  """Returns the frequency of the loudest partial."""
  window = np.hanning(len(samples))
  spectrum = np.abs(np.fft.rfft(samples * window))
  return np.fft.rfftfreq(len(samples), 1 / RATE)[spectrum.argmax()]


def read(path):
  with wave.open(str(path)) as file:
    samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return file.getparams(), samples / 32_767


def test_notes_sound_at_their_pitch_and_time(tmp_path):
  write_wav(SCORE, tmp_path / "a.wav")
  params, samples = read(tmp_path / "a.wav")
  assert (params.nchannels, params.sampwidth, params.framerate) == (1, 2, RATE)
  assert RATE >= 22_050
  assert abs(len(samples) / RATE - 2.5) < 0.2
  assert abs(frequency_of(samples[:RATE]) - 440) < 2
  assert abs(frequency_of(samples[2 * RATE :]) - 220) < 4
  silence = samples[int(1.2 * RATE) : 2 * RATE]
  assert not silence.any()


def test_many_notes_at_once_are_not_clipped_and_none_is_silence():
  notes = [Note(0, 100, pitch, velocity=127) for pitch in range(128)]
  chord = Score([Part("Piano", notes)], 100, [(0, 0.5)])
  assert np.abs(synthesize(chord)).max() < 1
  assert not synthesize(Score([], 100, [(0, 0.5)])).any()
