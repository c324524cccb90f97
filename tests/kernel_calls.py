"""Random calls of the operator and of implementations with tiles or blocks, and their results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from compiling import quickly

from relpos_jax import (
  ContentBias,
  DistanceBias,
  LinearBias,
  RelativePositions,
  dot_product_attention,
)
from relpos_jax.attention import reference
from relpos_jax.attention.inputs import gather_inputs

BATCH, WIDTH = 2, 4
DROPOUT = dict(dropout_rate=0.3, dropout_key=jax.random.key(0))
CAUSAL = dict(is_causal=True)
LONGER = dict(
  query_seq_lengths=np.array([3, 17]), key_value_seq_lengths=np.array([19, 9])
)
LENGTHS = dict(
  query_seq_lengths=np.array([5, 20]), key_value_seq_lengths=np.array([3, 0])
)


def normal(*shape):
  return np.random.default_rng(shape).normal(size=shape)


def arrays_of(
  *,
  queries=20,
  keys=20,
  heads=2,
  key_heads=2,
  width=WIDTH,
  rows=5,
  tables="kv",
  per_head="",
  bias=None,
  more=(),
  dtype=np.float64,
):
  """Returns random arrays to differentiate.

  `tables` names those for keys and for values, and `per_head` those that heads do not
  share; `bias` has axes of BNTS, others have size 1.
  """
  random = np.random.default_rng(0).normal
  arrays = dict(
    query=random(size=(BATCH, queries, heads, width)),
    key=random(size=(BATCH, keys, key_heads, width)),
    value=random(size=(BATCH, keys, key_heads, width)),
  )
  for name in tables:
    arrays[name] = random(size=(rows, *[heads] * (name in per_head), width))
  if bias is not None:
    sizes = dict(B=BATCH, N=heads, T=queries, S=keys)
    arrays["bias"] = random(
      size=[n if axis in bias else 1 for axis, n in sizes.items()]
    )
  return jax.tree.map(lambda x: jnp.asarray(x, dtype), arrays | dict(more=more))


def shapes_of(
  length=512,
  width=64,
  rows=33,
  *,
  dtype=jnp.bfloat16,
  key_heads=8,
  beyond="clip",
  t5=0,
  **more,
):
  """Returns the shapes of query, key, value and relations to compile for, eight heads."""
  query = jax.ShapeDtypeStruct((1, length, 8, width), dtype, **more)
  key = query.update(shape=(1, length, key_heads, width))
  table = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, **more)
  relations = [RelativePositions(*[table(rows, width)] * 2, beyond=beyond)] * (rows > 0)
  relations += [DistanceBias(table(t5, 8))] * (t5 > 0)
  return query, key, key, tuple(relations)


def arguments_of(arrays, beyond="clip", left=None, **options):
  """Returns the arguments of a call: of arrays of `arrays_of`, the tables become a relation."""
  arguments = arrays | options
  tables = [arguments.pop(name, None) for name in "kv"]
  relations = arguments.pop("more", ())
  if any(table is not None for table in tables):
    relations = RelativePositions(*tables, beyond, left), *relations
  return arguments | dict(relations=relations)


def attend(arrays, attention, **options):
  """Calls a module's function `attention` on arrays of `arrays_of`."""
  return attention(gather_inputs(**arguments_of(arrays, **options)))


def call(arrays, **options):
  """Calls the operator on arrays of `arrays_of`."""
  return dot_product_attention(**arguments_of(arrays, **options))


def cotangent_of(arrays):
  """Returns random numbers like the output, exact in any dtype."""
  value = arrays["value"]
  shape = *arrays["query"].shape[:-1], value.shape[-1]
  return jnp.asarray(
    np.round(4 * np.random.default_rng(1).normal(size=shape)) / 4, value.dtype
  )


def output_and_gradients(function, arrays, cotangent=None):
  """Returns a function's output and the gradients of its arrays by name, 0 for integers."""
  output, pull_back = jax.vjp(function, arrays)
  gradients = pull_back(cotangent_of(arrays) if cotangent is None else cotangent)
  of_integers = lambda x: x.dtype == jax.dtypes.float0
  return dict(output=output) | jax.tree.map(
    lambda x: 0.0 if of_integers(x) else x, *gradients
  )


