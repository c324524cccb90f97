"""The interface of a codec, which reads a MIDI file as tokens and writes tokens as a MIDI file.

The codecs are `relpos_jax.music.performance` and `relpos_jax.music.voices`.
"""

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from relpos_jax.data.tokenizer import BOS, EOS, PAD
from relpos_jax.typing import Float, Int


class Span(NamedTuple):
  """A note of a piano roll, from start to end in the codec's steps.

  `voice` counts from 0, the highest; it is 0 for music without voices.
  """

  start: int
  end: int
  pitch: int
  voice: int


class Codec(NamedTuple):
  """The functions of a codec. Tokens 0 to 2 are padding, begin and end.

  Attributes:
    vocab_size: V.
    read: returns the tokens of a MIDI file. Raises InputError.
    write: writes tokens to a MIDI file; skips tokens that have no meaning in their context.
    spans: returns the notes of tokens.
    times: returns the step of each token and of the token after the last.
    step: the unit of time, in words.
    alignment: a piece may be sliced at multiples of this many tokens.
    transpose: transposes tokens by semitones, as far as all pitches stay within 0 to 127.
  """

  vocab_size: int
  read: Callable[[str | os.PathLike], Int[np.ndarray, "_"]]
  write: Callable[[Int[np.ndarray, "_"], str | os.PathLike], None]
  spans: Callable[[Int[np.ndarray, "_"]], list[Span]]
  times: Callable[[Int[np.ndarray, "_"]], Float[np.ndarray, "_"]]
  step: str
  alignment: int
  transpose: Callable[[Int[np.ndarray, "_"], int], Int[np.ndarray, "_"]]


def clip_transposition(semitones: int, pitches: Int[np.ndarray, "_"]) -> int:
  """Returns the transposition nearest to `semitones` that keeps all pitches within 0 to 127.

  >>> [clip_transposition(semitones, np.array([60, 125])) for semitones in (5, -5)]
  [2, -5]
  """
  return int(np.clip(semitones, -pitches.min(initial=127), 127 - pitches.max(initial=0)))


def strip_special(tokens: Sequence[int] | np.ndarray, vocab_size: int) -> Int[np.ndarray, "_"]:
  """Returns the tokens of one piece without begin, padding, and the end and all after it.

  Raises ValueError: a token is outside the vocabulary.

  >>> strip_special([BOS, 7, 8, EOS, 9, PAD], vocab_size=10)
  array([7, 8])
  """
  row = np.asarray(tokens, int)
  ends = np.flatnonzero(row == EOS)
  row = row[: ends[0]] if len(ends) else row
  row = row[(row != PAD) & (row != BOS)]
  if len(row) and not EOS < row.min() <= row.max() < vocab_size:
    raise ValueError(
      f"tokens go from {row.min()} to {row.max()}; want {EOS + 1} to {vocab_size - 1}"
    )
  return row
