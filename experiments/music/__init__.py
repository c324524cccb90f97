"""Models music: MIDI files as tokens, a decoder-only model and its evaluation.

`midi_files.read_score` reads the notes of a MIDI file. A codec converts notes to
tokens: `performance` writes events, for any music; `voices` writes four parts on a grid
of 16th notes. `data` loads the pieces of each split, and `data.MusicRows` slices and
transposes them for training. `scores` computes the likelihood of pieces.
"""
