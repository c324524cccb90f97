"""Makes the positions of published schemes, of the sizes of a call to measure."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.length_tasks.model import Kerple
from relpos_jax import EdgeLabels
from relpos_jax.models.layers import LayersConfig, make_positions
from relpos_jax.nn import Positions

CLIP = 16  # Shaw et al. 2018
LONGEST = 128  # the distance from which on the other schemes make no difference


class Labels(Positions):
  """Adds a vector to the keys for one of 16 labels of each pair of tokens."""

  def __init__(self, length: int, width: int, *, rngs: nnx.Rngs):
    self.length = length
    self.table = nnx.Param(jax.random.normal(rngs.params(), (16, width)))

  def __call__(self) -> EdgeLabels:
    tokens = jnp.arange(self.length)
    labels = (7 * tokens[:, None] + 3 * tokens) % len(self.table)
    return EdgeLabels(labels, self.table[...], None)


Make = Callable[[int, int, int, nnx.Rngs], Positions]


def _layers(**options: Any) -> Make:
  """Returns a function that makes the positions of layers with these options."""

  def make(_: int, heads: int, width: int, rngs: nnx.Rngs) -> Positions:
    config = LayersConfig(width=heads * width, num_heads=heads, **options)
    return make_positions(config, is_causal=False, rngs=rngs)

  return make


_SHAW = dict(positions="relative", max_distance=CLIP, tables_per_head=False)
# By name, functions of a call's length, heads, width, and random numbers.
SCHEMES: dict[str, Make] = dict(
  shaw=_layers(**_SHAW),
  shaw_keys=_layers(**_SHAW, relative_values=False),
  t5=_layers(positions="t5", max_distance=LONGEST),
  alibi=_layers(positions="alibi"),
  rotary=_layers(positions="rotary"),
  xl=_layers(positions="xl", max_distance=LONGEST),
  content=_layers(positions="content", max_distance=LONGEST),
  deberta=_layers(positions="deberta", max_distance=LONGEST),
  labels=lambda length, _, width, rngs: Labels(length, width, rngs=rngs),
  kerple=_layers(positions=Kerple),
)
