"""The kernel for TPUs in interpret mode, on tiles so small that every kind of them occurs.

Sub-tiles of 4, tiles of 8, some twenty tokens: three blocks of queries and of keys.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quickly
from jax.test_util import check_grads

from relpos_jax import (
  ContentBias,
  DistanceBias,
  KeyBias,
  LinearBias,
  RelativePositions,
  dot_product_attention,
  explain,
)
from relpos_jax.attention import pallas_tpu, reference
from relpos_jax.attention.inputs import gather_inputs
from relpos_jax.attention.pallas_tpu_tiles import cost

pytestmark = pytest.mark.usefixtures("float64")

BATCH, WIDTH = 2, 4
TINY = dict(block=8, lanes=4)
DROPOUT = dict(dropout_rate=0.3, dropout_key=jax.random.key(0))


def _normal(*shape):
  return np.random.default_rng(shape).normal(size=shape)


def _arrays(
  queries=20, keys=20, heads=1, key_heads=1, rows=5, tables="kv", per_head=False, more=()
):
  random = np.random.default_rng(0).normal
  table = (rows, heads, WIDTH) if per_head else (rows, WIDTH)
  arrays = dict(
    query=random(size=(BATCH, queries, heads, WIDTH)),
    key=random(size=(BATCH, keys, key_heads, WIDTH)),
    value=random(size=(BATCH, keys, key_heads, WIDTH)),
  )
  names = dict(k="key_table", v="value_table")
  arrays |= {names[letter]: random(size=table) for letter in tables}
  return jax.tree.map(jnp.asarray, arrays | dict(more=more))


def _attend(arrays, attention, left=None, beyond="clip", **options):
  tables = [arrays.get(name) for name in ("key_table", "value_table")]
  given = any(table is not None for table in tables)
  relations = [RelativePositions(*tables, beyond=beyond, left=left)] * given
  sequences = (arrays[name] for name in ("query", "key", "value"))
  return attention(gather_inputs(*sequences, relations=(*relations, *arrays["more"]), **options))


def _output_and_gradients(arrays, attention, options):
  @quickly
  def run(arrays):
    output, pull_back = jax.vjp(lambda x: _attend(x, attention, **options), arrays)
    cotangent = np.random.default_rng(1).normal(size=output.shape)
    return dict(output=output, **pull_back(jnp.asarray(cotangent))[0])

  return run(arrays)


def _assert_exact(arrays, options, tiny=TINY):
  kernel = functools.partial(pallas_tpu.attention, **tiny)
  actual = _output_and_gradients(arrays, kernel, options)
  wanted = _output_and_gradients(arrays, reference.attention, options)
  for name in wanted:
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-10, err_msg=name)
    jax.tree.map(same, actual[name], wanted[name])


SHAPES = {
  "neither table, causal": (dict(tables=""), dict(is_causal=True)),
  "keys only, k = 0": (dict(rows=1, tables="k"), {}),
  "values only, a causal k = 0": (dict(rows=1, tables="v"), dict(is_causal=True)),
  "k larger than a block": (dict(rows=2 * 11 + 1), {}),
  "k larger than the sequence": (dict(rows=2 * 30 + 1, queries=12, keys=20), {}),
  "more keys, causal, grouped heads": (
    dict(queries=13, keys=29, heads=4, key_heads=2, per_head=True),
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
    dict(queries=9, keys=29, heads=2, per_head=True),
    dict(query_offset=np.array(13), is_causal=True) | DROPOUT,
  ),
  "offsets before the keys and after, k larger than a block": (
    dict(rows=2 * 11 + 1),
    dict(query_offset=np.array([-21, 26])),
  ),
  "offsets, dropout, segments": (
    dict(heads=2),
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
  "dropout": (dict(heads=2), DROPOUT),
  "dropout, causal": (dict(heads=2), DROPOUT | dict(is_causal=True)),
  "a bias": (dict(tables="", more=(DistanceBias(_normal(7)),)), {}),
  "a bias per head, causal, grouped heads": (
    dict(tables="", heads=4, key_heads=2, more=(DistanceBias(_normal(6, 4), left=4),)),
    dict(is_causal=True),
  ),
  "contents": (
    dict(
      tables="v",
      heads=2,
      more=(
        ContentBias(_normal(BATCH, 20, 2, 5), _normal(5, 2, 5)),
        ContentBias(_normal(BATCH, 20, 2, 3), _normal(4, 3), "zero", left=1),
      ),
    ),
    dict(mask=(np.arange(20) % 5 != 3)[None, None, None]),
  ),
  "slopes, window": (
    dict(tables="", heads=2, more=(LinearBias(_normal(2)),)),
    dict(local_window_size=(9, 6)),
  ),
  "slopes, values, dropout, causal": (
    dict(tables="v", heads=2, more=(LinearBias(_normal(2)),)),
    DROPOUT | dict(is_causal=True),
  ),
  "all, offsets, dropout": (
    dict(
      heads=2,
      more=(
        DistanceBias(_normal(5, 2), "zero"),
        LinearBias(_normal(2)),
        ContentBias(_normal(BATCH, 20, 2, 3), _normal(3, 3)),
        RelativePositions(_normal(13, 2, WIDTH), _normal(13, 2, WIDTH), "zero"),
        DistanceBias(_normal(3)),
      ),
    ),
    dict(query_offset=np.array([5, -24]), scale=-0.7) | DROPOUT,
  ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_exact(case):
  shape, options = SHAPES[case]
  _assert_exact(_arrays(**shape), options)


@pytest.mark.parametrize("rows", [5, 2 * 7 + 1])
def test_what_wraps_around_in_the_band_is_nobodys_logit(rows):
  """Sub-tiles as large as tiles, and a table that fills its period but for the rows it needs."""
  _assert_exact(_arrays(rows=rows), {}, dict(block=8, lanes=8))


def test_gradients_are_as_narrow_as_the_inputs_though_the_offset_is_traced():
  arrays = _arrays(queries=9, keys=9, more=(ContentBias(_normal(BATCH, 9, 1, 3), _normal(3, 3)),))
  arrays = jax.tree.map(lambda x: x.astype(jnp.bfloat16), arrays)
  kernel = functools.partial(pallas_tpu.attention, **TINY)
  loss = lambda arrays: _attend(arrays, kernel, query_offset=np.array(3)).sum()
  gradients = jax.eval_shape(jax.grad(loss), arrays)
  assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("bfloat16")}


def test_exact_on_tiles_of_default_size():
  _assert_exact(_arrays(queries=9, keys=11, heads=2), {}, {})


def test_exact_behind_masks_of_every_kind():
  random = np.random.default_rng(2)
  options = dict(
    mask=jnp.asarray(random.random((BATCH, 1, 1, 20)) < 0.6),
    query_segment_ids=jnp.asarray(random.integers(0, 3, (BATCH, 20))),
    key_segment_ids=jnp.asarray(random.integers(0, 3, (BATCH, 20))),
    query_seq_lengths=jnp.array([3, 17]),
    key_value_seq_lengths=jnp.array([19, 9]),
    local_window_size=(9, 3),
  )
  _assert_exact(_arrays(), options)


def test_keys_in_several_calls(monkeypatch):
  monkeypatch.setattr(pallas_tpu, "KEYS_A_CALL", 8)
  content = ContentBias(_normal(BATCH, 9, 1, 3), _normal(3, 3))
  more = content, LinearBias(_normal(1)), DistanceBias(_normal(5))
  arrays = _arrays(queries=9, keys=13, more=more)
  _assert_exact(arrays, DROPOUT | dict(key_value_seq_lengths=jnp.array([12, 7])))


def test_gradients_are_those_of_the_output():
  attend = functools.partial(_attend, attention=functools.partial(pallas_tpu.attention, **TINY))
  arrays = _arrays(queries=9, keys=9)
  check_grads(jax.jit(attend), (arrays,), order=1, modes=["rev"])


@pytest.mark.parametrize(
  ("options", "reason"),
  [
    (dict(bias=jnp.zeros((1, 1, 20, 20))), "a bias is given"),
    (dict(mask=jnp.ones((1, 1, 20, 1), bool)), "the same for all heads and queries"),
    (dict(query_positions=jnp.arange(20)), "positions are given"),
    (dict(relations=KeyBias(_normal(3, WIDTH))), "it has no KeyBias"),
  ],
)
def test_refuses_by_name(options, reason):
  arrays = [_arrays()[name] for name in ("query", "key", "value")]
  with pytest.raises(NotImplementedError, match=reason):
    dot_product_attention(*arrays, implementation="pallas_tpu", **options)


def test_refuses_a_traced_scale():
  attend = functools.partial(dot_product_attention, implementation="pallas_tpu")
  with pytest.raises(NotImplementedError, match="scale is traced"):
    jax.jit(lambda scale: attend(*[_arrays()["query"]] * 3, scale=scale))(0.1)


def test_it_takes_large_tables_of_which_a_call_reaches_few_rows():
  """Music Transformer: k = 1,024, of which a causal call reaches the left half and distance 0."""
  sequence, table = jnp.zeros((1, 2048, 1, 8)), jnp.zeros((2 * 1024 + 1, 8))
  reasons = []
  for is_causal in (True, False):
    relations = RelativePositions(table, None, beyond="zero")
    run = functools.partial(explain, sequence, sequence, sequence, relations=relations)
    reasons.append(run(is_causal=is_causal).reasons["pallas_tpu"])
  assert reasons[0].startswith("can do it")
  assert reasons[1] == "the call reaches 2051 rows of the tables; it takes at most 2048"


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
def test_tiles_with_a_visible_pair_cost_time(options):
  block, array = 16, jax.ShapeDtypeStruct((BATCH, 64, 1, WIDTH), np.float32)
  plans = []
  gather = lambda x: plans.append(pallas_tpu.plan_of(gather_inputs(x, x, x, **options), True)[0])
  jax.eval_shape(gather, array)
  operands = dict.fromkeys(("query", "key", "value"), array.update(shape=(BATCH, 1, 64, WIDTH)))
  found = cost(plans[0], operands, dict(output=operands["query"]), num_products=2)
  i, j = np.ogrid[:64, :64]
  left, right = options.get("local_window_size", (64, 64))
  seen = (j <= i if "is_causal" in options else True) & (j - i <= right) & (i - j <= left)
  num_tiles = seen.reshape(4, block, 4, block).any((1, 3)).sum()
  assert found.transcendentals == BATCH * num_tiles * block**2
  assert found.flops == 2 * 2 * WIDTH * found.transcendentals
  # A hidden tile of a causal call reads no keys; one outside of the window does.
  read = num_tiles / 16 if "is_causal" in options else 1
  assert found.bytes_accessed == (2 + 2 * 4 * read) * 4 * BATCH * 64 * WIDTH
