"""The laws of the operator, in float64, on random tables, for every implementation."""

import functools
import itertools
import operator

import cases
import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest
from adapters.relpos_jax import attend_by
from calls import (
  ANY_DTYPE,
  call,
  normal,
  output_and_gradients,
  results,
  set_tiles,
)
from calls import make_arrays as make_any_arrays
from comparing import assert_close
from compiling import compile_as_users_do, compile_quickly
from numpy.testing import assert_array_equal

from relpos_jax import ContentBias, DistanceBias, KeyBias, LinearBias
from relpos_jax.attention import choice

pytestmark = pytest.mark.usefixtures("float64")

TABLES = "kv"  # the names of the tables for keys and values among the arrays
KERNELS = ["pallas_gpu"]
# These take any bias, relation by distance and offset.
ANY_MASK = [name for name in ANY_DTYPE if name not in KERNELS]
make_arrays = functools.partial(make_any_arrays, queries=5, keys=5, width=3)


def parameters(name, *values):
  """Returns an implementation and other parameters of a test, marked for kernels."""
  marks = [pytest.mark.kernels] if name in KERNELS else []
  return pytest.param(name, *values, marks=marks)


# Kernels equal `reference` in tests of their own, from which most laws follow.
EACH = [parameters(name) for name in (*KERNELS, *ANY_MASK)]


# Laws 3 to 5, 7 to 9, 12, 14 and 15, as the conformance suite has them for any
# implementation. Law 6 has a test below, which compiles no program for each token.
OF_SUITE = {}
for case in cases.CASES:
  is_law = case.source.startswith("law") and not case.dtype
  if is_law and case.law is not laws.queries_one_by_one:
    OF_SUITE[case.name] = case


RELATIONS_OF_SUITE = {"key_table", "value_table", "distance_bias"}
# Skewing takes no positions and no labels.
NOT_BY_SKEWING = "permuted with its positions", "labels of distances"


@pytest.mark.parametrize("implementation", ANY_MASK)
@pytest.mark.parametrize("name", OF_SUITE)
def test_every_implementation_holds_the_laws_of_the_suite(name, implementation):
  if implementation == "skew" and name in NOT_BY_SKEWING:
    pytest.skip("skewing takes no positions and no labels")
  case = OF_SUITE[name]
  arrays = case.draw("float64")
  relations = arrays.keys() & RELATIONS_OF_SUITE
  if not relations and implementation in ("skew", "projected", "per_position"):
    pytest.skip("without relations it is the reference")
  if relations == {"distance_bias"} and implementation == "per_position":
    pytest.skip("without vectors it is the reference")
  assert_close(*case.law(attend_by(implementation), arrays, case.options))


# Law 6.
@pytest.mark.parametrize("name", ANY_MASK)
def test_decoding_one_by_one_is_the_full_pass(name):
  """Fills the slots of later tokens with other numbers, which causality masks."""
  arrays = make_arrays(queries=7, keys=7)
  attend = compile_quickly(functools.partial(call, is_causal=True, implementation=name))
  outputs = []
  for step in range(7):
    is_later = (np.arange(7) > step)[:, None, None]
    one = arrays | {"query": arrays["query"][:, step : step + 1]}
    for array in ("key", "value"):
      one[array] = jnp.where(is_later, 50.0, arrays[array])
    outputs.append(attend(one, query_offset=step))
  assert_close(jnp.concatenate(outputs, axis=1), attend(arrays))


# The negative halves of laws 4 and 9.
def test_reversing_tokens_or_tables_alone_does_not_reverse_the_output():
  """Reversing tokens permutes them, here without their positions."""
  arrays = make_arrays()

  def run(arrays):
    return results("reference", arrays, {})["output"]

  tokens, tables = dict(arrays), dict(arrays)
  for name in ("query", "key", "value"):
    tokens[name] = arrays[name][:, ::-1]
  for name in TABLES:
    tables[name] = arrays[name][::-1]
  output = run(arrays)
  backward = output[:, ::-1]
  assert not np.allclose(run(tokens), backward)
  of_tables = run(tables)
  assert not np.allclose(of_tables, backward)
  assert not np.allclose(of_tables, output)


