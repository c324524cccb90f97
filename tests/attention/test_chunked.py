"""Attention by blocks: exact over many blocks and tiles, and its own backward pass."""

import functools

import jax
import numpy as np
import pytest
from compiling import quickly
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_calls import DROPOUT, arrays_of, assert_exact, like_logits, shapes_of

from relpos_jax.attention import chunked
from relpos_jax.attention.inputs import gather_inputs

pytestmark = pytest.mark.usefixtures("float64")

SEGMENTS = np.random.default_rng(2).integers(0, 2, (2, 90))
LENGTHS = dict(
  query_segment_ids=SEGMENTS[:, :70],
  key_segment_ids=SEGMENTS,
  query_seq_lengths=np.array([70, 41]),
  key_value_seq_lengths=np.array([0, 55]),
)
CAUSAL = dict(is_causal=True)
# By name: the sizes of arrays, and the options of a call; of a mask the axes that it has.
CASES = {
  "causal": (dict(queries=70, keys=70, rows=7, bias="NTS", per_head="kv"), CAUSAL),
  "a stretch shorter than a block": (dict(queries=25, keys=25, rows=7), CAUSAL | dict(mask="TS")),
  "a table longer than a block": (
    dict(queries=70, keys=90, rows=81),
    CAUSAL | DROPOUT | dict(beyond="zero"),
  ),
  "fewer keys than near ones": (dict(keys=6, rows=7), dict(mask="BNTS")),
  "causal, more queries than keys": (dict(keys=9, bias="N"), CAUSAL),
  "one query": (dict(queries=1, rows=7, bias="BNTS"), dict(mask="NTS")),
  "a causal window": (
    dict(queries=30, keys=9, rows=7),
    CAUSAL | DROPOUT | dict(local_window_size=(2, 5)),
  ),
  "a table of the left, beyond all keys": (dict(rows=30), dict(left=29, beyond="zero")),
  "no relations, causal": (dict(queries=70, keys=70, tables=""), CAUSAL | DROPOUT),
  "queries that see no key": (dict(bias="BNTS"), CAUSAL | DROPOUT | dict(mask="BT")),
  "three queries a key head": (
    dict(keys=12, heads=6, per_head="v", bias="BN"),
    DROPOUT | dict(mask="NTS"),
  ),
  "an offset, causal": (dict(keys=70, rows=7), CAUSAL | DROPOUT | dict(query_offset=45)),
  "stretches before, among and after the keys": (
    dict(queries=70, rows=7, bias="TS"),
    CAUSAL | dict(query_offset=-45),
  ),
  "a table longer than all keys, queries before them": (
    dict(queries=12, keys=6, rows=41),
    dict(query_offset=-9),
  ),
  "offsets per sequence, a causal window": (
    dict(queries=12, keys=30),
    CAUSAL | dict(query_offset=np.array([31, -5]), local_window_size=(4, 2)),
  ),
  "a soft cap, no relations": (dict(keys=30, tables=""), CAUSAL | dict(logits_soft_cap=1.0)),
  "masks, segments and lengths": (
    dict(queries=70, keys=90, rows=7, bias="BTS"),
    dict(mask="BS") | LENGTHS,
  ),
}


def check(sizes, options, block=8, group=2, num_heads=4, num_stretches=2):
  """Checks a call against the reference, with at most `num_heads` heads at a time.

  A window allows more heads, because a block computes few keys.
  """
  sizes = dict(queries=20, keys=20, heads=4) | sizes
  if options.get("mask") is not None:
    shape = like_logits(options["mask"], *(sizes[name] for name in ("heads", "queries", "keys")))
    options = options | dict(mask=np.random.default_rng(1).random(shape) < 0.7)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(chunked, "_STRETCHES", num_stretches)
    num_pairs = num_heads * min(block, sizes["queries"]) * sizes["keys"]
    patch.setattr(chunked, "_PAIRS", num_pairs)
    attention = functools.partial(chunked.attention, block=block, group=group)
    assert_exact(attention, arrays_of(**sizes), options)


ALL = [(name, 2 ** (number % 3), 2) for number, name in enumerate(CASES)]  # 1, 2 or 4 heads a time
AGAIN = [("causal", 1, 4), ("causal", 4, 3), ("three queries a key head", 6, 2)]


@pytest.mark.parametrize("name, num_heads, num_stretches", [*ALL, *AGAIN])
def test_many_blocks_equal_the_reference(name, num_heads, num_stretches):
  check(*CASES[name], num_heads=num_heads, num_stretches=num_stretches)


@pytest.mark.parametrize("is_causal", [True, False])
def test_blocks_of_one_query_that_have_no_near_key(is_causal):
  check(dict(queries=2, keys=9, rows=1), dict(is_causal=is_causal), block=1)


@st.composite
def calls(draw):
  """Draws the sizes of arrays, and the options of a call."""
  key_heads, rows = draw(st.integers(1, 2)), draw(st.integers(1, 9) | st.integers(10, 60))
  lengths, sides, positions = st.integers(1, 40), st.integers(0, 12), st.integers(-60, 90)
  axes, tables = st.none() | st.sets(st.sampled_from("BNTS")), st.sampled_from(["", "k", "v", "kv"])
  sizes = dict(
    queries=draw(lengths),
    keys=draw(lengths),
    rows=rows,
    heads=key_heads * draw(st.integers(1, 3)),
    key_heads=key_heads,
    tables=draw(tables),
    per_head=draw(tables),
    bias=draw(axes),
  )
  return sizes, dict(
    left=draw(st.integers(0, rows - 1)),
    beyond=draw(st.sampled_from(["clip", "zero"])),
    is_causal=draw(st.booleans()),
    local_window_size=draw(st.none() | st.none() | sides | st.tuples(sides, sides)),
    query_offset=draw(st.just(0) | positions | st.tuples(positions, positions).map(np.array)),
    logits_soft_cap=draw(st.sampled_from([None, None, 0.7])),
    mask=draw(axes),
    **draw(st.sampled_from([{}, DROPOUT])),
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
  check(*call, block, group, num_heads, num_stretches)


@pytest.mark.parametrize("is_causal", [True, False])
def test_memory_is_linear_in_length(is_causal):
  def loss(query, key, value, relations):
    inputs = gather_inputs(query, key, value, relations=relations, is_causal=is_causal)
    return chunked.attention(inputs).sum()

  def bytes_per_token(length):
    arrays = shapes_of(length, 16, 9, dtype=np.float32)
    compiled = quickly(jax.grad(loss, (0, 1, 2, 3))).lower(*arrays).compile()
    return compiled.memory_analysis().temp_size_in_bytes / length

  assert bytes_per_token(65536) < 1.1 * bytes_per_token(4096)
