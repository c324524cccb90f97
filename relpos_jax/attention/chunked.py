"""Attention by blocks in plain XLA: never a [T, S] tensor.

A few heads at a time, a block of queries attends to all of its keys (chunked_block.py).
Its inputs are sliced out of the arrays, and its results written back: no full array is
transposed or padded. A causal call runs in a few stretches of queries, each with the
keys up to its end, so that most of the hidden pairs are never computed.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from relpos_jax.attention import band as bands
from relpos_jax.attention import blocks, chunked_block, dropout, ring
from relpos_jax.attention.by_distance import ContentBias, LinearBias
from relpos_jax.attention.chunked_block import (
  AXES,
  Arrays,
  ChunkPlan,
  Region,
  starts_and_sizes,
)
from relpos_jax.attention.inputs import Inputs, is_symbolic
from relpos_jax.attention.partitioned import (
  axes_of_keys,
  axes_of_query,
  over_devices,
  zeros,
)
from relpos_jax.typing import Array, ArrayLike, Float

# The maximum in a causal call: n stretches compute (n + 1) / 2n of all pairs, but
# compile n loops.
_STRETCHES = 4
# The maximum of pairs in a block, over all its heads, unless one head alone has more.
# Measured on four cores: products of fewer than 2**17 numbers do not use them all, and
# twice these pairs do not fit the cache.
_PAIRS = 2**21
# The least queries in a group. Measured on two cores: 64 take 4% less time at 512
# tokens, and 13% more at 128.
_GROUP = 128


def unsupported(inputs: Inputs) -> str | None:
  """Returns why this implementation cannot run a call; None if it can."""
  if is_symbolic(inputs.query, inputs.key):
    return "a dimension is symbolic; it needs numbers"
  names, num_devices = axes_of_keys()
  if names and (reason := ring.unsupported(inputs, num_devices)):
    return f"mesh_axes shards the keys over {names}: {reason}"
  return None


def attention(
  inputs: Inputs, block: int | None = None, group: int = _GROUP
) -> Float[Array, "B T N V"] | tuple[Array, Array]:
  """Computes attention over blocks of `block` queries, by default a size for the call.

  The queries of a block are in groups (chunked_block.py) of `group` or more. A call
  without a band has the algorithm of blocks.py.
  """
  if bands.unsupported(inputs):
    return blocks.attention(inputs, block)
  tables, (low, high) = bands.tables(inputs), bands.distances(inputs)
  shards, (of_keys, num_devices) = axes_of_query(inputs.explicit), axes_of_keys()
  plan = ChunkPlan(
    block=block or _default_block(inputs, inputs.key.shape[1] // num_devices),
    group=group,
    num_keys=inputs.key.shape[1],
    offset=inputs.query_offset if isinstance(inputs.query_offset, int) else 0,
    first=low + 1,
    num_diagonals=high - low - 1,
    has_band=bool(tables),
    soft_cap=inputs.soft_cap,
    is_causal=inputs.is_causal,
    window=inputs.window,
    dropout_rate=inputs.dropout_rate,
    has_residual=inputs.return_residual or inputs.sinks is not None,
    ring=of_keys,
    shards=(*shards, ("S", of_keys)) if of_keys else shards,
    precision=jax.config.jax_default_matmul_precision,
  )
  visibility = _not_none(
    mask=inputs.mask,
    query_mask=inputs.query_mask,
    key_mask=inputs.key_mask,
    query_segments=inputs.query_segment_ids,
    key_segments=inputs.key_segment_ids,
    seeds=dropout.from_row(inputs.dropout_seeds, inputs.query_offset),
    query_offset=None if isinstance(inputs.query_offset, int) else inputs.query_offset,
  )
  floats = _differentiable_arrays(inputs, tables)
  if of_keys:  # they travel in their own dtype
    floats |= dict(key=inputs.key, value=inputs.value)
  output, residual = _flash(plan, floats, visibility)
  if inputs.sinks is not None:
    output, residual = _with_sinks(output, residual, inputs.sinks)
  output = output.astype(inputs.value.dtype)
  return (output, residual) if inputs.return_residual else output


def _with_sinks(output: Array, residual: Array, sinks: Array) -> tuple[Array, Array]:
  """Merges attention with a part whose logit is the sink and whose value is zero."""
  sees_key, sinks = ~jnp.isneginf(residual), sinks[None, None]
  finite = jnp.where(sees_key, residual, 0)
  total = jnp.where(sees_key, jnp.logaddexp(finite, sinks), -jnp.inf)
  return output * jax.nn.sigmoid(finite - sinks)[..., None], total


def _default_block(inputs: Inputs, num_keys: int) -> int:
  """Returns the queries in a block: few in a window, which hides the more pairs of a
  block.

  A causal block computes its longest row.
  """
  if inputs.window is not None:
    return 128
  block = 256 if inputs.is_causal else 512
  while block > 64 and block * num_keys > 2 * _PAIRS:
    block //= 2
  return block


def _differentiable_arrays(inputs: Inputs, tables: Arrays) -> Arrays:
  """Returns the arrays that have gradients, in float32 or wider so that these are rounded once."""
  wide = jnp.promote_types(inputs.query.dtype, jnp.float32)
  slopes = [x.slopes for x in inputs.relations if isinstance(x, LinearBias)]
  contents = [x.query for x in inputs.relations if isinstance(x, ContentBias)]
  floats = _not_none(
    query=inputs.query.astype(wide) * jnp.asarray(inputs.scale, wide),
    key=inputs.key.astype(wide),
    value=inputs.value.astype(wide),
    bias=None if inputs.bias is None else inputs.bias.astype(wide),
    slopes=sum(slopes)[None] if slopes else None,
    content=jnp.concatenate(contents, axis=-1).astype(wide) if contents else None,
  )
  for name, x in tables.items():
    if name == "by_key_table":
      x *= jnp.asarray(inputs.scale, x.dtype)
    if (
      name == "value_table"
    ):  # relative to the left's row, last: it multiplies the sum of weights
      x = jnp.concatenate([x[1:] - x[:1], x[:1]])
    floats[name] = jnp.swapaxes(x, 0, 1)[None]
  return floats


def _not_none(**arrays: Array | None) -> Arrays:
  return {name: array for name, array in arrays.items() if array is not None}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(plan: ChunkPlan, floats: Arrays, visibility: Arrays) -> tuple[Array, Array]:
  """Computes attention [B,T,N,V] and its residual [B,T,N]; the backward pass recomputes weights."""
  return _flash_forward(plan, floats, visibility)[0]


def _flash_forward(
  plan: ChunkPlan, floats: Arrays, visibility: Arrays
) -> tuple[tuple, tuple]:
  outputs = _on_devices(plan, _forward, floats | visibility)
  inverse = outputs["inverse_total"]
  log_total = jnp.where(
    inverse > 0, -jnp.log(jnp.where(inverse > 0, inverse, 1)), -jnp.inf
  )
  residual = (outputs["maximum"] + log_total).swapaxes(1, 2)
  return (outputs["output"], residual), (floats, visibility, outputs)


def _flash_backward(
  plan: ChunkPlan, residuals: tuple, cotangents: tuple
) -> tuple[Arrays, None]:
  floats, visibility, outputs = residuals
  d_output, d_residual = cotangents
  # Divides each query's cotangent by its total once, instead of each of its weights.
  d_output *= outputs["inverse_total"].swapaxes(1, 2)[..., None]
  # sum_j p_ij dp_ij, with or without dropout.
  delta = jnp.einsum(
    "BTNV,BTNV->BNT", outputs["output"], d_output, precision=plan.precision
  )
  if plan.has_residual:
    delta -= d_residual.swapaxes(1, 2) * outputs["inverse_total"]
  saved = {
    name: x for name, x in outputs.items() if name not in ("output", "inverse_total")
  }
  arrays = floats | visibility | saved | dict(d_output=d_output, delta=delta)
  grads = _on_devices(plan, _backward, arrays)
  return {name: grads[f"d_{name}"].astype(x.dtype) for name, x in floats.items()}, None


def _on_devices(plan: ChunkPlan, compute: Callable, arrays: Arrays) -> Arrays:
  """Runs `compute` on each device's shard; keys that are sharded go round a ring."""
  kernel = functools.partial(ring.around, compute) if plan.ring else compute
  return over_devices(kernel, AXES, arrays, plan)


