"""Lists the checkpoints in a folder, reads them, finds their damage and keeps their
average.

Damage may be visible to one process only, so nothing here waits for other processes.
"""

import contextlib
import functools
import hashlib
import io
import itertools
import json
import logging
import pathlib
import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.errors import InputError
from experiments.files import (
  Path,
  download,
  in_bucket,
  list_folder,
  move,
  whole_file,
  with_digest,
  without_digest,
  write_whole,
)
from relpos_jax.typing import PyTree

COMPLETE = "commit_success.txt"  # the last file of a step in a bucket, written by Orbax into gs://
TEMPORARY = (
  "temporary.txt"  # marks a step between two regular ones; older checkpoints have none
)
_DIGESTS = "sha256sums.txt"  # `sha256sum --check` reads it; older checkpoints have none


class Damage(Exception):
  """A checkpoint differs from what was saved; the message names the difference."""


def list_steps(folder: Path) -> list[int]:
  """Returns the steps that have a complete folder, in order; links to folders do not count."""
  names = (path.name for path in _folders(folder))
  return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def list_damaged(folder: Path) -> list[Path]:
  """Returns the folders that were renamed as damaged."""
  return [path for path in _folders(folder) if path.name.startswith("damaged-")]


def _folders(folder: Path) -> list[Path]:
  paths = list_folder(folder)
  if in_bucket(folder):
    return [path for path in paths if path / COMPLETE in list_folder(path)]
  return [path for path in paths if path.is_dir() and not path.is_symlink()]


def mark_damaged(path: Path, reason: str) -> Path:
  """Renames the folder of a step to `damaged-STEP`, adds the reason and returns the new path."""
  suffixes = itertools.chain([""], (f"-{index}" for index in itertools.count(2)))
  paths = (path.with_name(f"damaged-{path.name}{suffix}") for suffix in suffixes)
  new = next(path for path in paths if not path.exists())
  move(path, new)
  write_whole(new / "reason.txt", f"{reason}\n")
  return new


@contextlib.contextmanager
def local_copy(path: Path) -> Iterator[pathlib.Path]:
  """Yields the folder of a step on this machine: a copy, if it is in a bucket."""
  if not in_bucket(path):
    yield path.absolute()
    return
  with tempfile.TemporaryDirectory() as folder:
    download(path, local := pathlib.Path(folder, path.name))
    yield local


def write_digests(path: Path) -> None:
  """Writes the SHA-256 of each file in the sub-folders of a step; Orbax adds others later."""
  with local_copy(path) as folder:
    files = sorted(file for file in folder.glob("*/**/*") if file.is_file())
    lines = [f"{_digest(file)}  {file.relative_to(folder)}\n" for file in files]
  write_whole(path / _DIGESTS, "".join(lines))


def check_digests(folder: pathlib.Path) -> None:
  """Raises Damage unless the files of a step are as they were saved.

  Warns of a step without digests, as older ones are: nothing tells what was saved.
  """
  file = folder / _DIGESTS
  if file.is_dir():
    raise Damage(f"{_DIGESTS} is a folder")
  lines = file.read_text(errors="replace").splitlines() if file.exists() else []
  if not lines:
    problem = f"checkpoint {folder.name} has no {_DIGESTS}"
    warning = "it is read, and damage of its files may not be seen"
    print(f"{problem}: {warning}", file=sys.stderr)
  for line in lines:
    digest, _, name = line.partition("  ")
    try:
      found = _digest(folder / name)
    except PermissionError:
      raise
    except (OSError, ValueError) as error:  # a damaged name
      raise Damage(f"{name} cannot be read ({type(error).__name__})") from error
    if found != digest:
      raise Damage(f"{name} is not what was saved")


def _digest(file: pathlib.Path) -> str:
  with open(file, "rb") as content:
    return hashlib.file_digest(content, "sha256").hexdigest()


def read(
  folder: pathlib.Path, wanted: Mapping[str, jax.ShapeDtypeStruct], field: str = ""
) -> dict[str, jax.Array]:
  """Reads the arrays of a step by name: those `wanted`, with these shardings.

  A `field` of the state is read alone. Raises Damage if the files that this process
  reads are damaged or partial, and InputError if the checkpoint is of another model.
  """
  import orbax.checkpoint as ocp

  there = read_kinds(folder)
  there = {
    n: x for n, x in there.items() if not field or f"{n}.".startswith(f"{field}.")
  }
  here = {name: describe(array) for name, array in wanted.items()}
  for name in sorted(here | there):
    if here.get(name) != there.get(name):
      before, now = there.get(name, "absent"), here.get(name, "absent")
      raise InputError(
        f"checkpoint {folder.name} is of another model: {name} is {before} there and {now} here: "
        "use the config it was trained with, or another --workdir"
      )
  restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
  request = ocp.args.PyTreeRestore(
    item=wanted, restore_args=restore_args, partial_restore=True
  )
  try:
    arrays = _checkpointer().restore(folder, args=ocp.args.Composite(state=request))[
      "state"
    ]
  except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
    raise
  except (
    Exception
  ) as error:  # Orbax and TensorStore raise many kinds for one broken file
    raise Damage(f"it cannot be read ({textwrap.shorten(str(error), 200)})") from error
  for (
    name
  ) in wanted:  # without Orbax's metadata of an array, what was asked for comes back
    if not isinstance(arrays.get(name), jax.Array):
      raise Damage(f"it has no array {name}")
  return arrays


