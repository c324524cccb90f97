"""Checks of the operator's arguments: one clear ValueError each, before anything is computed."""

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


def as_array(name: str, x: object) -> Array:
  """An argument, or nested lists of numbers, as an array; no integer may lose bits by it."""
  try:
    check_32_bits(name, x)
    return jnp.asarray(x)
  except TypeError as error:
    raise ValueError(f"{name} is {_describe(x)} and no array; want numbers") from error


def check_32_bits(name: str, x: object) -> None:
  """Integers that int32 holds, where they are known; jnp.asarray would cut them silently."""
  leaves = jax.tree.leaves(x)
  if not leaves or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
    return
  dtype = getattr(x, "dtype", None)
  if dtype is not None and (dtype.kind not in "iu" or np.can_cast(dtype, np.int32)):
    return
  array = _as_numpy(name, x)
  if array.dtype.kind not in "iuO" or not array.size:
    return
  low, high = array.min(), array.max()
  if low < _INT32.min or high > _INT32.max:
    raise ValueError(
      f"{name} goes from {low} to {high}; want what int32 holds, {_INT32.min} to {_INT32.max}"
    )


def _as_numpy(name: str, x: object) -> np.ndarray:
  try:
    return np.asarray(x)
  except ValueError as error:
    raise ValueError(f"{name} is {_describe(x)} and no array; want lists of one length") from error


def check_sizes(least: int, **sizes: object) -> None:
  """A layer's sizes: integers, `least` or more."""
  for name, size in sizes.items():
    if not isinstance(size, numbers.Integral) or size < least:
      raise ValueError(f"{name} is {size!r}; want an integer, at least {least}")


def check_width(name: str, x: Array, width: int) -> None:
  """What a layer reads: [..., D]."""
  if jnp.shape(x)[-1:] != (width,):
    raise ValueError(f"{name} has shape {jnp.shape(x)}; want [..., {width}]")


def check_shapes(query: Array, key: Array, value: Array) -> None:
  """Query [B,T,N,H], key and value [B,S,K,H], or all without B; N a multiple of K; one dtype."""
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
  """Bias or mask: the full rank, every axis of the full size or 1."""
  if array.ndim != len(shape) or any(
    n not in (1, m) for n, m in zip(array.shape, shape, strict=True)
  ):
    raise ValueError(
      f"{name} has shape {array.shape}; want one that broadcasts to {shape}, with as many axes"
    )
  if name == "mask" and array.dtype != bool:
    raise ValueError(f"mask has dtype {array.dtype}; want bool, True where a key may be seen")


def check_tokens_like(name: str, array: Array, shape: tuple[int, ...]) -> None:
  """Positions or segment ids: integers, one per token, the same for the whole batch or not."""
  if array.shape not in (shape, shape[-1:]):
    want = " or ".join(str(s) for s in dict.fromkeys([shape, shape[-1:]]))
    raise ValueError(f"{name} has shape {array.shape}; want {want}")
  if not jnp.issubdtype(array.dtype, jnp.integer):
    raise ValueError(f"{name} has dtype {array.dtype}; want integers")


def check_segment_pair(query_segment_ids: object, key_segment_ids: object) -> None:
  """Both segment ids or none."""
  if (query_segment_ids is None) != (key_segment_ids is None):
    missing = "query_segment_ids" if query_segment_ids is None else "key_segment_ids"
    raise ValueError(f"{missing} is None; want both segment ids or none")


def check_lengths(name: str, lengths: Array, shape: tuple[int, ...]) -> None:
  """Integers, one per sequence."""
  if lengths.shape != shape:
    raise ValueError(f"{name} has shape {lengths.shape}; want {shape}, one length per sequence")
  if not jnp.issubdtype(lengths.dtype, jnp.integer):
    raise ValueError(f"{name} has dtype {lengths.dtype}; want integers")


def check_sharding(name: str, array: Array) -> None:
  """Shardings of explicit mesh axes are part of a type, which products with tables do not keep."""
  spec = jax.typeof(array).sharding.spec
  if any(axis is not None for axis in spec):
    raise ValueError(
      f"{name} is sharded over explicit mesh axes, {spec}; make the mesh with "
      "axis_types=(jax.sharding.AxisType.Auto,) * its number of axes"
    )


