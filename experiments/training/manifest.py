"""The manifest of a checkpoint: names, dtypes, shapes and digests of its arrays."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from relpos_jax.typing import Array, Integer, PyTree

# Smaller arrays are digested on the host, where nothing is compiled for each shape.
_SMALL = 2**16

# Multiplying by an odd number is a bijection. These are constants of MurmurHash3 and xxHash.
_ODD = tuple(map(np.uint32, (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)))


class Damage(Exception):
  """A checkpoint differs from what was saved; the message names the difference."""


class Entry(NamedTuple):
  """The manifest's entry of an array."""

  kind: str  # as `describe` writes it
  digest: str


def make_manifest(arrays: Mapping, step: int) -> dict:
  """Returns the manifest, as JSON values, of arrays by name that are saved at a step.

  >>> make_manifest(dict(step=jnp.int32(7)), step=7)["arrays"]
  {'step': ['int32[]', '7cbdef15cf606302']}
  """
  entries = {name: [describe(arrays[name]), digest] for name, digest in digests(arrays).items()}
  return dict(step=step, arrays=entries, digest=_seal(entries))


def read_manifest(content: object, step: int) -> dict[str, Entry]:
  """Returns the entries by name of a manifest in the folder of a step.

  Raises Damage: the manifest is invalid, changed, or of another step.
  """
  try:
    if (saved := content["step"]) != step:
      raise Damage(f"it is of step {saved}: another step's folder was renamed or copied")
    if _seal(content["arrays"]) == content["digest"]:
      return {name: Entry(*entry) for name, entry in content["arrays"].items()}
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise Damage(f"its manifest cannot be understood: {type(error).__name__}") from error
  raise Damage("its manifest has another digest than when it was saved")


def check_kinds(arrays: Mapping, entries: Mapping[str, Entry]) -> None:
  """Raises Damage unless arrays have the dtypes and shapes of their entries."""
  for name, entry in entries.items():
    array = arrays.get(name)  # else, where Orbax's metadata are damaged, what was asked for
    is_array = isinstance(array, jax.Array | np.ndarray)
    found = describe(array) if is_array else type(array).__name__
    if found != entry.kind:
      raise Damage(f"{name} is {found}; {entry.kind} was saved")


def check_digests(arrays: Mapping, entries: Mapping[str, Entry]) -> None:
  """Raises Damage unless arrays have the digests of their entries.

  All processes that hold shards of an array must call this.
  """
  for name, found in digests(arrays).items():
    if found != entries[name].digest:
      raise Damage(f"{name} is not what was saved: digest {found}, not {entries[name].digest}")


def by_name(tree: PyTree, field: str = "") -> dict[str, object]:
  """Returns the leaves of a state by dotted path, as in params.kernel, prefixed with `field`."""
  field_path = (jax.tree_util.GetAttrKey(field),) if field else ()
  paths = jax.tree.leaves_with_path(tree)

  def name(path):
    return jax.tree_util.keystr(field_path + path, simple=True, separator=".")

  leaves = {name(path): leaf for path, leaf in paths}
  if len(leaves) != len(paths):
    raise ValueError("two leaves of the state have the same name: rename a key that has a dot")
  return leaves


def describe(array) -> str:
  """Returns dtype and shape of an array or `jax.ShapeDtypeStruct`, as in bfloat16[2,3]."""
  return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def abstract(kind: str) -> jax.ShapeDtypeStruct:
  """Parses the dtype and shape that `describe` returned."""
  dtype, sizes = re.fullmatch(r"(\w+)\[([\d,]*)\]", kind).groups()
  shape = tuple(map(int, sizes.split(","))) if sizes else ()
  return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _seal(entries: Mapping) -> str:
  return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def digests(arrays: Mapping[str, Array | np.ndarray]) -> dict[str, str]:
  """Returns the digests of arrays by name: 64 bits in hexadecimal, whatever their shardings.

  Each 32-bit word is mixed with its index by a bijection and summed modulo 2**32, twice with
  different mixers. A change of one word always changes both sums; any other change goes unnoticed
  with a probability of about 2**-64. Shape and dtype are not included. This detects accidents, not
  forgery.

  The sums are computed on the arrays' devices in one pass; only partial sums are communicated.

  >>> digests(dict(plus=jnp.zeros(3), minus=-jnp.zeros(3)))
  {'plus': '6651a214a3ff51cb', 'minus': '6e16dc5376a617ef'}
  """
  sums = jax.device_get([_sums(array) for array in arrays.values()])
  return {name: f"{a:08x}{b:08x}" for name, (a, b) in zip(arrays, sums, strict=True)}


def _sums(array):
  is_replicated = getattr(array, "is_fully_replicated", True)
  if array.size > _SMALL or not (is_replicated or array.is_fully_addressable):
    return device_sums(array)
  if isinstance(array, jax.Array) and is_replicated:
    array = array.addressable_data(0)
  words = _words(np.asarray(array).reshape(-1), np)
  index = np.arange(words.size, dtype=np.uint32).reshape(words.shape)
  return tuple(part.sum(dtype=np.uint32) for part in _mixed(words, index))


@jax.jit
def device_sums(array: Array) -> tuple[Integer[Array, ""], Integer[Array, ""]]:
  """Computes the two sums of a digest on the array's devices."""
  words = _words(array, jnp)
  index = jnp.zeros(words.shape, jnp.uint32)
  for axis in range(words.ndim):
    stride = np.uint32(math.prod(words.shape[axis + 1 :]) % 2**32)
    index += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * stride
  # Two reductions would make XLA write the mixed words to memory, at a tenth of the speed.
  zero, add = np.uint32(0), lambda x, y: (x[0] + y[0], x[1] + y[1])
  return tuple(lax.reduce(_mixed(words, index), (zero, zero), add, tuple(range(words.ndim))))


def _words(array, numpy):
  """Returns the bits as 32-bit words: one per element, two per 64-bit element."""
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
