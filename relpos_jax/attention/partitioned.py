"""Kernels over a mesh: what the partitioner cannot look into runs on each device's own part.

Batch, heads and queries may be sharded, evenly, and nothing else: every other axis is made whole
first. Where queries are sharded, a sequence lies on several devices: each gathers all of its keys.

What is cut by which axes of the mesh is known in one of two ways. With a mesh in context
(`jax.set_mesh`) by the axes' names, `AXIS_NAMES`. Without one it is as the query is sharded; for
that the compiler asks, which on TPUs it does not (JAX's issue 38196): set the mesh there.
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
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from relpos_jax.typing import Array, ArrayLike

# What the axes of a mesh in context cut: B batch, N heads, T queries.
AXIS_NAMES = dict(B=("data", "fsdp"), N=("tensor", "model"), T=("sequence",))

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
  # Traced once, not for its shapes and again for its results.
  of_all = jax.jit(lambda operands: kernel(operands, 0), inline=True)
  some = lambda operands, first_query: (
    of_all(operands) if isinstance(first_query, int) else kernel(operands, first_query)
  )
  results = jax.eval_shape(of_all, operands)
  call = _Call(some, axes, {name: x.shape for name, x in operands.items()}, results, tile)
  names = free_names()
  function = call.over(jax.sharding.get_abstract_mesh(), names) if names else call.as_sharded()
  found = sequential_vmap(function)(*operands.values())
  return dict(zip(results, found, strict=True))


def free_names() -> set[str]:
  """Of `AXIS_NAMES`, the axes of the mesh in context by which nobody has cut before."""
  mesh = jax.sharding.get_abstract_mesh()
  known = {*itertools.chain(*AXIS_NAMES.values())}
  return {name for name in known & _auto_names(mesh) if mesh.shape[name] > 1}


def _auto_names(mesh: AbstractMesh) -> set[str]:
  types = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return {name for name, kind in types if kind == AxisType.Auto}


class _Call(NamedTuple):
  """The arguments of `over_devices`: shapes of operands, and what the kernel makes of them."""

  kernel: Callable[[Arrays, ArrayLike], Arrays]
  axes: Mapping[str, str]
  operands: Mapping[str, tuple[int, ...]]
  results: Mapping[str, jax.ShapeDtypeStruct]
  tile: int

  def over(self, mesh: AbstractMesh, names: set[str]) -> Callable:
    """The call, cut by axes of the mesh in context, of these names."""
    wanted = {letter: tuple(n for n in some if n in names) for letter, some in AXIS_NAMES.items()}
    cut = self.cut(wanted, mesh)
    ends = self.ends(cut, mesh)
    return jax.shard_map(
      self.part(cut, ends),
      in_specs=self.specs(cut),
      out_specs=tuple(end.spec for end in ends),
      # All that there are: TPUs' kernels take no mesh of which an axis, if only of size 1, is left.
      axis_names=_auto_names(mesh),
      check_vma=False,
    )

  def as_sharded(self) -> Callable:
    """The call, cut as the compiler finds the query sharded."""
    whole = custom_partitioning(lambda *arrays: self.outputs(arrays, 0))

    def partition(mesh, given, _):
      spec = given[[*self.operands].index("query")].sharding.spec
      tuples = ((x,) if isinstance(x, str) else x or () for x in (*spec, *[None] * 4))
      cut = self.cut(dict(zip(self.axes["query"], tuples, strict=False)), mesh)
      ends = self.ends(cut, mesh)
      place = lambda specs: tuple(NamedSharding(mesh, spec) for spec in specs)
      return mesh, self.part(cut, ends), place(end.spec for end in ends), place(self.specs(cut))

    rule = _rule(self.axes, self.operands, {name: x.shape for name, x in self.results.items()})
    whole.def_partition(partition=partition, sharding_rule=rule)
    return whole

  def cut(self, wanted: Cut, mesh: Mesh | AbstractMesh) -> Cut:
    """The mesh axes wanted, where they cut the query and the key heads evenly."""

    def even(letter: str, array: str, together: int = 1) -> tuple[str, ...]:
      names = wanted.get(letter[0], ())
      size = self.operands[array][self.axes[array].index(letter[-1])]
      return names if size % (together * math.prod(mesh.shape[x] for x in names)) == 0 else ()

    heads = even("NK", "key")
    queries = even("T", "query", self.tile) if "T" in self.axes["query"] else ()
    return {"B": even("B", "query"), "N": heads, "K": heads, "T": queries}

  def specs(self, cut: Cut) -> tuple[PartitionSpec, ...]:
    """Of the operands."""
    return tuple(_spec(cut, self.axes[name], shape) for name, shape in self.operands.items())

  def ends(self, cut: Cut, mesh: Mesh | AbstractMesh) -> tuple["_End", ...]:
    """Of the results."""
    return tuple(_End.of(cut, self.axes[name], x, mesh) for name, x in self.results.items())

  def part(self, cut: Cut, ends: tuple["_End", ...]) -> Callable:
    """What one device does with its parts of the operands; a sum is that of all devices."""

    def of_one_device(*arrays):
      found = self.outputs(arrays, self.first_query(cut, arrays))
      return tuple(end.total(x) for end, x in zip(ends, found, strict=True))

    return of_one_device

  def first_query(self, cut: Cut, arrays: tuple[Array, ...]) -> ArrayLike:
    """The number of a device's first query; 0, and known before compiling, if it has all."""
    if not cut["T"]:
      return 0
    query = arrays[[*self.operands].index("query")]
    return jax.lax.axis_index(cut["T"]) * query.shape[self.axes["query"].index("T")]

  def outputs(self, arrays: tuple[Array, ...], first_query: ArrayLike) -> tuple[Array, ...]:
    """The kernel's, in the order of the results."""
    found = self.kernel(dict(zip(self.operands, arrays, strict=True)), first_query)
    return tuple(found[name] for name in self.results)


def _spec(cut: Cut, letters: str, shape: tuple[int, ...]) -> PartitionSpec:
  sharded = (cut.get(x) or None if n > 1 else None for x, n in zip(letters, shape, strict=True))
  return PartitionSpec(*sharded)


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
  def of(
    cls, cut: Cut, letters: str, result: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh
  ) -> "_End":
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


def _rule(axes: Mapping[str, str], operands: Mapping, results: Mapping) -> SdyShardingRule:
  """How shardings spread: along B, T, N and K, a head axis N of K groups where K < N."""
  query, key = (dict(zip(axes[n], operands[n], strict=True)) for n in ("query", "key"))
  grouped = 1 < key["K"] < query["N"]
  heads = dict(N=CompoundFactor("K", "G") if grouped else "N", K="K" if grouped else "N")
  ones, whole = itertools.count(), {}  # in the order in which they appear

  def factor(letter: str, size: int):
    if size == 1:
      return f"one{next(ones)}"
    if letter not in "BNKT":
      whole[letter] = None
    return heads.get(letter, letter)

  mapping = lambda shape, letters: ArrayMapping(*map(factor, letters, shape))
  mappings = [
    tuple(mapping(shape, axes[name]) for name, shape in shapes.items())
    for shapes in (operands, results)
  ]
  sizes = dict(G=query["N"] // key["K"]) if grouped else {}
  return SdyShardingRule(*mappings, need_replication_factors=tuple(whole), **sizes)
