"""Attention by blocks in plain XLA: never a [T, S] tensor.

A few heads at a time, a block of queries attends to all of its keys (chunked_block.py). Its inputs
are sliced out of the arrays, and its results written back (chunked_layout.py): no full array is
transposed or padded. A causal call runs in a few stretches of queries, each with the keys up to its
end, so that most of the hidden pairs are never computed.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.attention import band as bands
from relpos_jax.attention import chunked_layout as layout
from relpos_jax.attention.chunked_block import attend, differentiate
from relpos_jax.attention.chunked_layout import Arrays, ChunkPlan, Keys, Region
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.partitioned import over_devices
from relpos_jax.typing import Array, ArrayLike, Bool, Float, Int

# The maximum in a causal call: n stretches compute (n + 1) / 2n of all pairs, but compile n loops.
_STRETCHES = 4
# The maximum of pairs in a block, over all its heads, unless one head alone has more. Measured on
# four cores: products of fewer than 2**17 numbers do not use them all, and twice these pairs do not
# fit the cache.
_PAIRS = 2**21

unsupported = bands.unsupported


def attention(inputs: Inputs, block: int | None = None) -> Float[Array, "B T N H"]:
  """Computes attention over blocks of `block` queries, by default a size for the call."""
  band = bands.band_of(inputs)
  first, num_diagonals = (1, 0) if band is None else (band.first, band.num_diagonals)
  plan = ChunkPlan(
    block=min(block or _default_block(inputs), inputs.query.shape[1]),
    first=first,
    num_diagonals=num_diagonals,
    has_band=band is not None,
    is_causal=inputs.is_causal,
    window=inputs.window,
    dropout_rate=inputs.dropout_rate,
  )
  floats = _differentiable_arrays(inputs, band)
  visibility = _not_none(
    mask=inputs.mask,
    real_queries=inputs.real_queries(),
    real_keys=inputs.real_keys(),
    query_segments=inputs.query_segment_ids,
    key_segments=inputs.key_segment_ids,
    seeds=inputs.dropout_seeds,
  )
  return _flash(plan, floats, visibility).astype(inputs.value.dtype)


def _default_block(inputs: Inputs) -> int:
  """Returns the queries in a block: fewer if causal, where a block computes its longest row."""
  block = 256 if inputs.is_causal else 512
  while inputs.window is None and block > 64 and block * inputs.key.shape[1] > 2 * _PAIRS:
    block //= 2
  return block


def _differentiable_arrays(inputs: Inputs, band: bands.Band | None) -> Arrays:
  """Returns the arrays that have gradients, in float32 or wider so that these are rounded once."""
  wide = jnp.promote_types(inputs.query.dtype, jnp.float32)
  value_table = None
  if band is not None and band.value is not None:
    # The last row times the sum of all weights: one product with those by row.
    value_table = jnp.concatenate([band.value, band.left_value[None]])
  return _not_none(
    query=inputs.query.astype(wide) * jnp.asarray(inputs.scale, wide),
    key=inputs.key.astype(wide),
    value=inputs.value.astype(wide),
    key_table=None if band is None else band.key,
    value_table=value_table,
    bias=None if inputs.bias is None else inputs.bias.astype(wide),
  )


def _not_none(**arrays: Array | None) -> Arrays:
  return {name: array for name, array in arrays.items() if array is not None}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(plan: ChunkPlan, floats: Arrays, visibility: Arrays) -> Float[Array, "B T N H"]:
  """Computes attention; its own backward pass computes the weights again."""
  return _flash_forward(plan, floats, visibility)[0]


def _flash_forward(plan: ChunkPlan, floats: Arrays, visibility: Arrays) -> tuple[Array, tuple]:
  outputs = _on_each_device(functools.partial(_forward, plan), floats | visibility)
  return outputs["output"], (floats, visibility, outputs)


def _flash_backward(
  plan: ChunkPlan, residuals: tuple, d_output: Float[Array, "B T N H"]
) -> tuple[Arrays, None]:
  floats, visibility, outputs = residuals
  # Divides each query's cotangent by its total once, instead of each of its weights.
  d_output *= outputs["inverse_total"].swapaxes(1, 2)[..., None]
  # sum_j p_ij dp_ij, with or without dropout.
  delta = jnp.einsum("BTNH,BTNH->BNT", outputs["output"], d_output)
  saved = {name: x for name, x in outputs.items() if name not in ("output", "inverse_total")}
  arrays = floats | visibility | saved | dict(d_output=d_output, delta=delta)
  grads = _on_each_device(functools.partial(_backward, plan), arrays)
  for name in ("key_table", "value_table"):
    if name in floats:
      grad_RNH = grads[f"d_{name}"].sum(0).swapaxes(0, 1)
      shared = floats[name].shape[1] == 1
      grads[f"d_{name}"] = grad_RNH.sum(1, keepdims=True) if shared else grad_RNH
  return {name: grads[f"d_{name}"] for name in floats}, None


_flash.defvjp(_flash_forward, _flash_backward)


def _on_each_device(kernel: Callable[[Arrays, ArrayLike], Arrays], arrays: Arrays) -> Arrays:
  axes = {f"d_{name}": letters for name, letters in layout.AXES.items()} | layout.AXES
  return over_devices(kernel, axes, arrays)


# The loops over heads, stretches and blocks.


class Stretch(NamedTuple):
  """A range of queries, and the number of keys that any of them may attend to."""

  first: int
  last: int  # exclusive
  num_keys: int


def _stretches(plan: ChunkPlan, arrays: Arrays, first_query: ArrayLike) -> list[Stretch]:
  """Splits the queries of a causal call into stretches; the last may end inside a block.

  There is one stretch where devices share the queries: all run the same program, and the last
  device needs all keys.
  """
  num_queries, num_keys = arrays["query"].shape[1], arrays["key"].shape[1]
  if not plan.is_causal or not plan.has_far or isinstance(first_query, jax.Array):
    return [Stretch(0, num_queries, num_keys)]
  step = plan.block * -(-num_queries // (plan.block * _STRETCHES))
  firsts = range(0, num_queries, step)
  lasts = [*firsts[1:], num_queries]
  return [
    Stretch(first, last, min(last, num_keys)) for first, last in zip(firsts, lasts, strict=True)
  ]


def _forward(plan: ChunkPlan, arrays: Arrays, first_query: ArrayLike) -> Arrays:
  """Computes the outputs of `attend` for all queries of all heads."""
  batch, num_queries, heads, width = arrays["query"].shape
  zeros = lambda *shape: jnp.zeros((batch, *shape), arrays["query"].dtype)
  of_queries = ["maximum", "inverse_total"]
  if "value_table" in arrays:
    of_queries += ["right_sums", "row_sums"]
  output = zeros(num_queries, heads, width)
  outputs = dict(output=output, **{name: zeros(heads, num_queries) for name in of_queries})
  return _over_heads(plan, arrays, first_query, outputs, _attend_stretch, layout.write)


def _backward(plan: ChunkPlan, arrays: Arrays, first_query: ArrayLike) -> Arrays:
  """Computes the gradients of all differentiable arrays; a table has one per head and sequence."""
  batch, _, heads, width = arrays["query"].shape
  same, tables = ("query", "key", "value", "bias"), ("key_table", "value_table")
  shapes = {name: arrays[name].shape for name in same if name in arrays}
  shapes |= {name: (batch, heads, len(arrays[name]), width) for name in tables if name in arrays}
  dtype = arrays["query"].dtype
  grads = {f"d_{name}": jnp.zeros(shape, dtype) for name, shape in shapes.items()}
  return _over_heads(plan, arrays, first_query, grads, _differentiate_stretch, layout.add)


def _over_heads(
  plan: ChunkPlan,
  arrays: Arrays,
  first_query: ArrayLike,
  results: Arrays,
  run_stretch: Callable,
  store: Callable,
) -> Arrays:
  """Runs all stretches for a few heads at a time, and stores their results by `write` or `add`."""
  batch, num_queries, heads, _ = arrays["query"].shape
  plan = plan._replace(block=min(plan.block, num_queries))
  num_heads = _num_heads(plan, arrays)

  def run_heads(index, results):
    region = _heads_region(arrays, index * num_heads, num_heads)
    # A smaller array per group of heads: XLA would copy the full one for every group if several
    # loops one after the other wrote into it.
    of_heads = layout.zeros(results, region)
    for stretch in _stretches(plan, arrays, first_query):
      of_heads = run_stretch(plan, arrays, first_query, region, stretch, of_heads)
    return store(results, layout.read(of_heads, {}), region)

  return jax.lax.fori_loop(0, batch * heads // num_heads, run_heads, results)


def _num_heads(plan: ChunkPlan, arrays: Arrays) -> int:
  """Returns how many heads to compute at once: as many as `_PAIRS` allows, grouped by key head."""
  heads, key_heads = arrays["query"].shape[2], arrays["key"].shape[2]
  sharing = heads // key_heads
  at_most = _PAIRS // (plan.block * plan.num_computed(arrays["key"].shape[1]))
  fits = lambda n: heads % n == 0 and (n % sharing == 0 or sharing % n == 0)
  return max(n for n in range(1, min(max(at_most, 1), heads) + 1) if fits(n))


def _heads_region(arrays: Arrays, first: Int[Array, ""], num_heads: int) -> Region:
  """Returns the region of some heads of one sequence; `first` counts over all B N."""
  heads, key_heads = arrays["query"].shape[2], arrays["key"].shape[2]
  sharing = heads // key_heads
  key_range = first % heads // sharing, -(-num_heads // sharing)
  return dict(B=(first // heads, 1), N=(first % heads, num_heads), K=key_range)


def _attend_stretch(
  plan: ChunkPlan,
  arrays: Arrays,
  first_query: ArrayLike,
  heads: Region,
  stretch: Stretch,
  outputs: Arrays,
) -> Arrays:
  keys = _keys(plan, arrays, heads, stretch)

  def attend_block(number, outputs):
    row, _ = _rows(plan, stretch, number)
    queries = dict(T=(row, plan.block))
    of_block = attend(plan, _read_block(arrays, heads | queries), keys, first_query + row)
    return layout.write(outputs, of_block, queries)

  return jax.lax.fori_loop(0, _num_blocks(plan, stretch), attend_block, outputs)


def _differentiate_stretch(
  plan: ChunkPlan,
  arrays: Arrays,
  first_query: ArrayLike,
  heads: Region,
  stretch: Stretch,
  grads: Arrays,
) -> Arrays:
  keys = _keys(plan, arrays, heads, stretch)

  def differentiate_block(number, carry):
    grads, of_keys = carry
    row, is_new = _rows(plan, stretch, number)
    queries = dict(T=(row, plan.block))
    block = _read_block(arrays, heads | queries)
    for name in ("d_output", "delta"):  # zeros here make all gradients of a repeated query zero
      counted = jnp.expand_dims(is_new, range(1, block[name].ndim - 1))
      block[name] = jnp.where(counted, block[name], 0)
    of_block, of_keys = differentiate(plan, block, keys, first_query + row, of_keys)
    return layout.add(grads, of_block, queries), of_keys

  carry = grads, keys.zero_gradients()
  grads, of_keys = jax.lax.fori_loop(0, _num_blocks(plan, stretch), differentiate_block, carry)
  return layout.add(grads, keys.sum_copies(of_keys), dict(S=(0, stretch.num_keys)))


def _num_blocks(plan: ChunkPlan, stretch: Stretch) -> int:
  return -(-(stretch.last - stretch.first) // plan.block)


def _rows(
  plan: ChunkPlan, stretch: Stretch, number: Int[Array, ""]
) -> tuple[Int[Array, ""], Bool[Array, " T"]]:
  """Returns a block's first query, and False for the queries that the block before it has too.

  The last block is moved back so that it ends with the stretch.
  """
  start = stretch.first + number * plan.block
  row = jnp.minimum(start, stretch.last - plan.block)
  return row, row + jnp.arange(plan.block) >= start


def _read_block(arrays: Arrays, region: Region) -> Arrays:
  """Returns a block's slices of all arrays but keys and values."""
  rest = {name: x for name, x in arrays.items() if name not in ("key", "value")}
  return layout.read(rest, region)


def _keys(plan: ChunkPlan, arrays: Arrays, heads: Region, stretch: Stretch) -> Keys:
  """Returns the keys of a stretch, repeated for query heads that share a key head."""
  both = {name: arrays[name] for name in ("key", "value")}
  shared = layout.read(both, heads | dict(S=(0, stretch.num_keys)))
  _, num_heads = heads["N"]
  return Keys.of(plan, **{name: x.repeat(num_heads // len(x), 0) for name, x in shared.items()})
