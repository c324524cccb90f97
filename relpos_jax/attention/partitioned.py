"""Sharding of attention over a mesh, with explicit, automatic or manual axes.

XLA partitions the batch and the heads by itself. If a sequence is sharded, each device
computes its own queries in `jax.shard_map`, with all keys of the sequence. If
`mesh_axes` shards the keys, too, they go around a ring (ring.py). A kernel runs on each
device with its own sequences and heads.

Sharded sequences and kernels need the mesh in context (`jax.set_mesh`). They also need
a query with explicit sharding, or automatic axes with names that `mesh_axes` knows.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from relpos_jax.typing import Array, ArrayLike

# Usual names of the mesh axes that shard the axes B batch, N heads and T queries.
_USUAL_NAMES = dict(
  B=("data", "fsdp", "dp", "batch", "replica"),
  N=("tensor", "model", "tp", "heads"),
  T=("sequence", "seq", "sp", "context"),
)
_NAMED = jax.make_user_context(None)

# Pairs of an axis' letter and the mesh axes that shard it. A tuple, since it is static.
Shards = tuple[tuple[str, tuple[str, ...]], ...]


def mesh_axes(
  batch: str | tuple[str, ...] | None = None,
  heads: str | tuple[str, ...] | None = None,
  queries: str | tuple[str, ...] | None = None,
  keys: str | tuple[str, ...] | None = None,
):
  """Names the mesh axes that shard attention, within a `with` statement.

  Use it for meshes with automatic axes. Outside of it, attention looks for the usual
  names below. XLA shards the batch and the heads without knowing names; only kernels
  need the names of their axes. The layers of `relpos_jax.models` shard their
  activations over the same axes.

  Args:
    batch: axes that shard the batch, () for none. None looks for "data", "fsdp", "dp",
      "batch" and "replica".
    heads: axes that shard the heads. None looks for "tensor", "model", "tp" and
      "heads".
    queries: axes that shard the queries. None looks for "sequence", "seq", "sp" and
      "context".
    keys: None, to gather the keys, or the same axes as `queries`, to shard the keys and
      pass them around a ring of devices.

  The mesh must be in context when attention is called. The call raises ValueError if
  the mesh lacks one of the names.

  >>> with mesh_axes(batch=("replicas", "zero"), heads="megatron"):
  ...   pass
  """
  if keys is not None and (queries is None or _as_tuple(keys) != _as_tuple(queries)):
    raise ValueError(f"keys is {keys!r}; want None or the axes of queries, {queries!r}")
  named = dict(B=batch, N=heads, T=queries, S=keys)
  return _NAMED(
    tuple((x, _as_tuple(names)) for x, names in named.items() if names is not None)
  )


def axes_in_context() -> dict[str, tuple[str, ...]]:
  """Returns the automatic mesh axes that shard B, N, T and S, by letter."""
  mesh = jax.sharding.get_abstract_mesh()
  free = [name for name in mesh.auto_axes if mesh.shape[name] > 1]
  named = dict(_NAMED.value or ())
  missing = {*itertools.chain(*named.values())}.difference(mesh.axis_names)
  if missing and mesh.axis_names:
    raise ValueError(
      f"mesh_axes has {sorted(missing)}; want axes of the mesh in context, "
      f"{mesh.axis_names}"
    )
  usual = {x: _without(names, named) for x, names in _USUAL_NAMES.items()}
  known = usual | named
  return {
    letter: tuple(x for x in names if x in free) for letter, names in known.items()
  }


def _without(
  names: tuple[str, ...], used: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
  """Leaves out the names that already shard an axis in `used`, by letter."""
  others = {*itertools.chain(*used.values())}
  return tuple(name for name in names if name not in others)


def axes_of_keys() -> tuple[tuple[str, ...], int]:
  """Returns the mesh axes of `mesh_axes(keys=...)`, and the number of their devices."""
  mesh, names = jax.sharding.get_abstract_mesh(), axes_in_context().get("S", ())
  return names, math.prod(mesh.shape[name] for name in names)


def target_device() -> Any:
  """Returns a device of the mesh in context, or JAX's default device.

  A mesh in context (`jax.set_mesh`) has devices of this machine, or descriptions of
  devices (`jax.experimental.topologies`). Code that is traced in the context of the
  mesh is compiled for the devices of the mesh.
  """
  # A device, None, or the name of a platform.
  default = jax.config.jax_default_device  # pyright: ignore
  device = jax.sharding.get_abstract_mesh().abstract_device or default
  return jax.devices(device)[0] if device is None or isinstance(device, str) else device


def target_platform() -> str:
  """Returns the platform of `target_device`: "cpu", "gpu" or "tpu"."""
  platform = target_device().platform
  return "gpu" if platform in ("cuda", "rocm") else platform


def num_target_devices() -> int:
  """Returns the number of devices of the mesh in context, or of all devices."""
  mesh = jax.sharding.get_abstract_mesh()
  return jax.device_count() if mesh.empty else mesh.size


def explicit_axes(query: ArrayLike) -> Shards:
  """Returns the explicit mesh axes that shard the query, by letter."""
  sharding = jax.typeof(query).sharding
  if not sharding.mesh.explicit_axes:
    return ()
  letters = "BTNH"[-jnp.ndim(query) :]
  return tuple(
    (x, _as_tuple(names)) for x, names in zip(letters, sharding.spec, strict=True)
  )


def with_automatic_axes(
  attend: Callable,
  query: ArrayLike,
  *arguments: Any,
  result: str | tuple[str, ...] = "BTNH",
) -> Any:
  """Calls `attend(*arguments)`, with explicit mesh axes made automatic.

  `result` names the axes of the result by letters, such as "BTNH". For several results
  it is a tuple of such names. Each axis of a result is sharded like the query's axis
  with the same letter.
  """
  automatic, arrays = split_arrays(
    attend, arguments, lambda x: isinstance(x, jax.Array)
  )
  meshes = (jax.typeof(x).sharding.mesh for x in arrays.values())
  mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
  if mesh is None:
    return attend(*arguments)

  spec = dict(explicit_axes(query))

  def sharding(letters: str) -> NamedSharding:
    if jnp.ndim(query) == 3:  # of `edge_attention`, without a batch
      letters = letters.removeprefix("B")
    names = [spec.get(letter) or None for letter in letters]
    return NamedSharding(mesh, PartitionSpec(*names))

  out = jax.tree.map(sharding, result)
  return jax.sharding.auto_axes(automatic, axes=mesh.explicit_axes, out_sharding=out)(
    arrays
  )


def split_arrays(
  function: Callable, arguments: tuple, is_array: Callable[[Any], bool]
) -> tuple[Callable, dict[int, Any]]:
  """Splits arguments into arrays and the rest.

  Returns a function that takes only the arrays, and a dict of the arrays by index.
  """
  leaves, structure = jax.tree.flatten(arguments)

  def call(arrays):
    full = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
    return function(*jax.tree.unflatten(structure, full))

  return call, {i: x for i, x in enumerate(leaves) if is_array(x)}


def axes_of_tokens(explicit: Shards) -> tuple[str, ...]:
  """Returns the mesh axes that shard the queries along their sequence."""
  axes = dict(explicit)
  return axes.get("T") or _without(axes_in_context()["T"], axes)


def axes_of_heads(
  explicit: Shards, shape: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns the mesh axes that shard the batch, and those that shard the heads.

  `shape` is the shape of the keys, [B, S, K, H]. If the axes do not divide the batch or
  the key heads evenly, an empty tuple takes their place.
  """
  batch, _, key_heads, *_ = shape
  mesh, axes = jax.sharding.get_abstract_mesh(), dict(explicit) or axes_in_context()
  axes_by_letter = []
  for letter, size in (("B", batch), ("N", key_heads)):
    names = axes.get(letter, ())
    num_devices = math.prod(mesh.shape[name] for name in names)
    axes_by_letter.append(names if size % num_devices == 0 else ())
  return tuple(axes_by_letter)


