"""Rows of unequal length in one array, so that millions of sentences fit into memory."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from relpos_jax.typing import Int, Integer


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged(Sequence):
  """A sequence of integer rows; row i is `values[offsets[i] : offsets[i + 1]]` as int32."""

  values: Integer[np.ndarray, "tokens"]
  offsets: Int[np.ndarray, "rows_and_one"]

  @classmethod
  def of(cls, rows: Iterable[Sequence[int] | np.ndarray]) -> "Ragged":
    """Concatenates rows."""
    arrays = [np.asarray(row, np.int32) for row in rows]
    return cls.joined(np.concatenate([np.empty(0, np.int32), *arrays]), [*map(len, arrays)])

  @classmethod
  def joined(
    cls, values: Integer[np.ndarray, "tokens"], lengths: Sequence | np.ndarray
  ) -> "Ragged":
    """Splits values into rows of these lengths."""
    return cls(values, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))

  @property
  def lengths(self) -> Int[np.ndarray, "rows"]:
    return np.diff(self.offsets)

  def in_epoch(self, epoch: int) -> "Ragged":
    """Returns itself: the rows are the same in every epoch."""
    return self

  def __len__(self) -> int:
    return len(self.offsets) - 1

  def __getitem__(self, index: int) -> Int[np.ndarray, "tokens"]:
    row = range(len(self))[index]
    return self.values[self.offsets[row] : self.offsets[row + 1]].astype(np.int32)

  def padded(
    self, rows: Int[np.ndarray, "rows"], shape: tuple[int, int], padding: int
  ) -> Int[np.ndarray, "B L"]:
    """Returns an int32 array of the chosen rows, padded to a shape.

    >>> Ragged.of([[5, 6, 2], [2], [7, 2]]).padded(np.array([2, 0]), (3, 4), 0)
    array([[7, 2, 0, 0],
           [5, 6, 2, 0],
           [0, 0, 0, 0]], dtype=int32)
    """
    result = np.full(shape, padding, np.int32)
    starts, ends = self.offsets[rows, None], self.offsets[rows + 1, None]
    positions = starts + np.arange(shape[1])
    real = positions < ends
    result[: len(rows)][real] = self.values[positions[real]]
    return result
