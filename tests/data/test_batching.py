"""Batches: every pair once per epoch, few shapes, a function of seed and step alone."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.data.batching import Batches, bucket_boundaries, prefetch
from experiments.data.tokenizer import Ragged
from experiments.errors import InputError

BOUNDARIES = (3, 5, 8)


def corpus(lengths):
  """Makes pairs of these lengths; source tokens are the pair's number + 4, targets its negative."""
  sources = [[i + 4] * source for i, (source, _) in enumerate(lengths)]
  return sources, [[-i - 4] * target for i, (_, target) in enumerate(lengths)]


def pairs(batch):
  """Returns the pairs of a batch as tuples without padding."""
  assert batch.source.shape == batch.target.shape
  assert batch.source.dtype == batch.target.dtype == np.int32
  strip = lambda row: tuple(np.trim_zeros(row, "b").tolist())
  rows = zip(map(strip, batch.source), map(strip, batch.target), strict=True)
  return [row for row in rows if any(row)]


def random_corpus(number, seed=0):
  return corpus(np.random.default_rng(seed).integers(1, 9, (number, 2)).tolist())


def make(sources, targets, **changes):
  options: dict[str, Any] = (
    dict(boundaries=BOUNDARIES, budget=24, multiple_of=2, seed=0) | changes
  )
  return Batches(Ragged.from_rows(sources), Ragged.from_rows(targets), **options)


some_lengths = st.lists(
  st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=60
)
usable = some_lengths.filter(lambda lengths: min(map(max, lengths)) <= BOUNDARIES[-1])
seeds = st.one_of(st.none(), st.integers(-1, 2**64))


@given(lengths=usable, seed=seeds, epoch=st.integers(0, 3))
def test_the_first_steps_have_all_shapes_of_the_steps(lengths, seed, epoch):
  batches = make(*corpus(lengths), seed=seed)
  start, stop = (
    epoch * batches.num_per_epoch + epoch,
    (epoch + 1) * batches.num_per_epoch + 2,
  )
  shapes = [batches[step].source.shape for step in range(start, stop)]
  firsts = batches.first_steps(start, stop)
  assert [shapes[step - start] for step in firsts] == [*dict.fromkeys(shapes)]
  assert all(shapes.index(shapes[step - start]) == step - start for step in firsts)


@given(lengths=usable, seed=seeds, epoch=st.integers(0, 3))
def test_every_short_pair_comes_exactly_once_an_epoch(lengths, seed, epoch):
  sources, targets = corpus(lengths)
  batches = make(sources, targets, seed=seed)
  steps = range(epoch * batches.num_per_epoch, (epoch + 1) * batches.num_per_epoch)
  seen = [pair for step in steps for pair in pairs(batches[step])]
  short = [
    (tuple(source), tuple(target))
    for source, target in zip(sources, targets, strict=True)
    if max(len(source), len(target)) <= BOUNDARIES[-1]
  ]
  assert sorted(seen) == sorted(short)
  assert batches.dropped == len(sources) - len(short)


@given(
  lengths=usable, seed=seeds, multiple_of=st.integers(1, 4), budget=st.integers(32, 80)
)
def test_shapes_keep_to_the_budget_and_the_smallest_boundary(
  lengths, seed, multiple_of, budget
):
  batches = make(*corpus(lengths), seed=seed, multiple_of=multiple_of, budget=budget)
  epoch = [batches[step] for step in range(batches.num_per_epoch)]
  assert {batch.source.shape for batch in epoch} == {*batches.shapes}
  assert len({boundary for _, boundary in batches.shapes}) == len(batches.shapes)
  full = 0
  for batch in epoch:
    rows, boundary = batch.source.shape
    assert rows % multiple_of == 0
    at_most = budget // boundary
    assert len(pairs(batch)) <= at_most <= rows < at_most + multiple_of
    full += len(pairs(batch)) == at_most
    shorter = max((b for b in BOUNDARIES if b < boundary), default=0)
    assert all(shorter < max(map(len, pair)) <= boundary for pair in pairs(batch))
  assert full >= len(epoch) - len(batches.shapes)  # all but the last of a bucket
  cells = sum(batch.source.size + batch.target.size for batch in epoch)
  tokens = sum(np.count_nonzero(side) for batch in epoch for side in batch)
  assert batches.padding == pytest.approx(1 - tokens / cells)