def is_one_device() -> bool:
  """Returns whether traced code computes on the arrays of one device only.

  It does if there is one device, or if every mesh axis with more than one device is
  manual, as inside `jax.shard_map`.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return num_target_devices() == 1
  sizes = (mesh.shape[name] for name in (*mesh.auto_axes, *mesh.explicit_axes))
  return math.prod(sizes) == 1


def align_manual_axes(x: Any) -> Any:
  """Casts all arrays of a tree to vary over the same manual axes of `jax.shard_map`."""
  varying = frozenset().union(*(_varying(leaf) for leaf in jax.tree.leaves(x)))

  def cast(leaf):
    if not isinstance(leaf, jax.Array):
      return leaf
    missing = varying - _varying(leaf)
    if not missing:
      return leaf
    return jax.lax.pcast(leaf, tuple(sorted(missing)), to="varying")

  return jax.tree.map(cast, x)


def zeros(shape: Sequence[int], like: Array) -> Array:
  """Returns zeros with the dtype and the varying manual axes of `like`."""
  return align_manual_axes((jnp.zeros(shape, like.dtype), like))[0]


def shapes_like(like: Array, shapes: Any) -> Any:
  """Returns shapes with the varying manual axes of `like`."""
  kind = jax.typeof(like).manual_axis_type
  return jax.tree.map(lambda shape: shape.update(manual_axis_type=kind), shapes)


def _varying(x: Any) -> frozenset[str]:
  return jax.typeof(x).manual_axis_type.varying


def _as_tuple(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
  return (names,) if isinstance(names, str) else tuple(names or ())


def on_shards(
  function: Callable, axes: Sequence[tuple[str, ...]], in_specs: Any, out_specs: Any
) -> Callable:
  """Maps a function over the shards of its arguments along the mesh axes in `axes`.

  Arrays that all devices share are first cast to arrays that vary over devices. The
  transpose of this cast sums their gradients over devices.
  """
  names = {*itertools.chain(*axes)}
  if not names:
    return function

  def call(*arrays):
    return function(*align_manual_axes(arrays))

  return jax.shard_map(call, in_specs=in_specs, out_specs=out_specs, axis_names=names)


FIRST_DERIVATIVES_ONLY = (
  "this implementation of attention has first derivatives in reverse mode only: "
  "for second or forward ones name implementation='projected'"
)


def first_derivatives_only(function: Callable) -> Callable:
  """Makes a function raise NotImplementedError when it is differentiated.

  Wrap a function that the rules of a `jax.custom_vjp` call. Then a first derivative
  only calls it, and a second derivative raises.
  """
  function = jax.custom_jvp(function)

  @function.defjvp
  def refuse(primals, tangents):
    raise NotImplementedError(FIRST_DERIVATIVES_ONLY)

  return function
