"""Rows of music: every piece once an epoch, moved and cut by the seed and the epoch alone."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from relpos_jax.data.batching import Batches, Tokens
from relpos_jax.data.tokenizer import BOS, EOS, PAD
from relpos_jax.music import performance, voices
from relpos_jax.music.rows import MusicRows

EPOCHS = range(4)
codecs = st.sampled_from([voices.CODEC, performance.CODEC])
some_pieces = st.lists(
  st.integers(1, 40).flatmap(lambda n: st.lists(st.integers(3, 131), min_size=n, max_size=n)),
  min_size=1,
  max_size=6,
).map(lambda pieces: [np.array(piece) for piece in pieces])


def make(pieces, codec=voices.CODEC, **changes):
  options = dict(longest=12, alignment=codec.alignment, transpose=codec.transpose) | changes
  return MusicRows(pieces, **options)


def joined(rows) -> list[list[int]]:
  """The pieces that rows are of."""
  found = [[]]
  for token in itertools.chain.from_iterable(row.tolist() for row in rows):
    found[-1].append(token)
    if token == EOS:
      found.append([])
  assert not found.pop()
  return found


def pieces_of(*lengths) -> list[np.ndarray]:
  random = np.random.default_rng(0)
  return [random.integers(40, 80, 4 * length) for length in lengths]


@settings(max_examples=50)
@given(some_pieces, codecs, st.booleans(), st.integers(4, 20), st.integers(0, 3))
def test_rows_of_an_epoch_are_the_pieces_and_their_ends(pieces, codec, anew, longest, epoch):
  rows = make(pieces, codec, anew=anew, longest=longest)
  of_epoch = rows.in_epoch(epoch)
  assert joined(of_epoch) == [[*piece.tolist(), EOS] for piece in pieces]
  assert len(of_epoch) == len(rows.lengths)
  assert (of_epoch.lengths <= rows.lengths).all() and rows.lengths.max() <= longest
  assert all(len(row) % codec.alignment == 0 or row[-1] == EOS for row in of_epoch)


@settings(max_examples=50)
@given(some_pieces, codecs, st.integers(1, 130))
def test_a_piece_moves_as_one_and_within_its_bounds(pieces, codec, semitones):
  rows = make(pieces, codec, semitones=semitones, anew=True, seed=3)
  for epoch in EPOCHS:
    moved = joined(rows.in_epoch(epoch))
    for piece, other in zip(pieces, moved, strict=True):
      possible = [codec.transpose(piece, by).tolist() for by in range(-semitones, semitones + 1)]
      assert other[:-1] in possible


@settings(max_examples=50)
@given(st.lists(st.integers(-1, 127), min_size=4, max_size=16), st.integers(-130, 130))
def test_tokens_moved_are_notes_moved(pitches, semitones):
  grid = np.array(pitches[: len(pitches) // 4 * 4]).reshape(-1, 4)
  tokens = np.array([BOS, *voices.encode(grid), EOS, PAD])
  sounding = grid[grid >= 0]
  by = semitones
  while len(sounding) and not 0 <= sounding.min() + by <= sounding.max() + by <= 127:
    by -= np.sign(by)
  moved = voices.CODEC.transpose(tokens, semitones)
  np.testing.assert_array_equal(voices.decode(moved), np.where(grid < 0, -1, grid + by))
  assert [moved[0], *moved[-2:]] == [BOS, EOS, PAD]


@settings(max_examples=50)
@given(st.lists(st.integers(3, 390), max_size=30), st.integers(-130, 130))
def test_events_moved_are_notes_moved(stream, semitones):
  tokens = np.array([BOS, *stream, EOS, PAD])
  pitches = [(token - 3) % 128 for token in stream if token < performance.TIME_SHIFT]
  by = semitones
  while pitches and not 0 <= min(pitches) + by <= max(pitches) + by <= 127:
    by -= np.sign(by)
  moved = performance.CODEC.transpose(tokens, semitones)
  wanted = [note._replace(pitch=note.pitch + by) for note in performance.decode(tokens)]
  assert performance.decode(moved) == sorted(wanted, key=lambda note: (note.start, note.pitch))
  others = (tokens < 3) | (tokens >= performance.TIME_SHIFT)
  np.testing.assert_array_equal(moved[others], tokens[others])


def test_another_epoch_or_seed_moves_and_cuts_otherwise_and_the_same_again_alike():
  pieces = pieces_of(9, 30, 41)
  told = lambda rows, epoch: [row.tolist() for row in rows.in_epoch(epoch)]
  vary = lambda seed=0, semitones=5, anew=True: make(
    pieces, longest=40, semitones=semitones, anew=anew, seed=seed
  )
  assert told(vary(), 2) == told(vary(), 2)
  for changes in (dict(), dict(semitones=0), dict(anew=False)):
    rows = vary(**changes)
    assert told(rows, 0) != told(rows, 1)
    assert told(rows, 0) != told(vary(seed=1, **changes), 0)
    back = told(rows, 0)
    assert back == told(vary(**changes), 0), "what was read before does not matter"
  still = vary(semitones=0, anew=False)
  assert told(still, 0) == told(still, 1)


def test_every_transposition_and_every_cut_is_as_probable():
  piece = np.full(20 * 4, 60)
  rows = make([piece], longest=12 * 4, semitones=2, anew=True)
  drawn = [rows.in_epoch(epoch) for epoch in range(600)]
  moves = [row[0][0] - 60 for row in drawn]
  cuts = [len(row[0]) // 4 for row in drawn]
  for found, wanted in ((moves, range(-2, 3)), (cuts, range(9, 13))):
    numbers, counts = np.unique(found, return_counts=True)
    assert numbers.tolist() == [*wanted]
    assert counts.min() > 0.7 * 600 / len(wanted)
  assert abs(np.corrcoef(moves, cuts)[0, 1]) < 0.15


def test_batches_begun_anywhere_are_the_same_and_show_every_piece_each_epoch():
  pieces = pieces_of(2, 5, 9, 14, 20)
  options = dict(kind=Tokens, boundaries=(16, 24), token_budget=48, seed=7)
  batches = lambda: Batches(make(pieces, longest=24, semitones=3, anew=True, seed=7), **options)
  whole, per_epoch = batches(), batches().num_per_epoch
  for epoch in EPOCHS:
    steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
    resumed = batches()
    for step in steps:
      np.testing.assert_array_equal(whole[step].tokens, resumed[step].tokens)
    seen = np.concatenate([whole[step].tokens.ravel() for step in steps])
    assert (seen == EOS).sum() == len(pieces)
    assert (seen >= 3).sum() == sum(map(len, pieces))