@pytest.mark.parametrize("seed", [None, 3])
def test_the_pairs_of_a_step_do_not_depend_on_the_number_of_devices(seed):
  sources, targets = random_corpus(200)
  alone = make(sources, targets, seed=seed, multiple_of=1, budget=59)
  for num_devices in (2, 3, 7):
    spread = make(sources, targets, seed=seed, multiple_of=num_devices, budget=59)
    assert spread.num_per_epoch == alone.num_per_epoch
    for step in range(2 * alone.num_per_epoch):
      assert pairs(spread[step]) == pairs(alone[step])


def test_a_batch_depends_on_seed_and_step_alone():
  """Reads steps backwards, in several threads and ahead."""
  sources, targets = random_corpus(100)
  straight = make(sources, targets, seed=3)
  steps = [*range(3 * straight.num_per_epoch)]
  expected = [straight[step] for step in steps]
  resumed = make(sources, targets, seed=3)
  with ThreadPoolExecutor(8) as pool:
    backwards = [*pool.map(resumed.__getitem__, steps[::-1])]
  for found in (backwards[::-1], [*prefetch(resumed, 0, len(steps))]):
    for batch, wanted in zip(found, expected, strict=True):
      np.testing.assert_array_equal(batch, wanted)
  (ahead,) = prefetch(resumed, 4, 5)
  np.testing.assert_array_equal(ahead, expected[4])


def test_seeds_and_epochs_differ_and_batches_mix_shapes():
  sources, targets = random_corpus(100)
  number = make(sources, targets).num_per_epoch
  epochs = []
  for seed in (0, 1):
    batches = make(sources, targets, seed=seed)
    for start in (0, number):
      epochs.append([batches[step] for step in range(start, start + number)])
  orders = {tuple(pair for batch in epoch for pair in pairs(batch)) for epoch in epochs}
  shapes = {tuple(batch.source.shape for batch in epoch) for epoch in epochs}
  members = {frozenset(frozenset(pairs(batch)) for batch in epoch) for epoch in epochs}
  assert len(orders) == len(shapes) == len(members) == 4
  assert all(shape != tuple(sorted(shape)) for shape in shapes)


def test_without_a_seed_pairs_come_by_bucket_in_corpus_order():
  sources, targets = random_corpus(100)
  batches = make(sources, targets, seed=None)
  epoch = [batches[step] for step in range(batches.num_per_epoch)]
  widths = [batch.source.shape[1] for batch in epoch]
  assert widths == sorted(widths)
  for boundary in BOUNDARIES:
    numbers = [
      source[0]
      for b in epoch
      if b.source.shape[1] == boundary
      for source, _ in pairs(b)
    ]
    assert numbers == sorted(numbers)
  np.testing.assert_array_equal(batches[batches.num_per_epoch], batches[0])


@pytest.mark.parametrize("number", [0, 2])
def test_no_pair_short_enough_is_refused(number):
  problem = f"none of {number} examples is at most 8 long"
  with pytest.raises(
    InputError, match=f"{problem}, the largest length in training: train on longer"
  ):
    make([[5] * 9] * number, [[5]] * number)
  with pytest.raises(
    InputError, match=f"{problem}: .* raise config.batches.max_length"
  ):
    bucket_boundaries(np.full(number, 9), 4, max_length=8)


def test_the_limit_that_is_needed_is_named():
  with pytest.raises(InputError) as caught:
    bucket_boundaries(np.array([5037, 312, 900]), 4, max_length=128)
  assert str(caught.value) == (
    "none of 3 examples is at most 128 long: give shorter ones or raise config.batches.max_length, "
    "to 312 for the shortest or 5037 for all"
  )


def padded_tokens(lengths, boundaries):
  return sum(min(b for b in boundaries if b >= length) for length in lengths)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(1, 4))
def test_boundaries_are_the_best_of_all(lengths, number):
  boundaries = bucket_boundaries(np.array(lengths), number)
  assert len(boundaries) == min(number, len({*lengths}))
  assert boundaries[-1] == max(lengths)
  others = itertools.combinations(sorted({*lengths}), len(boundaries))
  best = min(padded_tokens(lengths, b) for b in others if b[-1] == max(lengths))
  assert padded_tokens(lengths, boundaries) == best


@given(st.lists(st.integers(1, 99), min_size=1), st.integers(1, 5), st.integers(1, 9))
def test_boundaries_are_multiples_that_hold_every_pair_in_reach(
  lengths, number, multiple_of
):
  reach = min(lengths) + 30
  boundaries = bucket_boundaries(
    np.array(lengths), number, max_length=reach, multiple_of=multiple_of
  )
  assert len(boundaries) <= number
  assert list(boundaries) == sorted({*boundaries})
  assert not any(boundary % multiple_of for boundary in boundaries)
  longest = max(length for length in lengths if length <= reach)
  assert longest <= boundaries[-1] < longest + multiple_of
