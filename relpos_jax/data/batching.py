"""Batches of sentences of similar length, each a function of the seed and the step alone."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, SupportsIndex, runtime_checkable

import grain
import numpy as np

from relpos_jax.data.ragged import Ragged
from relpos_jax.data.schedule import Schedule, counted
from relpos_jax.data.tokenizer import PAD
from relpos_jax.errors import InputError
from relpos_jax.typing import Array, Int


class Batch(NamedTuple):
  """Token ids of B sentence pairs, padded to L tokens; the target ends in EOS."""

  source: Int[Array | np.ndarray, "B L"]
  target: Int[Array | np.ndarray, "B L"]


@runtime_checkable
class Side(Protocol):
  """Rows of token ids that may change from epoch to epoch, but not in number.

  Attributes:
    lengths: the largest number of tokens that each row has in any epoch.
  """

  @property
  def lengths(self) -> Int[np.ndarray, "rows"]: ...

  def in_epoch(self, epoch: int) -> Ragged: ...


class Tokens(NamedTuple):
  """Token ids of B sequences, padded to L tokens."""

  tokens: Int[Array | np.ndarray, "B L"]


class Batches:
  """An endless sequence of batches: `batches[step]` for any step >= 0.

  Examples are sentence pairs, or have any other number of sides. A pair goes into the bucket of the
  smallest boundary that holds max(source, target) tokens, and a bucket's batches have
  token_budget // boundary pairs, padded to boundary tokens on both sides (Vaswani et al. 2017,
  section 5.1: pairs of similar length, a budget of tokens). Each epoch has every pair once,
  shuffled within its bucket, and the batches of all buckets in random order. Rows of padding fill
  the last batch of a bucket, and every batch up to a multiple of rows. So the pairs of a step are
  the same for any number of devices. Batches may be read from several threads.

  Attributes:
    num_per_epoch: batches per epoch, the same in every epoch.
    shapes: the (rows, boundary) that occur; a training step is compiled once for each.
    dropped: the number of pairs longer than the last boundary, which are left out.

  >>> batches = Batches([[5, 2], [6, 7, 8, 2], [9, 2]], [[5, 2], [6, 2], [7, 2]],
  ...                   boundaries=(2, 4), token_budget=4, seed=0)
  >>> print(batches)
  2 shapes: 2x2 1x4, 2 batches an epoch, 0 pairs longer than 4 tokens dropped, 12% padding
  >>> sorted(batches[step].target.tolist() for step in range(2))
  [[[5, 2], [7, 2]], [[6, 2, 0, 0]]]
  """

  def __init__(
    self,
    *sides: Sequence | Side,
    kind: Callable[..., Any] = Batch,
    boundaries: Sequence[int],
    token_budget: int,
    multiple_of: int = 1,
    seed: int | None,
  ):
    """Sorts the pairs into buckets.

    Args:
      sides: sources and targets, with the same number of rows. Each is a `Side`, or a sequence of
        integer rows that are the same in every epoch.
      kind: makes a batch from the arrays of its sides: `Batch`, or `Tokens` for one side.
      boundaries: padded lengths in tokens, increasing.
      token_budget: the largest number of tokens per batch (pairs times boundary), over all devices
        and microbatches.
      multiple_of: the number of rows is a multiple of this: devices times microbatches.
      seed: determines the order. None keeps the order of buckets and corpus; in evaluation
        `prefetch(batches, 0, batches.num_per_epoch)` then yields every pair once.

    Raises:
      ValueError: the sides have different numbers of rows.
      InputError: the boundaries do not increase, the budget is too small for one multiple of rows,
        or no pair is short enough.
    """
    self._sides = [side if isinstance(side, Side) else Ragged.of(side) for side in sides]
    self._kind = kind
    numbers = [len(side.lengths) for side in self._sides]
    if len({*numbers}) != 1:
      raise ValueError(f"the sides have {numbers} rows: want the same number in each")
    words = ("pairs", "tokens", " a side") if len(sides) == 2 else ("sequences", "tokens", "")
    self._schedule = Schedule(
      pair_lengths(*self._sides),
      boundaries=boundaries,
      budget=token_budget,
      multiple_of=multiple_of,
      seed=seed,
      words=words,
    )
    self._noun, self._longest = words[0], boundaries[-1]
    self.num_per_epoch = self._schedule.num_per_epoch
    self.shapes, self.dropped = self._schedule.shapes, self._schedule.dropped

  def __getitem__(self, step: SupportsIndex) -> Any:
    rows, bucket = self._schedule[step]
    sides = [side.in_epoch(operator.index(step) // self.num_per_epoch) for side in self._sides]
    return self._kind(*(side.padded(rows, self.shapes[bucket], PAD) for side in sides))

  @property
  def examples(self) -> list[np.ndarray]:
    """Returns the rows of all sides in the first epoch, before they are batched."""
    sides = [side.in_epoch(0) for side in self._sides]
    return [array for side in sides for array in (side.values, side.offsets)]

  @property
  def padding(self) -> float:
    """Returns the fraction of padding in the tokens of an epoch, over all sides."""
    lengths = [side.in_epoch(0).lengths for side in self._sides]
    tokens = sum(side[pairs].sum() for side in lengths for pairs in self._schedule.buckets)
    return float(1 - tokens / (self._schedule.cells * len(lengths)))

  def __str__(self) -> str:
    dropped = counted(self.dropped, self._noun.removesuffix("s"))
    return (
      f"{self._schedule}, {dropped} longer than {self._longest} tokens dropped,"
      f" {self.padding:.0%} padding"
    )


def pair_lengths(*sides: Side) -> Int[np.ndarray, "pairs"]:
  """Returns the length of each pair: max(source, target).

  >>> pair_lengths(Ragged.of([[5, 2], [2]]), Ragged.of([[2], [5, 6, 2]]))
  array([2, 3])
  """
  return np.maximum.reduce([side.lengths for side in sides])


def bucket_boundaries(
  lengths: Int[np.ndarray, "examples"],
  number: int,
  *,
  max_length: int | None = None,
  multiple_of: int = 1,
) -> tuple[int, ...]:
  """Computes the boundaries, at most `number`, that need the least padding.

  Every boundary costs a compilation. The solution is exact, by dynamic programming over the
  distinct lengths.

  Args:
    lengths: the length of each example, in tokens or nodes.
    number: the largest number of boundaries.
    max_length: examples longer than this are ignored.
    multiple_of: every boundary is a multiple of this (8 suits TPUs).

  Raises:
    InputError: every example is longer than max_length.

  >>> bucket_boundaries(np.array([3, 3, 3, 4, 9, 10]), 2)
  (4, 10)
  """
  short = lengths[lengths <= max_length] if max_length else lengths
  if not len(short):
    raise InputError(
      f"none of {len(lengths)} examples is at most {max_length} long:"
      " give other data or raise the longest length"
    )
  ends, counts = np.unique(-(-short // multiple_of) * multiple_of, return_counts=True)
  ends, examples = np.concatenate([[0], ends]), np.concatenate([[0], np.cumsum(counts)])
  # cells[j]: the fewest tokens, with padding, of the examples up to length ends[j]. Each iteration
  # adds a bucket, which holds the lengths i + 1 to j.
  cells, previous = np.where(examples, np.inf, 0.0), []
  none = np.tri(len(ends), dtype=bool)
  for _ in range(min(number, len(counts))):
    table_ij = np.where(none, np.inf, cells[:, None] + (examples - examples[:, None]) * ends)
    cells = table_ij.min(0)
    previous.append(table_ij.argmin(0))
  boundaries, j = [], len(counts)
  for bucket in reversed(previous):
    boundaries.append(int(ends[j]))
    j = bucket[j]
  return tuple(reversed(boundaries))


def prefetch(batches: Any, start: int, stop: int) -> Iterator[Any]:
  """Yields `batches[start]` to `batches[stop - 1]`, made ahead in a thread.

  >>> batches = Batches([[5, 2]], [[6, 2]], boundaries=(2,), token_budget=2, seed=0)
  >>> [batch.target.tolist() for batch in prefetch(batches, 3, 5)]
  [[[6, 2]], [[6, 2]]]
  """
  steps = grain.MapDataset.range(start, stop).map(batches.__getitem__)
  return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))
