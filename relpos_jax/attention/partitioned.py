"""Kernels over a mesh: each device runs kernels that XLA cannot partition on its own shards.

Only batch, heads and queries may be sharded, evenly: every other axis is gathered first. If queries
are sharded, every device gathers all keys of its sequences.

The sharding has one of two sources. With a mesh in context (`jax.set_mesh`) it follows the names of
the mesh's axes, `AXIS_NAMES`. Otherwise it follows the query's sharding, in a callback of the
partitioner, which does not work on TPUs (JAX's issue 38196): set the mesh there.
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

# The axes of a mesh in context that shard an axis: B batch, N heads, T queries.
AXIS_NAMES = dict(B=("data", "fsdp"), N=("tensor", "model"), T=("sequence",))

Arrays = dict[str, Array]
# The mesh axes that shard the axis of a letter.
ShardAxes = Mapping[str, tuple[str, ...]]


def over_devices(
  kernel: Callable[[Arrays, ArrayLike], Arrays],
  axes: Mapping[str, str],
  operands: Arrays,
  *,
  tile: int = 1,
) -> Arrays:
  """Returns `kernel(operands, 0)`, sharded over the batch, heads and queries.

  Under `jax.vmap` the calls run one after the other.

  Args:
    kernel: a function of named arrays and of the number of their first query, independent over
      batch, heads and queries. Results are summed over these where they have size 1 and the query
      has not, or no axis of queries: the gradients of a shared bias, and of keys.
    axes: a letter for each axis of each operand and result: B batch, N heads, K key heads (N a
      multiple of K), T queries, S keys. S and other letters are not sharded in operands. An axis of
      size 1 is replicated.
    operands: the arrays, including "query" and "key".
    tile: shards have a multiple of this number of queries.
  """
  # Traced once, for its shapes and for its results.
  unsharded = jax.jit(lambda operands: kernel(operands, 0), inline=True)
  traced_once = lambda operands, first_query: (
    unsharded(operands) if isinstance(first_query, int) else kernel(operands, first_query)
  )
  results = jax.eval_shape(unsharded, operands)
  call = _Call(traced_once, axes, {name: x.shape for name, x in operands.items()}, results, tile)
  names = free_names()
  mesh = jax.sharding.get_abstract_mesh()
  function = call.over_mesh(mesh, names) if names else call.as_query_is_sharded()
  outputs = sequential_vmap(function)(*operands.values())
  return dict(zip(results, outputs, strict=True))


def free_names() -> set[str]:
  """Returns the axes in `AXIS_NAMES` of the mesh in context that are not yet manual."""
  mesh = jax.sharding.get_abstract_mesh()
  known = {*itertools.chain(*AXIS_NAMES.values())}
  return {name for name in known & _auto_names(mesh) if mesh.shape[name] > 1}


def _auto_names(mesh: AbstractMesh) -> set[str]:
  types = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return {name for name, kind in types if kind == AxisType.Auto}


class _Call(NamedTuple):
  """The arguments of `over_devices`, with the shapes of operands and results."""

  kernel: Callable[[Arrays, ArrayLike], Arrays]
  axes: Mapping[str, str]
  operands: Mapping[str, tuple[int, ...]]
  results: Mapping[str, jax.ShapeDtypeStruct]
  tile: int

  def over_mesh(self, mesh: AbstractMesh, names: set[str]) -> Callable:
    """Returns the call, sharded over the named axes of the mesh in context."""
    wanted = {letter: tuple(n for n in known if n in names) for letter, known in AXIS_NAMES.items()}
    shards = self.even_shards(wanted, mesh)
    reductions = self.reductions(shards, mesh)
    return jax.shard_map(
      self.on_one_device(shards, reductions),
      in_specs=self.specs(shards),
      out_specs=tuple(x.spec for x in reductions),
      # All automatic axes: kernels for TPUs refuse a mesh with any left, even one of size 1.
      axis_names=_auto_names(mesh),
      check_vma=False,
    )

  def as_query_is_sharded(self) -> Callable:
    """Returns the call, sharded as the partitioner finds the query."""
    function = custom_partitioning(lambda *arrays: self.outputs(arrays, 0))

    def partition(mesh, given, _):
      spec = given[[*self.operands].index("query")].sharding.spec
      tuples = ((x,) if isinstance(x, str) else x or () for x in (*spec, *[None] * 4))
      shards = self.even_shards(dict(zip(self.axes["query"], tuples, strict=False)), mesh)
      reductions = self.reductions(shards, mesh)
      shardings = lambda specs: tuple(NamedSharding(mesh, spec) for spec in specs)
      outputs, operands = shardings(x.spec for x in reductions), shardings(self.specs(shards))
      return mesh, self.on_one_device(shards, reductions), outputs, operands

    rule = _rule(self.axes, self.operands, {name: x.shape for name, x in self.results.items()})
    function.def_partition(partition=partition, sharding_rule=rule)
    return function

  def even_shards(self, wanted: ShardAxes, mesh: Mesh | AbstractMesh) -> ShardAxes:
    """Returns the wanted mesh axes that shard the query and the key heads evenly."""

    def even(letter: str, array: str, multiple: int = 1) -> tuple[str, ...]:
      names = wanted.get(letter[0], ())
      size = self.operands[array][self.axes[array].index(letter[-1])]
      return names if size % (multiple * math.prod(mesh.shape[x] for x in names)) == 0 else ()

    heads = even("NK", "key")
    queries = even("T", "query", self.tile) if "T" in self.axes["query"] else ()
    return {"B": even("B", "query"), "N": heads, "K": heads, "T": queries}

  def specs(self, shards: ShardAxes) -> tuple[PartitionSpec, ...]:
    """Returns the partition specs of the operands."""
    return tuple(_spec(shards, self.axes[name], shape) for name, shape in self.operands.items())

  def reductions(self, shards: ShardAxes, mesh: Mesh | AbstractMesh) -> tuple["_Reduction", ...]:
    """Returns the reduction of each result."""
    named = self.results.items()
    return tuple(_Reduction.of(shards, self.axes[name], x, mesh) for name, x in named)

  def on_one_device(self, shards: ShardAxes, reductions: tuple["_Reduction", ...]) -> Callable:
    """Returns the function that one device runs on its shards of the operands."""

    def run(*arrays):
      outputs = self.outputs(arrays, self.first_query(shards, arrays))
      return tuple(sum_over.apply(x) for sum_over, x in zip(reductions, outputs, strict=True))

    return run

  def first_query(self, shards: ShardAxes, arrays: tuple[Array, ...]) -> ArrayLike:
    """Returns the number of a device's first query, a static 0 if queries are not sharded."""
    if not shards["T"]:
      return 0
    query = arrays[[*self.operands].index("query")]
    return jax.lax.axis_index(shards["T"]) * query.shape[self.axes["query"].index("T")]

  def outputs(self, arrays: tuple[Array, ...], first_query: ArrayLike) -> tuple[Array, ...]:
    """Runs the kernel, and returns its outputs in the order of the results."""
    outputs = self.kernel(dict(zip(self.operands, arrays, strict=True)), first_query)
    return tuple(outputs[name] for name in self.results)


