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
  """

  flops: float
  hbm: float
  hbm_bandwidth: float
  links: int
  link_bandwidth: float
  source: str


_DOCS = "docs.cloud.google.com/tpu/docs"
# The documents give the bandwidth of all of a chip's links together; v4's is in the paper on it.
CHIPS = {
  "v4": Chip(275e12, 32 * 2**30, 1200e9, 6, 50e9, f"{_DOCS}/v4, arXiv 2304.01433 (table 4)"),
  "v5e": Chip(197e12, 16e9, 819e9, 4, 200e9 / 4, f"{_DOCS}/v5e"),
  "v5p": Chip(459e12, 95e9, 2765e9, 6, 600e9 / 6, f"{_DOCS}/v5p"),
  "v6e": Chip(918e12, 32e9, 1600e9, 4, 400e9 / 4, f"{_DOCS}/v6e"),
}
# A ring over all chips passes through each by two of its links, once in either direction.
_LINKS_OF_A_RING = 2


class Estimate(NamedTuple):
  """Seconds that a step takes on each part of a chip, were it all that bounds it."""

  compute: float
  memory: float
  network: float

  @property
  def least(self) -> float:
    """Where all three go on at once: no step is faster."""
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


def estimate(chip: Chip, *, flops: float, hbm_bytes: float, sent_bytes: float) -> Estimate:
  """The roofline of what one chip does in a step.

  Williams et al. 2009, with the network as a third roof. `sent_bytes`: over the links of a ring.

  >>> chip = Chip(flops=100, hbm=1, hbm_bandwidth=10, links=4, link_bandwidth=1, source="")
  >>> estimate(chip, flops=200, hbm_bytes=30, sent_bytes=8)
  Estimate(compute=2.0, memory=3.0, network=4.0)
  """
  return Estimate(
    flops / chip.flops,
    hbm_bytes / chip.hbm_bandwidth,
    sent_bytes / (_LINKS_OF_A_RING * chip.link_bandwidth),
  )