_flash.defvjp(_flash_forward, _flash_backward)


# The loops over heads, stretches and blocks.


def _forward(plan: ChunkPlan, arrays: Arrays, first_query: ArrayLike) -> Arrays:
  """Computes the outputs of `attend` for all queries of all heads."""
  names = ["output", "maximum", "inverse_total"]
  names += ["right_sums", "row_sums"] if "value_table" in arrays else []
  query = arrays["query"]
  sizes = dict(zip("BTNV", (*query.shape[:3], arrays["value"].shape[3]), strict=True))
  outputs = {name: zeros([sizes[x] for x in AXES[name]], query) for name in names}
  return _over_heads(plan, arrays, first_query, outputs, chunked_block.attend, _write)


def _backward(plan: ChunkPlan, arrays: Arrays, first_query: ArrayLike) -> Arrays:
  """Computes the gradients of all differentiable arrays."""
  floats = {name: arrays[name] for name in chunked_block.FLOATS if name in arrays}
  grads = {f"d_{name}": zeros(x.shape, arrays["query"]) for name, x in floats.items()}
  return _over_heads(
    plan, arrays, first_query, grads, chunked_block.differentiate, _add
  )


def _over_heads(
  plan: ChunkPlan, arrays: Arrays, first_query: ArrayLike, results: Arrays, step, store
) -> Arrays:
  """Computes results, a few heads at a time.

  `step`, `attend` or `differentiate`, computes those of a block of queries; `store`,
  `_write` or `_add`, puts them in place.
  """
  batch, num_queries, heads, _ = arrays["query"].shape
  sharing = heads // arrays["key"].shape[2]
  batch_of_bias = batch // len(arrays["bias"]) if "bias" in arrays else 1
  plan = plan._replace(block=min(plan.block, num_queries))
  num_heads = _num_heads(plan, heads, sharing)

  def run_heads(index, results):
    first = index * num_heads
    key_heads = first % heads // sharing, -(-num_heads // sharing)
    region = dict(B=(first // heads, 1), N=(first % heads, num_heads), K=key_heads)
    region["A"] = first // heads // batch_of_bias, 1
    # A smaller array per group of heads: XLA would copy the full one for every group if
    # several loops one after the other wrote into it.
    of_heads = {
      name: zeros(starts_and_sizes(name, x, region)[1], x)
      for name, x in results.items()
    }
    for stretch in _stretches(plan, arrays, first_query):
      of_heads = _run_stretch(
        plan, arrays, first_query, region, stretch, of_heads, step, store
      )
    return store(results, _read(of_heads, {}), region)

  return jax.lax.fori_loop(0, batch * heads // num_heads, run_heads, results)


def _num_heads(plan: ChunkPlan, heads: int, sharing: int) -> int:
  """Returns how many heads to compute at once: as many as `_PAIRS` allows, grouped by key head."""
  at_most = max(1, _PAIRS // (plan.block * plan.num_read))
  sizes = (n for n in range(1, min(at_most, heads) + 1) if heads % n == 0)
  return max(n for n in sizes if n % sharing == 0 or sharing % n == 0)


def _stretches(plan: ChunkPlan, arrays: Arrays, first_query: ArrayLike) -> list[tuple]:
  """Returns ranges of a causal call's queries, and the number of keys that each may
  attend to.

  There is one where devices share the queries: all run the same program, and the last
  device needs all keys. There is one as well if the offset is traced.
  """
  num_queries = arrays["query"].shape[1]
  is_known = isinstance(first_query, int) and "query_offset" not in arrays
  if not plan.is_causal or plan.window is not None or not is_known:
    return [(0, num_queries, plan.num_keys)]
  step = plan.block * -(-num_queries // (plan.block * _STRETCHES))
  bounds = itertools.pairwise([*range(0, num_queries, step), num_queries])
  return [
    (first, end, min(max(end + plan.offset, 1), plan.num_keys)) for first, end in bounds
  ]


def _run_stretch(
  plan: ChunkPlan,
  arrays: Arrays,
  first_query,
  heads: Region,
  stretch,
  results: Arrays,
  step,
  store,
) -> Arrays:
  """Computes the blocks of a range of queries; the last one is moved back to end with it."""
  first, end, num_keys = stretch
  plan = plan._replace(num_keys=num_keys)
  keys = {name: arrays[name] for name in ("key", "value")}
  others = {name: x for name, x in arrays.items() if name not in keys}
  keys = _read(keys, heads | dict(S=(0, num_keys)))
  repeats = heads["N"][1] // len(keys["key"])  # for query heads that share a key head
  keys = {name: x.repeat(repeats, 0) for name, x in keys.items()}
  of_keys = {
    f"d_{name}": zeros(x.shape, x) for name, x in keys.items() if f"d_{name}" in results
  }
  keys = {name: _widen(x, plan.num_groups, heads["N"][0]) for name, x in keys.items()}

  def run_block(number, carry):
    results, of_keys = carry
    start = first + number * plan.block
    row = jnp.minimum(start, end - plan.block)
    queries = dict(T=(row, plan.block))
    block = _read(others, heads | queries)
    if (
      "delta" in block
    ):  # of queries that were computed before, the gradients are not added again
      is_new = jnp.arange(plan.block) >= start - row
      block["delta"] = jnp.where(is_new[None], block["delta"], 0)
      block["d_output"] = jnp.where(is_new[None, :, None], block["d_output"], 0)
    pairs = chunked_block.pairs_at(
      plan, first_query + block.get("query_offset", plan.offset) + row
    )
    of_block, of_keys = step(pairs, block, keys, of_keys)
    return store(results, of_block, queries), of_keys

  num_blocks = -(-(end - first) // plan.block)
  results, of_keys = jax.lax.fori_loop(0, num_blocks, run_block, (results, of_keys))
  return _add(results, of_keys, dict(S=(0, num_keys)))


def _widen(x: Array, groups: int, head: ArrayLike) -> Array:
  """Returns keys or values with room for an element per group."""
  if not groups:
    return x
  room = zeros((*x.shape[:2], x.shape[2] + groups), x)
  # A start that XLA does not know to be 0: it would make a known one a padding, and
  # compute what x is for each of its elements, which on a CPU costs 6% of the call.
  start = jnp.minimum(jnp.int32(head), 0)
  return jax.lax.dynamic_update_slice(room, x, (start, start, start))


# Slices of the arrays.


def _read(arrays: Arrays, region: Region) -> Arrays:
  """Returns the slice of each array in a region: heads first, and without the batch axis."""
  parts = chunked_block.read(arrays, region)
  return {name: x.transpose(_heads_first(name)).squeeze(0) for name, x in parts.items()}


def _write(arrays: Arrays, parts: Arrays, region: Region) -> Arrays:
  """Overwrites a region of the arrays with parts that have the axes `_read` returns."""
  orders = {name: np.argsort(_heads_first(name)) for name in parts}
  in_order = {name: x[None].transpose(orders[name]) for name, x in parts.items()}
  return chunked_block.write(arrays, in_order, region)


def _add(arrays: Arrays, parts: Arrays, region: Region) -> Arrays:
  """Adds parts to a region of the arrays, summed first over query heads that share a key head."""
  old = _read({name: arrays[name] for name in parts}, region)
  new = {
    name: x + parts[name].reshape(len(x), -1, *x.shape[1:]).sum(1)
    for name, x in old.items()
  }
  return _write(arrays, new, region)


def _heads_first(name: str) -> list[int]:
  """Returns the permutation of an array's axes to the batch, heads, all others."""
  letters = AXES[name]
  return sorted(range(len(letters)), key=lambda axis: letters[axis] not in "ABNK")
