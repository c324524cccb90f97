"""What a call of the fused kernels for TPUs costs: compilers cannot look into it, and ask."""

import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import pallas as pl

from relpos_jax.attention.pallas_tpu_tiles import TpuPlan

Shapes = Mapping[str, jax.Array | jax.ShapeDtypeStruct]


def cost(plan: TpuPlan, operands: Shapes, outputs: Shapes, num_products: int) -> pl.CostEstimate:
  """Of a call whose every tile takes `num_products` products of [block, H] by [block, block].

  What relations add is left out. Keys and values come anew for every block of queries, all else
  moves once. Of the devices that share the queries it is the last one's cost: if causal, that sees
  most keys.
  """
  batch, heads, length, width = operands["query"].shape
  num_keys = operands["key"].shape[2]
  offsets = _offsets(plan, length // plan.block, num_keys // plan.block, "first_block" in operands)
  num_pairs = batch * heads * _count(plan.runs(offsets), offsets) * plan.block**2
  # See the kernels' block specs: without its number no block of queries knows what it will not see.
  known = plan.is_causal and "first_block" not in operands
  fetched = batch * heads * _count(offsets <= 0 if known else True, offsets) * plan.block
  once = [x for name, x in (operands | outputs).items() if name not in ("key", "value")]
  per_key = 2 * width * operands["key"].dtype.itemsize
  return pl.CostEstimate(
    flops=2 * num_products * num_pairs * width,
    transcendentals=num_pairs,
    bytes_accessed=fetched * per_key + sum(math.prod(x.shape) * x.dtype.itemsize for x in once),
  )


def _offsets(plan: TpuPlan, num_queries: int, num_keys: int, is_last_part: bool) -> np.ndarray:
  """How many blocks each tile of a call stands right of the diagonal."""
  first = plan.num_blocks[0] - num_queries if is_last_part else 0
  queries, keys = np.ogrid[first : first + num_queries, plan.key_block : plan.key_block + num_keys]
  return keys - queries


def _count(chosen: np.ndarray | bool, offsets: np.ndarray) -> int:
  return int(np.broadcast_to(chosen, offsets.shape).sum())
