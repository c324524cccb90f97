"""Checks of the operator's arguments: one ValueError each, before anything is compiled."""

import dataclasses
import functools
import math
import numbers
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from relpos_jax.attention.relations import (
  ByDistance,
  ContentBias,
  EdgeFeatures,
  EdgeLabels,
  FunctionBias,
  LabelBias,
  LinearBias,
  Numbers,
  Relation,
  Relations,
  nan_if_clamped,
)
from relpos_jax.attention.relations import tables as tables_of
from relpos_jax.typing import Array, ArrayLike

Shape = tuple[int, ...]


def as_array(name: str, x: ArrayLike) -> Array:
  """Returns an array or nested lists of numbers as an array.

  Raises if concrete integers do not fit in int32: jnp.asarray would truncate them
  silently.
  """
  if isinstance(x, Relation):
    raise ValueError(f"{name} is {_describe(x)}; want an array: give relations=")
  leaves, dtype = jax.tree.leaves(x), getattr(x, "dtype", None)
  if not leaves or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
    return jnp.asarray(x)
  if dtype is None or (
    jnp.issubdtype(dtype, jnp.integer) and not np.can_cast(dtype, np.int32)
  ):
    found = np.asarray(x)
    if found.dtype.kind in "iuO" and found.size:
      low, high = found.min(), found.max()
      if low < -(2**31) or high >= 2**31:
        raise ValueError(f"{name} goes from {low} to {high}; want 32-bit integers")
  return jnp.asarray(x)


def check_shapes(query: Array, key: Array, value: Array) -> None:
  """Checks shapes and dtypes: query [*B,T,N,H], key [*B,S,K,H], value [*B,S,K,V]."""
  if query.ndim < 3 or not jnp.issubdtype(query.dtype, jnp.floating):
    raise ValueError(
      f"query is {_describe(query)}; want floating numbers of shape [*B, T, N, H], B any axes"
    )
  *batch, _, heads, width = query.shape
  if key.ndim != query.ndim or [*key.shape[:-3], key.shape[-1]] != [*batch, width]:
    want = ", ".join(str(n) for n in [*batch, "S", "K", width])
    raise ValueError(
      f"key has shape {key.shape}; want [{want}] for query of shape {query.shape}"
    )
  if heads % key.shape[-2]:
    raise ValueError(
      f"key has {key.shape[-2]} heads; want a divisor of the query's {heads} heads"
    )
  if value.shape[:-1] != key.shape[:-1]:
    want = ", ".join(str(n) for n in [*key.shape[:-1], "V"])
    raise ValueError(
      f"value has shape {value.shape}; want [{want}] for key of shape {key.shape}"
    )
  if {key.dtype, value.dtype} != {query.dtype}:
    found = f"key and value have dtypes {key.dtype} and {value.dtype}"
    raise ValueError(f"{found}; want the query's, {query.dtype}")


def check_array(name: str, x: ArrayLike, kind: type, *shapes: Shape) -> Array:
  """Returns x as an array, checked to have one of these shapes and a dtype of this kind."""
  array = as_array(name, x)
  if array.shape not in shapes:
    want = " or ".join(str(shape) for shape in dict.fromkeys(shapes))
    raise ValueError(f"{name} has shape {array.shape}; want {want}")
  if not jnp.issubdtype(array.dtype, kind):
    raise ValueError(f"{name} has dtype {array.dtype}; want {kind.__name__} numbers")
  return array


def check_relations(
  relations: Relations | None,
  logits: Shape,
  widths: tuple[int, int | None],
  dtype: np.dtype,
) -> tuple[Relation, ...]:
  """Returns relations as arrays, checked against logits of shape [*B, N, T, S].

  The widths are those of keys and of values; None for any width of values.
  """
  if relations is None:
    return ()
  several = isinstance(relations, tuple)
  *batch, heads, num_queries, num_keys = logits
  pairs = num_queries, num_keys
  checked = []
  for i, relation in enumerate(relations if several else (relations,)):
    name = f"relations[{i}]" if several else "relations"
    if not isinstance(relation, Relation):
      wanted = ", ".join(kind.__name__ for kind in typing.get_args(Relation))
      wanted += "" if several else ", a tuple of them or None"
      remedy = (
        ": call it" if callable(relation) else ""
      )  # positions of a layer, or a class
      raise ValueError(f"{name} is {_describe(relation)}{remedy}; want {wanted}")
    if isinstance(relation, FunctionBias):
      checked.append(_check_function(name, relation, logits))
      continue
    relation = _with_arrays(name, relation, heads, widths, (*batch, *pairs), pairs)
    if isinstance(relation, ContentBias):
      vectors, shape = (
        relation.query,
        (*batch, num_queries, heads, relation.table.shape[-1]),
      )
      check_array(f"{name}.query", vectors, jnp.floating, shape)
      if vectors.dtype != dtype:
        raise ValueError(
          f"{name}.query has dtype {vectors.dtype}; want the query's, {dtype}"
        )
    checked.append(relation)
  return tuple(checked)


