"""A ring of devices: each has a part of a sequence, and the keys go round.

In every round a device attends to the keys that it has, merges the result with that of
the rounds before, and passes the keys on to its neighbour (Liu et al. 2023, "Ring
attention with blockwise transformers"). So no device gathers them. The backward pass
goes round again, and the gradients of the keys travel with them.

Causal: a sequence has two chunks for each of n devices, and device i gets chunks i and
2n - 1 - i (the "zigzag" of Zhu's ring-flash-attention, 2024). Then in every round all
devices have about as many pairs that are not masked; `chunked` skips the tiles of the
others. Parts that have an odd number of tokens stay as they are.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from relpos_jax.attention import band, chunked
from relpos_jax.attention.chunked import Keys, Marks, Plan, Queries, Results, Sides
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.partitioned import axes_of_heads, axes_of_keys, on_shards
from relpos_jax.typing import Array, Float, Int


class Ring(NamedTuple):
  """The static parameters of a call."""

  plan: Plan
  names: tuple[str, ...]  # of the mesh axes
  num_chunks: int  # of a device's queries, and of its keys


def unsupported(inputs: Inputs) -> str | None:
  """Returns why keys cannot go round the devices, or None if they can."""
  if reason := band.unsupported(inputs):
    return reason
  if inputs.bias is not None:
    return "a bias is given"
  if inputs.mask is not None and min(inputs.mask.shape[-2:]) > 1:
    shape = inputs.mask.shape
    return f"mask has shape {shape}; it takes segments, lengths and masks of keys"
  _, num_devices = axes_of_keys()
  sizes = inputs.query.shape[1], inputs.key.shape[1]
  if any(size % num_devices or size < 2 * num_devices for size in sizes):
    return (
      f"{sizes[0]} queries and {sizes[1]} keys do not divide into parts of two or more"
    )
  return None


def attention(inputs: Inputs) -> Any:
  """Computes attention, and its residual if the inputs ask for it."""
  names, num_devices = axes_of_keys()
  plan, floats, marks = chunked.prepare(inputs)
  sizes = inputs.query.shape[1] // num_devices, inputs.key.shape[1] // num_devices
  is_dealt = inputs.is_causal and not any(size % 2 for size in sizes)
  ring = Ring(plan, names, 2 if is_dealt else 1)

  axes = axes_of_heads(inputs.explicit, floats.keys.vectors.shape)
  specs = [chunked.specs_of(axes, sides, names, names) for sides in (floats, marks)]
  attend = functools.partial(_attend, ring)
  of_batch, of_heads = axes
  results = PartitionSpec(of_batch, names, of_heads)
  results = on_shards(attend, (*axes, names), tuple(specs), results)(floats, marks)
  return chunked.finish(inputs, results)


def _attend(ring: Ring, floats: Sides, marks: Sides) -> Results:
  """Computes attention of a device's queries to the keys of all devices."""
  floats, marks = jax.tree.map(functools.partial(_split, ring), (floats, marks))
  if ring.num_chunks == 2:
    floats, marks = jax.tree.map(functools.partial(_deal, ring), (floats, marks))
  results = _around(ring, floats, marks)
  if ring.num_chunks == 2:
    results = jax.tree.map(functools.partial(_deal_back, ring), results)
  return jax.tree.map(_join, results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _around(ring: Ring, floats: Sides, marks: Sides) -> Results:
  """Computes attention, round by round.

  JAX's derivative would keep the keys of all rounds.
  """
  return _forward(ring, floats, marks)[0]


def _forward(ring: Ring, floats: Sides, marks: Sides) -> tuple[Results, tuple]:
  sums = chunked.empty_sums(ring.plan, floats.queries.vectors, floats.keys.values)
  empty = Results(sums.output, sums.weights, sums.total - jnp.inf)

  def run_round(_, carry: tuple) -> tuple:
    keys, results = carry

    def run_pair(index: Int[Array, ""], results: Results) -> Results:
      pair = _take_pair(ring, index, floats.queries, marks.queries, *keys)
      part = chunked.attend(ring.plan, *pair)
      chunk = index // ring.num_chunks
      return _set(results, chunk, _merge(_take(results, chunk), part))

    results = jax.lax.fori_loop(0, ring.num_chunks**2, run_pair, results)
    return _pass_on(ring, keys), results

  keys, rounds = (floats.keys, marks.keys), jax.lax.axis_size(ring.names)
  _, results = jax.lax.fori_loop(0, rounds, run_round, (keys, empty))
  return results, (floats, marks, results)


def _backward(ring: Ring, saved: tuple, d_results: Results) -> tuple[Sides, None]:
  floats, marks, results = saved

  def widened(x: Array) -> Array:
    return x.astype(floats.queries.vectors.dtype)

  def run_round(_, carry: tuple) -> tuple:
    keys, totals = carry

    def run_pair(index: Int[Array, ""], totals: Sides) -> Sides:
      pair, pair_marks = _take_pair(ring, index, floats.queries, marks.queries, *keys)
      # Wide keys have wide gradients, which are rounded after the last round.
      pair = pair._replace(keys=jax.tree.map(widened, pair.keys))
      part, of_part = jax.vjp(lambda x: chunked.attend(ring.plan, x, pair_marks), pair)
      chunk, chunk_of_keys = index // ring.num_chunks, index % ring.num_chunks
      whole, d_whole = _take((results, d_results), chunk)
      (gradients,) = of_part(_gradients_of_part(part, whole, d_whole))
      return Sides(
        _add(totals.queries, chunk, gradients.queries),
        _add(totals.keys, chunk_of_keys, gradients.keys),
      )

    totals = jax.lax.fori_loop(0, ring.num_chunks**2, run_pair, totals)
    keys, d_keys = _pass_on(ring, (keys, totals.keys))
    return keys, totals._replace(keys=d_keys)

  keys, rounds = (floats.keys, marks.keys), jax.lax.axis_size(ring.names)
  empty = jax.tree.map(jnp.zeros_like, (floats.queries, floats.keys))
  empty = Sides(*jax.tree.map(widened, empty))
  _, totals = jax.lax.fori_loop(0, rounds, run_round, (keys, empty))
  d_keys = jax.tree.map(
    lambda x, total: total.astype(x.dtype), floats.keys, totals.keys
  )
  return Sides(totals.queries, d_keys, None), None


_around.defvjp(_forward, _backward)


def _pass_on(ring: Ring, tree: Any) -> Any:
  """Sends arrays to the next device."""
  size = jax.lax.axis_size(ring.names)
  ways = [(device, (device + 1) % size) for device in range(size)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.names, ways), tree)


