"""Estimates from peak figures: their laws, and that the figures are of one chip each."""

import pytest

from experiments.planning.roofline import CHIPS, Chip, estimate

CHIP = Chip(
  flops=100.0,
  hbm=8.0,
  hbm_bandwidth=10.0,
  links=4,
  link_bandwidth=1.0,
  source="",
  slice_bandwidth=0.5,
)
WORK = dict(flops=200.0, hbm_bytes=30.0, sent_bytes=2.0)


def test_the_slowest_part_bounds_a_step():
  seconds = estimate(CHIP, **WORK)
  assert seconds == (2.0, 3.0, 1.0, 0.0)
  assert (seconds.bound, seconds.least, seconds.one_by_one) == ("memory", 3.0, 6.0)


@pytest.mark.parametrize(
  "work, peak, part",
  [
    ("flops", "flops", "compute"),
    ("hbm_bytes", "hbm_bandwidth", "memory"),
    ("sent_bytes", "link_bandwidth", "network"),
    ("slice_bytes", "slice_bandwidth", "slices"),
  ],
)
def test_twice_the_work_at_twice_the_peak_takes_as_long(work, peak, part):
  works = WORK | dict(slice_bytes=4.0)
  more = estimate(CHIP, **works | {work: 2 * works[work]})
  faster = CHIP._replace(**{peak: 2 * getattr(CHIP, peak)})
  assert getattr(more, part) == 2 * getattr(estimate(CHIP, **works), part) > 0
  assert estimate(faster, **works | {work: 2 * works[work]}) == estimate(CHIP, **works)


@pytest.mark.parametrize("name", CHIPS)
def test_the_figures_of_a_chip_are_in_their_units(name):
  """Of every chip so far: hundreds of operations a byte, some bytes of memory for one sent."""
  chip = CHIPS[name]
  assert 100 < chip.flops / chip.hbm_bandwidth < 1000
  assert 2 < chip.hbm_bandwidth / (chip.links * chip.link_bandwidth) < 10
  # A slice has a slower network to others than within.
  assert chip.slice_bandwidth < chip.link_bandwidth / 10
  assert 10e9 < chip.hbm < 200e9 and chip.links in (4, 6) and chip.source
