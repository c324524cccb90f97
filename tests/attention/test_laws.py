"""The laws of the operator, in float64, on random tables, for every implementation."""

import functools
import operator

import jax
import jax.numpy as jnp
import kernel_calls
import numpy as np
import pytest
from compiling import as_users_do, quickly, with_gradients

from relpos_jax import (
  ContentBias,
  DistanceBias,
  KeyBias,
  LinearBias,
  RelativePositions,
  dot_product_attention,
)
from relpos_jax.attention import blocks, chunked
from relpos_jax.attention.choice import IMPLEMENTATIONS

pytestmark = pytest.mark.usefixtures("float64")

ALL = [*IMPLEMENTATIONS, None]
POSITIONS = "query_positions", "key_positions"
LENGTHS = "queries", "keys"
TABLES = "kv"  # the names of the tables for keys and values among the arrays
KERNELS = ["pallas_tpu", "pallas_gpu"]
ANY_MASK = [name for name in ALL if name not in KERNELS]  # any bias, relation by distance, offset
# The bands of the others need 0, 1, 2, ...
ANY_POSITIONS = [name for name in ANY_MASK if name not in ("skew", "chunked")]
TOLERANCE = dict(rtol=0, atol=1e-10)
# Kernels equal `reference` in tests of their own, from which most laws follow.
EACH = [pytest.param(name, marks=[pytest.mark.kernels] * (name in KERNELS)) for name in ALL]


def arrays_of(k=2, queries=5, keys=5, group=1, **options):
  """Returns the arrays of a call with clipping distance k and two key heads."""
  sizes = dict(queries=queries, keys=keys, heads=2 * group, width=3, rows=2 * k + 1)
  return kernel_calls.arrays_of(**sizes, **options)


def attend(arrays, options, **static):
  """Calls the operator on named arrays, compiled."""
  dynamic, static = _split(options | static)
  return _compiled(arrays, dynamic, static)


def gradients(loss, arrays, options, implementation):
  """Returns the gradient of each number that `loss` of the output returns."""
  call = lambda arrays, options: loss(_call(arrays, options, implementation=implementation))
  dynamic, static = _split(options)
  return quickly(jax.jacrev(lambda x, dynamic: call(x, dynamic | dict(static))))(arrays, dynamic)


def _split(options):
  dynamic = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
  return dynamic, tuple((name, x) for name, x in options.items() if name not in dynamic)


def _call(arrays, options, beyond="clip", left=None, **more):
  arrays = dict(arrays)
  tables = [arrays.pop(name, None) for name in TABLES]
  relations = arrays.pop("more", ())
  if any(table is not None for table in tables):
    relations += (RelativePositions(*tables, beyond=beyond, left=left),)
  return dot_product_attention(**arrays, **options, **more, relations=relations)


@functools.partial(quickly, static_argnums=2)
def _compiled(arrays, dynamic, static):
  return _call(arrays, dynamic, **dict(static))


@functools.partial(quickly, static_argnums=(3, 4))
def _outputs_and_gradients(arrays, cotangent, dynamic, static, implementations):
  results = []
  for name in implementations:
    call = lambda arrays, name=name: _call(arrays, dynamic, **dict(static, implementation=name))
    output, pull_back = jax.vjp(call, arrays)
    results.append(dict(output=output, **pull_back(cotangent)[0]))
  return results


def cotangent_of(arrays):
  query = arrays["query"]
  return jnp.asarray(np.random.default_rng(7).normal(size=query.shape), query.dtype)


def results_of_each(implementations, arrays, options, beyond="clip", cotangent=None):
  """Returns output and gradients of each implementation for a cotangent, by default random."""
  dynamic, static = _split(options | dict(beyond=beyond))
  cotangent = cotangent_of(arrays) if cotangent is None else cotangent
  implementations = tuple(implementations)
  results = _outputs_and_gradients(arrays, cotangent, dynamic, static, implementations)
  return dict(zip(implementations, results, strict=True))


def results_of(implementation, *arguments, **options):
  return results_of_each([implementation], *arguments, **options)[implementation]


def assert_close(actual: dict, wanted: dict, whose: str | None = "", atol=1e-10):
  close = functools.partial(np.testing.assert_allclose, rtol=0, atol=atol, err_msg=str(whose))
  jax.tree.map(close, actual, wanted)


