"""Pieces of music as the rows a model is trained on: cut, transposed, others in each epoch."""

import functools
import threading
from collections.abc import Callable, Sequence

import numpy as np

from relpos_jax.data.ragged import Ragged
from relpos_jax.data.tokenizer import EOS
from relpos_jax.typing import Int

# The batches' order has the same key: this keeps what is drawn for the pieces apart from it.
_COUNTER = np.array([0, 0, 0, 1], np.uint64)


class MusicRows:
  """The rows of each epoch, a function of the seed and the epoch alone: `rows.in_epoch(3)`.

  A piece and its end are cut into as few rows as hold them, at multiples of `alignment`, so that
  the rows of an epoch, one after the other, are the pieces. Safe to read from several threads.

  Attributes:
    lengths: the most tokens of each row in any epoch.

  >>> move = lambda piece, semitones: piece + semitones
  >>> rows = MusicRows([np.arange(4, 11)], longest=5, alignment=2)
  >>> [row.tolist() for row in rows.in_epoch(0)], rows.lengths
  ([[4, 5, 6, 7], [8, 9, 10, 2]], array([4, 4]))
  >>> rows = MusicRows([np.arange(40, 45)], longest=5, alignment=2, anew=True,
  ...                  transpose=move, semitones=3, seed=0)
  >>> [[row.tolist() for row in rows.in_epoch(epoch)] for epoch in (0, 1)]
  [[[42, 43], [44, 45, 46, 2]], [[42, 43, 44, 45], [46, 2]]]
  """

  def __init__(
    self,
    pieces: Sequence[Int[np.ndarray, "_"]],
    *,
    longest: int,
    alignment: int,
    anew: bool = False,
    transpose: Callable[[np.ndarray, int], np.ndarray] | None = None,
    semitones: int = 0,
    seed: int = 0,
  ):
    """Counts the rows.

    Args:
      pieces: tokens, without begin and end.
      longest: tokens of a row, at most, the end included.
      alignment: where a piece may be cut: at multiples of this many tokens.
      anew: each epoch cuts a piece at other places, all as probable. Otherwise rows are full but
        for the last of a piece.
      transpose: from a piece and semitones to the piece so much higher, as a codec does.
      semitones: each epoch moves a piece by so many at most, up or down; all are as probable.
      seed: of cuts and transpositions.
    """
    self._pieces, self._seed = pieces, seed
    self._transpose, self._semitones = transpose, semitones
    self._size, self._alignment, self._anew = longest // alignment * alignment, alignment, anew
    whole = [np.diff(self._places(len(piece), 0.0)) for piece in pieces]
    self.lengths = np.concatenate(
      [np.full(len(found), self._size) if anew and len(found) > 1 else found for found in whole]
    )
    self._lock = threading.Lock()
    self._rows = functools.lru_cache(maxsize=2)(self._make)

  def in_epoch(self, epoch: int) -> Ragged:
    """The rows of an epoch, as many in each."""
    with self._lock:
      return self._rows(epoch)

  def _make(self, epoch: int) -> Ragged:
    key = np.array([self._seed % 2**64, epoch], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=_COUNTER))
    moves = generator.integers(-self._semitones, self._semitones + 1, len(self._pieces))
    phases = generator.random(len(self._pieces)) * float(self._anew)
    tokens = [
      np.append(self._transpose(piece, int(by)) if self._transpose and by else piece, EOS)
      for piece, by in zip(self._pieces, moves, strict=True)
    ]
    lengths = [
      np.diff(self._places(len(piece), float(phase)))
      for piece, phase in zip(self._pieces, phases, strict=True)
    ]
    return Ragged.joined(np.concatenate(tokens).astype(np.int32), np.concatenate(lengths))

  def _places(self, num_tokens: int, phase: float) -> Int[np.ndarray, "_"]:
    """Where rows begin and the piece ends; the first row is shorter by a part of what is free."""
    length = num_tokens + 1
    number = -(-length // self._size)
    free = (number * self._size - length) // self._alignment
    shift = int(phase * (free + 1)) * self._alignment
    return np.clip(np.arange(number + 1) * self._size - shift, 0, length)
