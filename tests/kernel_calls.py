"""Calls of the fused kernels in interpret mode, compared with the reference in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from compiling import quickly

from relpos_jax import ContentBias, DistanceBias, LinearBias, RelativePositions
from relpos_jax.attention import reference
from relpos_jax.attention.inputs import gather_inputs

BATCH, WIDTH = 2, 4
DROPOUT = dict(dropout_rate=0.3, dropout_key=jax.random.key(0))
LENGTHS = dict(query_seq_lengths=np.array([5, 20]), key_value_seq_lengths=np.array([3, 0]))


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
  per_head=False,
  more=(),
  dtype=np.float64,
):
  """Returns random arrays to differentiate; `tables` names those for keys and for values."""
  random = np.random.default_rng(0).normal
  table = (rows, *([heads] if per_head else []), width)
  arrays = dict(
    query=random(size=(BATCH, queries, heads, width)),
    key=random(size=(BATCH, keys, key_heads, width)),
    value=random(size=(BATCH, keys, key_heads, width)),
  )
  arrays |= {name: random(size=table) for name in tables}
  return jax.tree.map(lambda x: jnp.asarray(x, dtype), arrays | dict(more=more))


def attend(arrays, attention, beyond="clip", left=None, **options):
  """Calls the `attention` of a module on arrays of `arrays_of`."""
  tables = [arrays.get(name) for name in "kv"]
  given = any(table is not None for table in tables)
  relations = (*[RelativePositions(*tables, beyond, left)] * given, *arrays["more"])
  sequences = (arrays[name] for name in ("query", "key", "value"))
  return attention(gather_inputs(*sequences, relations=relations, **options))


def output_and_gradients(attention, arrays, options):
  """Returns the output, and the gradient of every array for a cotangent exact in any dtype."""
  output, pull_back = jax.vjp(lambda x: attend(x, attention, **options), arrays)
  cotangent = np.round(4 * np.random.default_rng(1).normal(size=output.shape)) / 4
  return dict(output=output, **pull_back(jnp.asarray(cotangent, output.dtype))[0])


def assert_exact(kernel, arrays, options, tolerance=1e-10):
  """Checks the output and the gradient of every array against the reference in float64."""
  run = lambda attention: quickly(lambda x: output_and_gradients(attention, x, options))
  actual = run(kernel)(arrays)
  wide = jax.tree.map(lambda x: x.astype(np.float64), arrays)
  for name, wanted in run(reference.attention)(wide).items():
    for x, y in zip(*map(jax.tree.leaves, (actual[name], wanted)), strict=True):
      np.testing.assert_allclose(x, y, 0, tolerance * max(1, np.abs(y).max()), err_msg=name)


LOW = -1e3, -1e9, -1e30, np.finfo(np.float32).min, -np.inf
# By name: the first and last hidden row of 7, and the options of a call.
HIDDEN = {
  "left end": (0, 2, {}),
  "left end, causal": (0, 0, dict(is_causal=True)),
  "right end, lengths": (5, 6, dict(key_value_seq_lengths=np.array([20, 18]))),
  "within, an offset": (2, 4, dict(query_offset=4)),
}


def assert_low_rows_hide(kernel, where):
  """Checks float32 with tables whose rows hide keys: each head has another number there."""
  first, last, options = HIDDEN[where]
  table = normal(7, len(LOW))
  table[first : last + 1] = LOW
  arrays = arrays_of(heads=len(LOW), key_heads=1, more=(DistanceBias(table),), dtype=np.float32)
  assert_exact(kernel, arrays, options, tolerance=2e-6)


def assert_finite_where_only_low_rows_are_seen(kernel):
  """Checks that such queries have finite gradients, and make no others infinite."""
  arrays = arrays_of(more=(DistanceBias(jnp.array([-1e30, 0.0, 0.0])),), dtype=np.float32)
  arrays["query"] *= 100
  options = dict(query_seq_lengths=np.array([9, 20]), key_value_seq_lengths=np.array([9, 2]))
  results = output_and_gradients(kernel, arrays, options)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(results))


# By name: the sizes of arrays, and the options of a call.
RELATIONS = {
  "a bias": (dict(tables="", more=(DistanceBias(normal(7)),)), {}),
  "a bias per head, causal, grouped heads": (
    dict(tables="", heads=4, more=(DistanceBias(normal(6, 4), left=4),)),
    dict(is_causal=True),
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
  "slopes, window": (
    dict(tables="", more=(LinearBias(normal(2)),)),
    dict(local_window_size=(9, 6)),
  ),
  "slopes, values, dropout, causal": (
    dict(tables="v", more=(LinearBias(normal(2)),)),
    DROPOUT | dict(is_causal=True),
  ),
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
