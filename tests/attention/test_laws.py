"""The laws of the operator, in float64, on random tables, for every implementation."""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import kernel_calls
import numpy as np
import pytest
from compiling import as_users_do, quickly, with_gradients
from kernel_calls import call, cotangent_of, output_and_gradients, results

from relpos_jax import ContentBias, DistanceBias, KeyBias, LinearBias
from relpos_jax.attention import band, blocks
from relpos_jax.attention.choice import IMPLEMENTATIONS

pytestmark = pytest.mark.usefixtures("float64")

ALL = [*IMPLEMENTATIONS, None]
TABLES = "kv"  # the names of the tables for keys and values among the arrays
KERNELS = ["pallas_gpu"]
ANY_MASK = [
  name for name in ALL if name not in KERNELS
]  # any bias, relation by distance, offset
# The bands of the others need 0, 1, 2, ...
ANY_POSITIONS = [name for name in ANY_MASK if name not in ("skew", "chunked")]
# Kernels equal `reference` in tests of their own, from which most laws follow.
EACH = [
  pytest.param(name, marks=[pytest.mark.kernels] * (name in KERNELS)) for name in ALL
]
arrays_of = functools.partial(kernel_calls.arrays_of, queries=5, keys=5, width=3)


def assert_close(actual, wanted, whose: str | None = "", atol=1e-10):
  close = functools.partial(
    np.testing.assert_allclose, rtol=0, atol=atol, err_msg=str(whose)
  )
  jax.tree.map(close, actual, wanted)


def reordered(arrays: dict, queries, keys) -> dict:
  """Arrays or results with their tokens in these orders."""
  orders = dict(query=queries, output=queries, key=keys, value=keys)
  return {
    name: x[:, orders[name]] if name in orders else x for name, x in arrays.items()
  }


