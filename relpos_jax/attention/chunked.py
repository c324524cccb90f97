"""Attention by blocks in plain XLA: never a [T, S] tensor.

A few heads at a time, a block of queries meets all of its keys (chunked_block.py). What a block
needs is cut out of the arrays, and what it gives is put in its place (chunked_places.py): no array
is transposed or padded as a whole. A causal call is made in a few stretches of queries, each with
the keys up to its end, so that most of what is hidden is never computed.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.attention import band as bands
from relpos_jax.attention import chunked_places as places
from relpos_jax.attention.chunked_block import attend, differentiate
from relpos_jax.attention.chunked_keys import Arrays, Keys, ChunkPlan
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.partitioned import over_devices
from relpos_jax.typing import Array, ArrayLike, Bool, Float, Int

# Zero for a query, they make all of its share in the gradients zero.
_OF_QUERIES = "d_output", "delta"
# At most, in a causal call: n of them compute (n + 1) / 2n of all pairs, but compile n loops.
_STRETCHES = 4
# Pairs of all heads of a block, at most, unless one head alone has more. As measured on four cores:
# a product of fewer than 2**17 numbers does not use them all, and twice these leave their cache.
_PAIRS = 2**21

unsupported = bands.unsupported


def attention(inputs: Inputs, block: int | None = None) -> Float[Array, "B T N H"]:
  """Attention of `block` queries at a time; None finds how many."""
  band = bands.band_of(inputs)
  output = _flash(_plan(inputs, band, block), _floats(inputs, band), _hidden(inputs))
  return output.astype(inputs.value.dtype)


def _plan(inputs: Inputs, band: bands.Band | None, block: int | None) -> ChunkPlan:
  block = block or _block(inputs)
  first, num_diagonals = (1, 0) if band is None else (band.first, band.num_diagonals)
  return ChunkPlan(
    block=min(block, inputs.query.shape[1]),
    first=first,
    num_diagonals=num_diagonals,
    has_band=band is not None,
    is_causal=inputs.is_causal,
    window=inputs.window,
    dropout_rate=inputs.dropout_rate,
  )


def _block(inputs: Inputs) -> int:
  """How many queries at a time; fewer in a causal call, where the longest row of a block counts."""
  block = 256 if inputs.is_causal else 512
  while inputs.window is None and block > 64 and block * inputs.key.shape[1] > 2 * _PAIRS:
    block //= 2
  return block


def _floats(inputs: Inputs, band: bands.Band | None) -> Arrays:
  """What gradients are taken of. Wide, so that gradients are added up wide and rounded once."""
  wide = jnp.promote_types(inputs.query.dtype, jnp.float32)
  value_table = None
  if band is not None and band.value is not None:
    # The last row times the sum of all weights: one product with those by row.
    value_table = jnp.concatenate([band.value, band.left_value[None]])
  return _given(
    query=inputs.query.astype(wide) * jnp.asarray(inputs.scale, wide),
    key=inputs.key.astype(wide),
    value=inputs.value.astype(wide),
    key_table=None if band is None else band.key,
    value_table=value_table,
    bias=None if inputs.bias is None else inputs.bias.astype(wide),
  )


def _hidden(inputs: Inputs) -> Arrays:
  """What hides and drops pairs, beside their positions."""
  return _given(
    mask=inputs.mask,
    real_queries=inputs.real_queries(),
    real_keys=inputs.real_keys(),
    query_segments=inputs.query_segment_ids,
    key_segments=inputs.key_segment_ids,
    seeds=inputs.dropout_seeds,
  )


def _given(**arrays: Array | None) -> Arrays:
  return {name: array for name, array in arrays.items() if array is not None}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(plan: ChunkPlan, floats: Arrays, hidden: Arrays) -> Float[Array, "B T N H"]:
  """Attention with a backward pass of its own, which computes the weights again."""
  return _flash_forward(plan, floats, hidden)[0]


def _flash_forward(plan: ChunkPlan, floats: Arrays, hidden: Arrays) -> tuple[Array, tuple]:
  outputs = _on_each_device(functools.partial(_forward, plan), floats | hidden)
  return outputs["output"], (floats, hidden, outputs)


def _flash_backward(
  plan: ChunkPlan, residuals: tuple, d_output: Float[Array, "B T N H"]
) -> tuple[Arrays, None]:
  floats, hidden, outputs = residuals
  # Divides each query's cotangent by its total once, in place of each of its weights.
  d_output *= outputs["inverse_total"].swapaxes(1, 2)[..., None]
  # sum_j p_ij dp_ij, whatever the p_ij were multiplied with.
  delta = jnp.einsum("BTNH,BTNH->BNT", outputs["output"], d_output)
  saved = {name: x for name, x in outputs.items() if name not in ("output", "inverse_total")}
  arrays = floats | hidden | saved | dict(d_output=d_output, delta=delta)
  grads = _on_each_device(functools.partial(_backward, plan), arrays)
  return {name: _shared(grads[f"d_{name}"], name, x.shape) for name, x in floats.items()}, None


_flash.defvjp(_flash_forward, _flash_backward)


def _shared(grad: Array, name: str, shape: tuple[int, ...]) -> Array:
  """The gradient of a table from those of all heads of all sequences; others as they are."""
  if not name.endswith("_table"):
    return grad
  grad_RNH = grad.sum(0).swapaxes(0, 1)
  return grad_RNH if shape[1] > 1 else grad_RNH.sum(1, keepdims=True)


def _on_each_device(kernel: Callable[[Arrays, ArrayLike], Arrays], arrays: Arrays) -> Arrays:
  axes = {f"d_{name}": letters for name, letters in places.AXES.items()} | places.AXES
  return over_devices(kernel, axes, arrays)


# The loops over heads, stretches and blocks.


class Stretch(NamedTuple):
  """Some queries, and as many keys as any of them may see."""

  first: int
  last: int  # the query after it
  num_keys: int


def _stretches(plan: ChunkPlan, arrays: Arrays, first_query: ArrayLike) -> list[Stretch]:
  """All queries; in a causal call in parts of whole blocks, but for the last.

  Not where devices share the queries: what they run is the same, and the last needs all keys.
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
  """What `attend` says of a block, of all queries of all heads."""
  return _over_heads(plan, arrays, first_query, _no_outputs(arrays), _attend_stretch, places.put)


