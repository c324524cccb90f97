"""Checks of the operator's arguments: one ValueError each, before anything is compiled."""

import dataclasses
import numbers

import jax
import jax.numpy as jnp
import numpy as np

from relpos_jax.attention.relations import (
  EdgeFeatures,
  EdgeLabels,
  Relations,
  RelativePositions,
)
from relpos_jax.typing import Array, ArrayLike

_INT32 = jnp.iinfo(jnp.int32)
_KINDS = {jnp.integer: "integers", jnp.floating: "floating numbers"}


def as_array(name: str, x: object) -> Array:
  """Returns an array or nested lists of numbers as an array, without losing bits of integers."""
  try:
    check_32_bits(name, x)
    return jnp.asarray(x)
  except TypeError as error:
    raise ValueError(f"{name} is {_describe(x)} and no array; want numbers") from error


def check_32_bits(name: str, x: object) -> None:
  """Raises if concrete integers do not fit in int32: jnp.asarray would truncate them silently."""
  leaves = jax.tree.leaves(x)
  if not leaves or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
    return
  dtype = getattr(x, "dtype", None)
  if dtype is not None and (dtype.kind not in "iu" or np.can_cast(dtype, np.int32)):
    return
  try:
    array = np.asarray(x)
  except ValueError as error:
    raise ValueError(f"{name} is {_describe(x)} and no array; want lists of one length") from error
  if array.dtype.kind not in "iuO" or not array.size:
    return
  low, high = array.min(), array.max()
  if low < _INT32.min or high > _INT32.max:
    raise ValueError(
      f"{name} goes from {low} to {high}; want what int32 holds, {_INT32.min} to {_INT32.max}"
    )


def check_shapes(query: Array, key: Array, value: Array) -> None:
  """Checks shapes and dtypes: query [B,T,N,H], key and value [B,S,K,H], or all without B."""
  if query.ndim not in (3, 4) or not jnp.issubdtype(query.dtype, jnp.floating):
    raise ValueError(
      f"query is {_describe(query)}; want floating numbers of shape [B, T, N, H] or [T, N, H]"
    )
  *batch, _, heads, width = query.shape
  if not heads or not width:
    want = "heads at least 1 wide" if heads else "at least one head"
    raise ValueError(f"query has shape {query.shape}; want {want}")
  if key.ndim != query.ndim or [*key.shape[:-3], key.shape[-1]] != [*batch, width]:
    want = ", ".join(str(n) for n in [*batch, "S", "K", width])
    raise ValueError(f"key has shape {key.shape}; want [{want}] for query of shape {query.shape}")
  if key.shape[-2] == 0 or heads % key.shape[-2]:
    raise ValueError(f"key has {key.shape[-2]} heads; want a divisor of the query's {heads} heads")
  if value.shape != key.shape:
    raise ValueError(f"value has shape {value.shape}; want the key's, {key.shape}")
  for name, array in (("key", key), ("value", value)):
    if array.dtype != query.dtype:
      raise ValueError(f"{name} has dtype {array.dtype}; want the query's, {query.dtype}")


def check_logits_like(name: str, array: Array, shape: tuple[int, ...]) -> None:
  """Checks that a bias or mask has full rank, and on every axis the full size or 1."""
  if array.ndim != len(shape) or any(
    n not in (1, m) for n, m in zip(array.shape, shape, strict=True)
  ):
    raise ValueError(
      f"{name} has shape {array.shape}; want one that broadcasts to {shape}, with as many axes"
    )
  if name == "mask" and array.dtype != bool:
    raise ValueError(f"mask has dtype {array.dtype}; want bool, True where a key may be seen")


def check_integers(name: str, array: Array, *shapes: tuple[int, ...]) -> None:
  """Checks positions, lengths, segment ids or labels: integers of one of these shapes."""
  _check(name, array, jnp.integer, *shapes)


def check_segment_pair(query_segment_ids: object, key_segment_ids: object) -> None:
  """Checks that both segment ids are given, or neither."""
  if (query_segment_ids is None) != (key_segment_ids is None):
    missing = "query_segment_ids" if query_segment_ids is None else "key_segment_ids"
    raise ValueError(f"{missing} is None; want both segment ids or none")


