"""Music as rows of tokens, by split, and how its tokens are written and read."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from relpos_jax.data.tokenizer import BOS, EOS, PAD
from relpos_jax.typing import Float, Int


class Span(NamedTuple):
  """A note as a picture shows it: from start to end, in the codec's steps.

  `voice` counts the voices from 0, the highest; it is 0 where music has no voices.
  """

  start: int
  end: int
  pitch: int
  voice: int


class Codec(NamedTuple):
  """One way to write music as tokens; 0 to 2 are padding, begin and end in every one.

  Attributes:
    vocab_size: V.
    read: the tokens of a MIDI file. Raises InputError.
    write: tokens to a MIDI file; tokens that mean nothing where they stand are left out.
    spans: the notes of tokens.
    times: the step of each token, with that of the token to come at the end.
    step: what time is counted in, in words.
    alignment: where a piece may be cut: at multiples of this many tokens.
    transpose: tokens so many semitones higher, or the nearest number that keeps all pitches within
      0 to 127; what is no note stays.
  """

  vocab_size: int
  read: Callable[[str | os.PathLike], Int[np.ndarray, "_"]]
  write: Callable[[Int[np.ndarray, "_"], str | os.PathLike], None]
  spans: Callable[[Int[np.ndarray, "_"]], list[Span]]
  times: Callable[[Int[np.ndarray, "_"]], Float[np.ndarray, "_"]]
  step: str
  alignment: int
  transpose: Callable[[Int[np.ndarray, "_"], int], Int[np.ndarray, "_"]]


@dataclasses.dataclass(frozen=True)
class Music:
  """Pieces by split: train, valid and test, as far as there are such.

  A piece is its tokens, without begin and end. `notes` are for the log, a line each.
  """

  splits: Mapping[str, Sequence[Int[np.ndarray, "_"]]]
  notes: tuple[str, ...] = ()


def possible(semitones: int, pitches: Int[np.ndarray, "_"]) -> int:
  """The number nearest to `semitones` that keeps all pitches within 0 to 127.

  >>> [possible(semitones, np.array([60, 125])) for semitones in (5, -5)]
  [2, -5]
  """
  return int(np.clip(semitones, -pitches.min(initial=127), 127 - pitches.max(initial=0)))


def content(tokens: Sequence[int] | np.ndarray) -> Int[np.ndarray, "_"]:
  """The tokens of one piece without begin, end, padding, and all that follows the end.

  >>> content([BOS, 7, 8, EOS, 9, PAD])
  array([7, 8])
  """
  row = np.asarray(tokens, int)
  ends = np.flatnonzero(row == EOS)
  row = row[: ends[0]] if len(ends) else row
  return row[(row != PAD) & (row != BOS)]