def _over_heads(
  plan: ChunkPlan,
  arrays: Arrays,
  first_query: ArrayLike,
  results: Arrays,
  of_stretch: Callable,
  place: Callable,
) -> Arrays:
  """The results of all stretches, of a few heads at a time, put or added in their `place`."""
  batch, num_queries, heads, _ = arrays["query"].shape
  plan = plan._replace(block=min(plan.block, num_queries))
  num_heads = _num_heads(plan, arrays)

  def of_heads(index, results):
    some = _heads(arrays, index * num_heads, num_heads)
    # Filled by blocks and then put in place: XLA would copy the larger arrays for every head if
    # several loops one after the other wrote into them.
    mine = places.zeros(results, some)
    for stretch in _stretches(plan, arrays, first_query):
      mine = of_stretch(plan, arrays, first_query, some, stretch, mine)
    return place(results, places.cut(mine, {}), some)

  return jax.lax.fori_loop(0, batch * heads // num_heads, of_heads, results)


def _num_heads(plan: ChunkPlan, arrays: Arrays) -> int:
  """As many as `_PAIRS` allows; those that share a key are together, or some of them are."""
  heads, key_heads = arrays["query"].shape[2], arrays["key"].shape[2]
  sharing = heads // key_heads
  at_most = _PAIRS // (plan.block * plan.num_met(arrays["key"].shape[1]))
  fits = lambda n: heads % n == 0 and (n % sharing == 0 or sharing % n == 0)
  return max(n for n in range(1, min(max(at_most, 1), heads) + 1) if fits(n))


def _no_outputs(arrays: Arrays) -> Arrays:
  """Zeros in place of all outputs."""
  batch, num_queries, heads, width = arrays["query"].shape
  zeros = lambda *shape: jnp.zeros((batch, *shape), arrays["query"].dtype)
  of_queries = ["maximum", "inverse_total"]
  if "value_table" in arrays:
    of_queries += ["right_sums", "row_sums"]
  output = zeros(num_queries, heads, width)
  return dict(output=output, **{name: zeros(heads, num_queries) for name in of_queries})


def _attend_stretch(
  plan: ChunkPlan,
  arrays: Arrays,
  first_query: ArrayLike,
  heads: places.Place,
  stretch: Stretch,
  outputs: Arrays,
) -> Arrays:
  keys = _keys(plan, arrays, heads, stretch)

  def attend_block(number, outputs):
    row, _ = _rows(plan, stretch, number)
    queries = dict(T=(row, plan.block))
    of_block = attend(plan, _block_of(arrays, heads | queries), keys, first_query + row)
    return places.put(outputs, of_block, queries)

  return jax.lax.fori_loop(0, _num_blocks(plan, stretch), attend_block, outputs)


def _backward(plan: ChunkPlan, arrays: Arrays, first_query: ArrayLike) -> Arrays:
  """The gradients of all `_floats`; those of tables for each head of each sequence."""
  grads = _no_grads(arrays)
  return _over_heads(plan, arrays, first_query, grads, _differentiate_stretch, places.add)


def _no_grads(arrays: Arrays) -> Arrays:
  """Zeros in place of all gradients."""
  batch, _, heads, width = arrays["query"].shape
  same, tables = ("query", "key", "value", "bias"), ("key_table", "value_table")
  shapes = {name: arrays[name].shape for name in same if name in arrays}
  shapes |= {name: (batch, heads, len(arrays[name]), width) for name in tables if name in arrays}
  dtype = arrays["query"].dtype
  return {f"d_{name}": jnp.zeros(shape, dtype) for name, shape in shapes.items()}


def _differentiate_stretch(
  plan: ChunkPlan,
  arrays: Arrays,
  first_query: ArrayLike,
  heads: places.Place,
  stretch: Stretch,
  grads: Arrays,
) -> Arrays:
  keys = _keys(plan, arrays, heads, stretch)

  def differentiate_block(number, carry):
    grads, of_keys = carry
    row, is_new = _rows(plan, stretch, number)
    queries = dict(T=(row, plan.block))
    block = _block_of(arrays, heads | queries)
    block |= {name: _where_new(is_new, block[name]) for name in block if name in _OF_QUERIES}
    of_block, of_keys = differentiate(plan, block, keys, first_query + row, of_keys)
    return places.add(grads, of_block, queries), of_keys

  carry = grads, keys.zeros()
  grads, of_keys = jax.lax.fori_loop(0, _num_blocks(plan, stretch), differentiate_block, carry)
  return places.add(grads, keys.once(of_keys), dict(S=(0, stretch.num_keys)))


def _num_blocks(plan: ChunkPlan, stretch: Stretch) -> int:
  return -(-(stretch.last - stretch.first) // plan.block)


def _rows(
  plan: ChunkPlan, stretch: Stretch, number: Int[Array, ""]
) -> tuple[Int[Array, ""], Bool[Array, " T"]]:
  """A block's first query, and which ones are new: the last block may begin before its place."""
  place = stretch.first + number * plan.block
  row = jnp.minimum(place, stretch.last - plan.block)
  return row, row + jnp.arange(plan.block) >= place


def _where_new(is_new: Bool[Array, " T"], x: Float[Array, "N T *R"]) -> Float[Array, "N T *R"]:
  """Zero for queries that an earlier block has seen: they are to be counted once."""
  return jnp.where(jnp.expand_dims(is_new, range(1, x.ndim - 1)), x, 0)


def _block_of(arrays: Arrays, place: places.Place) -> Arrays:
  """What a block needs beside the keys."""
  rest = {name: x for name, x in arrays.items() if name not in ("key", "value")}
  return places.cut(rest, place)


def _keys(plan: ChunkPlan, arrays: Arrays, heads: places.Place, stretch: Stretch) -> Keys:
  """Those a stretch may see, of each of the heads, whether or not heads share them."""
  whole = {name: arrays[name] for name in ("key", "value")}
  shared = places.cut(whole, heads | dict(S=(0, stretch.num_keys)))
  _, num_heads = heads["N"]
  return Keys.of(plan, **{name: x.repeat(num_heads // len(x), 0) for name, x in shared.items()})


def _heads(arrays: Arrays, first: Int[Array, ""], num_heads: int) -> places.Place:
  """The place of some heads of one sequence; first: among all B N."""
  heads, key_heads = arrays["query"].shape[2], arrays["key"].shape[2]
  sharing = heads // key_heads
  of_keys = first % heads // sharing, -(-num_heads // sharing)
  return dict(B=(first // heads, 1), N=(first % heads, num_heads), K=of_keys)