def _spec(shards: ShardAxes, letters: str, shape: tuple[int, ...]) -> PartitionSpec:
  sharded = (shards.get(x) or None if n > 1 else None for x, n in zip(letters, shape, strict=True))
  return PartitionSpec(*sharded)


class _Reduction(NamedTuple):
  """A result's sum over mesh axes: the same sum on all devices, or scattered along the keys.

  The gradients of keys are summed over the devices that share the queries. If the keys divide
  evenly the sum is scattered, which is half the traffic.
  """

  dtype: DTypeLike
  summed: tuple[str, ...]
  scattered: tuple[str, ...]
  keys: int  # the axis of keys
  spec: PartitionSpec

  @classmethod
  def of(
    cls, shards: ShardAxes, letters: str, result: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh
  ) -> "_Reduction":
    """Finds the mesh axes of a result."""
    shape, keys = result.shape, letters.find("S")
    shared = (shards.get(x, ()) for x, n in zip(letters, shape, strict=True) if n == 1)
    summed, spec = tuple(itertools.chain(*shared)), _spec(shards, letters, shape)
    of_queries = () if "T" in letters else shards["T"]
    if keys < 0 or shape[keys] % math.prod(mesh.shape[name] for name in of_queries):
      return cls(result.dtype, summed + of_queries, (), keys, spec)
    if of_queries:
      spec = PartitionSpec(*spec[:keys], of_queries, *spec[keys + 1 :])
    return cls(result.dtype, summed, of_queries, keys, spec)

  def apply(self, x: Array) -> Array:
    """Returns the sum over devices, or this device's shard of it, rounded once."""
    x = jax.lax.psum(x, self.summed)
    if self.scattered:
      x = jax.lax.psum_scatter(x, self.scattered, scatter_dimension=self.keys, tiled=True)
    return x.astype(self.dtype)


def _rule(axes: Mapping[str, str], operands: Mapping, results: Mapping) -> SdyShardingRule:
  """Returns the propagation rule: along B, T, N and K; an axis N has K groups if K < N."""
  query, key = (dict(zip(axes[n], operands[n], strict=True)) for n in ("query", "key"))
  grouped = 1 < key["K"] < query["N"]
  heads = dict(N=CompoundFactor("K", "G") if grouped else "N", K="K" if grouped else "N")
  ones, replicated = itertools.count(), {}  # a dict keeps the order of appearance

  def factor(letter: str, size: int):
    if size == 1:
      return f"one{next(ones)}"
    if letter not in "BNKT":
      replicated[letter] = None
    return heads.get(letter, letter)

  mapping = lambda shape, letters: ArrayMapping(*map(factor, letters, shape))
  mappings = [
    tuple(mapping(shape, axes[name]) for name, shape in shapes.items())
    for shapes in (operands, results)
  ]
  sizes = dict(G=query["N"] // key["K"]) if grouped else {}
  return SdyShardingRule(*mappings, need_replication_factors=tuple(replicated), **sizes)