def check_window(size: object) -> None:
  """A distance, or one to the left and one to the right."""
  sides = size if isinstance(size, tuple) else (size, size)
  if len(sides) != 2 or not all(isinstance(side, numbers.Integral) and side >= 0 for side in sides):
    raise ValueError(f"local_window_size is {size!r}; want None, or one or two integers >= 0")


def check_relations(relations: object, logits: tuple[int, ...], width: int) -> Relations:
  """A relation whose tables and edges fit logits of shape [B, N, T, S] or [N, T, S].

  Returns it, with arrays for what was given as nested lists.
  """
  if not isinstance(relations, Relations):
    raise ValueError(
      f"relations is {_describe(relations)}; want RelativePositions(key, value), EdgeLabels, "
      "EdgeFeatures or None"
    )
  relations = _with_arrays(relations)
  num_rows = _check_tables(relations, logits[-3], width)
  match relations:
    case RelativePositions():
      _check_relative_positions(relations, num_rows)
    case EdgeLabels():
      _check_labels(relations.labels, num_rows, logits)
    case EdgeFeatures():
      _check_features(relations.features, num_rows, logits)
  return relations


def _with_arrays(relations: Relations) -> Relations:
  arrays = {}
  for field in dataclasses.fields(relations):
    x = getattr(relations, field.name)
    if x is not None and not field.metadata.get("static"):
      arrays[field.name] = as_array(f"relations.{field.name}", x)
  return dataclasses.replace(relations, **arrays)


def _check_tables(relations: Relations, heads: int, width: int) -> int:
  """Tables [R, H] or [R, N, H] of one R, which is returned."""
  tables = {"key": relations.key, "value": relations.value}
  tables = {f"relations.{name}": table for name, table in tables.items() if table is not None}
  if not tables:
    raise ValueError("relations has neither a key nor a value table; want one, or relations=None")
  for name, table in tables.items():
    _check_table(name, table, heads, width)
  if len({len(table) for table in tables.values()}) > 1:
    shapes = " and ".join(str(table.shape) for table in tables.values())
    raise ValueError(f"relations.key and relations.value have shapes {shapes}; want as many rows")
  return len(next(iter(tables.values())))


def _check_relative_positions(relations: RelativePositions, num_rows: int) -> None:
  """A row for distance zero."""
  if relations.left is None and num_rows % 2 == 0:
    name = "relations.value" if relations.key is None else "relations.key"
    raise ValueError(f"{name} has {num_rows} rows; want an odd number, 2k + 1, or give left=")
  left = relations.left
  if left is not None and not (isinstance(left, numbers.Integral) and left in range(num_rows)):
    raise ValueError(f"relations.left is {left!r}; want 0 to {num_rows - 1}, a table row")
  if relations.beyond not in ("clip", "zero"):
    raise ValueError(f'relations.beyond is {relations.beyond!r}; want "clip" or "zero"')


def _check_labels(labels: Array, num_rows: int, logits: tuple[int, ...]) -> None:
  """Integers from -1 to the last row, one per pair."""
  _check_edges("relations.labels", labels, (*logits[:-3], *logits[-2:]), logits[-2:])
  if not jnp.issubdtype(labels.dtype, jnp.integer):
    raise ValueError(f"relations.labels has dtype {labels.dtype}; want integers")
  _check_range(
    "relations.labels", labels, num_rows, "-1 (no relation)", "the last row of the tables"
  )


def _check_features(features: Array, num_rows: int, logits: tuple[int, ...]) -> None:
  """Floating numbers, one for each row of the kernels per pair."""
  pairs = (*logits[-2:], num_rows)
  _check_edges("relations.features", features, (*logits[:-3], *pairs), pairs)
  if not jnp.issubdtype(features.dtype, jnp.floating):
    raise ValueError(f"relations.features has dtype {features.dtype}; want floating numbers")


def _check_edges(
  name: str, edges: Array, batched: tuple[int, ...], unbatched: tuple[int, ...]
) -> None:
  if edges.shape not in (batched, unbatched):
    want = " or ".join(str(shape) for shape in dict.fromkeys([batched, unbatched]))
    raise ValueError(f"{name} has shape {edges.shape}; want {want}")


