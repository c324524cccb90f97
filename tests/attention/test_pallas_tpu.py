"""The kernel for TPUs beyond what the kernels have in common: test_kernels.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import BATCH, DROPOUT, WIDTH, arrays_of, assert_exact, attend, normal

from relpos_jax import ContentBias, DistanceBias, LinearBias, RelativePositions, explain
from relpos_jax.attention import pallas_tpu, pallas_tpu_tiles
from relpos_jax.attention.inputs import gather_inputs
from relpos_jax.attention.pallas_tpu_tiles import cost

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


@pytest.mark.parametrize("options", [dict(), dict(is_causal=True), dict(local_window_size=(17, 0))])
@pytest.mark.parametrize(
  ("tiles_a_step", "read", "read_if_causal"), [(1, 1, 10 / 16), (2, 1, 5 / 8), (4, 1 / 4, 1 / 4)]
)
def test_tiles_with_a_visible_pair_cost_time(
  options, tiles_a_step, read, read_if_causal, monkeypatch
):
  block, array = 16, jax.ShapeDtypeStruct((BATCH, 64, 1, WIDTH), np.float32)
  monkeypatch.setattr(pallas_tpu_tiles, "STEP_BYTES", tiles_a_step * block * WIDTH * 4)
  plans = []
  gather = lambda x: plans.append(pallas_tpu.plan_of(gather_inputs(x, x, x, **options), True)[0])
  jax.eval_shape(gather, array)
  operands = dict.fromkeys(("query", "key", "value"), array.update(shape=(BATCH, 1, WIDTH, 64)))
  found = cost(plans[0], operands, dict(output=operands["query"]), num_products=2)
  i, j = np.ogrid[:64, :64]
  left, right = options.get("local_window_size", (64, 64))
  seen = (j <= i if "is_causal" in options else True) & (j - i <= right) & (i - j <= left)
  num_tiles = seen.reshape(4, block, 4, block).any((1, 3)).sum()
  assert found.transcendentals == BATCH * num_tiles * block**2
  assert found.flops == 2 * 2 * WIDTH * found.transcendentals
  # A hidden step of a causal call reads no keys; one outside of the window does. A single step
  # reads them once for all queries.
  read = read_if_causal if "is_causal" in options else read
  assert found.bytes_accessed == (2 + 2 * 4 * read) * 4 * BATCH * 64 * WIDTH
