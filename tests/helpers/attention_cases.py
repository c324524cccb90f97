"""Calls of many kinds: the sizes of their arrays, and their options.

With T = S = 20, blocks of queries have tiles to the right of the band, on it and to its
left, and padding.
"""

import functools
import inspect

import jax
import numpy as np
from calls import BATCH, WIDTH, make_arrays, normal, run

from relpos_jax import ContentBias, DistanceBias, LinearBias, RelativePositions
from relpos_jax.attention import reference

NAMES_OF_SIZES = inspect.signature(make_arrays).parameters


def case(**values):
  """Returns the sizes and the options of a call apart."""
  sizes = {name: values.pop(name) for name in NAMES_OF_SIZES if name in values}
  return sizes, values


DROPOUT = {"dropout_rate": 0.3, "dropout_key": jax.random.key(0)}
CAUSAL = {"is_causal": True}
LONGER = {
  "query_seq_lengths": np.array([3, 17]),
  "key_value_seq_lengths": np.array([19, 9]),
}
LENGTHS = {
  "query_seq_lengths": np.array([5, 20]),
  "key_value_seq_lengths": np.array([3, 0]),
}
RANDOM = np.random.default_rng(0)
KEY_MASK = RANDOM.random((2, 1, 1, 20)) < 0.6
QUERY_SEGMENTS, KEY_SEGMENTS = RANDOM.integers(0, 2, (2, 2, 20)).astype(np.int32)
SEGMENTS = {"query_segment_ids": QUERY_SEGMENTS, "key_segment_ids": KEY_SEGMENTS}
PAIRS_OF_HEADS = RelativePositions(normal(13, 4, WIDTH), normal(13, 4, WIDTH), "zero")
SUM = DistanceBias(normal(5, 4), "zero"), PAIRS_OF_HEADS, DistanceBias(normal(3))
CONTENTS = (
  ContentBias(normal(BATCH, 20, 2, 5), normal(5, 2, 5)),
  ContentBias(normal(BATCH, 20, 2, 3), normal(4, 3), "zero", left=1),
)
SLOPES = (LinearBias(normal(2)),)
CONTENT = ContentBias(normal(BATCH, 20, 4, 3), normal(3, 3))
# The one that kernels take, and two that they do not.
ALL = *SUM, LinearBias(normal(4)), CONTENT

CASES = {
  "neither table, causal": case(tables="", **CAUSAL),
  "keys only, k = 0": case(rows=1, tables="k"),
  "values only, a causal k = 0": case(rows=1, tables="v", **CAUSAL),
  "k larger than a block": case(rows=2 * 11 + 1),
  "a table that fills its period": case(rows=7, beyond="zero", **CAUSAL),
  "k larger than the sequence, zero": case(rows=2 * 30 + 1, queries=12, beyond="zero"),
  "more keys, causal, grouped heads": case(
    queries=13, keys=29, heads=4, per_head="kv", **CAUSAL
  ),
  "more queries, zero, lengths": case(queries=27, keys=13, beyond="zero", **LENGTHS),
  "nothing to the right of the query": case(left=4, **CAUSAL),
  "nothing to the left of it": case(left=0),
  "keys only, mask": case(tables="k", mask=KEY_MASK),
  "masks of every kind": case(mask=KEY_MASK, **LONGER, **SEGMENTS),
  "dropout, causal": case(key_heads=1, **DROPOUT, **CAUSAL),
  "dropout, values only, mask": case(tables="v", mask=KEY_MASK, **DROPOUT),
  "dropout alone": case(tables="", **DROPOUT),
  "a bias": case(tables="", more=(DistanceBias(normal(7)),)),
  "a bias per head, causal, grouped heads": case(
    tables="", heads=4, more=(DistanceBias(normal(6, 4), left=4),), **CAUSAL
  ),
  "a sum, dropout, lengths, segments": case(
    heads=4, more=SUM, scale=-0.7, **DROPOUT, **LENGTHS, **SEGMENTS
  ),
}

# What the kernels do not take.
MORE_CASES = {
  "window": case(rows=7, local_window_size=(5, 2)),
  "narrow window, causal": case(rows=9, local_window_size=(1, 6), **CAUSAL),
  "a window that leaves tiles out": case(
    queries=40, keys=40, tables="", local_window_size=(3, 9)
  ),
  "an offset, causal, zero": case(
    queries=13, keys=37, query_offset=19, beyond="zero", **CAUSAL
  ),
  "an offset beyond the keys, dropout": case(query_offset=30, **DROPOUT),
  "an offset before all keys": case(queries=13, rows=2 * 8 + 1, query_offset=-27),
  "an offset before all keys, one in a block": case(
    queries=13, query_offset=-15, local_window_size=(3, 9)
  ),
  "a traced offset, causal": case(
    queries=9,
    keys=29,
    key_heads=1,
    per_head="kv",
    query_offset=np.array(13),
    **CAUSAL,
    **DROPOUT,
  ),
  "offsets before the keys and after, k larger than a block": case(
    rows=2 * 11 + 1, query_offset=np.array([-21, 26])
  ),
  "offsets beyond all keys, lengths": case(query_offset=np.array([30, -26]), **LENGTHS),
  "offsets, window, segments, dropout": case(
    key_heads=1,
    query_offset=np.array([-3, 6]),
    local_window_size=(5, 2),
    **SEGMENTS,
    **DROPOUT,
  ),
  "offsets, causal, zero, values only": case(
    keys=24, tables="v", query_offset=np.array([3, -13]), beyond="zero", **CAUSAL
  ),
  "offsets, causal, dropout, mask": case(
    rows=3, query_offset=np.array([3, -4]), mask=KEY_MASK, **CAUSAL, **DROPOUT
  ),
  "contents": case(
    tables="v", more=CONTENTS, mask=(np.arange(20) % 5 != 3)[None, None, None]
  ),
  "slopes, window": case(tables="", more=SLOPES, local_window_size=(9, 6)),
  "slopes, values, dropout, causal": case(tables="v", more=SLOPES, **DROPOUT, **CAUSAL),
  "all, offsets, dropout, lengths": case(
    heads=4,
    more=ALL,
    query_offset=np.array([5, -24]),
    scale=-0.7,
    **DROPOUT,
    **LENGTHS,
  ),
}


@functools.cache
def exact_case(name):
  """Returns the arrays and options of a case, and the results of the reference."""
  sizes, options = (CASES | MORE_CASES)[name]
  arrays = make_arrays(**sizes)
  return arrays, options, run(reference.attention, arrays, options)
