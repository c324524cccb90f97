"""Checks of single arrays, with errors that name the array."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from relpos_jax.typing import Array, ArrayLike, Int

Shape = tuple[int, ...]


def as_array(name: str, x: ArrayLike) -> Array:
  """Converts numbers, nested lists or an array to a JAX array.

  Raises if concrete integers do not fit in int32, since jnp.asarray would truncate them
  silently.
  """
  if dataclasses.is_dataclass(x):
    raise ValueError(f"{name} is {describe(x)}; want an array: give relations=")
  array: Any = x if hasattr(x, "dtype") else jnp.asarray(x)
  dtype = array.dtype
  if jnp.issubdtype(dtype, jnp.integer) and not np.can_cast(dtype, np.int32):
    low, high = range_of(array)
    if low < -(2**31) or high >= 2**31:
      raise ValueError(f"{name} goes from {low} to {high}; want 32-bit integers")
  return jnp.asarray(array)


def check_array(name: str, x: ArrayLike, kind: type, *shapes: Shape) -> Array:
  """Returns x as an array, and checks its shape and the kind of its dtype."""
  array = as_array(name, x)
  if array.shape not in shapes:
    want = " or ".join(map(str, dict.fromkeys(shapes)))
    raise ValueError(f"{name} has shape {array.shape}; want {want}")
  if not jnp.issubdtype(array.dtype, kind):
    raise ValueError(f"{name} has dtype {array.dtype}; want {kind.__name__} numbers")
  return array


def check_range(name: str, x: ArrayLike, number: int) -> None:
  """Checks that concrete integers are from -1 to number - 1."""
  low, high = range_of(x)
  if low < -1 or high >= number:
    raise ValueError(
      f"{name} go from {low} to {high}; want 0 to {number - 1}, or -1 for none"
    )


def range_of(x: ArrayLike) -> tuple[int, int]:
  """Returns the smallest and largest of concrete integers.

  Returns 0 and -1 if there are none, or if they are traced.
  """
  if isinstance(x, Tracer) or not np.size(x):
    return 0, -1
  with jax.ensure_compile_time_eval():  # x may be closed over in jax.jit
    return int(np.min(x)), int(np.max(x))


def describe(x: Any) -> str:
  """Returns the dtype and the shape of an array, or the type of another object."""
  if hasattr(x, "dtype") and hasattr(x, "shape"):
    return f"{x.dtype} of shape {x.shape}"
  return f"of type {type(x).__name__}"


def shape_text(*sizes: int | str) -> str:
  """Formats a shape for an error message."""
  return "[" + ", ".join(map(str, sizes)) + "]"


def accumulation_dtype(dtype: DTypeLike) -> np.dtype:
  """Returns the accumulation dtype: float64 for float64, otherwise float32."""
  return jnp.promote_types(dtype, jnp.float32)


def with_one_batch_axis(x: Array, rank: int) -> Array:
  """Merges all axes before the last `rank` into one batch axis.

  If there are none, it adds a batch axis of size 1.
  """
  num_axes = x.ndim - rank
  if num_axes == 1:
    return x
  return x.reshape(math.prod(x.shape[:num_axes]), *x.shape[num_axes:])


def slice_queries(
  x: Array | None, start: Int[Array, ""], size: int, axis: int = 1
) -> Array | None:
  """Slices a block of queries along an axis of x.

  Returns x unchanged if it is None, or if the axis has size 1.
  """
  if x is None or x.shape[axis] == 1:
    return x
  return jax.lax.dynamic_slice_in_dim(x, start, size, axis)
