"""The operator's arguments: wrong ones are named, and integers do not wrap around."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from calls import make_arrays, results
from comparing import assert_close
from flax import nnx
from ones import KEY, QUERY, RELATIONS, TABLE, call

from relpos_jax import (
  ContentBias,
  DistanceBias,
  EdgeFeatures,
  EdgeLabels,
  FunctionBias,
  KeyBias,
  LinearBias,
  RelativePositions,
  attention_weights,
  edge_attention,
  rotate,
)
from relpos_jax.attention import band
from relpos_jax.nn import RelativePositionTables

NARROW_TABLE = TABLE[:, :3]
CONTENT = np.ones((2, 5, 4, 3), np.float32)
PAIRS = np.ones((5, 7))
LABELS = np.arange(35).reshape(5, 7)
WANT_NAMES = "want None, which chooses, or one of reference"


def weights(query=QUERY, key=KEY, value=None, relations=RELATIONS, **options):
  return attention_weights(query, key, relations=relations, **options)


def one(*_):
  return 1.0


def three(*_):
  return jnp.ones(3)


def imaginary(*_):
  return 1j


def check_message(message, function, *args, **options):
  """Checks how an error's message of one line starts."""
  with pytest.MonkeyPatch.context() as patch:
    # As for users, without the checks of annotations.
    patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError) as caught:
      function(*args, **options)
  assert str(caught.value).startswith(message)
  assert "\n" not in str(caught.value)


WANT_ROWS = "want floating numbers of shape [R], shared by the heads, or [R, 4]"


@pytest.mark.parametrize(
  "relations, message",
  [
    ([RELATIONS], "relations is of type list; want RelativePositions, EdgeLabels, Ed"),
    (
      (TABLE,),
      "relations[0] is float32 of shape (5, 8); want RelativePositions",
    ),
    (
      RelativePositionTables(2, 8, rngs=nnx.Rngs(0)),
      "relations is of type RelativePositionTables: call it; want RelativePositions",
    ),
    (
      (RELATIONS, DistanceBias(NARROW_TABLE)),
      f"relations[1].table is float32 of shape (5, 3); {WANT_ROWS}",
    ),
    (
      ContentBias(CONTENT[0], NARROW_TABLE),
      "relations.query has shape (5, 4, 3); want (2, 5, 4, 3)",
    ),
    (
      (RELATIONS, LinearBias(np.ones(3))),
      "relations[1].slopes has shape (3,); want (4,)",
    ),
    (
      (RELATIONS, KeyBias(TABLE[:4])),
      "relations[1] has 4 rows; want an odd number, 2k + 1",
    ),
    (
      ContentBias(CONTENT, NARROW_TABLE, beyond="wrap"),
      "relations.beyond is 'wrap'; want",
    ),
    (
      (RelativePositions(None, None), RELATIONS),
      "relations[0] has neither a key nor a value table",
    ),
    (RelativePositions(None, 1.0), "relations.value is float32 of shape (); want"),
    (
      RelativePositions(TABLE, TABLE[:3]),
      "relations.key and relations.value have 5 and 3 rows",
    ),
    (
      EdgeLabels(LABELS, TABLE, None),
      "relations.labels go from 0 to 34; want 0 to 4, or -1",
    ),
    (
      EdgeLabels(LABELS.T, TABLE, None),
      "relations.labels has shape (7, 5); want (2, 5, 7) or (5, 7)",
    ),
    (
      FunctionBias(three),
      "relations.function returns float32 of shape (3,); want a number, or [4]",
    ),
    (
      FunctionBias(imaginary),
      "relations.function returns complex64 of shape (); want a number, or [4]",
    ),
    (
      FunctionBias(one, of_pair=np.ones(5)),
      "relations.of_pair has an array of shape (5,); want [5, 7, ...] or [2, ",
    ),
  ],
)
def test_a_wrong_relation_is_named(relations, message):
  check_message(message, call, relations=relations)