@functools.partial(quickly, static_argnums=3)
def _results(arrays, cotangent, dynamic, static):
  function = lambda arrays: call(arrays, **dynamic, **dict(static))
  return output_and_gradients(function, arrays, cotangent)


def results(implementation, arrays, options, cotangent=None):
  """Returns the operator's output and the gradients of arrays by name; promotes no
  rank.

  Each shape and option is compiled once: clear `_results` after a patch of what it
  compiles.
  """
  options = options | dict(implementation=implementation)
  dynamic = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
  static = tuple((name, x) for name, x in options.items() if name not in dynamic)
  with jax.numpy_rank_promotion("raise"):
    return _results(arrays, cotangent, dynamic, static)


def run(attention, arrays, options):
  """Returns the output and gradients of a module's function `attention`; promotes no rank."""
  function = functools.partial(attend, attention=attention, **options)
  with jax.numpy_rank_promotion("raise"):
    return quickly(functools.partial(output_and_gradients, function))(arrays)


def errors(actual, wanted, least=0.0):
  """Returns the root-mean-square error of each array, as a share of its numbers', by name."""

  def error(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y)
    rms = lambda x: float(np.sqrt(np.mean(x**2)))
    return rms(x - y) / max(rms(y), least)

  found = jax.tree.leaves_with_path(jax.tree.map(error, actual, wanted))
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in found
  }


def assert_exact(kernel, arrays, options, wanted=None, tolerance=1e-10):
  """Checks the output and the gradient of every array against the reference in float64."""
  actual, wide = run(kernel, arrays, options), jax.tree.map(np.float64, arrays)
  for name, found in (wanted or run(reference.attention, wide, options)).items():
    for x, y in zip(*map(jax.tree.leaves, (actual[name], found)), strict=True):
      np.testing.assert_allclose(
        x, y, 0, tolerance * max(1, np.abs(y).max()), err_msg=name
      )


LOW = -1e3, -1e9, -1e30, np.finfo(np.float32).min, -np.inf

RANDOM = np.random.default_rng(0)
KEY_MASK = RANDOM.random((2, 1, 1, 20)) < 0.6
SEGMENTS = {
  name: RANDOM.integers(0, 2, (2, 20)).astype(np.int32)
  for name in ("query_segment_ids", "key_segment_ids")
}

# By name: the sizes of arrays, and the options of a call. With T = S = 20, blocks of
# queries have tiles to the right of the band, on it and to its left, and padding.
CASES = {
  "neither table, causal": (dict(tables=""), CAUSAL),
  "keys only, k = 0": (dict(rows=1, tables="k"), {}),
  "values only, a causal k = 0": (dict(rows=1, tables="v"), CAUSAL),
  "k larger than a block": (dict(rows=2 * 11 + 1), {}),
  "a table that fills its period": (dict(rows=7), dict(beyond="zero", is_causal=True)),
  "k larger than the sequence, zero": (
    dict(rows=2 * 30 + 1, queries=12),
    dict(beyond="zero"),
  ),
  "more keys, causal, grouped heads": (
    dict(queries=13, keys=29, heads=4, per_head="kv"),
    CAUSAL,
  ),
  "more queries, zero, lengths": (
    dict(queries=27, keys=13),
    dict(beyond="zero") | LENGTHS,
  ),
  "nothing to the right of the query": (dict(), dict(left=4, is_causal=True)),
  "nothing to the left of it": (dict(), dict(left=0)),
  "keys only, mask": (dict(tables="k"), dict(mask=KEY_MASK)),
  "masks of every kind": ({}, dict(mask=KEY_MASK) | LONGER | SEGMENTS),
  "dropout, causal": (dict(key_heads=1), DROPOUT | CAUSAL),
  "dropout, values only, mask": (dict(tables="v"), dict(mask=KEY_MASK) | DROPOUT),
  "dropout alone": (dict(tables=""), DROPOUT),
  "a bias": (dict(tables="", more=(DistanceBias(normal(7)),)), {}),
  "a bias per head, causal, grouped heads": (
    dict(tables="", heads=4, more=(DistanceBias(normal(6, 4), left=4),)),
    CAUSAL,
  ),
  "a sum, dropout, lengths, segments": (
    dict(
      heads=4,
      more=(
        DistanceBias(normal(5, 4), "zero"),
        RelativePositions(normal(13, 4, WIDTH), normal(13, 4, WIDTH), "zero"),
        DistanceBias(normal(3)),
      ),
    ),
    dict(scale=-0.7) | DROPOUT | LENGTHS | SEGMENTS,
  ),
}

