"""Attention over a mesh: explicit, automatic and manual axes, and kernels on each
device's shard.

XLA cannot partition a kernel, so each device runs it on its own shard. Only batch,
heads and queries may be sharded, evenly: every other axis is gathered first. If queries
are sharded, every device gathers all keys of its sequences, unless `mesh_axes` shards
these, too (ring.py).

On CPUs and GPUs the shards follow the query's, in a callback of the partitioner. This
does not work on TPUs (JAX's issue 38196). There the mesh must be in context
(`jax.set_mesh`), and the shards follow the query's explicit sharding, or the names of
the mesh's automatic axes: see `mesh_axes`.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap, sequential_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from relpos_jax.typing import Array, ArrayLike

# The mesh axes that usually shard an axis: B batch, N heads, T queries.
_USUAL = dict(
  B=("data", "fsdp", "dp", "batch", "replica"),
  N=("tensor", "model", "tp", "heads"),
  T=("sequence", "seq", "sp", "context"),
)
_GIVEN = jax.make_user_context(None)

Arrays = dict[str, Array]
ShardAxes = Mapping[
  str, tuple[str, ...]
]  # the mesh axes that shard the axis of a letter
Shards = tuple[tuple[str, tuple[str, ...]], ...]  # the same, as a static value


def mesh_axes(
  batch: str | tuple[str, ...] | None = None,
  heads: str | tuple[str, ...] | None = None,
  queries: str | tuple[str, ...] | None = None,
  keys: str | tuple[str, ...] | None = None,
):
  """Returns a context in which attention is sharded over these axes of the mesh in
  context.

  Without it, CPUs and GPUs follow the sharding of the query. TPUs need it for "chunked"
  and "pallas_tpu" if automatic axes of the mesh have other names than the usual ones;
  so does a `jax.shard_map` that leaves axes automatic, on any device. The layers of
  `relpos_jax.models` shard their activations over the same axes.

  Args:
    batch: axes that shard the batch, () for none; None for those of "data", "fsdp",
      "dp", "batch" and "replica" that the mesh has.
    heads: axes that shard the heads; None for "tensor", "model", "tp" and "heads".
    queries: axes that shard the queries; None for "sequence", "seq", "sp" and
      "context".
    keys: the axes of queries again, so that keys are sharded, too, and go round the
      devices (ring.py) instead of being gathered; None otherwise. The mesh must be in
      context.

  A name that the mesh in context lacks raises ValueError when attention is called.

  >>> with mesh_axes(batch=("replicas", "zero"), heads="megatron"):
  ...   pass
  """
  if keys is not None and (queries is None or _tuple(keys) != _tuple(queries)):
    raise ValueError(f"keys is {keys!r}; want None or the axes of queries, {queries!r}")
  given = dict(B=batch, N=heads, T=queries, S=keys)
  return _GIVEN(
    tuple((x, _tuple(names)) for x, names in given.items() if names is not None)
  )


def axes_in_context() -> dict[str, tuple[str, ...]]:
  """Returns the automatic axes of the mesh in context, by the letter of what they shard."""
  mesh = jax.sharding.get_abstract_mesh()
  free = [name for name in mesh.auto_axes if mesh.shape[name] > 1]
  given = dict(_GIVEN.value or ())
  missing = {*itertools.chain(*given.values())}.difference(mesh.axis_names)
  if missing and mesh.axis_names:
    raise ValueError(
      f"mesh_axes has {sorted(missing)}; the mesh in context {mesh.axis_names}"
    )
  known = _USUAL | given
  return {
    letter: tuple(x for x in names if x in free) for letter, names in known.items()
  }


def axes_of_keys() -> tuple[tuple[str, ...], int]:
  """Returns the axes of the mesh in context that shard keys, by `mesh_axes`, and their devices."""
  mesh, names = jax.sharding.get_abstract_mesh(), axes_in_context().get("S", ())
  return names, math.prod(mesh.shape[name] for name in names)


def target_device() -> jax.Device | jax.sharding.AbstractDevice:
  """Returns a device of the mesh in context, or JAX's default device.

  A mesh in context may have devices of this machine (`jax.set_mesh`) or described ones
  (`jax.experimental.topologies`); code traced in it is compiled for them.
  """
  default = jax.config.jax_default_device  # maybe None, or the name of a platform
  device = jax.sharding.get_abstract_mesh().abstract_device or default
  return jax.devices(device)[0] if device is None or isinstance(device, str) else device


def target_platform() -> str:
  """Returns the platform of `target_device`: "cpu", "gpu" or "tpu"."""
  platform = target_device().platform
  return "gpu" if platform in ("cuda", "rocm") else platform


def num_target_devices() -> int:
  """Returns the number of devices of the mesh in context; without one, of all that JAX has."""
  mesh = jax.sharding.get_abstract_mesh()
  return jax.device_count() if mesh.empty else mesh.size


def explicit_axes(query: ArrayLike) -> Shards:
  """Returns the explicit mesh axes that shard the query, [B, T, N, H] or [T, N, H], by letter."""
  sharding = jax.typeof(query).sharding
  if not sharding.mesh.explicit_axes:
    return ()
  letters = "BTNH"[-jnp.ndim(query) :]
  return tuple(
    (x, _tuple(names)) for x, names in zip(letters, sharding.spec, strict=True)
  )


def with_automatic_axes(
  attend: Callable,
  query: ArrayLike,
  *arguments: Any,
  result: str | tuple[str, ...] = "BTNH",
) -> Any:
  """Returns `attend(*arguments)`, run with automatic axes if arrays have explicit ones.

  The axes of the results, of letters `result`, are sharded as those of the query.
  """
  automatic, arrays = of_arrays(attend, arguments, lambda x: isinstance(x, jax.Array))
  meshes = (jax.typeof(x).sharding.mesh for x in arrays.values())
  mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
  if mesh is None:
    return attend(*arguments)

  spec = dict(explicit_axes(query))

  def sharding(letters: str) -> NamedSharding:
    names = [spec.get(letter) or None for letter in letters]
    return NamedSharding(
      mesh, PartitionSpec(*names[jnp.ndim(query) == 3 :])
    )  # [T, N, H]: no B

  out = jax.tree.map(sharding, result)
  return jax.sharding.auto_axes(automatic, axes=mesh.explicit_axes, out_sharding=out)(
    arrays
  )


def of_arrays(
  function: Callable, arguments: tuple, is_array: Callable[[Any], bool]
) -> tuple[Callable, dict[int, Any]]:
  """Returns a function of the arrays among its arguments alone, and these, by index."""
  leaves, structure = jax.tree.flatten(arguments)

  def call(arrays):
    full = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
    return function(*jax.tree.unflatten(structure, full))

  return call, {i: x for i, x in enumerate(leaves) if is_array(x)}


def axes_of_query(explicit: Shards) -> Shards | None:
  """Returns the mesh axes that shard the query; None to follow it, in XLA's partitioner."""
  mesh, is_given = jax.sharding.get_abstract_mesh(), _GIVEN.value is not None
  if not is_given:
    # Its callback does not work on TPUs, nor where `jax.shard_map` left some axes
    # automatic.
    is_followed = not mesh.manual_axes and target_platform() != "tpu"
    if is_followed or not mesh.auto_axes:
      return None
    if explicit:
      return explicit
  axes = axes_in_context()
  unknown = {x for x in mesh.auto_axes if mesh.shape[x] > 1}.difference(*axes.values())
  if not is_given and unknown:
    warnings.warn(
      f"attention gathers over the mesh axes {sorted(unknown)}: name what they shard in a context "
      "of relpos_jax.mesh_axes",
      stacklevel=2,
    )
  return tuple((letter, names) for letter, names in axes.items() if letter != "S")


