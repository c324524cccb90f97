"""A ring of devices: each has a part of a sequence, and the keys go round.

In every round a device attends to the keys that it has, adds the result to that of the
rounds before, and passes the keys on to its neighbour (Liu et al. 2023, "Ring attention
with blockwise transformers"). So no device gathers them. The backward pass goes round
again, and the gradients of the keys travel with them. Those of the tables are summed
over devices once, at the end.

Causal: a sequence has two chunks for each of n devices, and device i gets chunks i and
2n - 1 - i (the "zigzag" of Zhu's ring-flash-attention, 2024). In every round two of the
four pairs of chunks have visible weights, on all devices alike; in the first one three.
The others are skipped. Arrays are dealt at the start and put back at the end, which
moves each of them once. Parts that have an odd number of tokens stay as they are: the
last device then computes in every round, the first one in one, and waits for the others
in the rest.

A round is the algorithm of chunked.py, whose queries are at `query start - key start`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from relpos_jax.attention import band as bands
from relpos_jax.attention import masks
from relpos_jax.attention.chunked_block import (
  AXES,
  Arrays,
  ChunkPlan,
  Region,
  read,
  write,
)
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.partitioned import zeros
from relpos_jax.typing import Array, ArrayLike

Compute = Callable[[ChunkPlan, Arrays, ArrayLike], Arrays]


def unsupported(inputs: Inputs, num_devices: int) -> str | None:
  """Returns why keys cannot go round so many devices, or None if they can."""
  if reason := bands.unsupported(inputs):
    return reason
  if inputs.bias is not None:
    return "a bias is given"
  if inputs.mask is not None and min(inputs.mask.shape[-2:]) > 1:
    return f"mask has shape {inputs.mask.shape}; it takes segments, lengths and masks of keys"
  sizes = inputs.query.shape[1], inputs.key.shape[1]
  if any(size % num_devices or size < 2 * num_devices for size in sizes):
    return (
      f"{sizes[0]} queries and {sizes[1]} keys do not divide into parts of two or more"
    )
  return None


def around(
  compute: Compute, plan: ChunkPlan, arrays: Arrays, first_query: ArrayLike
) -> Arrays:
  """Computes `chunked`'s forward or backward pass, `compute`, for keys on several devices."""
  if isinstance(first_query, int):  # on one device, for the shapes of the results
    return _attend(plan, compute, arrays, first_query)
  shapes = jax.eval_shape(lambda arrays: _attend(plan, compute, arrays, 0), arrays)
  results = {name: zeros(x.shape, arrays["query"]) for name, x in shapes.items()}
  if "d_output" not in arrays:
    results["maximum"] += masks.LOWEST
    return _all_rounds(plan, compute, arrays, results, _merge)
  if (
    "value_table" in arrays
  ):  # the sums are of all rounds, so their gradients are counted once
    sums = [arrays[name] for name in ("right_sums", "row_sums")]
    d_rows = jnp.einsum("RBNT,BTNV->NRV", jnp.stack(sums), arrays["d_output"])
    table = results["d_value_table"]
    if table.shape[1] == 1:
      d_rows = d_rows.sum(0, keepdims=True)
    results["d_value_table"] = table.at[0, :, -2:].add(d_rows)
    arrays = arrays | dict.fromkeys(("right_sums", "row_sums"), jnp.zeros_like(sums[0]))
  return _all_rounds(plan, compute, arrays, results, _add)


