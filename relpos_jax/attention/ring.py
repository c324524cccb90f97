"""Ring attention: each device has a part of a sequence, and passes keys around.

In every round, a device attends from its queries to the keys that it currently has,
adds the results to its sums, and passes the keys to its neighbour. So no device gathers
all keys (Liu et al. 2023, "Ring attention with blockwise transformers"). The backward
pass goes around again, and the gradients of the keys travel with the keys.

Causal attention would give the devices unequal work, since tiles.py skips masked tiles.
So a sequence is cut into two chunks for each of n devices, and device i gets chunks 2i
and 2n - 1 - 2i, as in the "zigzag" of Zhu's ring-flash-attention, 2024. If a chunk is
not a whole number of blocks and tiles, the chunks stay in order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from relpos_jax.attention import band, tiles
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.partitioned import axes_of_keys, zeros
from relpos_jax.attention.tiles import Plan, Results, Sides, Sums
from relpos_jax.typing import Array

Names = tuple[str, ...]  # the mesh axes that shard the keys


def unsupported(inputs: Inputs) -> str | None:
  """Returns the reason why the ring cannot run this call, or None if it can."""
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
  names, _ = axes_of_keys()
  attend = functools.partial(_attend, names, inputs.is_causal)
  return band.attend_on_devices(attend, inputs, names, names)


def _attend(
  names: Names, is_causal: bool, plan: Plan, floats: Sides, marks: Sides
) -> Results:
  """Computes attention of a device's queries to the keys of all devices."""
  num_queries, num_keys = (side.vectors.shape[1] for side in floats[:2])
  block, more_queries = tiles.even_parts(num_queries // 2, plan.block)
  tile, more_keys = tiles.even_parts(num_keys // 2, plan.tile)
  has_halves = num_queries % 2 == num_keys % 2 == more_queries == more_keys == 0
  attend_in_ring = functools.partial(_attend_in_ring, names)
  if not (is_causal and has_halves):
    return tiles.attend(plan, floats, marks, attend_in_ring)
  plan = plan._replace(block=block, tile=tile)
  tables = floats.tables
  floats, marks = exchange_halves(names, (floats._replace(tables=()), marks))
  floats = floats._replace(tables=tables)
  return exchange_halves(names, tiles.attend(plan, floats, marks, attend_in_ring))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_in_ring(names: Names, plan: Plan, floats: Sides, marks: Sides) -> Results:
  """Computes attention round by round, with a derivative that is written by hand.

  JAX's derivative would keep the keys of all rounds in memory.
  """
  return _forward(names, plan, floats, marks)[0]


def _forward(
  names: Names, plan: Plan, floats: Sides, marks: Sides
) -> tuple[Results, tuple]:
  def run_round(_, carry: tuple) -> tuple:
    keys, sums = carry
    part = tiles.sum_over_keys(plan, *_with_keys(floats, marks, keys))
    return _pass_on(names, keys), _merge(sums, part)

  empty = tiles.no_sums(plan, floats.queries, floats.keys)
  carry = (floats.keys, marks.keys), empty
  _, sums = jax.lax.fori_loop(0, jax.lax.axis_size(names), run_round, carry)
  return tiles.normalize(sums), (floats, marks, sums)


def _backward(
  names: Names,
  plan: Plan,
  saved: tuple[Sides, Sides, Sums],
  d_results: Results,
) -> tuple[Sides, None]:
  floats, marks, sums = saved
  cotangents = tiles.compute_cotangents(sums, d_results)

  def promote(x: Array) -> Array:
    return x.astype(floats.queries.vectors.dtype)

  def run_round(_, carry: tuple) -> tuple:
    (keys, key_marks), totals = carry
    # Gradients of promoted keys are in the accumulation dtype: they are rounded once,
    # after the last round.
    pair = _with_keys(floats, marks, (jax.tree.map(promote, keys), key_marks))
    gradients = tiles.differentiate(plan, *pair, cotangents)
    totals = jax.tree.map(jnp.add, totals, gradients)
    keys, d_keys = _pass_on(names, ((keys, key_marks), totals.keys))
    return keys, totals._replace(keys=d_keys)

  empty = jax.tree.map(lambda x: zeros(x.shape, promote(x)), floats)
  carry = (floats.keys, marks.keys), empty
  _, totals = jax.lax.fori_loop(0, jax.lax.axis_size(names), run_round, carry)
  return jax.tree.map(lambda x, total: total.astype(x.dtype), floats, totals), None


_attend_in_ring.defvjp(_forward, _backward)


def _merge(sums: Sums, part: Sums) -> Sums:
  """Merges the sums over two parts of the keys."""
  maximum = jnp.maximum(sums.maximum, part.maximum)
  terms = tiles.relative_to(maximum, sums), tiles.relative_to(maximum, part)
  return jax.tree.map(jnp.add, *terms)._replace(maximum=maximum)


def _with_keys(floats: Sides, marks: Sides, keys: tuple) -> tuple[Sides, Sides]:
  """Replaces a device's own keys by the keys of this round."""
  return floats._replace(keys=keys[0]), marks._replace(keys=keys[1])


def _pass_on(names: Names, tree: Any) -> Any:
  """Sends arrays to the next device."""
  size = jax.lax.axis_size(names)
  routes = [(device, (device + 1) % size) for device in range(size)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, names, routes), tree)


def exchange_halves(names: Names, tree: Any) -> Any:
  """Exchanges the second halves of devices i and n - 1 - i. It is its own inverse."""
  size = jax.lax.axis_size(names)
  routes = [(device, size - 1 - device) for device in range(size)]

  def exchange(x: Array) -> Array:
    if x.shape[1] == 1:
      return x
    earlier, later = jnp.split(x, 2, axis=1)
    later = jax.lax.ppermute(later, names, routes)
    return jnp.concatenate([earlier, later], axis=1)

  return jax.tree.map(exchange, tree)