# Law 2. jax.nn averages the values for a fully masked query, so here is none.
RANDOM = np.random.default_rng(0)
PAIR_MASK = (RANDOM.random((2, 4, 4, 7)) < 0.5) | np.eye(4, 7, dtype=bool)
KEY_MASK = (RANDOM.random((2, 1, 1, 4)) < 0.5) | (np.arange(4) == 0)
LENGTHS = {
  "query_seq_lengths": jnp.int32([6, 3]),
  "key_value_seq_lengths": jnp.int32([5, 7]),
}
GROUPED = {"queries": 4, "keys": 7, "heads": 4, "bias": "BTS"}
WINDOW_OF_TWO_SIDES = {"local_window_size": (1, 3)}
CAUSAL_WINDOW = {"local_window_size": 2, "is_causal": True}


@pytest.mark.parametrize(
  "sizes, options",
  [
    (GROUPED, {"mask": jnp.asarray(PAIR_MASK)}),
    (
      {"queries": 7, "keys": 4, "heads": 6},
      {"mask": jnp.asarray(KEY_MASK), "is_causal": True},
    ),
    ({"queries": 6, "keys": 7}, LENGTHS),
    ({"queries": 6, "keys": 7}, WINDOW_OF_TWO_SIDES),
    ({"queries": 7, "keys": 7}, CAUSAL_WINDOW),
  ],
  ids=["bias, mask of pairs", "mask of keys", "lengths", "window", "causal window"],
)
def test_without_relations_it_is_jax_nn(sizes, options):
  """Compares in float32, the only dtype of jax.nn's softmax."""
  arrays = make_arrays(tables="", **sizes, dtype=np.float32)
  del arrays["more"]

  @compile_quickly
  def call_jax_nn(arrays):
    def attend(arrays):
      return jax.nn.dot_product_attention(**arrays, **options)

    return output_and_gradients(attend, arrays)

  wanted = call_jax_nn(arrays)
  is_refused_by_kernels = "bias" in arrays or "local_window_size" in options
  names = [None, "chunked"]  # without relations, others are the reference
  if not is_refused_by_kernels:
    names += KERNELS
  for implementation in names:
    actual = results(implementation, arrays, options)
    assert_close(actual, wanted, implementation, atol=1e-5)


# Law 5. By name: whether query i attends to key j, and the options that say so.
QUERY, KEY = np.ogrid[:6, :6]
FIRST_KEYS = np.broadcast_to(KEY < 4, (6, 6))
NOT_QUERY_2 = np.broadcast_to(QUERY != 2, (6, 6))
IDS_OF_KEYS = jnp.asarray(np.arange(6) >= 4, int)
SEGMENTS = {"query_segment_ids": jnp.zeros(6, int), "key_segment_ids": IDS_OF_KEYS}
MASKED_QUERY = "a fully masked query"
ATTENDS = {
  "causal": (KEY <= QUERY, {"is_causal": True}),
  "mask": (FIRST_KEYS, {"mask": jnp.asarray(KEY < 4)}),
  "segments": (FIRST_KEYS, SEGMENTS),
  MASKED_QUERY: (NOT_QUERY_2, {"mask": jnp.asarray(QUERY != 2)}),
}


def depends(gradients, name):
  """Returns whether the output of query i depends on token j at all."""
  return (gradients[name] != 0).any((1, 3, 4))


# Without relations, most implementations mask by the same code as with them.
WITH_TABLES = [parameters(name, TABLES) for name in (*KERNELS, *ANY_MASK)]
WITHOUT_TABLES = [parameters(name, "") for name in (*KERNELS, "chunked")]


@pytest.mark.parametrize("implementation, tables", WITH_TABLES + WITHOUT_TABLES)
@pytest.mark.parametrize("way", ATTENDS)
def test_masked_keys_have_no_effect_and_no_gradient(way, tables, implementation):
  if way == MASKED_QUERY and implementation in KERNELS:
    pytest.skip("they take no mask of queries")
  attends, options = ATTENDS[way]
  bias = "BTS" if way == MASKED_QUERY else None
  arrays = make_arrays(queries=6, keys=6, tables=tables, bias=bias)
  is_masked = ~attends.any(axis=0)[:, None, None]
  noisy = dict(arrays)
  for name in ("key", "value"):
    noisy[name] = jnp.where(is_masked, 1e3, arrays[name])

  @compile_quickly
  def run(arrays):
    def attend(arrays):
      return call(arrays, **options, implementation=implementation)

    def of_queries(arrays):
      return attend(arrays).sum((0, 2, 3))

    return attend(arrays), jax.jacrev(of_queries)(arrays)

  output, gradients = run(noisy)

  assert_array_equal(output, run(arrays)[0])
  assert_array_equal(depends(gradients, "value"), attends)
  assert not depends(gradients, "key")[~attends].any()
  if way == "causal":
    for name in tables:  # row 2 is for distance 0
      assert not gradients[name][:, 3:].any()
  for i in np.flatnonzero(~attends.any(axis=1)):
    assert not output[:, i].any()
    for x in jax.tree.leaves(gradients):
      assert not x[i].any()