def read_kinds(folder: pathlib.Path) -> dict[str, str]:
  """Returns the kinds of a step's arrays by name; raises Damage if they are of another step."""
  try:
    manifest = json.loads((folder / "manifest" / "metadata").read_bytes())
    # In older checkpoints a digest follows the kind.
    step, kinds = (
      manifest["step"],
      {name: kind for name, (kind, *_) in manifest["arrays"].items()},
    )
  except PermissionError:
    raise
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    raise Damage(f"its manifest cannot be read ({type(error).__name__})") from error
  if step != int(folder.name):
    raise Damage(f"it is of step {step}: another step's folder was renamed or copied")
  return kinds


def by_name(tree: PyTree, field: str = "") -> dict[str, Any]:
  """Returns the leaves of a state by dotted path, as in params.kernel, prefixed with `field`."""
  prefix = (jax.tree_util.GetAttrKey(field),) if field else ()
  return {
    jax.tree_util.keystr(prefix + path, simple=True, separator="."): leaf
    for path, leaf in jax.tree.leaves_with_path(tree)
  }


def describe(array: Any) -> str:
  """Returns the kind of an array or `jax.ShapeDtypeStruct`, as in bfloat16[2,3]."""
  return f"{array.dtype}[{','.join(map(str, array.shape))}]"


@functools.cache
def _checkpointer() -> Any:
  import orbax.checkpoint as ocp

  silence_orbax()
  this = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(primary_host=this, active_processes={this})
  return ocp.Checkpointer(
    ocp.CompositeCheckpointHandler(), multiprocessing_options=alone
  )


@functools.cache
def silence_orbax() -> None:
  """Silences Orbax's log of every save, and the warnings of requests that it abandons.

  When one of many parallel requests fails, the others complain, from other threads,
  before or after the error that is reported.
  """
  abandoned = "Event loop is closed|coroutine .* was never awaited"
  logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
  logging.getLogger("asyncio").setLevel(logging.CRITICAL)
  warnings.filterwarnings("ignore", abandoned, RuntimeWarning)
  before = sys.unraisablehook

  def hook(args) -> None:
    # Orbax renames the GeneratorExit that ends a coroutine as an error of reading.
    is_orbax = "orbax" in getattr(
      getattr(args.object, "cr_code", None), "co_filename", ""
    )
    if not is_orbax and not re.search(abandoned, str(args.exc_value)):
      before(args)

  sys.unraisablehook = hook


def key_of(folder: Path, steps: Sequence[int]) -> str:
  """Names steps with a digest of their contents: one that is saved anew has another name."""
  digests = {}
  for path in (folder / str(step) for step in steps):
    files = path / _DIGESTS, path / "manifest" / "metadata"
    content = next((file.read_bytes() for file in files if file.is_file()), b"")
    digests[path.name] = hashlib.sha256(content).hexdigest()
  return json.dumps(digests)


def read_average(file: pathlib.Path, key: str, like: PyTree) -> PyTree | None:
  """Returns the average that is kept for a key; None if it is another, damaged or not there."""
  try:
    content = without_digest(file.read_bytes())
  except (OSError, ValueError):
    return None
  wanted = by_name(like)
  with np.load(io.BytesIO(content)) as arrays:
    if arrays["key"].item() != key or not wanted.keys() <= {*arrays}:
      return None
    found = [arrays[name] for name in wanted]
  if [*map(describe, found)] != [*map(describe, wanted.values())]:
    return None
  shardings = [getattr(x, "sharding", None) for x in wanted.values()]
  return jax.tree.unflatten(jax.tree.structure(like), jax.device_put(found, shardings))


def write_average(file: pathlib.Path, key: str, average: PyTree) -> None:
  """Keeps an average for a key, unless the folder cannot be written."""
  arrays = {name: np.asarray(x) for name, x in by_name(average).items()}
  content = io.BytesIO()
  np.savez(content, key=key, **arrays)
  with contextlib.suppress(OSError), whole_file(file) as opened:
    opened.write(with_digest(content.getvalue()))
