"""Music: MIDI files as tokens, a decoder-only model and its scores.

How a MIDI file becomes tokens: `midi_files.read_score` reads its notes, and a codec
writes these as tokens, `performance` as events for any music, `voices` as four parts on
a grid of 16th notes. `data` loads the pieces of each split; `data.MusicRows` slices and
transposes them for training.
"""
