"""Batches of sentences of similar length, each a function of the seed and the step alone."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, SupportsIndex, TypeVar, runtime_checkable

import grain
import numpy as np

from relpos_jax.data.ragged import Ragged
from relpos_jax.data.schedule import Schedule, counted
from relpos_jax.data.tokenizer import PAD
from relpos_jax.errors import InputError
from relpos_jax.typing import Array, Int

_Batch = TypeVar("_Batch", covariant=True)


@runtime_checkable
class Steps(Protocol[_Batch]):
  """The batch of every step, of whatever kind."""

  def __getitem__(self, step: SupportsIndex, /) -> _Batch: ...


class Batch(NamedTuple):
  """Token ids of B sentence pairs, filled with PAD to L tokens; the target ends in EOS."""

  source: Int[Array | np.ndarray, "B L"]
  target: Int[Array | np.ndarray, "B L"]


@runtime_checkable
class Side(Protocol):
  """Rows that may be others in each epoch, as many of them.

  Attributes:
    lengths: the most tokens of each row in any epoch.
  """

  @property
  def lengths(self) -> Int[np.ndarray, "rows"]: ...

  def in_epoch(self, epoch: int) -> Ragged: ...


class Tokens(NamedTuple):
  """Token ids of B sequences, filled with PAD to L tokens."""

  tokens: Int[Array | np.ndarray, "B L"]


class Batches:
  """An endless sequence of batches: `batches[step]` for any step >= 0.

  Of sentence pairs, or of examples with one side or any number. A pair goes into the bucket of the
  smallest boundary that holds max(source, target) tokens, and a bucket's batches have
  token_budget // boundary pairs, padded to boundary tokens on both sides (Vaswani et al. 2017,
  section 5.1: pairs of similar length, a budget of tokens). Each epoch shows every pair once,
  shuffled inside its bucket, the buckets' batches in mixed order. Rows of PAD complete the last
  batch of a bucket, and every batch to a multiple of rows: so the pairs of a step are the same for
  any number of devices. Safe to read from several threads.

  Attributes:
    num_per_epoch: batches an epoch, the same in every epoch.
    shapes: the (rows, boundary) that occur: as many compilations of a training step.
    dropped: pairs longer than the last boundary, left out.

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
      sides: of each its rows of token ids, a `Ragged` or any sequence of integer rows: sources and
        as many targets. Or a `Side`, whose rows are those of the epoch.
      kind: what a batch is made by, from the sides' arrays: `Batch`, or `Tokens` of one side.
      boundaries: padded lengths, in tokens, increasing.
      token_budget: tokens a batch, pairs times boundary, at most, over all devices and all parts
        of an accumulated gradient.
      multiple_of: rows are filled up to a multiple of this: devices times accumulation.
      seed: of the order. None keeps the order of bucket and corpus: for evaluation, where
        `prefetch(batches, 0, batches.num_per_epoch)` gives every pair once.

    Raises:
      ValueError: the sides have different numbers of rows.
      InputError: boundaries that do not increase, a budget too small for one multiple of rows, or
        no pair short enough.
    """
    self._sides, self._kind = [_side(side) for side in sides], kind
    numbers = [len(side.lengths) for side in self._sides]
    if len({*numbers}) != 1:
      raise ValueError(f"the sides have {numbers} rows: want as many in each")
    words = ("pairs", "tokens", " a side") if len(sides) == 2 else ("sequences", "tokens", "")
    self._schedule = Schedule(
      pair_lengths(*self._sides),
      boundaries=boundaries,
      budget=token_budget,
      multiple_of=multiple_of,
      seed=seed,
      words=words,
    )
    self._what, self._longest = words[0], boundaries[-1]
    self.num_per_epoch = self._schedule.num_per_epoch
    self.shapes, self.dropped = self._schedule.shapes, self._schedule.dropped

  def __getitem__(self, step: SupportsIndex) -> Any:
    rows, bucket = self._schedule[step]
    sides = [side.in_epoch(operator.index(step) // self.num_per_epoch) for side in self._sides]
    return self._kind(*(side.padded(rows, self.shapes[bucket], PAD) for side in sides))

  @property
  def examples(self) -> list[np.ndarray]:
    """The rows of the first epoch, of all sides, before they are batched."""
    sides = [side.in_epoch(0) for side in self._sides]
    return [array for side in sides for array in (side.values, side.offsets)]

  @property
  def padding(self) -> float:
    """The share of PAD in an epoch's tokens, all sides together."""
    lengths = [side.in_epoch(0).lengths for side in self._sides]
    tokens = sum(side[pairs].sum() for side in lengths for pairs in self._schedule.buckets)
    return float(1 - tokens / (self._schedule.cells * len(lengths)))

  def __str__(self) -> str:
    dropped = counted(self.dropped, self._what.removesuffix("s"))
    return (
      f"{self._schedule}, {dropped} longer than {self._longest} tokens dropped,"
      f" {self.padding:.0%} padding"
    )


def _side(rows: Sequence | Side) -> Side:
  return rows if isinstance(rows, Side) else Ragged.of(rows)


def pair_lengths(*sides: Side) -> Int[np.ndarray, "pairs"]:
  """The tokens that count for each pair: max(source, target).

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
  """The boundaries, at most `number`, that pad examples of these lengths the least.

  Every boundary costs a compilation. Exact: the best last boundary for the first j lengths, bucket
  by bucket (dynamic programming over the distinct lengths).

  Args:
    lengths: of each example, in tokens or nodes.
    number: boundaries wanted.
    max_length: longer examples do not count, to be dropped. None: all count.
    multiple_of: every boundary is a multiple of this (8 suits TPUs).

  Raises:
    InputError: no example counts.

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
  # cells[j]: the least tokens, padding included, that hold the examples up to length ends[j]. One
  # more bucket holds lengths i + 1 to j of it.
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


def prefetch(batches: Steps[_Batch], start: int, stop: int) -> Iterator[_Batch]:
  """`batches[start]` to `batches[stop - 1]`, made in a thread while the caller computes.

  >>> batches = Batches([[5, 2]], [[6, 2]], boundaries=(2,), token_budget=2, seed=0)
  >>> [batch.target.tolist() for batch in prefetch(batches, 3, 5)]
  [[[6, 2]], [[6, 2]]]
  """
  steps = grain.MapDataset.range(start, stop).map(batches.__getitem__)
  return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))