def align_manual_axes(x: Any) -> Any:
  """Makes all arrays of a tree vary over the same manual axes of `jax.shard_map`."""
  varying = frozenset().union(*(_varying(leaf) for leaf in jax.tree.leaves(x)))

  def cast(leaf):
    missing = (
      tuple(sorted(varying - _varying(leaf))) if isinstance(leaf, jax.Array) else ()
    )
    return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

  return jax.tree.map(cast, x)


def zeros(shape: Sequence[int], like: Array) -> Array:
  """Returns zeros of the dtype of `like` that vary over the same manual axes."""
  return align_manual_axes((jnp.zeros(shape, like.dtype), like))[0]


def shapes_like(like: Array, shapes: Any) -> Any:
  """Returns shapes of arrays that vary over the same manual axes as `like`."""
  kind = jax.typeof(like).manual_axis_type
  return jax.tree.map(lambda shape: shape.update(manual_axis_type=kind), shapes)


def _varying(x: Any) -> frozenset[str]:
  return jax.typeof(x).manual_axis_type.varying


def _tuple(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
  return (names,) if isinstance(names, str) else tuple(names or ())


def over_devices(
  kernel: Callable, axes: Mapping[str, str], operands: Arrays, plan: Any
) -> Arrays:
  """Returns `kernel(plan, operands, 0)`, sharded over the batch, heads and queries.

  Args:
    kernel: a function of the plan, the arrays and the index of their first query, which
      computes each sequence, head and query by itself. Results are summed over these
      where they have size 1 and the query has not, or no axis of queries: the gradients
      of a shared bias, and of keys.
    axes: a letter for each axis of each operand and result; only B, N, K and T are
      sharded in operands, where they are larger than 1, and S if the plan's shards have
      it.
    operands: the arrays, including "query" and "key".
    plan: its `shards` are the mesh axes that shard the query by letter; None follows
      its sharding. Its `precision` is the default of the kernel's products, or None for
      the one in force now: partitioning may trace the kernel later, where another is in
      force.
  """
  default = jax.default_matmul_precision(
    plan.precision or jax.config.jax_default_matmul_precision
  )
  compute = default(functools.partial(kernel, plan))
  # Traced once, for its shapes and for its results.
  unsharded = jax.jit(lambda operands: compute(operands, 0), inline=True)
  results = jax.eval_shape(unsharded, operands)

  def shard(mesh, wanted):
    """Returns what one device runs on its shards, and the specs of operands and results."""
    shards = _even_shards(wanted, mesh, axes, operands)
    reductions = {
      name: _reduction(shards, axes[name], x, mesh) for name, x in results.items()
    }

    def on_one_device(arrays):
      if shards["T"]:
        num_queries = arrays["query"].shape[axes["query"].index("T")]
        outputs = compute(arrays, jax.lax.axis_index(shards["T"]) * num_queries)
      else:
        outputs = unsharded(arrays)
      return {name: reduce(outputs[name]) for name, (_, reduce) in reductions.items()}

    in_specs = {
      name: _spec(shards, axes[name], x.shape) for name, x in operands.items()
    }
    return (
      on_one_device,
      (in_specs,),
      {name: spec for name, (spec, _) in reductions.items()},
    )

  context = jax.sharding.get_abstract_mesh()

  def shard_as_query(mesh, given, _):
    sharding, rank = given[0]["query"].sharding, len(axes["query"])
    if mesh.empty:  # no argument of the program is sharded over one
      mesh, spec = _mesh_and_spec(sharding, context, rank)
    else:
      spec = sharding.spec
    function, *specs = shard(
      mesh, dict(zip(axes["query"], map(_tuple, spec), strict=True))
    )
    ins, outs = jax.tree.map(functools.partial(NamedSharding, mesh), specs)

    def without_mesh(
      arrays,
    ):  # the context still has explicit axes; these arrays have none
      with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return function(arrays)

    return mesh, without_mesh, outs, ins

  if plan.shards is not None and context.auto_axes:
    function, in_specs, out_specs = shard(context, dict(plan.shards))
    # All automatic axes: kernels for TPUs refuse a mesh with any left, even one of size
    # 1.
    names = {*context.auto_axes}
    on_shards = jax.shard_map(
      function,
      in_specs=in_specs,
      out_specs=out_specs,
      axis_names=names,
      check_vma=False,
    )

    # Unchecked, it forgets which axes of a `jax.shard_map` around it the results vary
    # over.
    def function(arrays):
      return align_manual_axes((on_shards(arrays), arrays))[0]
  elif context.manual_axes:
    function = unsharded  # the arrays are shards already
  else:
    function = custom_partitioning(unsharded)
    function.def_partition(shard_as_query, **_rule(axes, operands, results))
  function = custom_vmap(function)

  @function.def_vmap
  def map_over(size, is_mapped, arrays):
    """Merges the mapped axis into the batch; maps arrays without a batch one by one."""
    call, (mapped,) = (
      functools.partial(over_devices, kernel, axes, plan=plan),
      is_mapped,
    )
    if all(axes[name][0] in "AB" for name in operands if mapped[name]):
      merged = _merge(axes, operands, results, size, mapped, arrays)
      outputs = {
        name: _split(x, size, results[name]) for name, x in call(merged).items()
      }
    else:  # tables of the kernels for TPUs
      in_axes = {name: 0 if mapped[name] else None for name in operands}
      outputs = jax.vmap(sequential_vmap(call), (in_axes,))(arrays)
    return outputs, dict.fromkeys(results, True)

  return first_derivatives_only(function)(operands)


FIRST_DERIVATIVES_ONLY = (
  "this implementation of attention has first derivatives in reverse mode only: for second or "
  "forward ones name implementation='projected'"
)


def first_derivatives_only(function: Callable) -> Callable:
  """Returns the function, which names the remedy when it is differentiated.

  It is for what a `jax.custom_vjp` calls: only a second derivative comes here.
  """
  function = jax.custom_jvp(function)

  @function.defjvp
  def refuse(primals, tangents):
    raise NotImplementedError(FIRST_DERIVATIVES_ONLY)

  return function


def _merge(
  axes: Mapping,
  operands: Arrays,
  results: Mapping,
  size: int,
  mapped: Mapping,
  arrays: Arrays,
) -> Arrays:
  """Merges the first axis of mapped arrays into the batch, B or A; the others are repeated."""

  def merge(name, x):
    own, *rest = operands[name].shape
    may_broadcast = name in ("mask", "bias") and f"d_{name}" not in results
    if axes[name][0] not in "AB" or (may_broadcast and not mapped[name] and own == 1):
      return x
    own = own if axes[name][0] == "A" else operands["query"].shape[0]
    x = jnp.broadcast_to(x if mapped[name] else x[None], (size, own, *rest))
    return x.reshape(size * own, *rest)

  return {name: merge(name, x) for name, x in arrays.items()}


def _split(x: Array, size: int, result: jax.ShapeDtypeStruct) -> Array:
  """Splits the axis that `_merge` merged; sums the gradients of an array that sequences share."""
  x = x.reshape(size, -1, *x.shape[1:])
  return x.sum(1, keepdims=True) if result.shape[0] < x.shape[1] else x


def _mesh_and_spec(
  sharding: Sharding, context: AbstractMesh, rank: int
) -> tuple[Mesh, list]:
  """Returns the mesh in context with the devices of a sharding, and its spec on that mesh."""
  shape = (sharding.num_devices,) * rank  # divisible however it is sharded
  devices, indices = zip(*sharding.devices_indices_map(shape).items(), strict=True)
  starts = np.array([[part.start or 0 for part in index] for index in indices])
  starts = starts.reshape(*context.axis_sizes, rank)
  steps = {  # from one device to the next along a mesh axis
    name: np.diff(starts, axis=axis)[(0,) * len(context.axis_sizes)]
    for axis, (name, size) in enumerate(context.shape.items())
    if size > 1
  }
  spec = [
    tuple(sorted((x for x in steps if steps[x][axis]), key=lambda x: -steps[x][axis]))
    for axis in range(rank)
  ]
  return Mesh(np.reshape(devices, context.axis_sizes), context.axis_names), spec


def _even_shards(
  wanted: ShardAxes,
  mesh: Mesh | AbstractMesh,
  axes: Mapping[str, str],
  operands: Arrays,
) -> ShardAxes:
  """Returns the wanted mesh axes that shard the query, the key heads and the biases evenly."""

  def even(letter: str, array: str, of: str = "") -> tuple[str, ...]:
    names = wanted.get(letter, ())
    size = operands[array].shape[axes[array].index(of or letter)]
    return names if size % math.prod(mesh.shape[x] for x in names) == 0 else ()

  batch = even("B", "query")
  if "bias" in operands and len(operands["bias"]) > 1:
    batch = batch and even("B", "bias", of="A")
  heads = even("N", "key", of="K")
  queries = even("T", "query") if "T" in axes["query"] else ()
  of_keys = wanted.get("S", ())
  return {"A": batch, "B": batch, "N": heads, "K": heads, "T": queries, "S": of_keys}


def _spec(shards: ShardAxes, letters: str, shape: tuple[int, ...]) -> PartitionSpec:
  sharded = (
    shards.get(x) or None if n > 1 else None
    for x, n in zip(letters, shape, strict=True)
  )
  return PartitionSpec(*sharded)


def _reduction(
  shards: ShardAxes,
  letters: str,
  result: jax.ShapeDtypeStruct,
  mesh: Mesh | AbstractMesh,
) -> tuple[PartitionSpec, Callable[[Array], Array]]:
  """Returns the spec of a result, and its sum over devices, rounded once.

  The gradients of keys are summed over the devices that share the queries. If the keys
  divide evenly the sum is scattered, which is half the traffic.
  """
  shape, keys, spec = (
    result.shape,
    letters.find("S"),
    _spec(shards, letters, result.shape),
  )
  shared = (shards.get(x, ()) for x, n in zip(letters, shape, strict=True) if n == 1)
  summed, scattered = tuple(itertools.chain(*shared)), ()
  of_queries = () if "T" in letters or (keys >= 0 and shards["S"]) else shards["T"]
  if keys < 0 or shape[keys] % math.prod(mesh.shape[name] for name in of_queries):
    summed += of_queries
  elif of_queries:
    scattered, spec = of_queries, _spec({**shards, "S": of_queries}, letters, shape)

  def reduce(x):
    x = jax.lax.psum(x, summed)
    if scattered:
      x = jax.lax.psum_scatter(x, scattered, scatter_dimension=keys, tiled=True)
    return x.astype(result.dtype)

  return spec, reduce


def _rule(
  axes: Mapping[str, str], operands: Mapping, results: Mapping
) -> dict[str, Any]:
  """Returns the propagation rule: along B, T, N and K; an axis N has K groups if K < N.

  Biases that are fewer than the sequences have an axis of their own: they may not
  divide evenly.
  """
  num_heads = operands["query"].shape[axes["query"].index("N")]
  key_heads = operands["key"].shape[axes["key"].index("K")]
  grouped = 1 < key_heads < num_heads
  factors = dict(N="(K G)") if grouped else dict(K="N")
  if "bias" in operands and len(operands["bias"]) == len(operands["query"]):
    factors["A"] = "B"
  ones, replicated = itertools.count(), {}  # a dict keeps the order of appearance

  def factor(letter: str, size: int) -> str:
    if size == 1:
      return f"one{next(ones)}"
    if letter not in "ABNKT":
      replicated[letter] = None
    return factors.get(letter, letter)

  def mapping(arrays: Mapping) -> str:
    shapes = [
      (axes[name], arrays[name].shape) for name in sorted(arrays)
    ]  # as leaves of a tree
    return ", ".join(" ".join(map(factor, letters, shape)) for letters, shape in shapes)

  rule = f"{mapping(operands)} -> {mapping(results)}"
  sizes = dict(G=num_heads // key_heads) if grouped else {}
  return dict(sharding_rule=rule, need_replication_factors=tuple(replicated), **sizes)
