"""The kernel for TPUs in interpret mode, on tiles so small that every kind of them occurs.

Sub-tiles of 4, tiles of 8, some twenty tokens: three blocks of queries and of keys.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import (
  BATCH,
  DROPOUT,
  HIDDEN,
  RELATIONS,
  WIDTH,
  arrays_of,
  assert_exact,
  assert_finite_where_only_low_rows_are_seen,
  assert_low_rows_hide,
  attend,
  normal,
)

from relpos_jax import (
  ContentBias,
  DistanceBias,
  KeyBias,
  LinearBias,
  RelativePositions,
  dot_product_attention,
  explain,
)
from relpos_jax.attention import pallas_tpu, pallas_tpu_tiles
from relpos_jax.attention.inputs import gather_inputs
from relpos_jax.attention.pallas_tpu_tiles import cost

pytestmark = pytest.mark.usefixtures("float64")

TINY = dict(block=8, lanes=4)


@pytest.fixture(autouse=True)
def at_most_two_tiles_a_step(monkeypatch):
  """Three or five blocks of keys are as many steps, four are two."""
  monkeypatch.setattr(pallas_tpu_tiles, "STEP_BYTES", 2 * TINY["block"] * WIDTH * 8)


def in_tiles(**tiny):
  return functools.partial(pallas_tpu.attention, **tiny)


SHAPES = RELATIONS | {
  "neither table, causal": (dict(tables=""), dict(is_causal=True)),
  "keys only, k = 0": (dict(rows=1, tables="k"), {}),
  "values only, a causal k = 0": (dict(rows=1, tables="v"), dict(is_causal=True)),
  "k larger than a block": (dict(rows=2 * 11 + 1), {}),
  "k larger than the sequence": (dict(rows=2 * 30 + 1, queries=12), {}),
  "more keys, causal, grouped heads": (
    dict(queries=13, keys=29, heads=4, per_head=True),
    dict(is_causal=True),
  ),
  "more queries, zero beyond": (dict(queries=27, keys=13), dict(beyond="zero")),
  "nothing to the right of the query": (dict(), dict(left=4, is_causal=True)),
  "nothing to the left of it": (dict(), dict(left=0)),
  "a window that leaves tiles out": (
    dict(queries=40, keys=40, tables=""),
    dict(local_window_size=(3, 9)),
  ),
  "an offset, causal": (dict(queries=13, keys=37), dict(query_offset=19, is_causal=True)),
  "an offset of whole blocks": (dict(queries=8, keys=24), dict(query_offset=8)),
  "an offset beyond the keys, dropout": (dict(), dict(query_offset=30) | DROPOUT),
  "a traced offset, causal": (
    dict(queries=9, keys=29, key_heads=1, per_head=True),
    dict(query_offset=np.array(13), is_causal=True) | DROPOUT,
  ),
  "offsets before the keys and after, k larger than a block": (
    dict(rows=2 * 11 + 1),
    dict(query_offset=np.array([-21, 26])),
  ),
  "offsets, dropout, segments": (
    dict(key_heads=1),
    dict(query_offset=np.array([5, -4]), query_segment_ids=np.arange(20) // 6)
    | dict(key_segment_ids=np.arange(20) // 9)
    | DROPOUT,
  ),
  "offsets, causal, zero, values only": (
    dict(keys=24, tables="v"),
    dict(query_offset=np.array([3, -13]), is_causal=True) | dict(beyond="zero"),
  ),
  "an offset before all keys": (dict(queries=13, rows=2 * 8 + 1), dict(query_offset=-27)),
  "an offset before all keys, one in a block": (
    dict(queries=13),
    dict(query_offset=-15, local_window_size=(3, 9)),
  ),
  "dropout": (dict(key_heads=1), DROPOUT),
  "dropout, causal": (dict(key_heads=1), DROPOUT | dict(is_causal=True)),
}


@pytest.mark.parametrize("case", SHAPES)
def test_exact(case):
  shape, options = SHAPES[case]
  assert_exact(in_tiles(**TINY), arrays_of(**shape), options)


@pytest.mark.parametrize("where", HIDDEN)
def test_low_rows_of_tables_hide(where):
  assert_low_rows_hide(in_tiles(**TINY), where)


def test_queries_that_see_only_low_rows():
  assert_finite_where_only_low_rows_are_seen(in_tiles(**TINY))


@pytest.mark.parametrize("rows", [5, 2 * 7 + 1])
def test_what_wraps_around_in_the_band_is_nobodys_logit(rows):
  """Sub-tiles as large as tiles, and a table that fills its period but for the rows it needs."""
  assert_exact(in_tiles(block=8, lanes=8), arrays_of(rows=rows), {})


def test_gradients_are_as_narrow_as_the_inputs_though_the_offset_is_traced():
  arrays = arrays_of(queries=9, keys=9, more=(ContentBias(normal(BATCH, 9, 2, 3), normal(3, 3)),))
  arrays = jax.tree.map(lambda x: x.astype(jnp.bfloat16), arrays)
  loss = lambda arrays: attend(arrays, in_tiles(**TINY), query_offset=np.array(3)).sum()
  gradients = jax.eval_shape(jax.grad(loss), arrays)
  assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("bfloat16")}


def test_exact_on_tiles_of_default_size():
  assert_exact(pallas_tpu.attention, arrays_of(queries=9, keys=11, key_heads=1), {})


def test_exact_behind_masks_of_every_kind():
  random = np.random.default_rng(2)
  options = dict(
    mask=jnp.asarray(random.random((BATCH, 1, 1, 20)) < 0.6),
    query_segment_ids=jnp.asarray(random.integers(0, 3, (BATCH, 20)), jnp.int32),
    key_segment_ids=jnp.asarray(random.integers(0, 3, (BATCH, 20)), jnp.int32),
    query_seq_lengths=jnp.array([3, 17]),
    key_value_seq_lengths=jnp.array([19, 9]),
    local_window_size=(9, 3),
  )
  assert_exact(in_tiles(**TINY), arrays_of(), options)


def test_keys_in_several_calls(monkeypatch):
  monkeypatch.setattr(pallas_tpu, "KEYS_A_CALL", 8)
  content = ContentBias(normal(BATCH, 9, 2, 3), normal(3, 3))
  more = content, LinearBias(normal(2)), DistanceBias(normal(5))
  arrays = arrays_of(queries=9, keys=13, more=more)
  options = DROPOUT | dict(key_value_seq_lengths=jnp.array([12, 7]))
  assert_exact(in_tiles(**TINY), arrays, options)


@pytest.mark.parametrize("kernel", ["pallas_tpu", "pallas_gpu"])
@pytest.mark.parametrize(
  ("options", "reason"),
  [
    (dict(bias=jnp.zeros((1, 1, 20, 20))), "a bias is given"),
    (dict(mask=jnp.ones((1, 1, 20, 1), bool)), r"mask has shape \(1, 1, 20, 1\)"),
    (dict(query_positions=jnp.arange(20)), "positions are given"),
    (dict(relations=KeyBias(normal(3, WIDTH))), "it takes no KeyBias"),
  ],
)
def test_refuses_by_name(options, reason, kernel):
  arrays = [arrays_of()[name] for name in ("query", "key", "value")]
  with pytest.raises(NotImplementedError, match=reason):
    dot_product_attention(*arrays, implementation=kernel, **options)


@pytest.mark.parametrize("kernel", ["pallas_tpu", "pallas_gpu"])
def test_refuses_a_traced_scale(kernel):
  attend = functools.partial(dot_product_attention, implementation=kernel)
  with pytest.raises(NotImplementedError, match="scale is traced"):
    jax.jit(lambda scale: attend(*[arrays_of()["query"]] * 3, scale=scale))(0.1)


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
