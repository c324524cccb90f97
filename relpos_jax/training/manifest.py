"""The manifest of a checkpoint: names, dtypes, shapes and digests of its arrays."""

import functools
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
  """The manifest's entry of an array.

  Attributes:
    kind: dtype and shape, as `describe` writes them: `float32[2,3]`.
    digest: the result of `digest`, or None in checkpoints older than digests.
  """

  kind: str
  digest: str | None = None


def make_manifest(arrays: Mapping, step: int) -> dict:
  """Returns the manifest, as JSON values, of arrays by name that are saved at a step.

  >>> make_manifest(dict(step=jnp.int32(7)), step=7)["arrays"]
  {'step': ['int32[]', '7cbdef15cf606302']}
  """
  found = digests(arrays)
  entries = {name: [describe(array), found[name]] for name, array in arrays.items()}
  return dict(step=step, arrays=entries, digest=_seal(entries))


def read_manifest(content: object, step: int) -> dict[str, Entry]:
  """Returns the entries by name of a manifest in the folder of a step.

  Manifests of earlier versions have no step, or no digests either.

  Raises:
    Damage: the manifest is invalid, changed, or of another step.
  """
  try:
    if content and all(isinstance(kind, str) for kind in content.values()):
      return {name: Entry(describe(abstract(kind))) for name, kind in content.items()}
    if (saved := content.get("step", step)) != step:
      raise Damage(f"it is of step {saved}: another step's folder was renamed or copied")
    if _seal(content["arrays"]) == content["digest"]:
      return {name: Entry(*entry) for name, entry in content["arrays"].items()}
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise Damage(f"its manifest cannot be understood: {type(error).__name__}") from error
  raise Damage("its manifest is not what was saved: its digest is another")


def check_kinds(arrays: Mapping, entries: Mapping[str, Entry]) -> None:
  """Checks that arrays have the dtypes and shapes of their entries.

  Raises:
    Damage: names an array of another dtype or shape.
  """
  for name, entry in entries.items():
    found = _kind(arrays.get(name))
    if found != entry.kind:
      raise Damage(f"{name} is not what was saved: {found}, not {entry.kind}")


def check_digests(arrays: Mapping, entries: Mapping[str, Entry]) -> None:
  """Checks that arrays have the digests of their entries, where those have one.

  All processes that hold shards of an array must call this.

  Raises:
    Damage: names an array that differs from what was saved.
  """
  known = {name: array for name, array in arrays.items() if entries[name].digest is not None}
  for name, found in digests(known).items():
    if found != entries[name].digest:
      raise Damage(f"{name} is not what was saved: digest {found}, not {entries[name].digest}")


def by_name(tree: PyTree, field: str = "") -> dict[str, object]:
  """Returns the leaves of a state by their dotted paths, prefixed with `field` if it is given.

  Raises:
    ValueError: two leaves have the same path.

  >>> list(by_name(dict(params=dict(kernel=jnp.ones(2)))))
  ['params.kernel']
  """
  field_path = (jax.tree_util.GetAttrKey(field),) if field else ()
  paths, _ = jax.tree.flatten_with_path(tree)
  name = lambda path: jax.tree_util.keystr(field_path + path, simple=True, separator=".")
  leaves = {name(path): leaf for path, leaf in paths}
  if len(leaves) != len(paths):
    raise ValueError("two leaves of the state have the same name: rename a key that has a dot")
  return leaves


def num_bytes(arrays: Mapping) -> int:
  """Returns an upper bound of the disk space of a checkpoint; arrays are compressed."""
  blocks = 4096 * (len(arrays) + 16)  # files take full blocks, and a dozen are small
  return blocks + sum(array.size * array.dtype.itemsize for array in arrays.values())


def _kind(value: object) -> str:
  """Returns the kind of a restored value; where Orbax's metadata are damaged it is no array."""
  is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
  return describe(value) if is_array else type(value).__name__


def describe(array) -> str:
  """Returns dtype and shape of an array or `jax.ShapeDtypeStruct`.

  >>> describe(jnp.ones((2, 3), jnp.bfloat16))
  'bfloat16[2,3]'
  """
  return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def abstract(kind: str) -> jax.ShapeDtypeStruct:
  """Parses the dtype and shape that `describe` returned.

  Raises:
    AttributeError, TypeError: `kind` is invalid.

  >>> abstract("bfloat16[2,3]").shape
  (2, 3)
  """
  dtype, sizes = re.fullmatch(r"(\w+)\[([\d,]*)\]", kind).groups()
  shape = tuple(map(int, sizes.split(","))) if sizes else ()
  return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _seal(entries: Mapping) -> str:
  return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def digest(array: Array | np.ndarray) -> str:
  """Returns 64 bits in hexadecimal that depend on the array's bits and not on its sharding.

  Each 32-bit word is mixed with its index by a bijection and summed modulo 2**32, twice with
  different mixers. A change of one word always changes both sums; any other change goes unnoticed
  with a probability of about 2**-64. Shape and dtype are not included. This detects accidents, not
  forgery.

  The sums are computed on the array's devices in one pass; only partial sums are communicated.

  >>> digest(jnp.zeros(3)), digest(-jnp.zeros(3))
  ('6651a214a3ff51cb', '6e16dc5376a617ef')
  """
  return digests({"": array})[""]


def digests(arrays: Mapping[str, Array | np.ndarray]) -> dict[str, str]:
  """Returns the digest of every array by name, computed in parallel."""
  sums = {name: _sums(array) for name, array in arrays.items()}
  return {name: f"{a:08x}{b:08x}" for name, (a, b) in jax.device_get(sums).items()}


def _sums(array):
  """Returns the two sums, computed on the host for a small array that this process holds."""
  is_replicated = getattr(array, "is_fully_replicated", True)
  if array.size > _SMALL or not (is_replicated or array.is_fully_addressable):
    return device_sums(array, by_row=is_replicated)
  if isinstance(array, jax.Array) and is_replicated:
    array = array.addressable_data(0)
  words = _words(np.asarray(array).reshape(-1), np)
  index = np.arange(words.size, dtype=np.uint32).reshape(words.shape)
  return tuple(part.sum(dtype=np.uint32) for part in _mixed(words, index))


@functools.partial(jax.jit, static_argnames="by_row")
def device_sums(
  array: Array, by_row: bool = False
) -> tuple[Integer[Array, ""], Integer[Array, ""]]:
  """Computes the two sums of `digest` on the array's devices.

  With `by_row` rows are summed first, so that XLA uses all cores of a CPU for replicated arrays.
  """
  words = _words(array, jnp)
  strides = [math.prod(words.shape[axis + 1 :]) % 2**32 for axis in range(words.ndim)]
  index = jnp.zeros(words.shape, jnp.uint32)
  for axis, stride in enumerate(strides):
    index += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(stride)
  # Two reductions would make XLA write the mixed words to memory, at a tenth of the speed.
  zero, add = np.uint32(0), lambda x, y: (x[0] + y[0], x[1] + y[1])
  total = lambda parts, axes: lax.reduce(parts, (zero, zero), add, tuple(axes))
  rest = 1 if by_row and words.ndim > 1 else 0
  return total(total(_mixed(words, index), range(rest, words.ndim)), range(rest))


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
