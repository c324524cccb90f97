"""The fused kernels in interpret mode, on tiles so small that every kind of them occurs.

For TPUs sub-tiles of 4 and tiles of 8, for GPUs tiles of 4 and 8: three blocks or more.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import (
  CASES,
  LOW,
  WIDTH,
  arrays_of,
  assert_exact,
  exact_case,
  normal,
  output_and_gradients,
)

from relpos_jax import DistanceBias
from relpos_jax.attention import pallas_gpu, pallas_tpu, pallas_tpu_tiles
from relpos_jax.attention.pallas_gpu_kernels import Blocks

pytestmark = pytest.mark.usefixtures("float64")

SMALL = Blocks((4, 4, 2), (8, 4, 1), (4, 8, 2))
KERNELS = dict(
  tpu=functools.partial(pallas_tpu.attention, block=8, lanes=4),
  gpu=functools.partial(pallas_gpu.attention_in_blocks, blocks=SMALL, interpret=True),
)


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
  """Returns a kernel; on TPUs three or five blocks of keys are as many steps, four are two."""
  monkeypatch.setattr(pallas_tpu_tiles, "STEP_BYTES", 2 * 8 * WIDTH * 8)
  return KERNELS[request.param]


@pytest.mark.parametrize("case", CASES)
def test_exact(kernel, case):
  assert_exact(kernel, *exact_case(case))


# By name: the first and last hidden row of 7, and the options of a call.
HIDDEN = {
  "left end": (0, 2, {}),
  "left end, causal": (0, 0, dict(is_causal=True)),
  "right end, lengths": (5, 6, dict(key_value_seq_lengths=np.array([20, 18]))),
  "within, an offset": (2, 4, dict(query_offset=4)),
}


@pytest.mark.parametrize("where", HIDDEN)
def test_low_rows_of_tables_hide(kernel, where):
  """Checks float32 with tables whose rows hide keys: each head has another number there."""
  first, last, options = HIDDEN[where]
  table = normal(7, len(LOW))
  table[first : last + 1] = LOW
  arrays = arrays_of(heads=len(LOW), key_heads=1, more=(DistanceBias(table),), dtype=np.float32)
  assert_exact(kernel, arrays, options, tolerance=2e-6)


def test_queries_that_see_only_low_rows(kernel):
  """Checks that such queries have finite gradients, and make no others infinite."""
  arrays = arrays_of(more=(DistanceBias(jnp.array([-1e30, 0.0, 0.0])),), dtype=np.float32)
  arrays["query"] *= 100
  options = dict(query_seq_lengths=np.array([9, 20]), key_value_seq_lengths=np.array([9, 2]))
  results = output_and_gradients(kernel, arrays, options)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(results))
