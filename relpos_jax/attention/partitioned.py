"""Kernels over a mesh: each device runs kernels that XLA cannot partition on its own shards.

Only batch, heads and queries may be sharded, evenly: every other axis is gathered first. If queries
are sharded, every device gathers all keys of its sequences.

The sharding has one of two sources. With a mesh in context (`jax.set_mesh`) it follows the names of
the mesh's axes, `AXIS_NAMES`. Otherwise it follows the query's sharding, in a callback of the
partitioner, which does not work on TPUs (JAX's issue 38196): set the mesh there.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping

import jax
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import (
  ArrayMapping,
  CompoundFactor,
  SdyShardingRule,
  custom_partitioning,
)
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from relpos_jax.typing import Array, ArrayLike

# The axes of a mesh in context that shard an axis: B batch, N heads, T queries.
AXIS_NAMES = dict(B=("data", "fsdp"), N=("tensor", "model"), T=("sequence",))

Arrays = dict[str, Array]
ShardAxes = Mapping[str, tuple[str, ...]]  # the mesh axes that shard the axis of a letter


def over_devices(
  kernel: Callable[[Arrays, ArrayLike], Arrays],
  axes: Mapping[str, str],
  operands: Arrays,
  *,
  precision: str | None = None,
  tile: int = 1,
) -> Arrays:
  """Returns `kernel(operands, 0)`, sharded over the batch, heads and queries.

  Under `jax.vmap` the calls run one after the other.

  Args:
    kernel: a function of named arrays and of the number of their first query, independent over
      batch, heads and queries. Results are summed over these where they have size 1 and the query
      has not, or no axis of queries: the gradients of a shared bias, and of keys.
    axes: a letter for each axis of each operand and result; only B, N, K and T are sharded in
      operands, where they are larger than 1.
    operands: the arrays, including "query" and "key".
    precision: the default precision of the kernel's products, by default the one in force now.
      Partitioning may trace the kernel later, where another is in force.
    tile: shards have a multiple of this number of queries.
  """
  default = jax.default_matmul_precision(precision or jax.config.jax_default_matmul_precision)
  kernel = default(kernel)
  # Traced once, for its shapes and for its results.
  unsharded = jax.jit(lambda operands: kernel(operands, 0), inline=True)
  results = jax.eval_shape(unsharded, operands)
  named = lambda arrays: dict(zip(operands, arrays, strict=True))
  of_query = [*operands].index("query")

  def shard(mesh, wanted):
    """Returns what one device runs on its shards, and the specs of operands and results."""
    shards = _even_shards(wanted, mesh, axes, operands, tile)
    reductions = {name: _reduction(shards, axes[name], x, mesh) for name, x in results.items()}

    def on_one_device(*arrays):
      if shards["T"]:
        num_queries = arrays[of_query].shape[axes["query"].index("T")]
        outputs = kernel(named(arrays), jax.lax.axis_index(shards["T"]) * num_queries)
      else:
        outputs = unsharded(named(arrays))
      return tuple(reduce(outputs[name]) for name, (_, reduce) in reductions.items())

    in_specs = tuple(_spec(shards, axes[name], x.shape) for name, x in operands.items())
    return on_one_device, in_specs, tuple(spec for spec, _ in reductions.values())

  def shard_as_query(mesh, given, _):
    spec = given[of_query].sharding.spec
    tuples = ((x,) if isinstance(x, str) else x or () for x in (*spec, *[None] * 4))
    function, *specs = shard(mesh, dict(zip(axes["query"], tuples, strict=False)))
    ins, outs = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    return mesh, function, outs, ins

  if names := free_names():
    mesh = jax.sharding.get_abstract_mesh()
    wanted = {letter: tuple(n for n in known if n in names) for letter, known in AXIS_NAMES.items()}
    function, in_specs, out_specs = shard(mesh, wanted)
    # All automatic axes: kernels for TPUs refuse a mesh with any left, even one of size 1.
    auto = _auto_names(mesh)
    function = jax.shard_map(
      function, in_specs=in_specs, out_specs=out_specs, axis_names=auto, check_vma=False
    )
  else:
    function = custom_partitioning(lambda *arrays: tuple(unsharded(named(arrays)).values()))
    function.def_partition(partition=shard_as_query, sharding_rule=_rule(axes, operands, results))
  return dict(zip(results, sequential_vmap(function)(*operands.values()), strict=True))


def free_names() -> set[str]:
  """Returns the axes in `AXIS_NAMES` of the mesh in context that are not yet manual."""
  mesh = jax.sharding.get_abstract_mesh()
  known = {*itertools.chain(*AXIS_NAMES.values())}
  return {name for name in known & _auto_names(mesh) if mesh.shape[name] > 1}


def _auto_names(mesh: AbstractMesh) -> set[str]:
  types = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return {name for name, kind in types if kind == AxisType.Auto}


def _even_shards(
  wanted: ShardAxes,
  mesh: Mesh | AbstractMesh,
  axes: Mapping[str, str],
  operands: Arrays,
  tile: int,
) -> ShardAxes:
  """Returns the wanted mesh axes that shard the query and the key heads evenly."""

  def even(letter: str, array: str, multiple: int = 1, of: str = "") -> tuple[str, ...]:
    names = wanted.get(letter, ())
    size = operands[array].shape[axes[array].index(of or letter)]
    return names if size % (multiple * math.prod(mesh.shape[x] for x in names)) == 0 else ()

  heads = even("N", "key", of="K" if "K" in axes["key"] else "N")
  queries = even("T", "query", tile) if "T" in axes["query"] else ()
  return {"B": even("B", "query"), "N": heads, "K": heads, "T": queries}


def _spec(shards: ShardAxes, letters: str, shape: tuple[int, ...]) -> PartitionSpec:
  sharded = (shards.get(x) or None if n > 1 else None for x, n in zip(letters, shape, strict=True))
  return PartitionSpec(*sharded)


def _reduction(
  shards: ShardAxes, letters: str, result: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh
) -> tuple[PartitionSpec, Callable[[Array], Array]]:
  """Returns the spec of a result, and its sum over devices, rounded once.

  The gradients of keys are summed over the devices that share the queries. If the keys divide
  evenly the sum is scattered, which is half the traffic.
  """
  shape, keys, spec = result.shape, letters.find("S"), _spec(shards, letters, result.shape)
  shared = (shards.get(x, ()) for x, n in zip(letters, shape, strict=True) if n == 1)
  summed, scattered = tuple(itertools.chain(*shared)), ()
  of_queries = () if "T" in letters else shards["T"]
  if keys < 0 or shape[keys] % math.prod(mesh.shape[name] for name in of_queries):
    summed += of_queries
  elif of_queries:
    scattered = of_queries
    spec = PartitionSpec(*spec[:keys], of_queries, *spec[keys + 1 :])

  def reduce(x):
    x = jax.lax.psum(x, summed)
    if scattered:
      x = jax.lax.psum_scatter(x, scattered, scatter_dimension=keys, tiled=True)
    return x.astype(result.dtype)

  return spec, reduce


def _rule(axes: Mapping[str, str], operands: Mapping, results: Mapping) -> SdyShardingRule:
  """Returns the propagation rule: along B, T, N and K; an axis N has K groups if K < N."""
  sizes = lambda name: dict(zip(axes[name], operands[name].shape, strict=True))
  num_heads, key_heads = sizes("query")["N"], sizes("key")["K"]
  grouped = 1 < key_heads < num_heads
  heads = dict(N=CompoundFactor("K", "G") if grouped else "N", K="K" if grouped else "N")
  ones, replicated = itertools.count(), {}  # a dict keeps the order of appearance

  def factor(letter: str, size: int):
    if size == 1:
      return f"one{next(ones)}"
    if letter not in "BNKT":
      replicated[letter] = None
    return heads.get(letter, letter)

  mappings = [
    tuple(ArrayMapping(*map(factor, axes[name], x.shape)) for name, x in arrays.items())
    for arrays in (operands, results)
  ]
  groups = dict(G=num_heads // key_heads) if grouped else {}
  return SdyShardingRule(*mappings, need_replication_factors=tuple(replicated), **groups)
