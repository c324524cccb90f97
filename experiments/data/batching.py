"""Makes batches of examples of similar size; seed and step determine each batch."""

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from experiments.data.tokenizer import PAD
from experiments.errors import InputError
from relpos_jax.typing import Array, Int


class Batch(NamedTuple):
  """Holds the token ids of B sentence pairs, padded to L tokens.

  Sources and targets end in EOS.
  """

  source: Int[Array | np.ndarray, "B L"]
  target: Int[Array | np.ndarray, "B L"]


class Tokens(NamedTuple):
  """Holds the token ids of B sequences, padded to L tokens."""

  tokens: Int[Array | np.ndarray, "B L"]


class Schedule:
  """Chooses the examples of each batch, for an endless sequence of batches.

  Examples of similar size share a batch, so that little padding is needed. For this,
  examples are divided into buckets. Each bucket has a boundary: its examples are no
  larger, and are padded to this size. An example goes into the bucket with the smallest
  possible boundary. A batch has budget // boundary examples of one bucket (Vaswani et
  al. 2017, section 5.1).

  Each epoch has every example once. First the examples of each bucket are shuffled,
  then the batches of all buckets. Several threads may read a schedule.

  Attributes:
    num_per_epoch: the number of batches in an epoch, the same in every epoch.
    shapes: the number of rows of a batch and their padded size, for each bucket that is
      not empty. A step is compiled once for each shape.
    buckets: the examples of each bucket, in the order of `shapes`.
    dropped: the number of examples that are left out, because they exceed the last
      boundary.
    padding: the fraction of padding in an epoch, over both sides of pairs. In music,
      where the lengths of rows change with the epoch, it is the smallest possible
      fraction.
  """

  def __init__(
    self,
    *sides: Int[np.ndarray, "examples"],
    boundaries: Sequence[int],
    budget: int,
    multiple_of: int = 1,
    length_multiple_of: int = 1,
    seed: int | None,
  ):
    """Sorts the examples into buckets.

    Args:
      sides: the sizes of all examples, in tokens or nodes. Pairs have two sides, and
        the larger size counts.
      boundaries: the size to which each bucket's examples are padded, in increasing
        order.
      budget: the largest number of tokens or nodes in a batch, over all devices and
        microbatches: rows times boundary. Both are then rounded up to the multiples
        below. So a step has the same examples on any number of devices.
      multiple_of: the number of rows of a batch is rounded up to a multiple of this:
        devices times microbatches.
      length_multiple_of: the length of rows is rounded up to a multiple of this: the
        number of devices that share a row.
      seed: determines the order. None keeps buckets and examples in order.

    Raises InputError if no example is small enough.
    """
    self._seed, self._longest = seed, boundaries[-1]
    sizes = np.maximum.reduce(sides)
    if not (sizes <= self._longest).any():
      raise InputError(
        f"none of {len(sizes)} examples is at most {self._longest} long, the largest "
        "length in training: train on longer ones, or give shorter ones for validation"
      )
    bucket_index = np.searchsorted(boundaries, sizes)
    self.buckets, self._batches, shapes, num_cells = [], [], [], 0
    for index, boundary in enumerate(boundaries):
      num_rows = budget // boundary
      examples = np.flatnonzero(bucket_index == index).astype(np.int32)
      if not len(examples):
        continue
      shape = round_up(num_rows, multiple_of), round_up(boundary, length_multiple_of)
      for start in range(0, len(examples), num_rows):
        self._batches.append((len(shapes), slice(start, start + num_rows)))
        num_cells += math.prod(shape) * len(sides)
      shapes.append(shape)
      self.buckets.append(examples)
    self.shapes, self.num_per_epoch = tuple(shapes), len(self._batches)
    scheduled = np.concatenate(self.buckets)
    self.dropped = len(sizes) - len(scheduled)
    self.padding = float(1 - sum(side[scheduled].sum() for side in sides) / num_cells)
    self._plan = functools.lru_cache(maxsize=1)(self._shuffle)

  def order(self, step: SupportsIndex) -> Int[np.ndarray, "examples"]:
    """Returns the index of the example in each row of a step's batch."""
    return self.choose(step)[0]

  def choose(self, step: SupportsIndex) -> tuple[Int[np.ndarray, "examples"], int]:
    """Returns the indices of the examples in a step's batch, and of their bucket."""
    epoch, index = divmod(operator.index(step), self.num_per_epoch)
    examples, order = self._plan(epoch)
    bucket, part = self._batches[order[index]]
    return examples[bucket][part], bucket

  def shape(self, step: SupportsIndex) -> tuple[int, ...]:
    """Returns the shape of a step's batch, one of `shapes`."""
    return self.shapes[self.choose(step)[1]]

  def _shuffle(self, epoch: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Shuffles an epoch; returns each bucket's examples, and the order of batches."""
    if self._seed is None:
      return self.buckets, np.arange(self.num_per_epoch)
    key = np.array([self._seed % 2**64, epoch], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    examples = [generator.permutation(examples) for examples in self.buckets]
    return examples, generator.permutation(self.num_per_epoch)

  def __str__(self) -> str:
    shapes = " ".join(f"{rows}x{boundary}" for rows, boundary, *_ in self.shapes)
    return (
      f"shapes {shapes}, batches per epoch: {self.num_per_epoch:,}, "
      f"dropped (above {self._longest}): {self.dropped:,}, padding: {self.padding:.0%}"
    )


class Batches(Schedule):
  """Makes an endless sequence of batches: `batches[step]` for any step >= 0.

  Examples are sentence pairs or single sequences. `Schedule` chooses examples of
  similar length; the length of a pair is that of its longer side. All batches of a
  bucket have the same number of rows. Rows that no example needs are padding.
  """

  def __init__(self, *sides: Any, **options: Any):
    """Schedules the examples; takes the options of `Schedule`, and raises its errors.

    Two `sides`, sources and targets, give a `Batch`; a single one gives `Tokens`. A
    side is `Ragged`, or anything with two members: `in_epoch(epoch)` returns the rows
    of an epoch as `Ragged`, and `lengths` the largest length of each row in any epoch.
    """
    self._sides = sides
    super().__init__(*(side.lengths for side in sides), **options)

  def __getitem__(self, step: SupportsIndex) -> Any:
    rows, bucket = self.choose(step)
    epoch = operator.index(step) // self.num_per_epoch
    arrays = []
    for side in self._sides:
      arrays.append(side.in_epoch(epoch).pad(rows, self.shapes[bucket], PAD))
    return Batch(*arrays) if len(arrays) == 2 else Tokens(*arrays)

  @property
  def examples(self) -> list[np.ndarray]:
    """Returns the tokens of all examples in the first epoch, before batching.

    There are two arrays for each side: the values and the offsets of `Ragged`.
    """
    arrays = []
    for side in self._sides:
      rows = side.in_epoch(0)
      arrays += [rows.values, rows.offsets]
    return arrays


def first_steps(batches: Any, start: int, stop: int) -> list[int]:
  """Returns the first step with each shape, from `start` to `stop` - 1."""
  steps = {}
  num_shapes = len({*batches.shapes})
  for step in range(start, stop):
    if len(steps) == num_shapes:
      break
    steps.setdefault(batches.shape(step), step)
  return list(steps.values())


def round_up(number: int, multiple_of: int) -> int:
  """Rounds a number up to a multiple."""
  return -(-number // multiple_of) * multiple_of


def pair_lengths(*sides: Any) -> Int[np.ndarray, "pairs"]:
  """Returns the length of each pair, measured on its longer side."""
  return np.maximum.reduce([side.lengths for side in sides])


def bucket_boundaries(
  lengths: Int[np.ndarray, "n"],
  number: int,
  *,
  max_length: int | None = None,
  multiple_of: int = 1,
) -> tuple[int, ...]:
  """Computes at most `number` boundaries of buckets, so that padding is minimal.

  The solution is exact, by dynamic programming over the distinct lengths. Examples
  longer than `max_length` are ignored. Boundaries are rounded up to `multiple_of`; 8
  suits TPUs.

  Raises InputError if every example is longer than `max_length`.
  """
  max_length = max_length or int(lengths.max(initial=0))
  short = lengths[lengths <= max_length]
  if not len(short):
    remedy = "give shorter ones or raise config.batches.max_length"
    if len(lengths):
      remedy += f", to {lengths.min()} for the shortest or {lengths.max()} for all"
    raise InputError(
      f"none of {len(lengths)} examples is at most {max_length} long: {remedy}"
    )
  ends, counts = np.unique(-(-short // multiple_of) * multiple_of, return_counts=True)
  ends, num_up_to = np.append(0, ends), np.append(0, np.cumsum(counts))
  # num_tokens[j] is the smallest number of tokens, padding included, for all examples
  # up to length ends[j]. Each iteration adds a bucket: lengths above ends[i], up to
  # ends[j].
  in_bucket_ij = (num_up_to - num_up_to[:, None]) * ends
  in_bucket_ij = np.where(np.tri(len(ends), dtype=bool), np.inf, in_bucket_ij)
  num_tokens = np.where(num_up_to, np.inf, 0.0)
  starts = []
  for _ in range(min(number, len(counts))):
    total_ij = num_tokens[:, None] + in_bucket_ij
    num_tokens = total_ij.min(0)
    starts.append(total_ij.argmin(0))
  boundaries = []
  j = len(counts)
  for start in reversed(starts):
    boundaries.append(int(ends[j]))
    j = start[j]
  return tuple(reversed(boundaries))


def prefetch(batches: Any, start: int, stop: int) -> Iterator[Any]:
  """Yields `batches[start]` to `batches[stop - 1]`; a thread makes them in advance."""
  import grain  # here, because translating and sampling need no grain

  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
  steps = grain.MapDataset.range(start, stop).map(batches.__getitem__)
  return iter(steps.to_iter_dataset(options))
