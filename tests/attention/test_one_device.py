"""Chunked on one CPU, where it takes a few heads of a sequence at a time, and on eight.

On the eight simulated devices of the tests, it takes all heads and sequences at once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import call, make_arrays
from compiling import compile_quickly

from relpos_jax.attention import band


@pytest.mark.parametrize("is_one_device", [True, False])
@pytest.mark.parametrize("options", [{}, {"local_window_size": 5}, {"is_causal": True}])
def test_rows_that_no_pair_has_get_no_gradient(options, is_one_device, monkeypatch):
  monkeypatch.setattr(band, "is_one_device", lambda: is_one_device)
  length, reach = 128, 512
  sizes = {"queries": length, "keys": length, "rows": 2 * reach + 1}
  arrays = make_arrays(**sizes, dtype=np.float32)

  @compile_quickly
  @jax.grad
  def gradients(tables):
    output = call(arrays | tables, **options, implementation="chunked")
    return jnp.sum(jnp.sin(output))

  distances = np.arange(-reach, reach + 1)
  occurs = np.abs(distances) <= options.get("local_window_size", length - 1)
  if "is_causal" in options:
    occurs &= distances <= 0
  for gradient in gradients({"k": arrays["k"], "v": arrays["v"]}).values():
    np.testing.assert_array_equal(gradient.any(axis=-1), occurs)
