"""Kernels over a mesh: what the partitioner cannot look into runs on each device's own part.

Batch, heads and queries may be sharded, evenly, and nothing else: every other axis is made whole
first. Where queries are sharded, a sequence lies on several devices: each gathers all of its keys.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import (
  ArrayMapping,
  CompoundFactor,
  SdyShardingRule,
  custom_partitioning,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from relpos_jax.typing import Array, ArrayLike

Arrays = dict[str, Array]
# The mesh axes that cut the axis of a letter.
Cut = Mapping[str, tuple[str, ...]]


def over_devices(
  kernel: Callable[[Arrays, ArrayLike], Arrays],
  axes: Mapping[str, str],
  operands: Arrays,
  *,
  tile: int = 1,
) -> Arrays:
  """`kernel(operands, 0)`, where each device does its part of the batch, heads and queries.

  Under `jax.vmap` the calls are made one after the other.

  Args:
    kernel: a function of named arrays, and of the number of the first query among them, that treats
      all of the batch, all heads and all queries alike. What has size 1 in a result and not in the
      query, or no axis of queries, is summed over: the gradients of a shared bias, and of keys.
    axes: a letter for each axis of each operand and result: B batch, N heads, K key heads (N a
      multiple of K), T queries, S keys; others, and S, are not sharded in operands. Of size 1 an
      axis is shared.
    operands: the arrays, with a "query" and a "key" among them.
    tile: queries that stay together.
  """
  results = jax.eval_shape(lambda operands: kernel(operands, 0), operands)

  def outputs(arrays, first_query=0):
    found = kernel(dict(zip(operands, arrays, strict=True)), first_query)
    return tuple(found[name] for name in results)

  @custom_partitioning
  def whole(*arrays):
    return outputs(arrays)

  def partition(mesh, given, _):
    cut = _cut(axes, dict(zip(operands, given, strict=True)), mesh, tile)
    ends = {name: _End.of(cut, axes[name], results[name], mesh) for name in results}
    specs = lambda arrays: (_spec(cut, axes[name], array.shape) for name, array in arrays.items())
    place = lambda specs: tuple(NamedSharding(mesh, spec) for spec in specs)

    def part(*arrays):
      """The results of one device; a sum is that of all devices."""
      found = outputs(arrays, _first_query(cut, axes, dict(zip(operands, arrays, strict=True))))
      return tuple(end.total(x) for end, x in zip(ends.values(), found, strict=True))

    return mesh, part, place(end.spec for end in ends.values()), place(specs(operands))

  whole.def_partition(partition=partition, sharding_rule=_rule(axes, operands, results))
  found = sequential_vmap(whole)(*operands.values())
  return dict(zip(results, found, strict=True))


def _cut(axes: Mapping[str, str], given: dict, mesh: Mesh, tile: int) -> Cut:
  """The mesh axes of each letter: the query's, where they cut it and the key heads evenly."""
  size = lambda letter, name: given[name].shape[axes[name].index(letter)]
  spec = given["query"].sharding.spec
  of_query = dict(zip(axes["query"], (*spec, *[None] * 4), strict=False))

  def even(letter: str, size: int, together: int = 1) -> tuple[str, ...]:
    names = of_query.get(letter)
    names = (names,) if isinstance(names, str) else names or ()
    return names if size % (together * math.prod(mesh.shape[x] for x in names)) == 0 else ()

  heads = even("N", size("K", "key"))
  queries = even("T", size("T", "query"), tile) if "T" in axes["query"] else ()
  return {"B": even("B", size("B", "query")), "N": heads, "K": heads, "T": queries}


def _spec(cut: Cut, letters: str, shape: tuple[int, ...]) -> PartitionSpec:
  sharded = (cut.get(x) or None if n > 1 else None for x, n in zip(letters, shape, strict=True))
  return PartitionSpec(*sharded)


def _first_query(cut: Cut, axes: Mapping[str, str], arrays: Arrays) -> ArrayLike:
  """The number of a device's first query; 0, and known before compiling, if it has all."""
  if not cut["T"]:
    return 0
  return jax.lax.axis_index(cut["T"]) * arrays["query"].shape[axes["query"].index("T")]


class _End(NamedTuple):
  """How a result leaves the devices: summed over some mesh axes, the last of the sums in parts.

  The gradients of keys, which every device has of its own queries, are summed and, where that is
  even, scattered at once along the keys: half the traffic.
  """

  dtype: DTypeLike
  summed: tuple[str, ...]
  scattered: tuple[str, ...]
  keys: int  # their axis
  spec: PartitionSpec

  @classmethod
  def of(cls, cut: Cut, letters: str, result: jax.ShapeDtypeStruct, mesh: Mesh) -> "_End":
    shape, keys = result.shape, letters.find("S")
    shared = (cut.get(x, ()) for x, n in zip(letters, shape, strict=True) if n == 1)
    summed, spec = tuple(itertools.chain(*shared)), _spec(cut, letters, shape)
    of_queries = () if "T" in letters else cut["T"]
    if keys < 0 or shape[keys] % math.prod(mesh.shape[name] for name in of_queries):
      return cls(result.dtype, summed + of_queries, (), keys, spec)
    if of_queries:
      spec = PartitionSpec(*spec[:keys], of_queries, *spec[keys + 1 :])
    return cls(result.dtype, summed, of_queries, keys, spec)

  def total(self, x: Array) -> Array:
    """The sum over devices, or this one's part of it, rounded once."""
    x = jax.lax.psum(x, self.summed)
    if self.scattered:
      x = jax.lax.psum_scatter(x, self.scattered, scatter_dimension=self.keys, tiled=True)
    return x.astype(self.dtype)


def _rule(axes: Mapping[str, str], operands: dict, results: dict) -> SdyShardingRule:
  """How shardings spread: along B, T, N and K, a head axis N of K groups where K < N."""
  query, key = (dict(zip(axes[n], operands[n].shape, strict=True)) for n in ("query", "key"))
  grouped = 1 < key["K"] < query["N"]
  heads = dict(N=CompoundFactor("K", "G") if grouped else "N", K="K" if grouped else "N")
  ones, whole = itertools.count(), {}  # in the order in which they appear

  def factor(letter: str, size: int):
    if size == 1:
      return f"one{next(ones)}"
    if letter not in "BNKT":
      whole[letter] = None
    return heads.get(letter, letter)

  mapping = lambda array, letters: ArrayMapping(*map(factor, letters, array.shape))
  mappings = [
    tuple(mapping(array, axes[name]) for name, array in arrays.items())
    for arrays in (operands, results)
  ]
  sizes = dict(G=query["N"] // key["K"]) if grouped else {}
  return SdyShardingRule(*mappings, need_replication_factors=tuple(whole), **sizes)