# Law 2. jax.nn averages the values for a query that sees no key, so here each query
# sees one.
RANDOM = np.random.default_rng(0)
PLAIN = {
  "a bias and a mask of pairs": (
    dict(queries=4, keys=7, heads=4, bias="BTS"),
    dict(mask=(RANDOM.random((2, 4, 4, 7)) < 0.5) | np.eye(4, 7, dtype=bool)),
  ),
  "a mask of keys, causal": (
    dict(queries=7, keys=4, heads=6),
    dict(
      mask=(RANDOM.random((2, 1, 1, 4)) < 0.5) | (np.arange(4) == 0), is_causal=True
    ),
  ),
  "lengths": (
    dict(queries=6, keys=7),
    dict(query_seq_lengths=np.int32([6, 3]), key_value_seq_lengths=np.int32([5, 7])),
  ),
  "a window of two sides": (dict(queries=6, keys=7), dict(local_window_size=(1, 3))),
  "a window, causal": (
    dict(queries=7, keys=7),
    dict(local_window_size=2, is_causal=True),
  ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_without_relations_it_is_jax_nn(name):
  """Compares in float32, the only dtype of jax.nn's softmax."""
  sizes, options = PLAIN[name]
  arrays = arrays_of(tables="", **sizes, dtype=np.float32)
  del arrays["more"]
  options = {
    n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()
  }
  of_jax_nn = lambda arrays: jax.nn.dot_product_attention(**arrays, **options)
  wanted = quickly(functools.partial(output_and_gradients, of_jax_nn))(arrays)
  is_refused = "bias" in arrays or "local_window_size" in options
  for implementation in ANY_MASK if is_refused else ALL:
    assert_close(
      results(implementation, arrays, options), wanted, implementation, atol=1e-5
    )


SIZES = (
  (dict(queries=6, keys=6), dict(is_causal=True)),
  (dict(queries=4, keys=7, heads=4, per_head="kv"), {}),
)


# Law 3.
@pytest.mark.parametrize("implementation", EACH)
@pytest.mark.parametrize("sizes, options", SIZES, ids=str)
def test_k_0_adds_a_constant(implementation, sizes, options):
  arrays = arrays_of(rows=1, **sizes)
  plain = {name: x for name, x in arrays.items() if name not in TABLES}
  wanted = results("reference", plain, options)
  wanted["output"] += arrays["v"][0]
  wanted["k"] = jnp.zeros_like(arrays["k"])
  wanted["v"] = cotangent_of(arrays).sum((0, 1) if "per_head" in sizes else (0, 1, 2))[
    None
  ]
  assert_close(results(implementation, arrays, options), wanted)


# Law 4.
@pytest.mark.parametrize("implementation", ANY_POSITIONS)
@pytest.mark.parametrize("shift", [0, 1000])
@pytest.mark.parametrize("sizes, options", SIZES, ids=str)
def test_only_distances_count_and_no_order_of_tokens(
  implementation, shift, sizes, options
):
  """Shifts all positions, and permutes tokens with their positions: the output is permuted."""
  arrays = arrays_of(**sizes)
  cotangent, permutation = cotangent_of(arrays), np.random.default_rng(0).permutation
  queries, keys = (
    jnp.asarray(permutation(sizes[name])) for name in ("queries", "keys")
  )
  permuted = reordered(arrays, queries, keys)
  positions = options | dict(
    query_positions=queries + shift, key_positions=keys + shift
  )
  moved = results(implementation, permuted, positions, cotangent[:, queries])
  whole = results(implementation, arrays, options)
  assert_close(moved, reordered(whole, queries, keys))
  still = results(implementation, permuted, options)
  assert not np.allclose(moved["output"], still["output"])


FAR = 2**32  # which 32 bits do not hold
SEGMENTS = np.array([0, 0, 1, 1, 2])


def integers(queries, keys, of="positions", dtype=np.int64):
  """Returns integers of queries and of keys."""
  names = f"query_{of}", f"key_{of}"
  return dict(zip(names, (np.asarray(x, dtype) for x in (queries, keys)), strict=True))


# By name: integers of a call that may wrap around, and small ones that mean the same.
INTEGERS = {
  "segments": (
    integers(*[np.where(SEGMENTS == 2, FAR, SEGMENTS)] * 2, of="segment_ids"),
    integers(SEGMENTS, SEGMENTS, of="segment_ids"),
  ),
  "lengths": (dict(key_value_seq_lengths=np.array([FAR, FAR + 5])), {}),
  "an offset": (dict(query_offset=np.array(FAR)), dict(query_offset=100)),
  "positions": (dict(query_positions=FAR + np.arange(5)), dict(query_offset=100)),
  "positions of 8 bits": (
    integers(range(4, 9), range(5), dtype=np.uint8),
    dict(query_offset=4),
  ),
}
for first in (
  2**31 - 5,
  -(2**31) + 5,
):  # with a window that is as wide as an integer, too
  far, rows = (
    dict(query_offset=int(np.sign(first)) * 100),
    np.int32(first + np.arange(5)),
  )
  for what, given, same in (
    ("a traced offset of", dict(query_offset=np.int32(first)), far),
    ("queries from", dict(query_positions=rows), far),
    ("all from", integers(rows, rows, dtype=np.int32), {}),
  ):
    INTEGERS[f"{what} {first}"] = given | dict(local_window_size=2**31 - 1), same


@pytest.mark.parametrize(
  "name, implementation",
  [
    (name, implementation)
    for name, implementation in itertools.product(INTEGERS, ANY_MASK)
    if implementation in ANY_POSITIONS or "query_positions" not in INTEGERS[name][0]
  ],
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_integers_do_not_wrap_around(name, implementation, is_causal):
  given, same = INTEGERS[name]
  traced = lambda x: x if isinstance(x, int) else jnp.asarray(x)
  found, wanted = (
    results(x, arrays_of(), jax.tree.map(traced, of) | dict(is_causal=is_causal))
    for x, of in ((implementation, given), ("reference", same))
  )
  assert_close(found, wanted)


# Law 5. By name: whether query i sees key j, and the options that say so.
QUERY, KEY = np.ogrid[:6, :6]
NO_KEY = "a query sees no key"
SEEN = {
  "causal": (KEY <= QUERY, dict(is_causal=True)),
  "mask": ((QUERY >= 0) & (KEY < 4), dict(mask=(KEY < 4)[None, None])),
  "segments": (
    (QUERY >= 0) & (KEY < 4),
    dict(query_segment_ids=np.zeros(6, int), key_segment_ids=(KEY[0] >= 4).astype(int)),
  ),
  NO_KEY: ((QUERY != 2) & (KEY >= 0), dict(mask=(QUERY != 2)[None, None])),
}


@pytest.mark.parametrize("implementation", EACH)
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("way", SEEN)
def test_hidden_keys_have_no_effect_and_no_gradient(way, relative, implementation):
  if way == NO_KEY and implementation in KERNELS:
    pytest.skip("they take no such mask")
  seen, options = SEEN[way]
  options = {
    n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()
  }
  bias = "BTS" if way == NO_KEY else None
  arrays = arrays_of(queries=6, keys=6, tables=TABLES * relative, bias=bias)
  hidden = ~seen.any(axis=0)  # from all queries
  noisy = arrays | {
    name: jnp.where(hidden[:, None, None], 1e3, arrays[name])
    for name in ("key", "value")
  }

  @quickly
  def run(arrays):
    output = lambda arrays: call(arrays, **options, implementation=implementation)
    return output(arrays), jax.jacrev(lambda x: output(x).sum((0, 2, 3)))(arrays)

  (output, gradients), (quiet, _) = run(noisy), run(arrays)
  np.testing.assert_array_equal(output, quiet)
  np.testing.assert_array_equal((gradients["value"] != 0).any((1, 3, 4)), seen)
  np.testing.assert_array_equal((gradients["value"] != 0).all((1, 3, 4)), seen)
  assert not (gradients["key"] != 0).any((1, 3, 4))[~seen].any()
  if way == "causal" and relative:
    assert not any(gradients[name][:, 3:].any() for name in TABLES)
  for i in np.flatnonzero(~seen.any(axis=1)):  # this query sees no key
    assert not output[:, i].any()
    assert not any(x[i].any() for x in jax.tree.leaves(gradients))


# Law 6.
@pytest.mark.parametrize("implementation", ANY_POSITIONS)
@pytest.mark.parametrize("chunks", [(4, 1, 1), (1,) * 6, (2, 3, 1)])
def test_decoding_equals_the_full_pass(implementation, chunks):
  """Uses slots in any order, some of them empty: only positions matter."""
  arrays = arrays_of(queries=6, keys=6)
  whole = results(implementation, arrays, dict(is_causal=True))["output"]
  slots = jnp.asarray([7, 2, 0, 5, 3, 8])  # of nine, where each token is kept
  cache = {
    name: jnp.full((2, 9, 2, 3), 1e3).at[:, slots].set(arrays[name])
    for name in ("key", "value")
  }
  positions = jnp.full(9, -1).at[slots].set(jnp.arange(6))
  start = 0
  for size in chunks:
    rows = slice(start, start + size)
    options = dict(
      is_causal=True,
      query_positions=jnp.arange(6)[rows],
      key_positions=positions,
      mask=(positions >= 0)[None, None, None],
    )
    part = arrays | cache | dict(query=arrays["query"][:, rows])
    assert_close(results(implementation, part, options)["output"], whole[:, rows])
    start += size


# Law 7.
@pytest.mark.parametrize("implementation", EACH)
@pytest.mark.parametrize("sizes, options", SIZES, ids=str)
def test_a_clipped_table_equals_a_full_one_whose_end_rows_repeat(
  implementation, sizes, options
):
  """Compares gradients as well: a repeated row gets the sum of those of its copies."""
  arrays = arrays_of(**sizes)
  repeat_ends = lambda table: table[jnp.clip(jnp.arange(13), 4, 8) - 4]
  tables = {name: arrays[name] for name in TABLES}
  full, pull_back = jax.vjp(functools.partial(jax.tree.map, repeat_ends), tables)
  wanted = results("reference", arrays | full, options | dict(beyond="zero"))
  for beyond in ("clip", "zero"):  # are one if the table covers the sequence
    assert_close(
      results(implementation, arrays | full, options | dict(beyond=beyond)), wanted
    )
  (of_tables,) = pull_back({name: wanted[name] for name in tables})
  assert_close(results(implementation, arrays, options), wanted | of_tables)
  others = results(implementation, arrays, options | dict(beyond="zero"))
  assert not np.allclose(others["output"], wanted["output"])


# Law 9.
@pytest.mark.parametrize("implementation", EACH)
@pytest.mark.parametrize(
  "sizes", [dict(rows=5), dict(rows=13, heads=4, per_head="kv")], ids=str
)
def test_positions_are_signed(implementation, sizes):
  arrays = arrays_of(queries=6, keys=6, **sizes)
  cotangent = cotangent_of(arrays)
  backward = jnp.arange(6)[::-1]
  turn = lambda arrays: reordered(arrays, backward, backward)
  turn_tables = lambda arrays: arrays | {name: arrays[name][::-1] for name in TABLES}
  run = functools.partial(results, implementation, options={})
  whole = run(arrays)
  both = run(turn_tables(turn(arrays)), cotangent=cotangent[:, backward])
  assert_close(both, turn_tables(turn(whole)))
  for turned in (turn(run(turn(arrays))), run(turn_tables(arrays))):
    assert not np.allclose(turned["output"], whole["output"])


# Dropout.
def test_the_same_dropped_weights_feed_both_values():
  """Uses v_j = 0 and one shared row: the output is the row times the sum of the kept weights."""
  options = dict(dropout_rate=0.5, dropout_key=jax.random.key(0))
  arrays = arrays_of(rows=1, tables="v", keys=40)
  table, ones = arrays["v"], jnp.ones_like(arrays["value"])
  zeros = jnp.zeros_like(ones)
  run = lambda arrays: results("reference", arrays, options)["output"]
  from_table = run(arrays | dict(value=zeros))
  left_of_weights = run(arrays | dict(value=ones, v=jnp.zeros_like(table)))
  assert_close(from_table, left_of_weights * table[0])
  assert left_of_weights.std() > 0.01
  np.testing.assert_allclose(left_of_weights.mean(), 1, atol=0.2)


def test_dropout_is_the_same_in_every_implementation():
  options = dict(is_causal=True, dropout_rate=0.3, dropout_key=jax.random.key(1))
  wanted = results("reference", arrays_of(), options)
  for name in ALL:
    assert_close(results(name, arrays_of(), options), wanted, name)


@pytest.mark.parametrize(
  "lowest, soft_cap",
  [(np.finfo(np.float32).min, None), (-np.inf, None), (-np.inf, 0.5)],
)
@pytest.mark.parametrize(
  "relative, name", [*((True, x) for x in ANY_MASK), (False, None)]
)
def test_a_bias_hides_as_a_mask_does(relative, name, lowest, soft_cap):
  """Covers jax.nn, which averages the values of a query that sees no key, or returns NaN."""
  dtype = jnp.float64 if relative else jnp.float32
  arrays = arrays_of(tables=TABLES * relative, bias="BTS", dtype=dtype)
  hidden = jnp.zeros((2, 1, 5, 5), bool).at[:, :, 1].set(True).at[0, 0, 2, 3].set(True)
  low = arrays | dict(bias=jnp.where(hidden, dtype(lowest), arrays["bias"]))
  options = dict(logits_soft_cap=soft_cap)
  biased = results(name, low, options)
  masked = results(name, arrays, options | dict(mask=~hidden))
  assert_close(biased, masked, str(name), atol=1e-10 if relative else 1e-6)
  assert not biased["output"][:, 1].any()


@pytest.mark.parametrize("name", EACH)
def test_nan_stays_nan(name):
  """Checks that a diverged model does not look healthy, nor a healthy row diverged.

  From 40 keys on, XLA's maximum on a CPU may drop a NaN.
  """
  arrays, options = (
    arrays_of(queries=100, keys=100, dtype=np.float32),
    dict(is_causal=True),
  )
  run = as_users_do(functools.partial(call, **options, implementation=name))
  broken = np.zeros((2, 100), bool)
  for of, tokens, rows in (
    ("query", 30, 30),
    ("key", 97, slice(97, 100)),
    ("query", ..., ...),
  ):
    diverged = arrays | {of: arrays[of].at[0, tokens].set(jnp.nan)}
    broken[0] = False
    broken[0, rows] = True
    found = np.isnan(run(diverged))
    np.testing.assert_array_equal(
      found, np.broadcast_to(broken[..., None, None], found.shape)
    )


@pytest.mark.parametrize("implementation", ["reference", "chunked", *KERNELS])
def test_no_intermediate_result_is_nan(implementation):
  with jax.debug_nans(True):  # checks all that is not compiled
    jax.grad(lambda arrays: call(arrays, implementation=implementation).sum())(
      arrays_of()
    )


# Logits of each head have their own magnitude, or a bias as people use it to mask.
MAGNITUDES = 2.0 ** np.array([0, 10, 20, 24, 27, 30])
LOWEST = (-1e4, -1e7, -1e9, float(np.finfo(np.float32).min))


def large_logits(relative, biased, length=40, width=4, rows=5):
  """Returns arrays whose logits float32 holds exactly: integers times a power of two."""
  random = np.random.default_rng(0)
  # Near -1e9 float32 holds multiples of 64.
  factors = np.array([*MAGNITUDES, *[128.0] * len(LOWEST)]) if biased else MAGNITUDES
  heads = len(factors)
  integers = lambda *shape: random.integers(-1, 2, shape).astype(np.float32)
  arrays = {
    name: integers(1, length, heads, width) for name in ("query", "key", "value")
  }
  arrays["query"] *= factors[:, None]
  if relative:
    arrays |= {name: integers(rows, heads, width) for name in TABLES}
  if biased:
    bias = factors[:, None, None] * integers(1, heads, length, length)
    i, j = np.ogrid[:length, :length]
    hidden = (
      (i % 4 == 0) | ((i % 4 == 1) & (j < length // 2)) | ((i % 4 == 2) & (j != i // 2))
    )
    bias[:, len(MAGNITUDES) :] = np.array(LOWEST)[:, None, None] * hidden
    arrays["bias"] = bias
  return {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("relative", [True, False])
def test_gradients_are_exact_however_large_the_logits(relative, is_causal, monkeypatch):
  """Compares float32 with float64. The kernels do not support a bias."""
  monkeypatch.setattr(band, "_choose_sizes", lambda *_: (16, 31, None))
  monkeypatch.setattr(blocks, "default_block", lambda *_: 16)
  plain = [] if relative else [None]  # with relations None is one of the others
  for names in ([name for name in ANY_MASK if name] + plain, KERNELS):
    arrays = large_logits(relative, biased=names is not KERNELS)
    wide = {name: x.astype(jnp.float64) for name, x in arrays.items()}
    wanted = results("reference", wide, dict(is_causal=is_causal))
    found = {name: results(name, arrays, dict(is_causal=is_causal)) for name in names}
    if "chunked" in names:
      given = dict(is_causal=is_causal, query_positions=jnp.arange(40))
      found["blocks"] = results("chunked", arrays, given)
    for name, result in found.items():
      for of, exact in wanted.items():
        axis_of_heads = 1 if of == "bias" else exact.ndim - 2
        axes = tuple(axis for axis in range(exact.ndim) if axis != axis_of_heads)
        error = np.abs(result[of] - exact).max(axes) / np.abs(exact).max(axes)
        assert error.max() < 1e-5, f"{name}: {of} of each head errs by {error}"


# Law 12.
MAPPED = {
  "all": ["query", "key", "value", "k", "v"],
  "queries": ["query"],
  "tables": ["k", "v"],
  "biases": ["bias"],
  "tables and segments": ["k", "query_segment_ids"],
  "other relations": ["more"],
  "offsets": ["key", "query_offset"],
}


@pytest.mark.parametrize("mapped", MAPPED)
@pytest.mark.parametrize(
  "able", [ANY_MASK, pytest.param(KERNELS, marks=pytest.mark.kernels)]
)
def test_vmap_equals_a_call_for_each(able, mapped):
  names, is_biased, in_kernels = MAPPED[mapped], mapped == "biases", able == KERNELS
  if in_kernels and mapped in ("biases", "offsets"):
    pytest.skip("they take none")
  random = np.random.default_rng(1)
  normal = lambda *shape: jnp.asarray(random.normal(size=shape))
  more = (DistanceBias(normal(5, 4)),)
  if not in_kernels:
    content = ContentBias(normal(2, 5, 4, 5), normal(3, 5))
    more += content, LinearBias(normal(4)), KeyBias(normal(3, 4, 3))
  arrays = arrays_of(heads=4, bias="TS" if is_biased else None, more=more)
  arrays["k"] = arrays["k"][:, None].repeat(4, 1)  # one per head, one shared
  ids = jnp.asarray(random.integers(0, 2, (2, 2, 5)), jnp.int32)
  options = dict(
    is_causal=True,
    mask=jnp.asarray(random.random((2, 1, 1, 5)) < 0.7),
    query_segment_ids=ids[0],
    key_segment_ids=ids[1],
    query_offset=0 if in_kernels else jnp.array([-1, 2]),
  )
  several = jax.tree.map(
    lambda x: jnp.stack([x, 2 * x, x[..., ::-1]]),
    {name: x for name, x in (arrays | options).items() if name in names},
  )

  def output_and_gradients(changes, implementation):
    full = lambda given: {name: changes.get(name, x) for name, x in given.items()}
    run = lambda arrays: call(arrays, **full(options), implementation=implementation)
    return with_gradients(run, full(arrays))

  one = quickly(functools.partial(output_and_gradients, implementation="reference"))
  wanted = [one(jax.tree.map(operator.itemgetter(i), several)) for i in range(3)]
  wanted = jax.tree.map(lambda *x: jnp.stack(x), *wanted)
  for name in able:
    each = functools.partial(output_and_gradients, implementation=name)
    assert_close(quickly(jax.vmap(each))(several), wanted, name)