LOWEST_FLOAT32 = float(np.finfo(np.float32).min)


@pytest.mark.parametrize(
  "lowest, soft_cap", [(LOWEST_FLOAT32, None), (-np.inf, None), (-np.inf, 0.5)]
)
@pytest.mark.parametrize("name", ["reference", "chunked"])
def test_a_bias_masks_as_a_mask_does(name, lowest, soft_cap):
  attend = functools.partial(results, name)
  arrays, options = make_arrays(bias="BTS"), {"logits_soft_cap": soft_cap}
  check_that_a_bias_masks(attend, arrays, options, lowest)


@pytest.mark.parametrize("lowest", [LOWEST_FLOAT32, -np.inf])
def test_a_bias_masks_as_a_mask_does_by_jax_nn(lowest, monkeypatch):
  """jax.nn, chosen on a TPU, alone averages a masked query's values, or returns NaN."""
  monkeypatch.setattr(choice, "target_platform", lambda: "tpu")

  def attend(arrays, options):
    function = functools.partial(call, **options)
    return compile_quickly(functools.partial(output_and_gradients, function))(arrays)

  arrays = make_arrays(tables="", bias="BTS", dtype=np.float32)
  check_that_a_bias_masks(attend, arrays, {}, lowest, atol=1e-6)


def check_that_a_bias_masks(attend, arrays, options, lowest, atol=1e-10):
  is_masked = np.zeros((2, 1, 5, 5), bool)
  is_masked[:, :, 1] = True
  is_masked[0, 0, 2, 3] = True
  low = arrays | {"bias": jnp.where(is_masked, lowest, arrays["bias"])}
  biased = attend(low, options)
  masked = attend(arrays, options | {"mask": jnp.asarray(~is_masked)})
  assert_close(biased, masked, atol=atol)
  assert not biased["output"][:, 1].any()


# The array of which one sequence has NaN, at which tokens, and the outputs that get it.
BROKEN = [
  ("query", 30, 30),
  ("key", 97, slice(97, 100)),
  ("query", ..., ...),
]


@pytest.mark.parametrize("name", EACH)
def test_nan_stays_nan(name):
  """Checks that a diverged model does not look healthy, nor a healthy row diverged.

  From 40 keys on, XLA's maximum on a CPU may drop a NaN.
  """
  arrays = make_arrays(queries=100, keys=100, dtype=np.float32)
  run = compile_as_users_do(
    functools.partial(call, is_causal=True, implementation=name)
  )
  for array, tokens, queries in BROKEN:
    diverged = arrays | {array: arrays[array].at[0, tokens].set(jnp.nan)}
    output = run(diverged)
    is_broken = np.zeros(output.shape, bool)
    is_broken[0, queries] = True
    assert_array_equal(np.isnan(output), is_broken)


@pytest.mark.parametrize("implementation", ["reference", "chunked", *KERNELS])
def test_no_intermediate_result_is_nan(implementation):
  def loss(arrays):
    return call(arrays, implementation=implementation).sum()

  with jax.debug_nans(True):  # checks what the compiled passes return
    jax.grad(loss)(make_arrays())


# Logits of each head have their own magnitude, or a bias as people use it to mask.
MAGNITUDES = 2.0 ** np.array([0, 10, 20, 24, 27, 30])
LOWEST = np.array([-1e4, -1e7, -1e9, LOWEST_FLOAT32])
# Near -1e9 float32 holds multiples of 64.
FACTORS = np.append(MAGNITUDES, [128.0] * len(LOWEST))
HEADS, LENGTH = len(FACTORS), 40


def large_logits(relative):
  """Returns arrays for logits that are exact in float32: integers times powers of 2."""
  random = np.random.default_rng(0)

  def integers(*shape):
    return random.integers(-1, 2, shape).astype(np.float32)

  arrays = {}
  for name in ("query", "key", "value"):
    arrays[name] = integers(1, LENGTH, HEADS, 4)
  arrays["query"] *= FACTORS[:, None]
  for name in TABLES * relative:
    arrays[name] = integers(5, HEADS, 4)
  arrays["bias"] = FACTORS[:, None, None] * integers(1, HEADS, LENGTH, LENGTH)
  low = LOWEST[:, None, None] * masked_pairs()
  arrays["bias"][:, len(MAGNITUDES) :] = low
  return jax.tree.map(jnp.float32, arrays)


