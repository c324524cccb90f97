"""Digests of arrays: any flipped bit changes one, where the array's parts lie does not."""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from relpos_jax.typing import Array, Integer

# A smaller array is digested on the host, where nothing has to be compiled for its shape.
_SMALL = 2**16

# Odd, so that to multiply by them is a bijection; the mixers of MurmurHash3 and xxHash.
_ODD = tuple(map(np.uint32, (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)))


def digest(array: Array | np.ndarray) -> str:
  """64 bits, in hexadecimal, that say what the array's bits are, and nothing of its sharding.

  The words of the array, each mixed with its place by a bijection, are summed modulo 2**32; and so
  are these, mixed again. So a change of a single word always changes both sums, and any other
  change goes unnoticed with a probability of about 2**-64. Shape and dtype are not part of it. It
  guards against accidents, not against people.

  Computed where the array is, in one pass: of a sharded array only the sums of its parts travel.

  >>> digest(jnp.zeros(3)), digest(-jnp.zeros(3))
  ('6651a214a3ff51cb', '6e16dc5376a617ef')
  """
  return digests({"": array})[""]


def digests(arrays: Mapping[str, Array | np.ndarray]) -> dict[str, str]:
  """The digest of every array, by name; all are under way before the first is waited for."""
  sums = {name: _sums(array) for name, array in arrays.items()}
  return {name: f"{a:08x}{b:08x}" for name, (a, b) in jax.device_get(sums).items()}


def _sums(array):
  """Of a small array on the host, if that can be: of a replicated one a copy is enough.

  A large one stays where it is: a copy on one device is refused within the context of a mesh.
  """
  is_whole = getattr(array, "is_fully_replicated", True)
  if array.size > _SMALL or not (is_whole or array.is_fully_addressable):
    return device_sums(array, by_row=is_whole)
  if isinstance(array, jax.Array) and is_whole:
    array = array.addressable_data(0)
  words = _words(np.asarray(array).reshape(-1), np)
  index = np.arange(words.size, dtype=np.uint32).reshape(words.shape)
  return tuple(part.sum(dtype=np.uint32) for part in _mixed(words, index))


@functools.partial(jax.jit, static_argnames="by_row")
def device_sums(
  array: Array, by_row: bool = False
) -> tuple[Integer[Array, ""], Integer[Array, ""]]:
  """The two sums of `digest`; the partial ones of all devices are added, nothing else is moved.

  Of an array that each device has whole they are added `by_row` first, for which XLA takes all
  cores of a CPU.
  """
  words = _words(array, jnp)
  strides = [math.prod(words.shape[axis + 1 :]) % 2**32 for axis in range(words.ndim)]
  index = jnp.zeros(words.shape, jnp.uint32)
  for axis, stride in enumerate(strides):
    index += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(stride)
  # One reduction of both, or XLA writes the mixed words to memory, at a tenth of the speed.
  zero, add = np.uint32(0), lambda x, y: (x[0] + y[0], x[1] + y[1])
  total = lambda parts, axes: lax.reduce(parts, (zero, zero), add, tuple(axes))
  rest = 1 if by_row and words.ndim > 1 else 0
  return total(total(_mixed(words, index), range(rest, words.ndim)), range(rest))


def _words(array, numpy):
  """The bits, as 32-bit words: one an element, or two if it is wider."""
  if numpy.iscomplexobj(array):
    array = numpy.stack((array.real, array.imag), -1)
  if array.dtype == bool:
    return array.astype(np.uint32)
  wanted = {1: np.uint8, 2: np.uint16}.get(array.dtype.itemsize, np.uint32)
  if numpy is np:
    return np.ascontiguousarray(array).view(wanted).astype(np.uint32)
  return lax.bitcast_convert_type(array, wanted).astype(jnp.uint32)


def _mixed(words, index):
  x = words + index * _ODD[0]
  x = (x ^ (x >> 16)) * _ODD[1]
  x = (x ^ (x >> 15)) * _ODD[2]
  first = x ^ (x >> 16)
  x = (first ^ (first >> 15)) * _ODD[3]
  return first, x ^ (x >> 13)