def reordered(arrays: dict, queries, keys) -> dict:
  """Arrays or results with their tokens in these orders."""
  orders = dict(query=queries, output=queries, key=keys, value=keys)
  return {name: x[:, orders[name]] if name in orders else x for name, x in arrays.items()}


# Law 2. jax.nn averages the values for a query that sees no key, so here each query sees one.
RANDOM = np.random.default_rng(0)
PLAIN = {
  "a bias and a mask of pairs": (
    dict(queries=4, keys=7, group=2, bias="BTS"),
    dict(mask=(RANDOM.random((2, 4, 4, 7)) < 0.5) | np.eye(4, 7, dtype=bool)),
  ),
  "a mask of keys, causal": (
    dict(queries=7, keys=4, group=3),
    dict(mask=(RANDOM.random((2, 1, 1, 4)) < 0.5) | (np.arange(4) == 0), is_causal=True),
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
  arrayed = {n: jnp.asarray(x) for n, x in options.items() if isinstance(x, np.ndarray)}
  options = options | arrayed

  @quickly
  def results_of_jax_nn(arrays):
    call = lambda arrays: jax.nn.dot_product_attention(**arrays, **options)
    output, pull_back = jax.vjp(call, arrays)
    return dict(output=output, **pull_back(cotangent_of(arrays))[0])

  wanted = results_of_jax_nn(arrays)
  is_refused = "bias" in arrays or "local_window_size" in options
  able = ANY_MASK if is_refused else ALL
  for implementation, actual in results_of_each(able, arrays, options).items():
    assert_close(actual, wanted, implementation, atol=1e-5)


SIZES = (
  (dict(queries=6, keys=6), dict(is_causal=True)),
  (dict(queries=4, keys=7, group=2, per_head="kv"), {}),
)


# Law 3.
@pytest.mark.parametrize("implementation", EACH)
@pytest.mark.parametrize("sizes, options", SIZES, ids=str)
def test_k_0_adds_a_constant(implementation, sizes, options):
  arrays = arrays_of(k=0, **sizes)
  plain = {name: x for name, x in arrays.items() if name not in TABLES}
  wanted = results_of("reference", plain, options)
  wanted["output"] += arrays["v"][0]
  wanted["k"] = jnp.zeros_like(arrays["k"])
  wanted["v"] = cotangent_of(arrays).sum((0, 1) if "per_head" in sizes else (0, 1, 2))[None]
  assert_close(results_of(implementation, arrays, options), wanted)


# Law 4.
@pytest.mark.parametrize("implementation", ANY_POSITIONS)
@pytest.mark.parametrize("sizes, options", SIZES, ids=str)
def test_shifting_all_positions_changes_nothing(implementation, sizes, options):
  run = functools.partial(results_of, implementation, arrays_of(**sizes))
  far = {name: jnp.arange(sizes[of]) + 1000 for name, of in zip(POSITIONS, LENGTHS, strict=True)}
  assert_close(run(options | far), run(options))


@pytest.mark.parametrize("implementation", ANY_POSITIONS)
@pytest.mark.parametrize("sizes, options", SIZES, ids=str)
def test_permuting_tokens_with_their_positions_permutes_the_output(implementation, sizes, options):
  arrays = arrays_of(**sizes)
  cotangent, permutation = cotangent_of(arrays), np.random.default_rng(0).permutation
  queries, keys = (jnp.asarray(permutation(sizes[name])) for name in LENGTHS)
  permuted = reordered(arrays, queries, keys)
  positions = options | dict(query_positions=queries, key_positions=keys)
  moved = results_of(implementation, permuted, positions, cotangent=cotangent[:, queries])
  whole = results_of(implementation, arrays, options)
  assert_close(moved, reordered(whole, queries, keys))
  still = results_of(implementation, permuted, options)
  assert not np.allclose(moved["output"], still["output"])


@pytest.mark.parametrize("implementation", ANY_MASK)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("first", [2**31 - 5, -(2**31) + 5])
def test_positions_and_offsets_near_the_ends_of_32_bits(first, is_causal, implementation):
  """Gives a window that is as wide as an integer, too."""
  arrays, causal = arrays_of(), dict(is_causal=is_causal)
  options = causal | dict(local_window_size=2**31 - 1)
  far = dict(query_positions=np.sign(first) * 100 + jnp.arange(5))
  wanted = results_of("reference", arrays, causal | far)
  ways = [dict(query_offset=first), dict(query_offset=jnp.int32(first))]
  if implementation in ANY_POSITIONS:
    ways.append(dict(query_positions=first + jnp.arange(5, dtype=jnp.int32)))
  for way in ways:
    assert_close(results_of(implementation, arrays, options | way), wanted)
  if implementation in ANY_POSITIONS:  # near ones at both ends
    ends = {name: first + jnp.arange(5, dtype=jnp.int32) for name in POSITIONS}
    wanted = results_of("reference", arrays, causal)
    assert_close(results_of(implementation, arrays, causal | ends), wanted)


@pytest.mark.parametrize("implementation", ANY_MASK)
def test_traced_integers_of_64_bits_do_not_wrap(implementation):
  """Adds 2**32, which 32 bits do not hold: to some segments, a length, an offset, positions."""
  arrays, far = arrays_of(), 2**32
  segments = np.array([0, 0, 1, 1, 2])
  names = "query_segment_ids", "key_segment_ids"
  run = lambda **given: results_of(implementation, arrays, jax.tree.map(jnp.asarray, given))
  both = lambda x: run(**dict.fromkeys(names, x))
  assert_close(both(np.where(segments == 2, far, segments)), both(segments))
  assert_close(run(key_value_seq_lengths=np.array([far, far + 5])), run())
  wanted = results_of("reference", arrays, dict(query_offset=jnp.asarray(100)))
  assert_close(run(query_offset=far), wanted)
  if implementation in ANY_POSITIONS:
    assert_close(run(query_positions=far + np.arange(5)), wanted)


# Law 5.
@pytest.mark.parametrize("implementation", EACH)
def test_no_gradient_flows_to_later_keys(implementation):
  each_query = lambda output: output.sum(axis=(0, 2, 3))
  arrays = arrays_of(queries=6, keys=6)
  grads = gradients(each_query, arrays, dict(is_causal=True), implementation)
  for i in range(6):
    for name in ("key", "value"):
      assert not grads[name][i, :, i + 1 :].any()
    assert grads["value"][i, :, : i + 1].all()
  for name in TABLES:
    assert not grads[name][:, 3:].any()


@pytest.mark.parametrize("implementation", EACH)
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("way", ["mask", "segments"])
def test_hidden_keys_have_no_effect_and_no_gradient(way, implementation, relative):
  arrays = arrays_of(queries=4, keys=6, tables=TABLES * relative)
  hidden = jnp.arange(6) >= 4
  options = dict(mask=~hidden[None, None, None])
  if way == "segments":
    options = dict(
      query_segment_ids=jnp.zeros(4, jnp.int32), key_segment_ids=hidden.astype(jnp.int32)
    )
  noisy = arrays | {
    name: jnp.where(hidden[:, None, None], 1e3, arrays[name]) for name in ("key", "value")
  }
  run = functools.partial(attend, options=options, implementation=implementation)
  np.testing.assert_array_equal(run(noisy), run(arrays))
  grads = gradients(lambda output: (output**2).sum(), noisy, options, implementation)
  assert not grads["key"][:, 4:].any() and not grads["value"][:, 4:].any()
  assert grads["value"][:, :4].all()


@pytest.mark.parametrize("implementation", ANY_MASK)
@pytest.mark.parametrize("relative", [True, False])
def test_a_query_that_sees_no_key_gives_zero_and_takes_no_gradient(implementation, relative):
  arrays, sees = arrays_of(tables=TABLES * relative, bias="BTS"), jnp.arange(5) != 2
  options = dict(mask=sees[None, None, :, None])
  output = attend(arrays, options, implementation=implementation)
  assert not output[:, 2].any() and output[:, sees].all()
  row = lambda output: output[:, 2].sum()
  grads = gradients(row, arrays, options, implementation)
  assert not any(grad.any() for grad in jax.tree.leaves(grads))


# Law 6.
@pytest.mark.parametrize("implementation", ANY_POSITIONS)
@pytest.mark.parametrize("chunks", [(4, 1, 1), (1,) * 6, (2, 3, 1)])
def test_decoding_equals_the_full_pass(implementation, chunks):
  """Uses slots in any order, some of them empty: only positions matter."""
  arrays = arrays_of(queries=6, keys=6)
  whole = attend(arrays, dict(is_causal=True), implementation=implementation)
  slots = jnp.asarray([7, 2, 0, 5, 3, 8])  # of nine, where each token is kept
  cache = {
    name: jnp.full((2, 9, 2, 3), 1e3).at[:, slots].set(arrays[name]) for name in ("key", "value")
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
    np.testing.assert_allclose(
      attend(part, options, implementation=implementation), whole[:, rows], **TOLERANCE
    )
    start += size


# Law 7.
@pytest.mark.parametrize("implementation", EACH)
@pytest.mark.parametrize("sizes, options", SIZES, ids=str)
def test_a_clipped_table_equals_a_full_one_whose_end_rows_repeat(implementation, sizes, options):
  """Compares gradients as well: a repeated row gets the sum of those of its copies."""
  arrays = arrays_of(**sizes)
  repeat_ends = lambda table: table[jnp.clip(jnp.arange(13), 4, 8) - 4]
  tables = {name: arrays[name] for name in TABLES}
  full, pull_back = jax.vjp(functools.partial(jax.tree.map, repeat_ends), tables)
  wanted = results_of("reference", arrays | full, options, "zero")
  for beyond in ("clip", "zero"):  # are one if the table covers the sequence
    assert_close(results_of(implementation, arrays | full, options, beyond), wanted)
  (of_tables,) = pull_back({name: wanted[name] for name in tables})
  assert_close(results_of(implementation, arrays, options), wanted | of_tables)
  others = results_of(implementation, arrays, options, "zero")
  assert not np.allclose(others["output"], wanted["output"])


# Law 9.
@pytest.mark.parametrize("implementation", EACH)
@pytest.mark.parametrize("sizes", [dict(k=2), dict(k=6, group=2, per_head="kv")], ids=str)
def test_positions_are_signed(implementation, sizes):
  arrays = arrays_of(queries=6, keys=6, **sizes)
  cotangent = cotangent_of(arrays)
  backward = jnp.arange(6)[::-1]
  turn = lambda arrays: reordered(arrays, backward, backward)
  turn_tables = lambda arrays: arrays | {name: arrays[name][::-1] for name in TABLES}
  run = functools.partial(results_of, implementation, options={})
  whole = run(arrays)
  both = run(turn_tables(turn(arrays)), cotangent=cotangent[:, backward])
  assert_close(both, turn_tables(turn(whole)))
  for turned in (turn(run(turn(arrays))), run(turn_tables(arrays))):
    assert not np.allclose(turned["output"], whole["output"])


# Dropout.
def test_the_same_dropped_weights_feed_both_values():
  """Uses v_j = 0 and one shared row: the output is the row times the sum of the kept weights."""
  options = dict(dropout_rate=0.5, dropout_key=jax.random.key(0))
  arrays = arrays_of(k=0, tables="v", keys=40)
  table, ones = arrays["v"], jnp.ones_like(arrays["value"])
  zeros = jnp.zeros_like(ones)
  run = functools.partial(attend, options=options, implementation="reference")
  from_table = run(arrays | dict(value=zeros))
  left_of_weights = run(arrays | dict(value=ones, v=jnp.zeros_like(table)))
  np.testing.assert_allclose(from_table, left_of_weights * table[0], **TOLERANCE)
  assert left_of_weights.std() > 0.01
  np.testing.assert_allclose(left_of_weights.mean(), 1, atol=0.2)


def test_dropout_is_the_same_in_every_implementation():
  options = dict(is_causal=True, dropout_rate=0.3, dropout_key=jax.random.key(1))
  results = results_of_each(ALL, arrays_of(), options)
  for name in ALL:
    assert_close(results[name], results["reference"], name)


@pytest.mark.parametrize(
  "lowest, soft_cap", [(np.finfo(np.float32).min, None), (-np.inf, None), (-np.inf, 0.5)]
)
@pytest.mark.parametrize("relative, name", [*((True, x) for x in ANY_MASK), (False, None)])
def test_a_bias_hides_as_a_mask_does(relative, name, lowest, soft_cap):
  """Covers jax.nn, which averages the values of a query that sees no key, or returns NaN."""
  dtype = jnp.float64 if relative else jnp.float32
  arrays = arrays_of(tables=TABLES * relative, bias="BTS", dtype=dtype)
  hidden = jnp.zeros((2, 1, 5, 5), bool).at[:, :, 1].set(True).at[0, 0, 2, 3].set(True)
  low = arrays | dict(bias=jnp.where(hidden, dtype(lowest), arrays["bias"]))
  options = dict(logits_soft_cap=soft_cap)
  biased = results_of(name, low, options)
  masked = results_of(name, arrays, options | dict(mask=~hidden))
  assert_close(biased, masked, str(name), atol=1e-10 if relative else 1e-6)
  assert not biased["output"][:, 1].any()


@pytest.mark.parametrize("name", EACH)
def test_nan_stays_nan(name):
  """Checks that a diverged model does not look healthy, nor a healthy row diverged.

  From 40 keys on, XLA's maximum on a CPU may drop a NaN.
  """
  arrays, options = arrays_of(queries=100, keys=100, dtype=np.float32), dict(is_causal=True)
  run = as_users_do(functools.partial(_call, options=options, implementation=name))
  broken = np.zeros((2, 100), bool)
  for of, tokens, rows in (("query", 30, 30), ("key", 97, slice(97, 100)), ("query", ..., ...)):
    diverged = arrays | {of: arrays[of].at[0, tokens].set(jnp.nan)}
    broken[0] = False
    broken[0, rows] = True
    found = np.isnan(run(diverged))
    np.testing.assert_array_equal(found, np.broadcast_to(broken[..., None, None], found.shape))


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
  arrays = {name: integers(1, length, heads, width) for name in ("query", "key", "value")}
  arrays["query"] *= factors[:, None]
  if relative:
    arrays |= {name: integers(rows, heads, width) for name in TABLES}
  if biased:
    bias = factors[:, None, None] * integers(1, heads, length, length)
    i, j = np.ogrid[:length, :length]
    hidden = (i % 4 == 0) | ((i % 4 == 1) & (j < length // 2)) | ((i % 4 == 2) & (j != i // 2))
    bias[:, len(MAGNITUDES) :] = np.array(LOWEST)[:, None, None] * hidden
    arrays["bias"] = bias
  return {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("relative", [True, False])
def test_gradients_are_exact_however_large_the_logits(relative, is_causal, monkeypatch):
  """Compares float32 with float64. The kernels do not support a bias."""
  monkeypatch.setattr(chunked, "_default_block", lambda *_: 16)
  monkeypatch.setattr(chunked, "_STRETCHES", 2)
  monkeypatch.setattr(blocks, "_default_block", lambda pairs: 16)
  plain = [] if relative else [None]  # with relations None is one of the others
  for names in ([name for name in ANY_MASK if name] + plain, KERNELS):
    arrays = large_logits(relative, biased=names is not KERNELS)
    wide = {name: x.astype(jnp.float64) for name, x in arrays.items()}
    wanted = results_of("reference", wide, dict(is_causal=is_causal))
    found = results_of_each(names, arrays, dict(is_causal=is_causal))
    if "chunked" in names:
      given = dict(is_causal=is_causal, query_positions=jnp.arange(40))
      found["blocks"] = results_of("chunked", arrays, given)
    for name, results in found.items():
      for of, exact in wanted.items():
        axis_of_heads = 1 if of == "bias" else exact.ndim - 2
        axes = tuple(axis for axis in range(exact.ndim) if axis != axis_of_heads)
        error = np.abs(results[of] - exact).max(axes) / np.abs(exact).max(axes)
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
@pytest.mark.parametrize("able", [ANY_MASK, pytest.param(KERNELS, marks=pytest.mark.kernels)])
def test_vmap_equals_a_call_for_each(able, mapped):
  names, is_biased, in_kernels = MAPPED[mapped], mapped == "biases", able == KERNELS
  if in_kernels and mapped in ("biases", "offsets"):
    pytest.skip("they take none")
  random = np.random.default_rng(1)
  normal = lambda *shape: jnp.asarray(random.normal(size=shape))
  more = (DistanceBias(normal(5, 4)),)
  if not in_kernels:
    more += ContentBias(normal(2, 5, 4, 5), normal(3, 5)), LinearBias(normal(4))
    more += (KeyBias(normal(3, 4, 3)),)
  arrays = arrays_of(group=2, bias="TS" if is_biased else None, more=more)
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
    call = lambda arrays: _call(arrays, full(options), implementation=implementation)
    return with_gradients(call, full(arrays))

  one = quickly(functools.partial(output_and_gradients, implementation="reference"))
  wanted = [one(jax.tree.map(operator.itemgetter(i), several)) for i in range(3)]
  wanted = jax.tree.map(lambda *x: jnp.stack(x), *wanted)
  for name in able:
    each = functools.partial(output_and_gradients, implementation=name)
    close = functools.partial(np.testing.assert_allclose, **TOLERANCE, err_msg=str(name))
    jax.tree.map(close, quickly(jax.vmap(each))(several), wanted)
