"""The least time that a step can take, from a chip's peak figures. Nothing here was measured."""

from typing import NamedTuple


class Chip(NamedTuple):
  """Peak figures of one chip.

  Attributes:
    flops: a second, bfloat16.
    hbm: bytes of memory.
    hbm_bandwidth: bytes a second from and to it.
    links: to neighbours.
    link_bandwidth: bytes a second over one of them, one way.
    source: of all of these.
    slice_bandwidth: bytes a second from one slice to others, one way, a chip's part of it; 0 where
      the source does not tell.
  """

  flops: float
  hbm: float
  hbm_bandwidth: float
  links: int
  link_bandwidth: float
  source: str
  slice_bandwidth: float = 0.0


_DOCS = "docs.cloud.google.com/tpu/docs"
# The documents give the bandwidth of all of a chip's links together; v4's is in the paper on it.
# Between slices: v5e has 6.4 Tbit/s for a pod of 256 chips, v5p 50 Gbit/s a chip.
CHIPS = {
  "v4": Chip(275e12, 32 * 2**30, 1200e9, 6, 50e9, f"{_DOCS}/v4, arXiv 2304.01433 (table 4)"),
  "v5e": Chip(197e12, 16e9, 819e9, 4, 200e9 / 4, f"{_DOCS}/v5e", 6.4e12 / 8 / 256),
  "v5p": Chip(459e12, 95e9, 2765e9, 6, 600e9 / 6, f"{_DOCS}/v5p", 50e9 / 8),
  "v6e": Chip(918e12, 32e9, 1600e9, 4, 400e9 / 4, f"{_DOCS}/v6e"),
}
# A ring over all chips passes through each by two of its links, once in either direction.
_LINKS_OF_A_RING = 2


class Estimate(NamedTuple):
  """Seconds that a step takes on each part of a chip, were it all that bounds it.

  `network` is that of a slice, `slices` the one between them.
  """

  compute: float
  memory: float
  network: float
  slices: float = 0.0

  @property
  def least(self) -> float:
    """Where all go on at once: no step is faster."""
    return max(self)

  @property
  def one_by_one(self) -> float:
    """Where none goes on beside another."""
    return sum(self)

  @property
  def bound(self) -> str:
    """The part that takes longest.

    >>> Estimate(compute=2.0, memory=3.0, network=1.0).bound
    'memory'
    """
    return max(self._fields, key=self._asdict().get)


def estimate(
  chip: Chip, *, flops: float, hbm_bytes: float, sent_bytes: float, slice_bytes: float = 0
) -> Estimate:
  """The roofline of what one chip does in a step.

  Williams et al. 2009, with the networks as further roofs. `sent_bytes`: over the links of a ring.

  >>> chip = Chip(flops=100, hbm=1, hbm_bandwidth=10, links=4, link_bandwidth=1, source="")
  >>> estimate(chip, flops=200, hbm_bytes=30, sent_bytes=8)
  Estimate(compute=2.0, memory=3.0, network=4.0, slices=0.0)
  """
  return Estimate(
    flops / chip.flops,
    hbm_bytes / chip.hbm_bandwidth,
    sent_bytes / (_LINKS_OF_A_RING * chip.link_bandwidth),
    slice_bytes / chip.slice_bandwidth if slice_bytes else 0.0,
  )
