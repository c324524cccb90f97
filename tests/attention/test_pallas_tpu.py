"""The kernel for TPUs beyond what the kernels have in common: test_kernels.py."""

import functools

import jax
import jax.numpy as jnp
import pytest
from kernel_calls import arrays_of, assert_exact

from relpos_jax import RelativePositions, explain
from relpos_jax.attention import pallas_tpu
from relpos_jax.attention.inputs import gather_inputs

pytestmark = pytest.mark.usefixtures("float64")


def test_a_skewed_array_as_large_as_a_tile():
  """A table that fills its period, and sees the block of another."""
  attention = functools.partial(pallas_tpu.attention, block=8)
  assert_exact(attention, arrays_of(rows=2 * 3 + 1), dict(beyond="zero", is_causal=True))


def test_exact_on_tiles_of_default_size():
  assert_exact(pallas_tpu.attention, arrays_of(queries=9, keys=11, key_heads=1), {})


def test_it_takes_large_tables_of_which_a_call_reaches_few_rows():
  """Music Transformer: k = 1,024, of which a causal call reaches half."""
  sequence, table = jnp.zeros((1, 2048, 1, 8)), jnp.zeros((2 * 1024 + 1, 8))
  relations = RelativePositions(table, None, beyond="zero")
  run = functools.partial(explain, sequence, sequence, sequence, relations=relations)
  assert run(is_causal=True).reasons["pallas_tpu"].startswith("can do it")
  refused = "the call reaches 2051 rows of the tables; it takes at most 2048"
  assert run().reasons["pallas_tpu"] == refused


def test_refuses_on_a_tpu_what_it_cannot_compile():
  wide = gather_inputs(*[jnp.zeros((1, 8, 1, 512), jnp.bfloat16)] * 3)
  double = gather_inputs(*[jnp.zeros((1, 8, 1, 64))] * 3)
  long = gather_inputs(*[jnp.zeros((1, 20481, 1, 128), jnp.bfloat16)] * 3)
  assert "20480 fit the chip" in pallas_tpu.unsupported(long, interpret=False)
  assert "512 wide" in pallas_tpu.unsupported(wide, interpret=False)
  assert "float64" in pallas_tpu.unsupported(double, interpret=False)
  assert pallas_tpu.unsupported(double) is None


def test_bfloat16_lowers_for_a_tpu_whatever_the_default_precision():
  def output_and_gradient(query):
    inputs = gather_inputs(
      query, query, query, relations=RelativePositions(jnp.ones((5, 64)), None)
    )
    kernel = functools.partial(pallas_tpu.attention, interpret=False)
    output, pull_back = jax.vjp(lambda query: kernel(inputs._replace(query=query)), inputs.query)
    return pull_back(output)

  query = jax.ShapeDtypeStruct((1, 512, 1, 64), jnp.bfloat16)
  with jax.enable_x64(False), jax.default_matmul_precision("high"):
    jax.jit(output_and_gradient).trace(query).lower(lowering_platforms=("tpu",))