def check_edge_list(
  senders: Array, receivers: Array, queries: tuple[int, ...], num_keys: int
) -> None:
  """Integers [*B, M]: -1, or a key of a sender and a query of a receiver, where they are known."""
  *batch, num_queries = queries
  for name, nodes, number in (
    ("senders", senders, num_keys),
    ("receivers", receivers, num_queries),
  ):
    if [*nodes.shape[:-1]] != batch or nodes.ndim != len(queries):
      want = ", ".join(str(n) for n in [*batch, "M"])
      raise ValueError(f"{name} has shape {nodes.shape}; want [{want}], one node an edge")
    if not jnp.issubdtype(nodes.dtype, jnp.integer):
      raise ValueError(f"{name} has dtype {nodes.dtype}; want integers")
    _check_range(name, nodes, number, "-1 (padding)", "the last node")
  if senders.shape != receivers.shape:
    raise ValueError(
      f"receivers has shape {receivers.shape}; want that of senders, {senders.shape}"
    )


def check_edge_relation(
  name: str, relation: object, edges: tuple[int, ...], head: tuple
) -> EdgeLabels | EdgeFeatures | None:
  """Labels [*B, M] or features [*B, M, F] that fit the tables.

  Returns the relation, with arrays for what was given as nested lists.
  """
  wanted = EdgeLabels if name == "labels" else EdgeFeatures
  if not isinstance(relation, wanted | None):
    raise ValueError(f"{name} is {_describe(relation)}; want {wanted.__name__} or None")
  if relation is None:
    return None
  relation = _with_arrays(relation)
  num_rows = _check_tables(relation, *head)
  of_edges = getattr(relation, name)
  shape, kind, want = (
    (edges, jnp.integer, "integers")
    if name == "labels"
    else ((*edges, num_rows), jnp.floating, "floating numbers")
  )
  if of_edges.shape != shape:
    raise ValueError(f"{name}.{name} has shape {of_edges.shape}; want {shape}")
  if not jnp.issubdtype(of_edges.dtype, kind):
    raise ValueError(f"{name}.{name} has dtype {of_edges.dtype}; want {want}")
  if name == "labels":
    _check_range("labels.labels", of_edges, num_rows, "-1 (no label)", "the last row of the tables")
  return relation


def _check_range(name: str, x: Array, number: int, lowest: str, highest: str) -> None:
  """-1 to number - 1, where the numbers are known."""
  if isinstance(x, jax.core.Tracer) or not x.size:
    return
  low, high = int(x.min()), int(x.max())
  if low < -1 or high >= number:
    raise ValueError(f"{name} go from {low} to {high}; want {lowest} to {number - 1}, {highest}")


def check_scale(scale: ArrayLike) -> None:
  """One number."""
  if jnp.ndim(scale):
    raise ValueError(f"scale has shape {jnp.shape(scale)}; want one number")


def check_dropout(rate: float, key: ArrayLike | None) -> None:
  """A rate in [0, 1), and a key where something is dropped."""
  if not isinstance(rate, numbers.Real) or not 0 <= rate < 1:
    raise ValueError(f"dropout_rate is {rate!r}; want 0 <= rate < 1")
  if rate > 0 and key is None:
    raise ValueError(f"dropout_rate is {rate} and dropout_key is None; want a jax.random.key")
  if key is not None and not _is_key(key):
    raise ValueError(f"dropout_key is {_describe(key)}; want one key, such as jax.random.key(0)")


def _is_key(key: ArrayLike) -> bool:
  """One of `jax.random.key`, or of the old `jax.random.PRNGKey`."""
  dtype, shape = getattr(key, "dtype", None), jnp.shape(key)
  if dtype == jnp.uint32:
    return shape == jax.eval_shape(jax.random.PRNGKey, 0).shape
  return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()


def _check_table(name: str, table: Array, heads: int, width: int) -> None:
  if (
    table.ndim not in (2, 3)
    or len(table) == 0
    or table.shape[1:] not in ((width,), (heads, width))
    or not jnp.issubdtype(table.dtype, jnp.floating)
  ):
    raise ValueError(
      f"{name} is {_describe(table)}; want floating numbers of shape "
      f"[R, {width}], shared by the heads, or [R, {heads}, {width}]"
    )


def _describe(x: object) -> str:
  if hasattr(x, "dtype"):
    return f"{x.dtype} of shape {jnp.shape(x)}"
  return f"of type {type(x).__name__}"