def check_sharding(name: str, array: Array) -> None:
  """Checks that no explicit mesh axis shards an array: products with tables would lose it."""
  spec = jax.typeof(array).sharding.spec
  if any(axis is not None for axis in spec):
    raise ValueError(
      f"{name} is sharded over explicit mesh axes, {spec}; make the mesh with "
      "axis_types=(jax.sharding.AxisType.Auto,) * its number of axes"
    )


def check_window(size: object) -> None:
  """Checks the distance, or the distances to the left and to the right."""
  sides = size if isinstance(size, tuple) else (size, size)
  if len(sides) != 2 or not all(isinstance(side, numbers.Integral) and side >= 0 for side in sides):
    raise ValueError(f"local_window_size is {size!r}; want None, or one or two integers >= 0")


def check_relations(relations: object, logits: tuple[int, ...], width: int) -> Relations:
  """Returns relations as arrays, checked against logits of shape [B, N, T, S] or [N, T, S]."""
  if not isinstance(relations, Relations):
    raise ValueError(
      f"relations is {_describe(relations)}; want RelativePositions(key, value), EdgeLabels, "
      "EdgeFeatures or None"
    )
  relations, num_rows = _with_arrays(relations, logits[-3], width)
  *batch, _, num_queries, num_keys = logits
  pairs = num_queries, num_keys
  match relations:
    case RelativePositions():
      _check_relative_positions(relations, num_rows)
    case EdgeLabels():
      check_integers("relations.labels", relations.labels, (*batch, *pairs), pairs)
      _check_range("relations.labels", relations.labels, num_rows, "-1 (no relation)", _LAST_ROW)
    case EdgeFeatures():
      shapes = (*batch, *pairs, num_rows), (*pairs, num_rows)
      _check("relations.features", relations.features, jnp.floating, *shapes)
  return relations


def check_edge_list(
  senders: Array, receivers: Array, queries: tuple[int, ...], num_keys: int
) -> None:
  """Checks senders and receivers [*B, M]: nodes, or -1, where their numbers are known."""
  *batch, num_queries = queries
  for name, nodes, number in (
    ("senders", senders, num_keys),
    ("receivers", receivers, num_queries),
  ):
    if [*nodes.shape[:-1]] != batch or nodes.ndim != len(queries):
      want = ", ".join(str(n) for n in [*batch, "M"])
      raise ValueError(f"{name} has shape {nodes.shape}; want [{want}], one node an edge")
    check_integers(name, nodes, nodes.shape)
    _check_range(name, nodes, number, "-1 (padding)", "the last node")
  if senders.shape != receivers.shape:
    raise ValueError(
      f"receivers has shape {receivers.shape}; want that of senders, {senders.shape}"
    )


def check_edge_relation(
  name: str, relation: object, edges: tuple[int, ...], head: tuple[int, int]
) -> EdgeLabels | EdgeFeatures | None:
  """Returns labels [*B, M] or features [*B, M, F] as arrays, checked against their tables."""
  wanted = EdgeLabels if name == "labels" else EdgeFeatures
  if not isinstance(relation, wanted | None):
    raise ValueError(f"{name} is {_describe(relation)}; want {wanted.__name__} or None")
  if relation is None:
    return None
  relation, num_rows = _with_arrays(relation, *head)
  if isinstance(relation, EdgeFeatures):
    _check("features.features", relation.features, jnp.floating, (*edges, num_rows))
  else:
    check_integers("labels.labels", relation.labels, edges)
    _check_range("labels.labels", relation.labels, num_rows, "-1 (no label)", _LAST_ROW)
  return relation


def check_scale(scale: ArrayLike) -> None:
  """Checks that the scale is one number."""
  if jnp.ndim(scale):
    raise ValueError(f"scale has shape {jnp.shape(scale)}; want one number")