def _check_function(name: str, relation: FunctionBias, logits: Shape) -> FunctionBias:
  """Returns a function's data as arrays with one batch axis, checked as its result is."""
  *batch, heads, num_queries, num_keys = logits
  sizes = dict(
    of_query=(num_queries,), of_key=(num_keys,), of_pair=(num_queries, num_keys)
  )

  def with_batch(field: str, x: ArrayLike) -> Array:
    x = as_array(f"{name}.{field}", x)
    return _with_one_batch_axis(f"{name}.{field}", x, tuple(batch), sizes[field])

  fields = {
    field: jax.tree.map(functools.partial(with_batch, field), getattr(relation, field))
    for field in sizes
  }
  params = jax.tree.map(functools.partial(as_array, f"{name}.params"), relation.params)
  relation = dataclasses.replace(relation, params=params, **fields)

  def of_one(field: str) -> Any:
    num_axes = 1 + len(sizes[field])
    return jax.tree.map(lambda x: jnp.zeros(x.shape[num_axes:], x.dtype), fields[field])

  pair = jnp.int32(0), jnp.int32(0), *map(of_one, sizes)
  found = jax.eval_shape(relation.function, params, *pair)
  is_number = hasattr(found, "shape") and jnp.issubdtype(found.dtype, jnp.number)
  if not is_number or found.shape not in ((), (heads,)):
    raise ValueError(
      f"{name}.function returns {_describe(found)}; want a number, or [{heads}], one per head"
    )
  # Arrays of the code around it become parameters: `jax.custom_vjp` refuses to
  # differentiate them.
  function, around = jax.closure_convert(relation.function, params, *pair)
  if not around:
    return relation
  return dataclasses.replace(
    relation,
    function=lambda given, *pair: function(given[0], *pair, *given[1]),
    params=(params, around),
  )


def _with_one_batch_axis(name: str, x: Array, batch: Shape, size: Shape) -> Array:
  """Returns data of a function with one batch axis, of size 1 if it is shared."""

  def begins_with(*shape: int) -> bool:
    return x.shape[: len(shape)] == shape

  def described(*shape: int) -> str:
    return f"[{', '.join(map(str, shape))}, ...]"

  ones = (1,) * len(batch)
  has_ones = begins_with(*ones, *size)
  is_own, is_shared = begins_with(*batch, *size), begins_with(*size)
  # With one query, [1, 1] may be [1, T], or [T, P] without the axes of a batch.
  is_bare = bool(batch) and is_shared and x.ndim == len(ones) + len(size)
  if has_ones and not is_bare:
    return x.reshape(1, *x.shape[len(batch) :])
  found = f"{name} has an array of shape {x.shape}"
  if (is_own or has_ones) and is_shared and batch:
    raise ValueError(
      f"{found}, which may be shared or not; want {described(*ones, *size)} if it is, "
      "as x[None] has; if it is not, map the call over the sequences with jax.vmap"
    )
  if is_own:
    return x.reshape(math.prod(batch), *x.shape[len(batch) :])
  if is_shared:
    return x[None]
  own = f" or {described(*batch, *size)}" if batch else ""
  raise ValueError(f"{found}; want {described(*size)}{own}")


def check_edge_relation(
  name: str, relation: object, edges: Shape, heads: int, widths: tuple[int, int]
) -> EdgeLabels | EdgeFeatures | None:
  """Returns labels [*B, M] or features [*B, M, F] as arrays, checked against their tables."""
  wanted = EdgeLabels if name == "labels" else EdgeFeatures
  if not isinstance(relation, wanted | None):
    raise ValueError(f"{name} is {_describe(relation)}; want {wanted.__name__} or None")
  return (
    None if relation is None else _with_arrays(name, relation, heads, widths, edges)
  )


def check_numbers(
  scale: ArrayLike, rate: float, key: ArrayLike | None, soft_cap: float | None = None
) -> None:
  """Checks the scale of a call, its dropout and its soft cap."""
  if jnp.ndim(scale):
    raise ValueError(f"scale has shape {jnp.shape(scale)}; want one number")
  if not isinstance(rate, numbers.Real) or not 0 <= rate < 1:
    raise ValueError(f"dropout_rate is {rate!r}; want 0 <= rate < 1")
  if rate > 0 and key is None:
    raise ValueError(
      f"dropout_rate is {rate} and dropout_key is None; want a jax.random.key"
    )
  is_positive = isinstance(soft_cap, numbers.Real) and 0 < soft_cap < float("inf")
  if soft_cap is not None and not is_positive:
    raise ValueError(f"logits_soft_cap is {soft_cap!r}; want a positive number or None")


