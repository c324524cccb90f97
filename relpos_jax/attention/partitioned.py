"""Attention over a mesh: explicit, automatic and manual axes.

XLA partitions the batch and the heads itself. Along a sequence each device computes its
own queries, in `jax.shard_map`, with all keys of the sequence, unless `mesh_axes` shards
these, too (ring.py). A kernel runs on each device's own sequences and heads. For both
the mesh must be in context (`jax.set_mesh`), with the explicit sharding of the query or
names of the mesh's automatic axes: see `mesh_axes`.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from relpos_jax.typing import Array, ArrayLike

# The mesh axes that usually shard an axis: B batch, N heads, T queries.
_USUAL = dict(
  B=("data", "fsdp", "dp", "batch", "replica"),
  N=("tensor", "model", "tp", "heads"),
  T=("sequence", "seq", "sp", "context"),
)
_GIVEN = jax.make_user_context(None)

# The mesh axes that shard the axis of a letter, as a static value.
Shards = tuple[tuple[str, tuple[str, ...]], ...]


def mesh_axes(
  batch: str | tuple[str, ...] | None = None,
  heads: str | tuple[str, ...] | None = None,
  queries: str | tuple[str, ...] | None = None,
  keys: str | tuple[str, ...] | None = None,
):
  """Returns a context in which attention is sharded over these axes of the mesh in
  context.

  Without it, automatic axes of a mesh in context are known by the usual names. The batch
  and the heads need no names, but for kernels. The layers of `relpos_jax.models` shard
  their activations over the same axes.

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


def axes_of_tokens(explicit: Shards) -> tuple[str, ...]:
  """Returns the mesh axes that shard the queries along their sequence."""
  return dict(explicit).get("T") or axes_in_context()["T"]


def axes_of_heads(
  explicit: Shards, shape: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns the mesh axes that shard the batch and the heads evenly.

  The shape is that of the keys, [B, S, K, ...].
  """
  batch, _, key_heads, *_ = shape
  mesh, axes = jax.sharding.get_abstract_mesh(), dict(explicit) or axes_in_context()
  found = []
  for letter, size in (("B", batch), ("N", key_heads)):
    names = axes.get(letter, ())
    num_devices = math.prod(mesh.shape[name] for name in names)
    found.append(names if size % num_devices == 0 else ())
  return tuple(found)


def is_one_device() -> bool:
  """Returns whether the program in hand runs on one device, or on one device's shards."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return num_target_devices() == 1
  sizes = (mesh.shape[name] for name in (*mesh.auto_axes, *mesh.explicit_axes))
  return math.prod(sizes) == 1


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


def on_shards(
  function: Callable, axes: Sequence[tuple[str, ...]], in_specs: Any, out_specs: Any
) -> Callable:
  """Returns a function that each device along these mesh axes calls with its shards.

  Arrays that the devices share are cast to varying ones first: the transpose of the cast
  sums their gradients.
  """
  names = {*itertools.chain(*axes)}
  if not names:
    return function

  def of_shards(*arrays):
    return function(*align_manual_axes(arrays))

  return jax.shard_map(
    of_shards, in_specs=in_specs, out_specs=out_specs, axis_names=names
  )


FIRST_DERIVATIVES_ONLY = (
  "this implementation of attention has first derivatives in reverse mode only: "
  "for second or forward ones name implementation='projected'"
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
