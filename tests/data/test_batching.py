"""Batches: every pair once per epoch, few shapes, a function of seed and step alone."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.data.batching import (
  Batches,
  bucket_boundaries,
  first_steps,
  prefetch,
)
from experiments.data.tokenizer import Ragged
from experiments.errors import InputError

BOUNDARIES = (3, 5, 8)


def corpus(lengths):
  """Makes pairs of these lengths, of the pair's number + 4 and of its negative."""
  pairs = []
  for token, (source, target) in enumerate(lengths, 4):
    pairs.append(([token] * source, [-token] * target))
  return pairs


def random_corpus(number, seed=0):
  return corpus(np.random.default_rng(seed).integers(1, 9, (number, 2)).tolist())


def make(pairs, **changes):
  sources, targets = zip(*pairs, strict=True)
  options: dict[str, Any] = dict(
    boundaries=BOUNDARIES, budget=24, multiple_of=2, seed=0
  )
  return Batches(
    Ragged.from_rows(sources), Ragged.from_rows(targets), **options | changes
  )


def choose_pairs(batch):
  """Returns the pairs of a batch without padding."""
  assert batch.source.shape == batch.target.shape
  assert batch.source.dtype == batch.target.dtype == np.int32
  pairs = []
  for source, target in zip(batch.source, batch.target, strict=True):
    pair = np.trim_zeros(source, "b").tolist(), np.trim_zeros(target, "b").tolist()
    if any(pair):
      pairs.append(pair)
  return pairs


def epoch_of(batches, number=0):
  """Returns the batches of an epoch."""
  first = number * batches.num_per_epoch
  return [batches[step] for step in range(first, first + batches.num_per_epoch)]


def longest(pair) -> int:
  return max(len(side) for side in pair)


lengths_of_pairs = st.tuples(st.integers(1, 9), st.integers(1, 9))
some_pairs = st.lists(lengths_of_pairs, min_size=1, max_size=60).map(corpus)
usable = some_pairs.filter(lambda pairs: min(map(longest, pairs)) <= BOUNDARIES[-1])
seeds = st.one_of(st.none(), st.integers(-1, 2**64))


@given(pairs=usable, seed=seeds, epoch=st.integers(0, 3))
def test_every_short_pair_comes_exactly_once_an_epoch(pairs, seed, epoch):
  batches = make(pairs, seed=seed)
  seen = []
  for batch in epoch_of(batches, epoch):
    seen += choose_pairs(batch)
  short = [pair for pair in pairs if longest(pair) <= BOUNDARIES[-1]]
  assert sorted(seen) == sorted(short)
  assert batches.dropped == len(pairs) - len(short)


@given(
  pairs=usable, seed=seeds, multiple_of=st.integers(1, 4), budget=st.integers(32, 80)
)
def test_shapes_keep_to_the_budget_and_the_smallest_boundary(
  pairs, seed, multiple_of, budget
):
  batches = make(pairs, seed=seed, multiple_of=multiple_of, budget=budget)
  epoch = epoch_of(batches)
  assert {batch.source.shape for batch in epoch} == {*batches.shapes}
  assert len({boundary for _, boundary in batches.shapes}) == len(batches.shapes)
  num_full = 0
  for batch in epoch:
    rows, boundary = batch.source.shape
    at_most = budget // boundary
    in_batch = choose_pairs(batch)
    assert rows % multiple_of == 0
    assert len(in_batch) <= at_most <= rows < at_most + multiple_of
    num_full += len(in_batch) == at_most
    shorter = max((b for b in BOUNDARIES if b < boundary), default=0)
    assert all(shorter < longest(pair) <= boundary for pair in in_batch)
  assert num_full >= len(epoch) - len(batches.shapes)  # all but the last of a bucket


def test_a_batch_depends_on_seed_and_step_alone():
  """Reads steps backwards, in several threads and ahead."""
  pairs = random_corpus(100)
  straight, resumed = make(pairs, seed=3), make(pairs, seed=3)
  steps = [*range(3 * straight.num_per_epoch)]
  wanted = [straight[step] for step in steps]
  with ThreadPoolExecutor(8) as pool:
    backwards = [*pool.map(resumed.__getitem__, steps[::-1])]
  ahead = [*prefetch(resumed, 0, len(steps))]
  for batch, read, prefetched in zip(wanted, backwards[::-1], ahead, strict=True):
    np.testing.assert_array_equal(read, batch)
    np.testing.assert_array_equal(prefetched, batch)
  (fifth,) = prefetch(resumed, 4, 5)
  np.testing.assert_array_equal(fifth, wanted[4])


def test_no_pair_short_enough_is_refused():
  long, short = Ragged.from_rows([[5] * 9] * 2), Ragged.from_rows([[5]] * 2)
  words = "none of 2 examples is at most 8 long, the largest length in training"
  with pytest.raises(InputError, match=words):
    Batches(long, short, boundaries=BOUNDARIES, budget=24, seed=0)
  words = "config.batches.max_length, to 9 for the shortest or 12 for all"
  with pytest.raises(InputError, match=words):
    bucket_boundaries(np.array([9, 12]), 4, max_length=8)


def num_padded(lengths, boundaries) -> int:
  """Returns the tokens of rows that are padded to the smallest boundary."""
  return np.take(boundaries, np.searchsorted(boundaries, lengths)).sum()


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(1, 4))
def test_boundaries_are_the_best_of_all(lengths, number):
  boundaries = bucket_boundaries(np.array(lengths), number)
  assert len(boundaries) == min(number, len({*lengths}))
  *shorter, last = sorted({*lengths})
  assert boundaries[-1] == last
  others = itertools.combinations(shorter, len(boundaries) - 1)
  best = min(num_padded(lengths, (*other, last)) for other in others)
  assert num_padded(lengths, boundaries) == best


@given(st.lists(st.integers(1, 99), min_size=1), st.integers(1, 5), st.integers(1, 9))
def test_boundaries_are_multiples_that_hold_every_pair_in_reach(
  lengths, number, multiple_of
):
  reach = min(lengths) + 30
  options = dict(max_length=reach, multiple_of=multiple_of)
  boundaries = bucket_boundaries(np.array(lengths), number, **options)
  assert len(boundaries) <= number
  assert list(boundaries) == sorted({*boundaries})
  assert not any(boundary % multiple_of for boundary in boundaries)
  last = max(length for length in lengths if length <= reach)
  assert last <= boundaries[-1] < last + multiple_of


def test_the_first_step_with_each_shape_is_found():
  pairs = random_corpus(40)
  for multiple in (1, 4, 8):  # with 8, all batches have one shape
    batches = make(pairs, multiple_of=8, length_multiple_of=multiple)
    shapes = [batches[step].source.shape for step in range(5, 60)]
    steps = first_steps(batches, 5, 10**9)
    assert steps == [5 + shapes.index(shape) for shape in dict.fromkeys(shapes)]
    assert first_steps(batches, 5, 6) == [5]