def _with_arrays(
  name: str,
  relation: Relation,
  heads: int,
  widths: tuple[int, int | None],
  *shapes: Shape,
) -> Relation:
  """Returns a relation as arrays, checked against the shapes that the edges may have."""
  fields = [
    f.name for f in dataclasses.fields(relation) if not f.metadata.get("static")
  ]
  given = {f: getattr(relation, f) for f in fields if getattr(relation, f) is not None}
  arrays = {field: as_array(f"{name}.{field}", x) for field, x in given.items()}
  if missing := [field for field in fields if field not in ("key", "value", *arrays)]:
    raise ValueError(f"{name}.{missing[0]} is None; want an array")
  relation = dataclasses.replace(relation, **arrays)
  if isinstance(relation, LinearBias):
    check_array(f"{name}.slopes", relation.slopes, jnp.floating, (heads,))
    return relation
  tables = tables_of(relation)
  if not tables:
    raise ValueError(f"{name} has neither a key nor a value table; want one or both")
  for field, table in tables.items():
    width = widths[field == "value"]
    if isinstance(relation, Numbers):
      row = ()
    elif isinstance(relation, ContentBias):
      row = relation.query.shape[-1:]
    else:
      row = table.shape[-1:] if width is None else (width,)
    shaped = (
      table.ndim > len(row) and table.shape[1:] in (row, (heads, *row)) and len(table)
    )
    if not shaped or not jnp.issubdtype(table.dtype, jnp.floating):
      want = ["R", *row], ["R", heads, *row]
      shared, own = ("[" + ", ".join(map(str, shape)) + "]" for shape in want)
      raise ValueError(
        f"{name}.{field} is {_describe(table)}; want floating numbers of shape "
        f"{shared}, shared by the heads, or {own}"
      )
  num_rows, *others = {len(table) for table in tables.values()}
  if others:
    found = " and ".join(str(table.shape) for table in tables.values())
    raise ValueError(
      f"{name}.key and {name}.value have shapes {found}; want as many rows"
    )
  match relation:
    case ByDistance(beyond=beyond, left=left):
      if left is None and num_rows % 2 == 0:
        raise ValueError(
          f"{name} has {num_rows} rows; want an odd number, 2k + 1, or give left="
        )
      if left is not None and not (isinstance(left, int) and left in range(num_rows)):
        raise ValueError(
          f"{name}.left is {left!r}; want 0 to {num_rows - 1}, a table row"
        )
      if beyond not in ("clip", "zero"):
        raise ValueError(f'{name}.beyond is {beyond!r}; want "clip" or "zero"')
    case EdgeLabels() | LabelBias():
      labels = arrays["labels"]
      check_array(f"{name}.labels", labels, jnp.integer, *shapes)
      check_range(f"{name}.labels", labels, num_rows)
      for field, table in tables.items():
        tables[field] = nan_if_clamped(table, labels, num_rows)
      relation = dataclasses.replace(relation, **tables)
    case EdgeFeatures():
      wanted = [(*shape, num_rows) for shape in shapes]
      check_array(f"{name}.features", arrays["features"], jnp.floating, *wanted)
  return relation


def check_range(name: str, x: Array, number: int) -> None:
  """Checks that concrete numbers go from -1 to number - 1."""
  low, high = _range_of(x)
  if low < -1 or high >= number:
    raise ValueError(
      f"{name} go from {low} to {high}; want 0 to {number - 1}, or -1 for none"
    )


def check_offset(offset: ArrayLike) -> None:
  """Checks that concrete offsets leave room for distances in 32 bits."""
  if isinstance(offset, int | np.integer):
    low = high = int(offset)
  else:
    low, high = _range_of(as_array("query_offset", offset))
  if low < -(2**30) or high > 2**30:
    raise ValueError(f"query_offset goes from {low} to {high}; want -2**30 to 2**30")


def _range_of(x: Array) -> tuple[int, int]:
  """Returns the least and the greatest of concrete integers; 0 and -1 if not known."""
  if isinstance(x, jax.core.Tracer) or not x.size:
    return 0, -1
  with jax.ensure_compile_time_eval():  # also where a compiled function closes over x
    return int(x.min()), int(x.max())


def _describe(x: object) -> str:
  if hasattr(x, "dtype") and hasattr(x, "shape"):
    return f"{x.dtype} of shape {jnp.shape(x)}"
  return f"of type {type(x).__name__}"