def _all_rounds(
  plan: ChunkPlan, compute: Compute, arrays: Arrays, results: Arrays, store: Callable
) -> Arrays:
  """Stores what `compute` returns for every pair of a chunk of queries and one of keys."""
  sizes = [arrays[name].shape[1] for name in ("query", "key")]
  num_chunks = 2 if plan.is_causal and not any(size % 2 for size in sizes) else 1
  num_queries, num_keys = (size // num_chunks for size in sizes)
  plan = plan._replace(num_keys=num_keys)
  here, size = jax.lax.axis_index(plan.ring), jax.lax.axis_size(plan.ring)
  if num_chunks > 1:
    arrays = _deal(plan, arrays)
  travelling = {name: x for name, x in arrays.items() if _travels(name, x)}
  forth = [(i, (i + 1) % size) for i in range(size)]

  def run_round(number, carry):
    travelling, results = carry
    owner = (here - number) % size

    def run_pair(index, results):
      of_queries, of_keys = index // num_chunks, index % num_chunks
      region = dict(
        T=(of_queries * num_queries, num_queries), S=(of_keys * num_keys, num_keys)
      )
      first_key = _chunk(owner, of_keys, num_chunks, size) * num_keys
      first_query = _chunk(here, of_queries, num_chunks, size) * num_queries - first_key

      def run(results):
        part = read(arrays | travelling, region)
        part["first_key"] = first_key[None]
        return store(results, _attend(plan, compute, part, first_query), region)

      is_visible = _is_visible(plan, arrays, first_query, num_queries)
      return jax.lax.cond(is_visible, run, lambda results: results, results)

    results = jax.lax.fori_loop(0, num_chunks**2, run_pair, results)
    moving = travelling | {name: x for name, x in results.items() if _travels(name, x)}
    moved = {name: jax.lax.ppermute(x, plan.ring, forth) for name, x in moving.items()}
    return {name: moved.pop(name) for name in travelling}, results | moved

  _, results = jax.lax.fori_loop(0, size, run_round, (travelling, results))
  return _deal(plan, results, back=True) if num_chunks > 1 else results


def _is_visible(
  plan: ChunkPlan, arrays: Arrays, first_query: Array, num_queries: int
) -> Array:
  """Returns whether a query of a chunk may see a key of another; `first_query` is from the keys."""
  left, right = plan.window or (2**31 - 1, 2**31 - 1)
  right = 0 if plan.is_causal else right
  first = first_query + arrays.get("query_offset", jnp.full(1, plan.offset))
  return jnp.any(
    (first + num_queries - 1 >= -right) & (first - plan.num_keys + 1 <= left)
  )


def _merge(results: Arrays, part: Arrays, region: Region) -> Arrays:
  """Adds the output and the sums of another part of the keys, relative to the higher maximum."""
  both = read(results, region), part
  maximum = jnp.maximum(*(x["maximum"] for x in both))
  factors = [jnp.exp(x["maximum"] - maximum) for x in both]
  totals = [
    _inverse(x["inverse_total"]) * of for x, of in zip(both, factors, strict=True)
  ]
  merged = dict(maximum=maximum, inverse_total=_inverse(sum(totals)))
  shares = [(x * merged["inverse_total"]).swapaxes(1, 2)[..., None] for x in totals]
  for name in [name for name in part if name not in merged]:
    of_both = shares if name == "output" else factors
    merged[name] = sum(x[name] * of for x, of in zip(both, of_both, strict=True))
  return write(results, merged, region)


def _add(results: Arrays, part: Arrays, region: Region) -> Arrays:
  """Adds the gradients of another part of the keys."""
  old = read(results, region)
  return write(results, {name: old[name] + x for name, x in part.items()}, region)


def _inverse(total: Array) -> Array:
  """Returns 1 / total; 0 for 0, which a query has that sees no key."""
  return jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))


def _attend(
  plan: ChunkPlan, compute: Compute, arrays: Arrays, first_query: ArrayLike
) -> Arrays:
  """Computes the part of one chunk of keys, which travel in their own dtype."""
  wide = {name: arrays[name].astype(arrays["query"].dtype) for name in ("key", "value")}
  return compute(
    plan._replace(num_keys=arrays["key"].shape[1]), arrays | wide, first_query
  )


# Chunks and how they are dealt.


def _chunk(
  device: ArrayLike, number: ArrayLike, num_chunks: int, num_devices: int
) -> Array:
  """Returns the place in the sequence of a device's chunk; the first of 4 has 0 and 7."""
  return jnp.where(number == 0, device, num_chunks * num_devices - 1 - device)


def _deal(plan: ChunkPlan, arrays: Arrays, back: bool = False) -> Arrays:
  """Moves chunks 2i and 2i + 1 of device i to the devices that `_chunk` gives them, or
  back.

  Each device has an even chunk and an odd one, and so either kind is permuted at once.
  """
  size = jax.lax.axis_size(plan.ring)
  is_even = (
    jax.lax.axis_index(plan.ring) % 2 == 0
  )  # whether the earlier of its chunks is
  places = [min(chunk, 2 * size - 1 - chunk) for chunk in range(2 * size)]
  ways = [[(i, places[2 * i + odd]) for i in range(size)] for odd in (0, 1)]
  ways = [[(there, here) for here, there in way] for way in ways] if back else ways

  def in_order(x, y):
    return jnp.where(is_even, x, y), jnp.where(is_even, y, x)

  def deal(x, axis):
    parts = jnp.split(x, 2, axis)
    if back:
      parts = in_order(*parts)
    parts = [
      jax.lax.ppermute(x, plan.ring, way) for x, way in zip(parts, ways, strict=True)
    ]
    return jnp.concatenate(parts if back else in_order(*parts), axis)

  dealt = dict(arrays)
  for name, x in arrays.items():
    for axis, letter in enumerate(AXES[name]):
      if letter in "TS" and x.shape[axis] > 1:
        dealt[name] = deal(x, axis)
  return dealt


def _travels(name: str, x: Array) -> bool:
  axis = AXES[name].find("S")
  return axis >= 0 and x.shape[axis] > 1
