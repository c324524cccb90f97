"""The order of examples in training, a function of the seed and the step alone."""

import functools
import math
import operator
import threading
from collections.abc import Iterator, Sequence
from typing import SupportsIndex

import numpy as np

from relpos_jax.errors import InputError
from relpos_jax.typing import Int


class Schedule:
  """An endless sequence of batches of examples of similar size: `schedule[step]`, step >= 0.

  An example goes into the bucket of the smallest boundary that holds it, and a bucket's batches
  have budget // boundary examples. Each epoch has every example once, shuffled within its bucket,
  and the batches of all buckets in random order. May be read from several threads.

  Attributes:
    num_per_epoch: batches per epoch, the same in every epoch.
    shapes: rows per batch and boundary of each bucket that is not empty.
    buckets: the examples of each bucket, in the order of `shapes`.
    dropped: the number of examples larger than the last boundary, which are left out.
    cells: the size of all batches of an epoch, with padding.

  >>> schedule = Schedule(np.array([2, 4, 1, 9]), boundaries=(2, 4), budget=4, seed=None)
  >>> schedule.shapes, schedule.num_per_epoch, schedule.dropped
  (((2, 2), (1, 4)), 2, 1)
  >>> [(examples.tolist(), bucket) for examples, bucket in (schedule[0], schedule[1])]
  [([0, 2], 0), ([1], 1)]
  """

  def __init__(
    self,
    sizes: Int[np.ndarray, "examples"],
    *,
    boundaries: Sequence[int],
    budget: int,
    multiple_of: int = 1,
    seed: int | None,
    words: tuple[str, str, str] = ("examples", "cells", ""),
  ):
    """Sorts the examples into buckets.

    Args:
      sizes: the size of each example.
      boundaries: increasing; the examples of a bucket are padded to its boundary.
      budget: the largest size of a batch, examples times boundary.
      multiple_of: the number of rows of a batch is a multiple of this.
      seed: determines the order. None keeps the order of buckets and examples.
      words: the nouns for examples and sizes in messages, and a suffix to sizes such as " a side".

    Raises:
      InputError: the boundaries do not increase, the budget is too small for one multiple of rows,
        or no example is small enough.
    """
    self._seed = seed
    found = [*_buckets(sizes, boundaries, budget, multiple_of, words)]
    self.buckets = [examples for _, examples in found]
    self._batches = [
      (bucket, slice(start, start + size))
      for bucket, ((size, _), examples) in enumerate(found)
      for start in range(0, len(examples), size)
    ]
    self.num_per_epoch = len(self._batches)
    self.shapes = tuple(
      (math.ceil(size / multiple_of) * multiple_of, boundary) for (size, boundary), _ in found
    )
    self.dropped = len(sizes) - sum(map(len, self.buckets))
    self.cells = sum(math.prod(self.shapes[bucket]) for bucket, _ in self._batches)
    self._lock = threading.Lock()
    self._plan = functools.lru_cache(maxsize=1)(self._shuffled)

  def __getitem__(self, step: SupportsIndex) -> tuple[Int[np.ndarray, "examples"], int]:
    """Returns the examples of a step's batch, and their bucket."""
    number = operator.index(step)
    if number < 0:
      raise IndexError(f"step {number}: want at least 0")
    epoch, index = divmod(number, self.num_per_epoch)
    with self._lock:
      examples, order = self._plan(epoch)
    bucket, part = self._batches[order[index]]
    return examples[bucket][part], bucket

  def _shuffled(self, epoch: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the examples of each bucket and the batches, in the order of an epoch."""
    if self._seed is None:
      return self.buckets, np.arange(self.num_per_epoch)
    key = np.array([self._seed % 2**64, epoch], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    examples = [generator.permutation(examples) for examples in self.buckets]
    return examples, generator.permutation(self.num_per_epoch)

  def __str__(self) -> str:
    shapes = " ".join(f"{rows}x{boundary}" for rows, boundary in self.shapes)
    number, batches = counted(len(self.shapes), "shape"), counted(self.num_per_epoch, "batch", "es")
    return f"{number}: {shapes}, {batches} an epoch"


def counted(number: int, thing: str, ending: str = "s") -> str:
  """Formats a number and a noun.

  >>> counted(1, "shape"), counted(2000, "batch", "es")
  ('1 shape', '2,000 batches')
  """
  return f"{number:,} {thing}{ending if number != 1 else ''}"


def _buckets(
  sizes: Int[np.ndarray, "examples"],
  boundaries: Sequence[int],
  budget: int,
  multiple_of: int,
  words: tuple[str, str, str],
) -> Iterator[tuple[tuple[int, int], Int[np.ndarray, "bucket"]]]:
  """Yields ((examples per batch, boundary), examples) of each bucket that is not empty."""
  examples, cells, limit = words
  if list(boundaries) != sorted({*boundaries}) or not boundaries or boundaries[0] < 1:
    raise InputError(f"boundaries {boundaries}: give increasing lengths in {cells}, from 1")
  if sizes.min(initial=boundaries[-1] + 1) > boundaries[-1]:
    raise InputError(
      f"none of {len(sizes)} {examples} has at most {boundaries[-1]} {cells}{limit}:"
      " give other data or a longer last boundary"
    )
  bucket = np.searchsorted(boundaries, sizes)
  for index, boundary in enumerate(boundaries):
    size = budget // boundary
    if size < multiple_of:
      raise InputError(
        f"boundary {boundary} with a budget of {budget} {cells} leaves no room for"
        f" {multiple_of} rows: raise the budget to {boundary * multiple_of} or lower the boundary"
      )
    members = np.flatnonzero(bucket == index).astype(np.int32)
    if len(members):
      yield (size, boundary), members