@pytest.mark.parametrize(
  "name, value, message",
  [
    ("query", QUERY.astype(int), "query is int32 of shape (2, 5, 4, 8); want floating"),
    (
      "key",
      np.ones((2, 7, 3, 8), "f4"),
      "key has 3 heads; want a divisor of the query's 4 heads",
    ),
    ("key", KEY.astype("f2"), "key and value have dtypes float16 and float32; want"),
    (
      "value",
      KEY[:, 1:],
      "value has shape (2, 6, 2, 8); want [2, 7, 2, V] for key of shape (2, 7, 2, 8)",
    ),
    (
      "bias",
      np.ones((5, 6)),
      "bias has shape (5, 6); want one that broadcasts to (2, 4, 5, 7)",
    ),
    (
      "bias",
      RELATIONS,
      "bias is of type RelativePositions; want an array: give relations=",
    ),
    (
      "bias",
      PAIRS.astype(bool),
      "bias has dtype bool; want floating numbers, or give mask=",
    ),
    ("bias", PAIRS.astype(int), "bias has dtype int32; want floating numbers"),
    ("mask", PAIRS.astype(int), "mask has dtype int32; want bool"),
    ("mask", jax.random.key(0), "mask has dtype key<fry>; want bool"),
    (
      "key_positions",
      np.arange(6),
      "key_positions has shape (6,); want (2, 7) or (7,)",
    ),
    (
      "query_offset",
      2**32,
      "query_offset goes from 4294967296 to 4294967296; want -2**30",
    ),
    (
      "query_offset",
      jnp.array([-(2**30) - 1, 3]),
      "query_offset goes from -1073741825 to 3; want -2**30 to 2**30",
    ),
    ("local_window_size", -1, "local_window_size is -1; want None, or one or two"),
    ("local_window_size", 2.0, "local_window_size is 2.0; want None, or one or two"),
    ("local_window_size", (3, None), "local_window_size is (3, None); want None, or"),
    ("local_window_size", jnp.arange(2), "local_window_size is [0 1]; want None, or"),
    (
      "query_segment_ids",
      np.ones((2, 5), int),
      "want both query_segment_ids and key_s",
    ),
    ("logits_soft_cap", 0.0, "logits_soft_cap is 0.0; want a positive number or None"),
    ("dropout_rate", 0.1, "dropout_rate is 0.1 and dropout_key is None"),
    ("implementation", "flash", f"implementation is 'flash'; {WANT_NAMES}"),
  ],
)
def test_a_wrong_option_is_named(name, value, message):
  check_message(message, call, **{name: value})


@pytest.mark.parametrize(
  "query, key", [(QUERY[..., :0], KEY[..., :0]), (QUERY, KEY[:, :, :0])]
)
def test_heads_and_their_width_are_not_zero(query, key):
  message = f"query and key have shapes {query.shape} and {key.shape}; want heads of"
  check_message(message, call, query, key, key)


def test_an_offset_beside_positions_is_named():
  options = {"query_offset": 1, "key_positions": np.arange(7)}
  check_message("query_offset is given with positions; want it or", call, **options)


def test_an_offset_of_zero_goes_with_positions():
  options = {"key_positions": np.arange(7), "query_positions": np.arange(5)}
  y = call(**options)
  np.testing.assert_array_equal(call(query_offset=np.int32(0), **options), y)


@pytest.mark.parametrize(
  "implementation, is_one_device",
  [("reference", False), ("projected", False), ("chunked", False), ("chunked", True)],
)
def test_values_may_have_no_width(implementation, is_one_device, monkeypatch):
  monkeypatch.setattr(band, "is_one_device", lambda: is_one_device)
  jax.clear_caches()  # eager calls would find what was compiled before the patch
  relations = RelativePositions(TABLE, None)
  y = call(value=KEY[..., :0], relations=relations, implementation=implementation)
  assert y.shape == (2, 5, 4, 0)


LARGE = jnp.array([3, 2**30 + 2])


@pytest.mark.parametrize(
  "offset, first, last", [(2**30 + 1, 2**30 + 1, 2**30 + 1), (LARGE, 3, 2**30 + 2)]
)
def test_an_offset_that_is_known_within_jit_is_checked(offset, first, last):
  compiled = jax.jit(lambda query: call(query, query_offset=offset))
  check_message(f"query_offset goes from {first} to {last}", compiled, QUERY)


# By the field of data of three sequences, and the shape to give if they share it.
SHARED_OR_OWN = [
  ("of_query", (3, 3, 5), "[1, 3, ...]"),
  ("of_key", (3, 3), "[1, 3, ...]"),
  ("of_pair", (3, 3, 3), "[1, 3, 3, ...]"),
]


@pytest.mark.parametrize("field, shape, wanted", SHARED_OR_OWN)
def test_data_that_may_be_shared_or_not_are_refused(field, shape, wanted):
  tokens = np.ones((3, 3, 2, 4), np.float32)
  relation = FunctionBias(one, **{field: {"x": np.ones(shape)}})
  message = (
    f"relations.{field} has an array of shape {shape}, which may be shared or not; "
    f"want {wanted} if it is"
  )
  check_message(message, call, tokens, tokens, tokens, relation)


@pytest.mark.parametrize(
  "make, shape, message",
  [
    (DistanceBias.t5, (3, 8), "buckets has 3 rows and max_distance is 128; want"),
    (KeyBias.deberta, (10, 4), "buckets has 10 rows and max_distance is 512; want"),
  ],
)
def test_a_table_of_too_few_buckets_is_named(make, shape, message):
  check_message(message, make, np.ones(shape))


@pytest.mark.parametrize(
  "width, positions, frequencies, message",
  [
    (7, 5, None, "heads have width 7, as x has shape (2, 5, 4, 7)"),
    (8, 4, None, "positions has shape (4,); want (2, 5) or (5,)"),
    (8, 5, np.ones(5), "frequencies has shape (5,); want at most (4,)"),
  ],
)
def test_a_wrong_rotation_is_named(width, positions, frequencies, message):
  options = {"frequencies": frequencies}
  check_message(message, rotate, QUERY[..., :width], np.arange(positions), **options)