def check_dropout(rate: float, key: ArrayLike | None) -> None:
  """Checks that the rate is in [0, 1), and that a positive rate comes with a key."""
  if not isinstance(rate, numbers.Real) or not 0 <= rate < 1:
    raise ValueError(f"dropout_rate is {rate!r}; want 0 <= rate < 1")
  if rate > 0 and key is None:
    raise ValueError(f"dropout_rate is {rate} and dropout_key is None; want a jax.random.key")
  if key is not None and not _is_key(key):
    raise ValueError(f"dropout_key is {_describe(key)}; want one key, such as jax.random.key(0)")


_LAST_ROW = "the last row of the tables"


def _with_arrays(relations: Relations, heads: int, width: int) -> tuple[Relations, int]:
  """Returns relations as arrays, and the number of rows of their checked tables."""
  arrays = {}
  for field in dataclasses.fields(relations):
    x = getattr(relations, field.name)
    if x is not None and not field.metadata.get("static"):
      arrays[field.name] = as_array(f"relations.{field.name}", x)
  tables = {name: arrays[name] for name in ("key", "value") if name in arrays}
  if not tables:
    raise ValueError("relations has neither a key nor a value table; want one, or relations=None")
  for name, table in tables.items():
    shaped = table.ndim in (2, 3) and table.shape[1:] in ((width,), (heads, width)) and len(table)
    if not shaped or not jnp.issubdtype(table.dtype, jnp.floating):
      raise ValueError(
        f"relations.{name} is {_describe(table)}; want floating numbers of shape "
        f"[R, {width}], shared by the heads, or [R, {heads}, {width}]"
      )
  if len({len(table) for table in tables.values()}) > 1:
    shapes = " and ".join(str(table.shape) for table in tables.values())
    raise ValueError(f"relations.key and relations.value have shapes {shapes}; want as many rows")
  return dataclasses.replace(relations, **arrays), len(next(iter(tables.values())))


def _check_relative_positions(relations: RelativePositions, num_rows: int) -> None:
  """Checks that the tables have a row for distance zero."""
  if relations.left is None and num_rows % 2 == 0:
    name = "relations.value" if relations.key is None else "relations.key"
    raise ValueError(f"{name} has {num_rows} rows; want an odd number, 2k + 1, or give left=")
  left = relations.left
  if left is not None and not (isinstance(left, numbers.Integral) and left in range(num_rows)):
    raise ValueError(f"relations.left is {left!r}; want 0 to {num_rows - 1}, a table row")
  if relations.beyond not in ("clip", "zero"):
    raise ValueError(f'relations.beyond is {relations.beyond!r}; want "clip" or "zero"')


def _check(name: str, array: Array, kind: type, *shapes: tuple[int, ...]) -> None:
  """Checks that an array has one of these shapes and a dtype of this kind."""
  if array.shape not in shapes:
    want = " or ".join(str(shape) for shape in dict.fromkeys(shapes))
    raise ValueError(f"{name} has shape {array.shape}; want {want}")
  if not jnp.issubdtype(array.dtype, kind):
    raise ValueError(f"{name} has dtype {array.dtype}; want {_KINDS[kind]}")


def _check_range(name: str, x: Array, number: int, lowest: str, highest: str) -> None:
  """Checks that concrete numbers go from -1 to number - 1."""
  if isinstance(x, jax.core.Tracer) or not x.size:
    return
  low, high = int(x.min()), int(x.max())
  if low < -1 or high >= number:
    raise ValueError(f"{name} go from {low} to {high}; want {lowest} to {number - 1}, {highest}")


def _is_key(key: ArrayLike) -> bool:
  """Returns whether this is one `jax.random.key`, or one old `jax.random.PRNGKey`."""
  dtype, shape = getattr(key, "dtype", None), jnp.shape(key)
  if dtype == jnp.uint32:
    return shape == jax.eval_shape(jax.random.PRNGKey, 0).shape
  return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()


def _describe(x: object) -> str:
  if hasattr(x, "dtype"):
    return f"{x.dtype} of shape {jnp.shape(x)}"
  return f"of type {type(x).__name__}"
