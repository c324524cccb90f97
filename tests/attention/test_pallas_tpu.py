"""The kernel for TPUs beyond what the kernels have in common: test_kernels.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import BATCH, DROPOUT, arrays_of, assert_exact, attend, normal

from relpos_jax import ContentBias, DistanceBias, LinearBias, RelativePositions, explain
from relpos_jax.attention import pallas_tpu
from relpos_jax.attention.inputs import gather_inputs

pytestmark = pytest.mark.usefixtures("float64")

in_tiles = functools.partial(pallas_tpu.attention, block=8, lanes=4)


@pytest.mark.parametrize("rows", [5, 2 * 7 + 1])
def test_what_wraps_around_in_the_band_is_nobodys_logit(rows):
  """Sub-tiles as large as tiles, and a table that fills its period but for the rows it needs."""
  assert_exact(functools.partial(in_tiles, lanes=8), arrays_of(rows=rows), {})


def test_gradients_are_as_narrow_as_the_inputs_though_the_offset_is_traced():
  arrays = arrays_of(queries=9, keys=9, more=(ContentBias(normal(BATCH, 9, 2, 3), normal(3, 3)),))
  arrays = jax.tree.map(lambda x: x.astype(jnp.bfloat16), arrays)
  loss = lambda arrays: attend(arrays, in_tiles, query_offset=np.array(3)).sum()
  gradients = jax.eval_shape(jax.grad(loss), arrays)
  assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("bfloat16")}


def test_exact_on_tiles_of_default_size():
  assert_exact(pallas_tpu.attention, arrays_of(queries=9, keys=11, key_heads=1), {})


def test_keys_in_several_calls(monkeypatch):
  monkeypatch.setattr(pallas_tpu, "KEYS_A_CALL", 8)
  content = ContentBias(normal(BATCH, 9, 2, 3), normal(3, 3))
  more = content, LinearBias(normal(2)), DistanceBias(normal(5))
  arrays = arrays_of(queries=9, keys=13, more=more)
  options = DROPOUT | dict(key_value_seq_lengths=jnp.array([12, 7]))
  assert_exact(in_tiles, arrays, options)


def test_it_takes_large_tables_of_which_a_call_reaches_few_rows():
  """Music Transformer: k = 1,024, of which a causal call reaches half, and one in a window few."""
  sequence, table = jnp.zeros((1, 2048, 1, 8)), jnp.zeros((2 * 1024 + 1, 8))
  reasons = []
  for options in (dict(is_causal=True), dict(local_window_size=99), {}):
    relations = RelativePositions(table, None, beyond="zero")
    run = functools.partial(explain, sequence, sequence, sequence, relations=relations)
    reasons.append(run(**options).reasons["pallas_tpu"])
  assert all(reason.startswith("can do it") for reason in reasons[:2])
  assert reasons[2] == "the call reaches 2051 rows of the tables; it takes at most 2048"


def test_refuses_on_a_tpu_what_it_cannot_compile():
  wide = gather_inputs(*[jnp.zeros((1, 8, 1, 512), jnp.bfloat16)] * 3)
  double = gather_inputs(*[jnp.zeros((1, 8, 1, 64))] * 3)
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
