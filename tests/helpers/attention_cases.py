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
TABLES_OF_HEADS = normal(13, 4, WIDTH), normal(13, 4, WIDTH)
PAIRS_OF_HEADS = RelativePositions(*TABLES_OF_HEADS, beyond="zero")
SUM = DistanceBias(normal(5, 4), beyond="zero"), PAIRS_OF_HEADS, DistanceBias(normal(3))
CONTENTS = (
  ContentBias(normal(BATCH, 20, 2, 5), normal(5, 2, 5)),
  ContentBias(normal(BATCH, 20, 2, 3), normal(4, 3), beyond="zero", left=1),
)
SLOPES = (LinearBias(normal(2)),)
CONTENT = ContentBias(normal(BATCH, 20, 4, 3), normal(3, 3))
# The one that kernels take, and two that they do not.
ALL = *SUM, LinearBias(normal(4)), CONTENT

CASES = {}
CASES["neither table, causal"] = case(tables="", **CAUSAL)
CASES["keys only, k = 0"] = case(rows=1, tables="k")
CASES["values only, a causal k = 0"] = case(rows=1, tables="v", **CAUSAL)
CASES["k larger than a block"] = case(rows=23)
CASES["a table that fills its period"] = case(rows=7, beyond="zero", **CAUSAL)
CASES["k larger than the sequence, zero"] = case(rows=61, queries=12, beyond="zero")
MORE_KEYS = {"queries": 13, "keys": 29, "heads": 4, "per_head": "kv"}
CASES["more keys, causal, grouped heads"] = case(**MORE_KEYS, **CAUSAL)
MORE_QUERIES = {"queries": 27, "keys": 13, "beyond": "zero"}
CASES["more queries, zero, lengths"] = case(**MORE_QUERIES, **LENGTHS)
CASES["nothing to the right of the query"] = case(left=4, **CAUSAL)
CASES["nothing to the left of it"] = case(left=0)
CASES["keys only, mask"] = case(tables="k", mask=KEY_MASK)
CASES["masks of every kind"] = case(mask=KEY_MASK, **LONGER, **SEGMENTS)
CASES["dropout, causal"] = case(key_heads=1, **DROPOUT, **CAUSAL)
CASES["dropout, values only, mask"] = case(tables="v", mask=KEY_MASK, **DROPOUT)
CASES["dropout alone"] = case(tables="", **DROPOUT)
BY_HEAD = {"tables": "", "heads": 4, "more": (DistanceBias(normal(6, 4), left=4),)}
CASES["a bias per head, causal, grouped heads"] = case(**BY_HEAD, **CAUSAL)
SUM_OF_FOUR = {"heads": 4, "more": SUM, "scale": -0.7}
EVERY_MASK = DROPOUT | LENGTHS | SEGMENTS
CASES["a sum, dropout, lengths, segments"] = case(**SUM_OF_FOUR, **EVERY_MASK)

# What the kernels do not take.
MORE_CASES = {}
MORE_CASES["window"] = case(rows=7, local_window_size=(5, 2))
MORE_CASES["narrow window, causal"] = case(rows=9, local_window_size=(1, 6), **CAUSAL)
WINDOW = {"local_window_size": (3, 9)}
LONG = {"queries": 40, "keys": 40, "tables": ""}
MORE_CASES["a window that leaves tiles out"] = case(**LONG, **WINDOW)
LATER = {"queries": 13, "keys": 37, "query_offset": 19}
MORE_CASES["an offset, causal, zero"] = case(**LATER, beyond="zero", **CAUSAL)
ONE_IN_A_BLOCK = {"queries": 13, "query_offset": -15}
MORE_CASES["an offset before all keys, one in a block"] = case(
  **ONE_IN_A_BLOCK, **WINDOW
)
TRACED = {"queries": 9, "keys": 29, "key_heads": 1, "query_offset": np.array(13)}
MORE_CASES["a traced offset, causal"] = case(
  per_head="kv", **TRACED, **CAUSAL, **DROPOUT
)
MORE_CASES["offsets before the keys and after, k larger than a block"] = case(
  rows=23, query_offset=np.array([-21, 26])
)
MORE_CASES["offsets beyond all keys, lengths"] = case(
  query_offset=np.array([30, -26]), **LENGTHS
)
OFFSETS = {"query_offset": np.array([-3, 6]), "local_window_size": (5, 2)}
MORE_CASES["offsets, window, segments, dropout"] = case(
  key_heads=1, **OFFSETS, **SEGMENTS, **DROPOUT
)
ONE_BEFORE = {"query_offset": np.array([3, -4]), "mask": KEY_MASK, "beyond": "zero"}
MORE_CASES["offsets, causal, zero, dropout, mask"] = case(
  rows=3, **ONE_BEFORE, **CAUSAL, **DROPOUT
)
FIFTHS_MASKED = {"mask": (np.arange(20) % 5 != 3)[None, None, None]}
MORE_CASES["contents"] = case(tables="v", more=CONTENTS, **FIFTHS_MASKED)
MORE_CASES["slopes, window"] = case(tables="", more=SLOPES, local_window_size=(9, 6))
MORE_CASES["slopes, values, dropout, causal"] = case(
  tables="v", more=SLOPES, **DROPOUT, **CAUSAL
)
ALL_OF_FOUR = {"heads": 4, "more": ALL, "scale": -0.7}
MORE_CASES["all, offsets, dropout, lengths"] = case(
  **ALL_OF_FOUR, query_offset=np.array([5, -24]), **DROPOUT, **LENGTHS
)


@functools.cache
def exact_case(name):
  """Returns the arrays and options of a case, and the results of the reference."""
  sizes, options = (CASES | MORE_CASES)[name]
  arrays = make_arrays(**sizes)
  return arrays, options, run(reference.attention, arrays, options)
