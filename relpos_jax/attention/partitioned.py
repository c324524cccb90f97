"""Kernels over a mesh: what the partitioner cannot look into runs on each device's own part.

Batch and heads may be sharded, evenly, and nothing else: every other axis is made whole first.
"""

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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from relpos_jax.typing import Array

# The mesh axes of each letter.
Specs = Mapping[str, tuple[str, ...]]


def over_batch_and_heads(
  kernel: Callable[[dict[str, Array]], dict[str, Array]],
  axes: Mapping[str, str],
  operands: dict[str, Array],
) -> dict[str, Array]:
  """`kernel(operands)`, where each device does its part of the batch and of the heads.

  Under `jax.vmap` the calls are made one after the other.

  Args:
    kernel: a function of named arrays that treats all of the batch and all heads alike. What has
      size 1 in a result, and not in the query, is summed over: the gradient of a shared bias.
    axes: a letter for each axis of each operand and result: B batch, N heads, K key heads (N a
      multiple of K); others are not sharded. Of size 1 an axis is shared.
    operands: the arrays, with a "query" and a "key" among them.
  """
  kernel = jax.jit(kernel, inline=True)  # traced once, not for its shapes and again for its results
  results = jax.eval_shape(kernel, operands)

  @custom_partitioning
  def whole(*arrays):
    outputs = kernel(dict(zip(operands, arrays, strict=True)))
    return tuple(outputs[name] for name in results)

  def partition(mesh, given, _):
    specs = _specs(axes, dict(zip(operands, given, strict=True)), mesh)
    place = lambda arrays: tuple(
      NamedSharding(mesh, _spec(specs, axes[name], array.shape)) for name, array in arrays.items()
    )

    def part(*arrays):
      """The results of one device; a sum is that of all devices."""
      over = lambda name: _summed_over(specs, axes[name], results[name].shape)
      outputs = zip(results, whole.fun(*arrays), strict=True)
      return tuple(jax.lax.psum(output, over(name)) for name, output in outputs)

    return mesh, part, place(results), place(operands)

  whole.def_partition(partition=partition, sharding_rule=_rule(axes, operands, results))
  outputs = sequential_vmap(whole)(*operands.values())
  return dict(zip(results, outputs, strict=True))


def _specs(axes: Mapping[str, str], given: dict, mesh: Mesh) -> Specs:
  """The mesh axes of each letter: the query's, where they cut batch and key heads evenly."""
  size = lambda letter, name: given[name].shape[axes[name].index(letter)]
  spec = given["query"].sharding.spec
  of_query = dict(zip(axes["query"], (*spec, *[None] * 4), strict=False))

  def even(names: str | tuple[str, ...] | None, size: int) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else names or ()
    return names if size % math.prod(mesh.shape[name] for name in names) == 0 else ()

  batch, heads = even(of_query["B"], size("B", "query")), even(of_query["N"], size("K", "key"))
  return {"B": batch, "N": heads, "K": heads}


def _spec(specs: Specs, letters: str, shape: tuple[int, ...]) -> PartitionSpec:
  sharded = (specs.get(x) or None if n > 1 else None for x, n in zip(letters, shape, strict=True))
  return PartitionSpec(*sharded)


def _summed_over(specs: Specs, letters: str, shape: tuple[int, ...]) -> tuple[str, ...]:
  """The mesh axes that cut the query where a result has size 1."""
  shared = (specs.get(x, ()) for x, n in zip(letters, shape, strict=True) if n == 1)
  return tuple(itertools.chain(*shared))


def _rule(axes: Mapping[str, str], operands: dict, results: dict) -> SdyShardingRule:
  """How shardings spread: along B, N and K, a head axis N of K groups where K < N."""
  query, key = (dict(zip(axes[n], operands[n].shape, strict=True)) for n in ("query", "key"))
  grouped = 1 < key["K"] < query["N"]
  heads = dict(N=CompoundFactor("K", "G") if grouped else "N", K="K" if grouped else "N")
  ones, whole = itertools.count(), {}  # in the order in which they appear

  def factor(letter: str, size: int):
    if size == 1:
      return f"one{next(ones)}"
    if letter not in "BNK":
      whole[letter] = None
    return heads.get(letter, letter)

  mapping = lambda array, letters: ArrayMapping(*map(factor, letters, array.shape))
  mappings = [
    tuple(mapping(array, axes[name]) for name, array in arrays.items())
    for arrays in (operands, results)
  ]
  sizes = dict(G=query["N"] // key["K"]) if grouped else {}
  return SdyShardingRule(*mappings, need_replication_factors=tuple(whole), **sizes)