SLOPES = (LinearBias(normal(2)),)
# What the kernels do not take.
MORE_CASES = {
  "window": (dict(rows=7), dict(local_window_size=(5, 2))),
  "narrow window, causal": (
    dict(rows=9),
    dict(local_window_size=(1, 6), is_causal=True),
  ),
  "a window that leaves tiles out": (
    dict(queries=40, keys=40, tables=""),
    dict(local_window_size=(3, 9)),
  ),
  "an offset, causal, zero": (
    dict(queries=13, keys=37),
    dict(query_offset=19, is_causal=True, beyond="zero"),
  ),
  "an offset beyond the keys, dropout": (dict(), dict(query_offset=30) | DROPOUT),
  "an offset before all keys": (
    dict(queries=13, rows=2 * 8 + 1),
    dict(query_offset=-27),
  ),
  "an offset before all keys, one in a block": (
    dict(queries=13),
    dict(query_offset=-15, local_window_size=(3, 9)),
  ),
  "a traced offset, causal": (
    dict(queries=9, keys=29, key_heads=1, per_head="kv"),
    dict(query_offset=np.array(13), is_causal=True) | DROPOUT,
  ),
  "offsets before the keys and after, k larger than a block": (
    dict(rows=2 * 11 + 1),
    dict(query_offset=np.array([-21, 26])),
  ),
  "offsets beyond all keys, lengths": (
    {},
    dict(query_offset=np.array([30, -26])) | LENGTHS,
  ),
  "offsets, window, segments, dropout": (
    dict(key_heads=1),
    dict(query_offset=np.array([-3, 6]), local_window_size=(5, 2)) | SEGMENTS | DROPOUT,
  ),
  "offsets, causal, zero, values only": (
    dict(keys=24, tables="v"),
    dict(query_offset=np.array([3, -13]), is_causal=True, beyond="zero"),
  ),
  "offsets, causal, dropout, mask": (
    dict(rows=3),
    dict(query_offset=np.array([3, -4]), is_causal=True, mask=KEY_MASK) | DROPOUT,
  ),
  "contents": (
    dict(
      tables="v",
      more=(
        ContentBias(normal(BATCH, 20, 2, 5), normal(5, 2, 5)),
        ContentBias(normal(BATCH, 20, 2, 3), normal(4, 3), "zero", left=1),
      ),
    ),
    dict(mask=(np.arange(20) % 5 != 3)[None, None, None]),
  ),
  "slopes, window": (dict(tables="", more=SLOPES), dict(local_window_size=(9, 6))),
  "slopes, values, dropout, causal": (dict(tables="v", more=SLOPES), DROPOUT | CAUSAL),
  "all, offsets, dropout, lengths": (
    dict(
      heads=4,
      more=(
        DistanceBias(normal(5, 4), "zero"),
        LinearBias(normal(4)),
        ContentBias(normal(BATCH, 20, 4, 3), normal(3, 3)),
        RelativePositions(normal(13, 4, WIDTH), normal(13, 4, WIDTH), "zero"),
        DistanceBias(normal(3)),
      ),
    ),
    dict(query_offset=np.array([5, -24]), scale=-0.7) | DROPOUT | LENGTHS,
  ),
}


@functools.cache
def exact_case(name):
  """Returns the arrays and options of a case, and the results of the reference."""
  sizes, options = (CASES | MORE_CASES)[name]
  arrays = arrays_of(**sizes)
  return arrays, options, run(reference.attention, arrays, options)
