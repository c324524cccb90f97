"""Four voices: grid, tokens and MIDI files hold the same music."""

import mido
import numpy as np
import pytest
from faults import refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from experiments.data.tokenizer import BOS, EOS
from experiments.errors import InputError
from experiments.music import voices
from experiments.music.midi_files import Note, Part, Score, write_score

shapes = st.tuples(st.integers(0, 9), st.just(4))
grids = arrays.arrays(np.int64, shapes, elements=st.integers(-1, 127))
sounding = grids.filter(lambda grid: len(grid) and grid[-1].max() >= 0)


@settings(max_examples=40)
@given(sounding)
def test_a_score_holds_the_grid_in_any_order_of_its_parts(grid):
  score = voices.score(grid)
  backwards = score._replace(parts=score.parts[::-1])
  for scored in (score, backwards):
    np.testing.assert_array_equal(voices.round_to_grid(scored), grid)


def test_a_midi_file_holds_the_tokens_even_of_silent_voices(tmp_path):
  grid = np.random.default_rng(0).integers(-1, 128, (50, 4))
  grid[:, 1] = -1
  tokens = voices.encode(grid)
  voices.CODEC.write([BOS, *tokens.tolist(), EOS], tmp_path / "a.mid")
  np.testing.assert_array_equal(voices.CODEC.read(tmp_path / "a.mid"), tokens)
  names = [track.name for track in mido.MidiFile(tmp_path / "a.mid").tracks]
  assert names[1:] == ["Soprano", "Alto", "Tenor", "Bass"]


def test_parts_without_names_are_voices_by_pitch_and_notes_go_to_the_nearest_step():
  late = Note(55, 190, 60, 64)  # at 100 ticks per step: from 1 to 2
  short = Note(210, 220, 61, 64)  # lasts one step
  parts = [Part("", [Note(0, 300, pitch, 64)]) for pitch in (40, 70, 50)]
  grid = voices.round_to_grid(Score([*parts, Part("", [late, short])], 400, [(0, 0.5)]))
  wanted = [[70, -1, 50, 40], [70, 60, 50, 40], [70, 61, 50, 40]]
  np.testing.assert_array_equal(grid, wanted)


def test_four_named_voices_are_read_beside_other_parts():
  grid = np.array([[67, 64, 60, 48], [67, 65, -1, 50]])
  score = voices.score(grid)
  horn = Part("Horn", [Note(0, 960, 72, 64)])
  beside = score._replace(parts=[horn, *score.parts])
  np.testing.assert_array_equal(voices.round_to_grid(beside), grid)
  two_sopranos = score._replace(parts=[score.parts[0], *score.parts])
  assert "has 5 tracks" in refusal(voices.round_to_grid, two_sopranos)


def test_a_file_of_three_voices_is_refused(tmp_path):
  score = Score([Part("", [Note(0, 9, 60, 64)])] * 3, 480, [(0, 0.5)])
  write_score(score, tmp_path / "trio.mid")
  words = r"trio\.mid has 3 tracks or channels with notes; want four"
  with pytest.raises(InputError, match=words):
    voices.CODEC.read(tmp_path / "trio.mid")
