"""Makes the positions of published schemes, of the sizes of a call to measure."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.length_tasks.model import Kerple
from relpos_jax import EdgeLabels
from relpos_jax.nn import (
  AlibiPositions,
  ContentPositions,
  DebertaPositions,
  Positions,
  RelativePositionTables,
  RotaryPositions,
  T5Positions,
  TransformerXLPositions,
)

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


# By name, functions of a call's length, heads, width, and random numbers.
SCHEMES: dict[str, Callable[[int, int, int, nnx.Rngs], Positions]] = dict(
  shaw=lambda _, heads, width, rngs: RelativePositionTables(CLIP, width, rngs=rngs),
  shaw_keys=lambda _, heads, width, rngs: RelativePositionTables(
    CLIP, width, values=False, rngs=rngs
  ),
  t5=lambda _, heads, width, rngs: T5Positions(heads, LONGEST, rngs=rngs),
  alibi=lambda _, heads, width, rngs: AlibiPositions(heads),
  rotary=lambda _, heads, width, rngs: RotaryPositions(),
  xl=lambda _, heads, width, rngs: TransformerXLPositions(
    heads * width, heads, width, LONGEST, rngs=rngs
  ),
  content=lambda _, heads, width, rngs: ContentPositions(
    heads, width, LONGEST, rngs=rngs
  ),
  deberta=lambda _, heads, width, rngs: DebertaPositions(
    heads, width, LONGEST, rngs=rngs
  ),
  labels=lambda length, heads, width, rngs: Labels(length, width, rngs=rngs),
  kerple=lambda _, heads, width, rngs: Kerple(heads),
)
