"""Parts of arrays: cut out, put back or added, by the letters of their axes."""

import jax
import jax.numpy as jnp
import numpy as np

from relpos_jax.attention.chunked_keys import Arrays
from relpos_jax.typing import Array, ArrayLike, Int

# A letter for each axis; a gradient "d_x" has those of "x". T and S of size 1 stand for all.
AXES = dict(
  query="BTNH",
  key="BSKH",
  value="BSKH",
  key_table="RNH",
  value_table="RNH",
  bias="BNTS",
  mask="BNTS",
  real_queries="BNTS",
  real_keys="BNTS",
  query_segments="BT",
  key_segments="BS",
  seeds="BN",
  output="BTNH",
  right_sums="BNT",
  row_sums="BNT",
  maximum="BNT",
  inverse_total="BNT",
  delta="BNT",
  # Of one head each, whether or not heads share a table.
  d_key_table="BNRH",
  d_value_table="BNRH",
)

Place = dict[str, tuple[ArrayLike, int]]  # of an axis letter: where to begin, and how many


def cut(arrays: Arrays, place: Place) -> Arrays:
  """The part of each array in that place: heads first, and no axis for the batch."""

  def cut_one(name, array):
    part = jax.lax.dynamic_slice(array, *_corner(name, array.shape, place))
    return part.transpose(_heads_first(name)).squeeze(_batch(name))

  return {name: cut_one(name, array) for name, array in arrays.items()}


def put(arrays: Arrays, parts: Arrays, place: Place) -> Arrays:
  """The arrays with these parts, as `cut` gives them, in that place."""

  def put_one(name, part):
    starts, _ = _corner(name, arrays[name].shape, place)
    part = jnp.expand_dims(part, _batch(name)).transpose(np.argsort(_heads_first(name)))
    return jax.lax.dynamic_update_slice(arrays[name], part, starts)

  return arrays | {name: put_one(name, part) for name, part in parts.items()}


def add(arrays: Arrays, parts: Arrays, place: Place) -> Arrays:
  """The arrays with these parts added in that place; summed first over heads that share one."""
  old = cut({name: arrays[name] for name in parts}, place)
  sum_shared = lambda part, x: part.reshape(len(x), -1, *x.shape[1:]).sum(1)
  new = {name: x + sum_shared(parts[name], x) for name, x in old.items()}
  return put(arrays, new, place)


def zeros(arrays: Arrays, place: Place) -> Arrays:
  """Zeros in the shapes of the parts in that place, axes in the order of the arrays."""
  shapes = {name: _corner(name, x.shape, place)[1] for name, x in arrays.items()}
  return {name: jnp.zeros(shapes[name], x.dtype) for name, x in arrays.items()}


def _corner(
  name: str, shape: tuple[int, ...], place: Place
) -> tuple[list[Int[Array, ""]], tuple[int, ...]]:
  """Where a part begins, and its shape; an axis of size one stands for all."""
  axes = [
    place.get(letter, (0, size)) if size > 1 else (0, size)
    for letter, size in zip(_letters(name), shape, strict=True)
  ]
  starts, sizes = zip(*axes, strict=True)
  return [jnp.int32(start) for start in starts], sizes


def _heads_first(name: str) -> list[int]:
  """The axes in the order of parts: the batch, heads, all others."""
  letters = _letters(name)
  return sorted(range(len(letters)), key=lambda axis: letters[axis] not in "BNK")


def _batch(name: str) -> tuple[int, ...]:
  return (0,) if "B" in _letters(name) else ()


def _letters(name: str) -> str:
  return AXES.get(name) or AXES[name.removeprefix("d_")]