def masked_pairs():
  """Masks a query in four fully, one by half, and one but for a key."""
  i, j = np.ogrid[:LENGTH, :LENGTH]
  half = (i % 4 == 1) & (j < LENGTH // 2)
  all_but_one = (i % 4 == 2) & (j != i // 2)
  return (i % 4 == 0) | half | all_but_one


def check_each_head(arrays, name, options):
  """Compares float32 with float64."""
  exact_arrays = jax.tree.map(jnp.float64, arrays)
  wanted = results("reference", exact_arrays, {"is_causal": options["is_causal"]})
  actual = results(name, arrays, options)
  for array, exact in wanted.items():
    axis_of_heads = 1 if array == "bias" else exact.ndim - 2
    axes = tuple({*range(exact.ndim)} - {axis_of_heads})
    error = np.abs(actual[array] - exact).max(axes) / np.abs(exact).max(axes)
    assert error.max() < 1e-5, f"{array} of each head errs by {error}"


# By name, with relations or without, causal or not. The others call `reference`.
LARGE = [("reference", True, True), ("reference", False, False)]
for name in ("per_position", "projected", "skew"):
  LARGE.append((name, True, True))
for name in (*KERNELS, "chunked", "in blocks"):
  for way in itertools.product([True, False], repeat=2):
    LARGE.append(parameters(name, *way))


@pytest.mark.parametrize("name, relative, is_causal", LARGE)
def test_gradients_are_exact_however_large_the_logits(
  name, relative, is_causal, monkeypatch
):
  set_tiles(monkeypatch, 16, 31)
  options = {"is_causal": is_causal}
  if name == "in blocks":
    name, options = "chunked", options | {"query_positions": jnp.arange(LENGTH)}
  arrays = large_logits(relative)
  if name in KERNELS:
    del arrays["bias"]  # they take none, and heads that have low ones are left out
    arrays = {name: x[..., : len(MAGNITUDES), :] for name, x in arrays.items()}
  check_each_head(arrays, name, options)


# Law 12.
MAPPED = {
  "all": ["query", "key", "value", "k", "v"],
  "a bias": ["bias"],
  "tables and segments": ["k", "v", "query_segment_ids"],
  "relations and offsets": ["more", "query_offset"],
}
REFUSED_BY_KERNELS = "a bias", "relations and offsets"
KERNELS_OR_NOT = [False, pytest.param(True, marks=pytest.mark.kernels)]


def arguments_to_map(mapped, in_kernels):
  """Returns the arguments of a call, with one table per head and one shared."""
  more = (DistanceBias(normal(5, 4)),)
  if not in_kernels:
    content = ContentBias(normal(2, 5, 4, 5), normal(3, 5))
    more += content, LinearBias(normal(4)), KeyBias(normal(3, 4, 3))
  bias = "TS" if mapped == "a bias" else None
  arguments = make_arrays(heads=4, per_head="k", bias=bias, more=more)
  query_ids, key_ids = np.random.default_rng(1).integers(0, 2, (2, 2, 5))
  arguments["query_segment_ids"] = jnp.int32(query_ids)
  arguments["key_segment_ids"] = jnp.int32(key_ids)
  arguments["mask"] = jnp.asarray(normal(2, 1, 1, 5) < 0.5)
  if not in_kernels:
    arguments["query_offset"] = jnp.array([-1, 2])
  return arguments


@pytest.mark.parametrize("in_kernels", KERNELS_OR_NOT, ids=["others", "kernels"])
@pytest.mark.parametrize("mapped", MAPPED)
def test_vmap_equals_a_call_for_each(mapped, in_kernels):
  if in_kernels and mapped in REFUSED_BY_KERNELS:
    pytest.skip("kernels do not take them")
  arguments = arguments_to_map(mapped, in_kernels)
  chosen = {name: arguments[name] for name in MAPPED[mapped]}
  several = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x[..., ::-1]]), chosen)

  def run(name, changes):
    attend = functools.partial(call, is_causal=True, implementation=name)
    return output_and_gradients(attend, arguments | changes)

  one = compile_quickly(functools.partial(run, "reference"))
  each = [one(jax.tree.map(operator.itemgetter(i), several)) for i in range(3)]
  wanted = jax.tree.map(lambda *x: jnp.stack(x), *each)
  names = KERNELS if in_kernels else ["projected", "skew", "chunked"]
  if mapped == "all" and not in_kernels:
    names.append("per_position")  # its other terms are those of `reference`
  for name in names:
    actual = compile_quickly(jax.vmap(functools.partial(run, name)))(several)
    assert_close(actual, wanted, name)
