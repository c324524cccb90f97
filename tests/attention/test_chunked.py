"""Attention by blocks: exact over many blocks and tiles, and its own backward pass."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quickly
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from relpos_jax import RelativePositions
from relpos_jax.attention import chunked, reference
from relpos_jax.attention.inputs import gather_inputs

pytestmark = pytest.mark.usefixtures("float64")


def arrays_of(T, S, k=0, rows=None, N=4, K=2, key_table="shared", value_table="shared", bias=None):
  """Returns random arrays; a table is "shared", "per head" or None, a bias names axes of BNTS."""
  random = lambda seed, shape: jnp.asarray(np.random.default_rng(seed).normal(size=shape))
  rows = 2 * k + 1 if rows is None else rows
  tables = {"shared": (rows, 3), "per head": (rows, N, 3)}
  return dict(
    query=random(0, (2, T, N, 3)),
    key=random(1, (2, S, K, 3)),
    value=random(2, (2, S, K, 3)) + 1,
    key_table=None if key_table is None else random(3, tables[key_table]),
    value_table=None if value_table is None else random(4, tables[value_table]) * 2,
    bias=None if bias is None else random(5, like_logits(bias, T, S, N)),
  )


def like_logits(axes, T, S, N):
  return tuple(n if axis in axes else 1 for axis, n in dict(B=2, N=N, T=T, S=S).items())


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


SEGMENTS = np.random.default_rng(2).integers(0, 2, (2, 90))
LENGTHS = dict(
  query_segment_ids=SEGMENTS[:, :70],
  key_segment_ids=SEGMENTS,
  query_seq_lengths=np.array([70, 41]),
  key_value_seq_lengths=np.array([0, 55]),
)
PER_HEAD = dict(key_table="per head", value_table="per head")
NO_TABLES = dict(key_table=None, value_table=None)
# By name: the arguments of `arrays_of` and of `attend`; of a mask the axes it has.
CASES = {
  "causal": dict(T=70, S=70, k=3, bias="NTS", is_causal=True, **PER_HEAD),
  "a stretch shorter than a block": dict(T=25, S=25, k=3, is_causal=True, mask="TS"),
  "a table longer than a block": dict(
    T=70, S=90, k=40, is_causal=True, beyond="zero", dropout_rate=0.1
  ),
  "fewer keys than near ones": dict(T=20, S=6, k=3, mask="BNTS"),
  "causal, more queries than keys": dict(T=20, S=9, k=2, bias="N", is_causal=True),
  "one query": dict(T=1, S=20, k=3, bias="BNTS", mask="NTS"),
  "a causal window": dict(
    T=30, S=9, k=3, is_causal=True, local_window_size=(2, 5), dropout_rate=0.2
  ),
  "a table of the left, beyond all keys": dict(T=20, S=20, rows=30, left=29, beyond="zero"),
  "no relations, causal": dict(T=70, S=70, is_causal=True, dropout_rate=0.2, **NO_TABLES),
  "queries that see no key": dict(
    T=20, S=20, k=2, bias="BNTS", mask="BT", is_causal=True, dropout_rate=0.2
  ),
  "three queries a key head": dict(
    T=20, S=12, k=2, N=6, value_table="per head", bias="BN", mask="NTS", dropout_rate=0.2
  ),
  "an offset, causal": dict(T=20, S=70, k=3, is_causal=True, query_offset=45, dropout_rate=0.2),
  "stretches before, among and after the keys": dict(
    T=70, S=20, k=3, is_causal=True, bias="TS", query_offset=-45
  ),
  "a table longer than all keys, queries before them": dict(T=12, S=6, k=20, query_offset=-9),
  "offsets per sequence, a causal window": dict(
    T=12, S=30, k=2, query_offset=np.array([31, -5]), is_causal=True, local_window_size=(4, 2)
  ),
  "a soft cap, no relations": dict(T=20, S=30, logits_soft_cap=1.0, is_causal=True, **NO_TABLES),
  "masks, segments and lengths": dict(T=70, S=90, k=3, bias="BTS", mask="BS", **LENGTHS),
}


def assert_exact(call, block=8, group=2, num_heads=4, num_stretches=2):
  """Checks a call against the reference, with at most `num_heads` heads at a time.

  A window allows more heads, because a block computes few keys.
  """
  of_arrays = inspect.signature(arrays_of).parameters
  arrays = arrays_of(**{name: x for name, x in call.items() if name in of_arrays})
  options = {name: x for name, x in call.items() if name not in of_arrays}
  if options.get("mask") is not None:
    shape = like_logits(options["mask"], call["T"], call["S"], call.get("N", 4))
    options["mask"] = np.random.default_rng(1).random(shape) < 0.7
  if "dropout_rate" in options:
    options["dropout_key"] = jax.random.key(0)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(chunked, "_STRETCHES", num_stretches)
    patch.setattr(chunked, "_PAIRS", num_heads * min(block, call["T"]) * call["S"])
    attention = functools.partial(chunked.attention, block=block, group=group)
    actual = results(arrays, attention, **options)
  wanted = results(arrays, reference.attention, **options)
  for name, x in wanted.items():
    if x is not None:
      np.testing.assert_allclose(actual[name], x, rtol=0, atol=1e-10, err_msg=name)


ALL = [(name, 2 ** (number % 3), 2) for number, name in enumerate(CASES)]  # 1, 2 or 4 heads a time
AGAIN = [("causal", 1, 4), ("causal", 4, 3), ("three queries a key head", 6, 2)]


@pytest.mark.parametrize("name, num_heads, num_stretches", [*ALL, *AGAIN])
def test_many_blocks_equal_the_reference(name, num_heads, num_stretches):
  assert_exact(CASES[name], num_heads=num_heads, num_stretches=num_stretches)


@pytest.mark.parametrize("is_causal", [True, False])
def test_blocks_of_one_query_that_have_no_near_key(is_causal):
  assert_exact(dict(T=2, S=9, is_causal=is_causal), block=1)


@st.composite
def calls(draw):
  """Arguments of `arrays_of`, and of `attend`."""
  key_heads, rows = draw(st.integers(1, 2)), draw(st.integers(1, 9) | st.integers(10, 60))
  lengths, sides, positions = st.integers(1, 40), st.integers(0, 12), st.integers(-60, 90)
  axes, tables = (
    st.none() | st.sets(st.sampled_from("BNTS")),
    st.sampled_from(["shared", "per head", None]),
  )
  return dict(
    T=draw(lengths),
    S=draw(lengths),
    rows=rows,
    N=key_heads * draw(st.integers(1, 3)),
    K=key_heads,
    key_table=draw(tables),
    value_table=draw(tables),
    bias=draw(axes),
    left=draw(st.integers(0, rows - 1)),
    beyond=draw(st.sampled_from(["clip", "zero"])),
    is_causal=draw(st.booleans()),
    local_window_size=draw(st.none() | st.none() | sides | st.tuples(sides, sides)),
    dropout_rate=draw(st.sampled_from([0.0, 0.3])),
    query_offset=draw(st.just(0) | positions | st.tuples(positions, positions).map(np.array)),
    logits_soft_cap=draw(st.sampled_from([None, None, 0.7])),
    mask=draw(axes),
  )


# Compiling every example is what takes the time.
@settings(max_examples=20, phases=(Phase.explicit, Phase.generate))
@given(
  call=calls(),
  block=st.integers(1, 9),
  group=st.integers(1, 9),
  num_heads=st.integers(1, 6),
  num_stretches=st.integers(1, 3),
)
def test_any_call_equals_the_reference(call, block, group, num_heads, num_stretches):
  assert_exact(call, block, group, num_heads, num_stretches)


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
