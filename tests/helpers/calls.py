"""Random calls of the operator and of implementations, and their results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from comparing import assert_close
from compiling import compile_quickly

from relpos_jax import DistanceBias, RelativePositions, dot_product_attention
from relpos_jax.attention import band, blocks, reference
from relpos_jax.attention.choice import IMPLEMENTATIONS
from relpos_jax.attention.inputs import gather_inputs

BATCH, WIDTH = 2, 4
# Kernels in Mosaic take 16 bits only, and have tests of their own.
ANY_DTYPE = [name for name in IMPLEMENTATIONS if name != "mosaic_gpu"]
# These take every relation, and so does per_position. It computes only the products of
# queries and vectors in its own way, and all else as the reference.
ANY_RELATION = ["reference", "projected", "chunked"]
# Numbers that mask, or nearly.
LOW = -1e3, -1e9, -1e30, np.finfo(np.float32).min, -np.inf


def normal(*shape, seeds=()):
  """Returns random numbers, the same for the same shape and seeds."""
  return np.random.default_rng((*shape, *seeds)).normal(size=shape)


def make_arrays(
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
  arrays = {
    "query": random(size=(BATCH, queries, heads, width)),
    "key": random(size=(BATCH, keys, key_heads, width)),
    "value": random(size=(BATCH, keys, key_heads, width)),
    "more": more,
  }
  for name in tables:
    axis_of_heads = (heads,) if name in per_head else ()
    arrays[name] = random(size=(rows, *axis_of_heads, width))
  if bias is not None:
    sizes = {"B": BATCH, "N": heads, "T": queries, "S": keys}
    shape = [size if axis in bias else 1 for axis, size in sizes.items()]
    arrays["bias"] = random(size=shape)
  return jax.tree.map(lambda x: jnp.asarray(x, dtype), arrays)


def make_shapes(
  length=512, width=64, rows=33, *, dtype=jnp.bfloat16, t5=0, sharding=None
):
  """Returns the shapes of a query, key, value and relations, of eight heads."""

  def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

  query = shape(dtype, 1, length, 8, width)
  relations = ()
  if rows:
    table = shape(jnp.float32, rows, width)
    relations += (RelativePositions(table, table),)
  if t5:
    relations += (DistanceBias(shape(jnp.float32, t5, 8)),)
  return query, query, query, relations


def arguments_of(arrays, beyond="clip", left=None, **options):
  """Returns the arguments of a call: a relation in place of the tables."""
  arguments = arrays | options
  key_table, value_table = arguments.pop("k", None), arguments.pop("v", None)
  relations = arguments.pop("more", ())
  if key_table is not None or value_table is not None:
    positions = RelativePositions(key_table, value_table, beyond=beyond, left=left)
    relations = (positions, *relations)
  return arguments | {"relations": relations}


def attend(arrays, attention, **options):
  """Calls a module's function `attention` on arrays of `make_arrays`."""
  return attention(gather_inputs(**arguments_of(arrays, **options)))


def call(arrays, **options):
  """Calls the operator on arrays of `make_arrays`."""
  return dot_product_attention(**arguments_of(arrays, **options))


def make_cotangent(arrays):
  """Returns random numbers like the output, exact in any dtype."""
  value = arrays["value"]
  shape = *arrays["query"].shape[:-1], value.shape[-1]
  numbers = np.random.default_rng(1).normal(size=shape)
  return jnp.asarray(np.round(4 * numbers) / 4, value.dtype)


def output_and_gradients(function, arrays, cotangent=None):
  """Returns an output and the gradients of arrays by name, 0 for integers."""
  output, pull_back = jax.vjp(function, arrays)
  if cotangent is None:
    cotangent = make_cotangent(arrays)
  (gradients,) = pull_back(cotangent)

  def without_integers(x):
    return 0.0 if x.dtype == jax.dtypes.float0 else x

  return {"output": output} | jax.tree.map(without_integers, gradients)


def traced_results(arrays, cotangent, dynamic, static):
  def function(arrays):
    return call(arrays, **dynamic, **dict(static))

  return output_and_gradients(function, arrays, cotangent)


@functools.partial(compile_quickly, static_argnums=3)
def compiled_results(*args):
  return traced_results(*args)


@functools.partial(compile_quickly, static_argnums=3)
def compiled_reference(*args):
  return traced_results(*args)


def results(implementation, arrays, options, cotangent=None):
  """Returns the operator's output and gradients of arrays by name; promotes no rank.

  Each shape and option is compiled once, and again after `set_tiles`, except for the
  reference, which has no tiles.
  """
  compiled = compiled_results
  if implementation == "reference":
    compiled = compiled_reference
  dynamic, static = {}, {"implementation": implementation}
  for name, x in options.items():
    chosen = dynamic if isinstance(x, jax.Array) else static
    chosen[name] = x
  with jax.numpy_rank_promotion("raise"):
    return compiled(arrays, cotangent, dynamic, tuple(static.items()))


def run(attention, arrays, options):
  """Returns the output and gradients of a module's function; promotes no rank."""
  function = functools.partial(attend, attention=attention, **options)
  with jax.numpy_rank_promotion("raise"):
    return compile_quickly(functools.partial(output_and_gradients, function))(arrays)


def set_tiles(monkeypatch, block, tile=None, heads=None):
  """Sets the queries in a block, and the keys and heads in a tile, of "chunked"."""
  compiled_results.clear_cache()
  monkeypatch.setattr(blocks, "default_block", lambda *_: block)
  monkeypatch.setattr(band, "choose_sizes", lambda *_: (block, tile or block, heads))


def assert_exact(attention, arrays, options, wanted=None, tolerance=1e-10):
  """Checks the output and all gradients against the reference in float64."""
  actual = run(attention, arrays, options)
  if wanted is None:
    exact_arrays = jax.tree.map(np.float64, arrays)
    wanted = run(reference.attention, exact_arrays, options)
  for name, exact in wanted.items():
    for x, y in zip(*map(jax.tree.leaves, (actual[name], exact)), strict=True):
      assert_close(x, y, name, atol=tolerance * max(1, np.abs(y).max()))