def _merge(whole: Results, part: Results) -> Results:
  """Merges the results of two parts of the keys."""
  log_total = jnp.logaddexp(whole.log_total, part.log_total)
  share_of_whole = _share(whole.log_total, log_total)
  share_of_part = _share(part.log_total, log_total)

  def merged(x: Array, y: Array) -> Array:
    return share_of_whole[..., None] * x + share_of_part[..., None] * y

  weights = None
  if whole.weights is not None:
    weights = merged(whole.weights, part.weights)
  return Results(merged(whole.output, part.output), weights, log_total)


def _gradients_of_part(part: Results, whole: Results, d_whole: Results) -> Results:
  """Returns the gradients of a part's results, of those of the whole."""
  share = _share(part.log_total, whole.log_total)
  d_share = d_whole.log_total
  d_share += (d_whole.output * (part.output - whole.output)).sum(3)
  d_weights = None
  if whole.weights is not None:
    d_share += (d_whole.weights * (part.weights - whole.weights)).sum(3)
    d_weights = share[..., None] * d_whole.weights
  return Results(share[..., None] * d_whole.output, d_weights, share * d_share)


def _share(log_part: Float[Array, "B T N"], log_total: Float[Array, "B T N"]) -> Array:
  """Returns a part's share of all weights; 0 if all keys are masked."""
  is_masked = jnp.isneginf(log_total)
  return jnp.where(is_masked, 0, jnp.exp(log_part - jnp.where(is_masked, 0, log_total)))


# Chunks of a device's tokens, an axis before all others; of size 1 if they share one.


def _split(ring: Ring, x: Array) -> Array:
  batch, size, *rest = x.shape
  if size == 1:
    return x[None]
  return jnp.moveaxis(x.reshape(batch, ring.num_chunks, -1, *rest), 1, 0)


def _join(x: Array) -> Array:
  chunks, batch, size, *rest = x.shape
  return jnp.moveaxis(x, 0, 1).reshape(batch, chunks * size, *rest)


def _take_pair(
  ring: Ring,
  index: Int[Array, ""],
  queries: Queries,
  query_marks: Marks,
  keys: Keys,
  key_marks: Marks,
) -> tuple[Sides, Sides]:
  """Returns the arrays of a chunk of queries and of one of keys."""
  queries, query_marks = _take((queries, query_marks), index // ring.num_chunks)
  keys, key_marks = _take((keys, key_marks), index % ring.num_chunks)
  return Sides(queries, keys, None), Sides(query_marks, key_marks, None)


def _take(tree: Any, chunk: Int[Array, ""]) -> Any:
  return jax.tree.map(lambda x: x[_place(x, chunk)], tree)


def _set(tree: Any, chunk: Int[Array, ""], parts: Any) -> Any:
  return jax.tree.map(lambda x, part: x.at[_place(x, chunk)].set(part), tree, parts)


def _add(tree: Any, chunk: Int[Array, ""], parts: Any) -> Any:
  return jax.tree.map(lambda x, part: x.at[_place(x, chunk)].add(part), tree, parts)


def _place(x: Array, chunk: Int[Array, ""]) -> Int[Array, ""]:
  return jnp.minimum(chunk, len(x) - 1)


def _ways(ring: Ring, is_odd: bool) -> list[tuple[int, int]]:
  """Returns from which device to which the chunks 0, 2, ... go, or 1, 3, ..."""
  size = jax.lax.axis_size(ring.names)
  chunks = range(int(is_odd), 2 * size, 2)
  return [(chunk // 2, min(chunk, 2 * size - 1 - chunk)) for chunk in chunks]


def _deal(ring: Ring, x: Array) -> Array:
  """Sends chunks i and 2n - 1 - i of a sequence to device i.

  Each device has an even and an odd chunk, before and after: either kind is permuted at
  once.
  """
  if len(x) == 1:
    return x
  even = jax.lax.ppermute(x[0], ring.names, _ways(ring, False))
  odd = jax.lax.ppermute(x[1], ring.names, _ways(ring, True))
  return _in_order(ring, even, odd)


def _deal_back(ring: Ring, x: Array) -> Array:
  even, odd = _in_order(ring, x[0], x[1])
  of_parity = []
  for part, is_odd in ((even, False), (odd, True)):
    ways = [(there, here) for here, there in _ways(ring, is_odd)]
    of_parity.append(jax.lax.ppermute(part, ring.names, ways))
  return jnp.stack(of_parity)


def _in_order(ring: Ring, first: Array, second: Array) -> Array:
  """Stacks an even and an odd chunk by place, or chunks by place as even and odd."""
  is_even = jax.lax.axis_index(ring.names) % 2 == 0  # whether its earlier chunk is
  earlier = jnp.where(is_even, first, second)
  return jnp.stack([earlier, jnp.where(is_even, second, first)])
