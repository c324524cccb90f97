"""Attention by blocks: exact over many blocks and tiles, and its own backward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quickly
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from relpos_jax import RelativePositions
from relpos_jax.attention import chunked, reference
from relpos_jax.attention.inputs import gather_inputs

pytestmark = pytest.mark.usefixtures("float64")


def arrays_of(
  num_queries,
  num_keys,
  k=0,
  rows=None,
  heads=4,
  key_heads=2,
  key_table="shared",
  value_table="shared",
  bias=None,
):
  """Returns random arrays; a table is "shared", "per head" or None, a bias names axes of BNTS."""
  random = lambda seed, shape: jnp.asarray(np.random.default_rng(seed).normal(size=shape))
  rows = 2 * k + 1 if rows is None else rows
  tables = {"shared": (rows, 3), "per head": (rows, heads, 3)}
  sizes = num_queries, num_keys, heads
  return dict(
    query=random(0, (2, num_queries, heads, 3)),
    key=random(1, (2, num_keys, key_heads, 3)),
    value=random(2, (2, num_keys, key_heads, 3)) + 1,
    key_table=None if key_table is None else random(3, tables[key_table]),
    value_table=None if value_table is None else random(4, tables[value_table]) * 2,
    bias=None if bias is None else random(5, like_logits(bias, *sizes)),
  )


def like_logits(axes, num_queries, num_keys, heads=4):
  sizes = dict(B=2, N=heads, T=num_queries, S=num_keys)
  return tuple(size if axis in axes else 1 for axis, size in sizes.items())


def attend(arrays, attention, beyond="clip", left=None, **options):
  tables = arrays["key_table"], arrays["value_table"]
  relations = None
  if any(table is not None for table in tables):
    relations = RelativePositions(*tables, beyond=beyond, left=left)
  inputs = gather_inputs(
    *(arrays[name] for name in ("query", "key", "value")),
    arrays.get("bias"),
    relations=relations,
    **options,
  )
  return attention(inputs)


def results(arrays, attention, **options):
  """Returns the output, and the gradients for a random cotangent."""

  @quickly
  def run(arrays):
    output, pull_back = jax.vjp(lambda arrays: attend(arrays, attention, **options), arrays)
    cotangent = jnp.asarray(np.random.default_rng(7).normal(size=output.shape))
    return dict(output=output, **pull_back(cotangent)[0])

  return run(arrays)


TABLES = "shared", "per head", None
SEGMENTS = np.random.default_rng(2).integers(0, 2, (2, 90))
# By name: the arguments of `arrays_of`, and those of `attend`; of a mask the axes it has.
CASES = {
  "many blocks and tiles": (dict(num_queries=70, num_keys=90, k=3), {}),
  "causal": (
    dict(
      num_queries=70, num_keys=70, k=3, key_table="per head", value_table="per head", bias="NTS"
    ),
    dict(is_causal=True),
  ),
  "a stretch shorter than a block": (
    dict(num_queries=25, num_keys=25, k=3),
    dict(is_causal=True, mask="TS"),
  ),
  "a table longer than a block": (
    dict(num_queries=70, num_keys=90, k=40),
    dict(is_causal=True, beyond="zero", dropout_rate=0.1),
  ),
  "dropped on both sides": (dict(num_queries=20, num_keys=30, k=2), dict(dropout_rate=0.3)),
  "k = 0, more queries than keys": (dict(num_queries=70, num_keys=10, k=0, bias="BNT"), {}),
  "fewer keys than near ones": (dict(num_queries=20, num_keys=6, k=3), dict(mask="BNTS")),
  "causal, more queries than keys": (
    dict(num_queries=20, num_keys=9, k=2, bias="N"),
    dict(is_causal=True),
  ),
  "causal, more keys than queries": (
    dict(num_queries=12, num_keys=30, k=2),
    dict(is_causal=True, beyond="zero", mask="N"),
  ),
  "one query": (dict(num_queries=1, num_keys=20, k=3, bias="BNTS"), dict(mask="NTS")),
  "one key": (dict(num_queries=20, num_keys=1, k=3, bias="BNTS"), dict(mask="NTS")),
  "a window, more keys than queries, one table": (
    dict(num_queries=10, num_keys=70, k=4, value_table=None),
    dict(beyond="zero", local_window_size=(30, 2)),
  ),
  "a window, more queries than keys": (
    dict(num_queries=30, num_keys=9, k=2, bias="TS"),
    dict(local_window_size=(4, 2)),
  ),
  "a causal window, the other table": (
    dict(num_queries=70, num_keys=70, k=4, key_table=None, bias="S"),
    dict(is_causal=True, local_window_size=9),
  ),
  "a causal window, more queries than keys": (
    dict(num_queries=30, num_keys=9, k=3),
    dict(is_causal=True, local_window_size=(2, 5), dropout_rate=0.2),
  ),
  "a table of the right": (dict(num_queries=20, num_keys=23, rows=4), dict(left=0)),
  "a table of the right, causal": (
    dict(num_queries=16, num_keys=16, rows=4),
    dict(left=0, is_causal=True, beyond="zero"),
  ),
  "a table of the left": (dict(num_queries=20, num_keys=23, rows=4), dict(left=3)),
  "a table of the left, causal": (
    dict(num_queries=16, num_keys=12, rows=4),
    dict(left=3, is_causal=True),
  ),
  "a table of the left, beyond all keys": (
    dict(num_queries=20, num_keys=20, rows=30),
    dict(left=29, beyond="zero"),
  ),
  "more of the right than of the left": (
    dict(num_queries=20, num_keys=30, rows=9, key_table="per head", bias=""),
    dict(left=2, mask="BTS"),
  ),
  "no relations": (
    dict(num_queries=20, num_keys=30, key_table=None, value_table=None),
    dict(mask="B"),
  ),
  "no relations, causal": (
    dict(num_queries=70, num_keys=70, key_table=None, value_table=None),
    dict(is_causal=True, dropout_rate=0.2),
  ),
  "no relations, a window": (
    dict(num_queries=20, num_keys=30, key_table=None, value_table=None),
    dict(local_window_size=(3, 2)),
  ),
  "queries that see no key": (
    dict(num_queries=20, num_keys=20, k=2, bias="BNTS"),
    dict(mask="BT", is_causal=True, dropout_rate=0.2),
  ),
  "three queries a key head": (
    dict(num_queries=20, num_keys=12, k=2, heads=6, value_table="per head", bias="BN"),
    dict(mask="NTS", dropout_rate=0.2),
  ),
  "three queries a key head, causal": (
    dict(num_queries=40, num_keys=40, k=2, heads=6, bias="NTS"),
    dict(is_causal=True),
  ),
  "one causal query, no relations: no key is near": (
    dict(num_queries=1, num_keys=9, key_table=None, value_table=None),
    dict(is_causal=True),
  ),
  "masks, segments and lengths": (
    dict(num_queries=70, num_keys=90, k=3, bias="BTS"),
    dict(
      mask="BS",
      query_segment_ids=SEGMENTS[:, :70],
      key_segment_ids=SEGMENTS,
      query_seq_lengths=np.array([70, 41]),
      key_value_seq_lengths=np.array([0, 55]),
    ),
  ),
}


def assert_exact(sizes, options, block=8, num_heads=4, num_stretches=2):
  """Checks a call against the reference, with at most `num_heads` heads at a time.

  A window allows more heads, because a block computes few keys.
  """
  arrays, options = arrays_of(**sizes), dict(options)
  num_queries, num_keys = arrays["query"].shape[1], arrays["key"].shape[1]
  if options.get("mask") is not None:
    shape = like_logits(options["mask"], num_queries, num_keys, arrays["query"].shape[2])
    options["mask"] = np.random.default_rng(1).random(shape) < 0.7
  if "dropout_rate" in options:
    options["dropout_key"] = jax.random.key(0)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(chunked, "_STRETCHES", num_stretches)
    patch.setattr(chunked, "_PAIRS", num_heads * min(block, num_queries) * num_keys)
    actual = results(arrays, functools.partial(chunked.attention, block=block), **options)
  wanted = results(arrays, reference.attention, **options)
  for name, x in wanted.items():
    if x is not None:
      np.testing.assert_allclose(actual[name], x, rtol=0, atol=1e-10, err_msg=name)


ALL = [(name, 2 ** (number % 3), 2) for number, name in enumerate(CASES)]  # 1, 2 or 4 heads a time
AGAIN = [("causal", 1, 4), ("causal", 4, 3), ("three queries a key head", 6, 2)]


@pytest.mark.parametrize("name, num_heads, num_stretches", [*ALL, *AGAIN])
def test_many_blocks_equal_the_reference(name, num_heads, num_stretches):
  assert_exact(*CASES[name], num_heads=num_heads, num_stretches=num_stretches)


@pytest.mark.parametrize("is_causal", [True, False])
def test_blocks_of_one_query_that_have_no_near_key(is_causal):
  assert_exact(dict(num_queries=2, num_keys=9, k=0), dict(is_causal=is_causal), block=1)


@st.composite
def calls(draw):
  """Arguments of `arrays_of`, and of `attend`."""
  key_heads, rows = draw(st.integers(1, 2)), draw(st.integers(1, 9) | st.integers(10, 60))
  lengths, booleans = st.integers(1, 40), st.booleans()
  axes, tables = st.none() | st.sets(st.sampled_from("BNTS")), st.sampled_from(TABLES)
  sides = st.integers(0, 12)
  sizes = dict(
    num_queries=draw(lengths),
    num_keys=draw(lengths),
    rows=rows,
    heads=key_heads * draw(st.integers(1, 3)),
    key_heads=key_heads,
    key_table=draw(tables),
    value_table=draw(tables),
    bias=draw(axes),
  )
  options = dict(
    left=draw(st.integers(0, rows - 1)),
    beyond=draw(st.sampled_from(["clip", "zero"])),
    is_causal=draw(booleans),
    local_window_size=draw(st.none() | st.none() | sides | st.tuples(sides, sides)),
    dropout_rate=draw(st.sampled_from([0.0, 0.3])),
    mask=draw(axes),
  )
  return sizes, options


# Compiling every example is what takes the time.
@settings(max_examples=30, phases=(Phase.explicit, Phase.generate))
@given(
  call=calls(),
  block=st.integers(1, 9),
  num_heads=st.integers(1, 6),
  num_stretches=st.integers(1, 3),
)
def test_any_call_equals_the_reference(call, block, num_heads, num_stretches):
  assert_exact(*call, block, num_heads, num_stretches)


def test_the_backward_pass_is_the_derivative():
  arrays = arrays_of(num_queries=9, num_keys=11, k=2)
  blocked = functools.partial(chunked.attention, block=4)
  run = jax.jit(lambda arrays: attend(arrays, blocked))
  check_grads(run, (arrays,), order=1, modes=["rev"])


@pytest.mark.parametrize("is_causal", [True, False])
def test_memory_is_linear_in_length(is_causal):
  def bytes_per_token(length):
    array = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
    table = jax.ShapeDtypeStruct((9, 16), jnp.float32)
    arrays = dict(query=array, key=array, value=array, key_table=table, value_table=table)
    loss = lambda arrays: attend(arrays, chunked.attention, is_causal=is_causal).sum()
    compiled = quickly(jax.grad(loss)).lower(arrays).compile()
    return compiled.memory_analysis().temp_size_in_bytes / length

  assert bytes_per_token(65536) < 1.1 * bytes_per_token(4096)
