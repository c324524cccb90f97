"""The fused kernels in interpret mode, on tiles so small that every kind of them occurs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import (
  CASES,
  LOW,
  arrays_of,
  assert_exact,
  exact_case,
  normal,
  output_and_gradients,
)

from relpos_jax import DistanceBias
from relpos_jax.attention import pallas_gpu, pallas_tpu

pytestmark = pytest.mark.usefixtures("float64")

KERNELS = dict(
  tpu=functools.partial(pallas_tpu.attention, block=8),
  gpu=functools.partial(pallas_gpu.attention, block=(8, 4)),
)


@pytest.fixture(params=KERNELS)
def kernel(request):
  return KERNELS[request.param]


@pytest.mark.parametrize("case", CASES)
def test_exact(kernel, case):
  assert_exact(kernel, *exact_case(case))


# By name: the first and last hidden row of 7, and the options of a call.
HIDDEN = {
  "left end": (0, 2, {}),
  "left end, causal": (0, 0, dict(is_causal=True)),
  "right end, lengths": (5, 6, dict(key_value_seq_lengths=np.array([20, 18]))),
  "within": (2, 4, {}),
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