def attend_on_edges(
  senders=(0, 1), receivers=(1, 0), labels=(0, 1), features=TABLE[:2, :2]
):
  """Attends over two edges of four nodes."""
  tokens, table = np.ones((4, 2, 3)), np.ones((2, 3))
  edges = np.array(senders), np.array(receivers)
  return edge_attention(
    *(tokens, tokens, tokens, *edges),
    labels=EdgeLabels(np.array(labels), table, None),
    features=EdgeFeatures(features, table, None),
  )


@pytest.mark.parametrize(
  "name, value, message",
  [
    ("senders", [0, 4], "senders go from 0 to 4; want 0 to 3, or -1"),
    ("receivers", [0, 0, 0], "receivers has shape (3,); want (2,)"),
    ("labels", [0, 2], "labels.labels go from 0 to 2; want 0 to 1, or -1"),
    ("labels", [0, 1, 1], "labels.labels has shape (3,); want (2,)"),
    ("features", np.ones((2, 3)), "features.features has shape (2, 3); want (2, 2)"),
  ],
)
def test_a_wrong_edge_is_named(name, value, message):
  check_message(message, attend_on_edges, **{name: value})


ONE_QUERY = {"query": QUERY[:, :1], "is_causal": True}


@pytest.mark.parametrize("attend", [call, weights])
def test_one_causal_query_without_a_position_is_warned_of(attend):
  with pytest.warns(UserWarning, match="the one query is at position 0.*query_offset="):
    jax.eval_shape(lambda: attend(**ONE_QUERY))


@pytest.mark.parametrize(
  "change",
  [
    {"query_offset": 0},
    {"query_positions": np.array([6])},
    {"key_positions": np.arange(7)},
    {"relations": None},
    {"key": KEY[:, :1], "value": KEY[:, :1]},
    {"is_causal": False},
  ],
  ids=str,
)
def test_one_query_whose_position_is_known_is_not_warned_of(change):
  jax.eval_shape(lambda: call(**ONE_QUERY | change))


def test_heads_before_tokens_are_a_warning():
  query = np.ones((2, 4, 80, 8), np.float32)  # [B, N, T, H]
  message = r"80 heads and 4 tokens: the layout is \[B, T, N, H\]"
  with pytest.warns(UserWarning, match=message):
    jax.eval_shape(lambda: call(query, query, query))


FAR = 2**32  # which 32 bits do not hold
HUGE = 2**31 - 1  # a window as wide as an integer
LAST, FIRST = 2**31 - 5, 5 - 2**31
ROWS = np.arange(5)
IDS = np.array([0, 0, 1, 1, 2])
FAR_IDS = np.where(IDS == 2, FAR, IDS)
SMALL = {"query_positions": np.uint8(4 + ROWS), "key_positions": np.uint8(ROWS)}


def queries_from(first):
  return {"query_positions": np.int32(first + ROWS), "local_window_size": HUGE}


def segments(ids):
  return {"query_segment_ids": ids, "key_segment_ids": ids}


def traced_arrays(options, is_causal):
  arrays = jax.tree.map(lambda x: x if isinstance(x, int) else jnp.asarray(x), options)
  return arrays | {"is_causal": is_causal}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
  "integers, same, is_causal",
  [
    (segments(FAR_IDS), segments(IDS), True),
    ({"key_value_seq_lengths": np.array([FAR, FAR + 5])}, {}, True),
    ({"query_offset": np.array(FAR)}, {"query_offset": 100}, True),
    ({"query_positions": FAR + ROWS}, {"query_offset": 100}, True),
    (SMALL, {"query_offset": 4}, True),
    (queries_from(LAST), {"query_offset": 100}, True),
    (queries_from(LAST), {"query_offset": 100}, False),
    (queries_from(FIRST), {"query_offset": -100}, True),
    (queries_from(FIRST), {"query_offset": -100}, False),
  ],
)
@pytest.mark.parametrize("implementation", ["projected", "chunked"])
def test_integers_do_not_wrap_around(implementation, integers, same, is_causal):
  """Compares integers that may wrap around with small ones that mean the same."""
  arrays = make_arrays(queries=5, keys=5, width=3)
  actual = results(implementation, arrays, traced_arrays(integers, is_causal))
  wanted = results("reference", arrays, traced_arrays(same, is_causal))
  assert_close(actual, wanted)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_result_in_the_values_dtype_and_weights_in_float32(dtype):
  query, key = jnp.asarray(QUERY, dtype), jnp.asarray(KEY, dtype)
  assert call(query, key, key, RELATIONS).dtype == dtype
  shares = weights(query, key, relations=RELATIONS)
  assert shares.dtype == jnp.float32
  assert shares.shape == (2, 4, 5, 7)
  np.testing.assert_allclose(shares.sum(-1), 1, rtol=1e-6)
