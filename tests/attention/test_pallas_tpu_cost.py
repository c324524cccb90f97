"""The cost estimates of the kernels for TPUs: counts by hand, and laws."""

import jax
import numpy as np
import pytest

from relpos_jax.attention.inputs import gather_inputs
from relpos_jax.attention.pallas_tpu import plan_of
from relpos_jax.attention.pallas_tpu_tiles import cost

BATCH, HEADS, WIDTH, BLOCK = 2, 3, 8, 16


def cost_of(length, num_keys=None, *, first_key=0, is_part=False, **options):
  """Returns the cost of a forward call on the last `length` of 64 queries."""
  array = lambda size: jax.ShapeDtypeStruct((BATCH, HEADS, size, WIDTH), np.float32)
  full = jax.ShapeDtypeStruct((BATCH, 64, HEADS, WIDTH), np.float32)
  plans = []
  gather = lambda x: plans.append(plan_of(gather_inputs(x, x, x, **options), True)[0])
  jax.eval_shape(gather, full)
  plan = plans[0]._replace(key_block=first_key // BLOCK)
  operands = dict(query=array(length), key=array(num_keys or 64), value=array(num_keys or 64))
  if is_part:
    operands["first_block"] = jax.ShapeDtypeStruct((1, 1), np.int32)
  return cost(plan, operands, dict(output=array(length)), num_products=2)


OPTIONS = [dict(), dict(is_causal=True), dict(local_window_size=(17, 0))]


@pytest.mark.parametrize("options", OPTIONS)
def test_tiles_with_a_visible_pair_are_counted(options):
  i, j = np.ogrid[:64, :64]
  left, right = options.get("local_window_size", (64, 64))
  seen = (j <= i if "is_causal" in options else True) & (j - i <= right) & (i - j <= left)
  tiles = seen.reshape(4, BLOCK, 4, BLOCK).any((1, 3)).sum()
  found = cost_of(64, **options)
  assert found.transcendentals == BATCH * HEADS * tiles * BLOCK**2
  assert found.flops == 2 * 2 * WIDTH * found.transcendentals


def test_visible_keys_are_read_for_every_block_of_queries():
  array = 4 * BATCH * HEADS * 64 * WIDTH
  assert cost_of(64).bytes_accessed == (2 + 2 * 4) * array
  tiles = 10 / 16
  assert cost_of(64, is_causal=True).bytes_accessed == (2 + 2 * 4 * tiles) * array
  assert cost_of(64, local_window_size=(17, 0)).bytes_accessed == (2 + 2 * 4) * array


@pytest.mark.parametrize("options", OPTIONS)
def test_calls_for_some_keys_each_add_up(options):
  parts = [cost_of(64, 32, first_key=start, **options) for start in (0, 32)]
  assert sum(part.flops for part in parts) == cost_of(64, **options).flops


def test_the_cost_of_a_shard_is_that_of_the_last_queries():
  # Its 16 queries attend to all keys: 4 of the 10 causal tiles.
  last = cost_of(16, is_part=True, is_causal=True)
  assert last.flops / cost_of(64, is_causal=True).flops == 4 / 10
  assert last.flops == cost_of(16, is_part=True).flops
