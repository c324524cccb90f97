"""What a checkpoint says of its arrays: names, dtypes, shapes, digests, and a digest of that."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from relpos_jax.training.digest import digests
from relpos_jax.typing import PyTree


class Damage(Exception):
  """A checkpoint is not what was saved; the message says in what, in one line."""


class Entry(NamedTuple):
  """What a manifest says of an array.

  Attributes:
    kind: dtype and shape, as `describe` writes them: `float32[2,3]`.
    digest: as `relpos_jax.training.digest` has it; None in checkpoints older than digests.
  """

  kind: str
  digest: str | None = None


def make_manifest(arrays: Mapping, step: int) -> dict:
  """The manifest of arrays by name, saved at a step, of values that JSON has; waits for the arrays.

  >>> make_manifest(dict(step=jnp.int32(7)), step=7)["arrays"]
  {'step': ['int32[]', '7cbdef15cf606302']}
  """
  found = digests(arrays)
  entries = {name: [describe(array), found[name]] for name, array in arrays.items()}
  return dict(step=step, arrays=entries, digest=_seal(entries))


def read_manifest(content: object, step: int) -> dict[str, Entry]:
  """The entries of a manifest, by name, found in the folder of a step.

  Raises:
    Damage: it is of another step, or not one that `make_manifest` made, or earlier versions, which
      knew no step, or no digests either.
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
  """Compares dtypes and shapes with those of the entries.

  Raises:
    Damage: names an array that is of another kind than was saved.
  """
  for name, entry in entries.items():
    found = _kind(arrays.get(name))
    if found != entry.kind:
      raise Damage(f"{name} is not what was saved: {found}, not {entry.kind}")


def check_digests(arrays: Mapping, entries: Mapping[str, Entry]) -> None:
  """Compares digests with those of the entries; an entry without one has it right.

  All processes that have parts of an array call this.

  Raises:
    Damage: names an array that is not what was saved.
  """
  known = {name: array for name, array in arrays.items() if entries[name].digest is not None}
  for name, found in digests(known).items():
    if found != entries[name].digest:
      raise Damage(f"{name} is not what was saved: digest {found}, not {entries[name].digest}")


def by_name(tree: PyTree, field: str = "") -> dict[str, object]:
  """The leaves of a state by their dotted paths, below `field` if one is named.

  Raises:
    ValueError: two have the same.

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
  """What a checkpoint takes of a disk at most; arrays that can be are stored smaller."""
  blocks = 4096 * (len(arrays) + 16)  # a file takes whole blocks, and there are a dozen small ones
  return blocks + sum(array.size * array.dtype.itemsize for array in arrays.values())


def _kind(value: object) -> str:
  """Orbax may give anything instead of an array where its own notes are damaged."""
  is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
  return describe(value) if is_array else type(value).__name__


def describe(array) -> str:
  """Dtype and shape of an array, or of what stands for one.

  >>> describe(jnp.ones((2, 3), jnp.bfloat16))
  'bfloat16[2,3]'
  """
  return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def abstract(kind: str) -> jax.ShapeDtypeStruct:
  """The shape and dtype that `describe` wrote.

  Raises:
    AttributeError, TypeError: it wrote something else.

  >>> abstract("bfloat16[2,3]").shape
  (2, 3)
  """
  dtype, sizes = re.fullmatch(r"(\w+)\[([\d,]*)\]", kind).groups()
  shape = tuple(map(int, sizes.split(","))) if sizes else ()
  return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _seal(entries: Mapping) -> str:
  return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
