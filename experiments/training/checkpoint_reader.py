"""Lists the checkpoints in a folder, reads them and detects damage.

No function here waits for other processes, because they may not notice the damage.
"""

import contextlib
import errno
import functools
import hashlib
import json
import logging
import pathlib
import re
import sys
import tempfile
import textwrap
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from experiments.errors import InputError
from experiments.files import (
  Path,
  download,
  in_bucket,
  list_folder,
  move,
  write_lines,
)
from relpos_jax.typing import PyTree

COMPLETE = "commit_success.txt"  # written last in a bucket, as Orbax does in gs://
TEMPORARY = "temporary.txt"  # marks a checkpoint between two regular saves
_DIGESTS = "sha256sums.txt"  # for `sha256sum --check`; old checkpoints have none
# Errors of the system or of a network's file server, not of a file.
_SYSTEM_ERRORS = errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT


class Damage(Exception):
  """Reports that a checkpoint differs from what was saved, and how."""


@contextlib.contextmanager
def _detect_damage(name: str) -> Iterator[None]:
  """Turns an error of reading the file `name` into Damage.

  Orbax and TensorStore raise many kinds of errors for a broken file, so all kinds
  become Damage. There are four exceptions, because the file is not their cause: lack
  of memory, lack of permission, a failure inside JAX, and one of the system or server.
  """
  try:
    yield
  except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
    raise
  except Exception as error:
    if getattr(error, "errno", None) in _SYSTEM_ERRORS:
      raise
    reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
    raise Damage(f"{name} cannot be read ({reason})") from error


def list_steps(folder: Path) -> list[int]:
  """Returns the steps with a complete folder, in order; links are ignored."""
  steps = []
  for path in _folders(folder):
    if re.fullmatch("0|[1-9][0-9]*", path.name):
      steps.append(int(path.name))
  return sorted(steps)


def list_regular(folder: Path) -> list[int]:
  """Returns the steps of regular saves, without the saves that a signal caused."""
  steps = list_steps(folder)
  return [step for step in steps if not (folder / str(step) / TEMPORARY).exists()]


def list_damaged(folder: Path) -> list[Path]:
  """Returns the folders of steps that were renamed because of damage."""
  return [path for path in _folders(folder) if path.name.startswith("damaged-")]


def _folders(folder: Path) -> list[Path]:
  paths = list_folder(folder)
  if in_bucket(folder):
    return [path for path in paths if path / COMPLETE in list_folder(path)]
  return [path for path in paths if path.is_dir() and not path.is_symlink()]


def explain_missing(folder: Path) -> InputError:
  """Makes the error for a folder without a good checkpoint."""
  damaged = [path.name for path in list_damaged(folder)]
  damaged += map(str, list_steps(folder))
  if not damaged:
    return InputError(
      f"no checkpoint in {folder}: train first, or give another --workdir"
    )
  return InputError(
    f"no good checkpoint in {folder}: damaged are {', '.join(damaged)}: "
    "put back a good copy, or delete that folder to start again"
  )


def mark_damaged(path: Path, reason: str) -> Path:
  """Renames a step's folder to `damaged-STEP`; returns the new path.

  Writes the reason into reason.txt.
  """
  new = path.with_name(f"damaged-{path.name}")
  number = 1
  while new.exists():
    number += 1
    new = path.with_name(f"damaged-{path.name}-{number}")
  move(path, new)
  write_lines(new / "reason.txt", [reason])
  return new


@contextlib.contextmanager
def local_copy(path: Path) -> Iterator[pathlib.Path]:
  """Yields a step's folder on this machine; copies it first if it is in a bucket."""
  if not in_bucket(path):
    yield path.absolute()
    return
  with tempfile.TemporaryDirectory() as folder:
    local = pathlib.Path(folder, path.name)
    download(path, local)
    yield local


def write_digests(path: Path) -> None:
  """Writes the SHA-256 of each file in the sub-folders of a step.

  Files in the step's folder itself are left out, because Orbax still adds some.
  """
  lines = []
  with local_copy(path) as folder:
    for file in sorted(folder.glob("*/**/*")):
      if file.is_file():
        lines.append(f"{_digest(file)}  {file.relative_to(folder)}")
  write_lines(path / _DIGESTS, lines)


def check_digests(folder: pathlib.Path) -> None:
  """Raises Damage unless the files of a step match their digests.

  Warns if the step has no digests, as is the case for older checkpoints.
  """
  file, lines = folder / _DIGESTS, []
  with _detect_damage(_DIGESTS), contextlib.suppress(FileNotFoundError):
    lines = file.read_text(errors="replace").splitlines()
  if not lines:
    print(
      f"checkpoint {folder.name} has no {_DIGESTS}: it is read, and damage of its "
      "files may not be seen",
      file=sys.stderr,
    )
  for line in lines:
    digest, _, name = line.partition("  ")
    with _detect_damage(name):  # the name may be damaged too
      present = _digest(folder / name)
    if present != digest:
      raise Damage(f"{name} is not what was saved")


def _digest(file: pathlib.Path) -> str:
  with open(file, "rb") as content:
    return hashlib.file_digest(content, "sha256").hexdigest()


def read_digests(folder: Path, steps: Sequence[int]) -> dict[int, str]:
  """Reads a digest of each step; it changes when the step is saved again."""
  digests = {}
  for step in steps:
    file = folder / str(step) / _DIGESTS
    if not file.is_file():  # older steps have digests in their manifest
      file = folder / str(step) / "manifest" / "metadata"
    digests[step] = _digest(file) if file.is_file() else ""
  return digests


def read(folder: pathlib.Path, like: PyTree, field: str = "") -> PyTree:
  """Reads the state of a step, with the structure and the shardings of `like`.

  With `field`, reads that field of the state alone. Raises Damage if files that this
  process reads are damaged or incomplete. Raises InputError if the checkpoint is of
  another model.
  """
  import orbax.checkpoint as ocp

  state = {field: like} if field else like
  wanted = name_leaves(jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
  _check_same_model(folder, wanted, field)
  request = ocp.args.PyTreeRestore(
    item=wanted,
    restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
    partial_restore=True,
  )
  with _detect_damage("it"):
    items = _checkpointer().restore(folder, ocp.args.Composite(state=request))
  leaves = []
  for name in wanted:
    leaf = items["state"].get(name)
    # If Orbax's metadata of an array is missing, it returns the request itself.
    if not isinstance(leaf, jax.Array):
      raise Damage(f"it has no array {name}")
    leaves.append(leaf)
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _check_same_model(
  folder: pathlib.Path, wanted: Mapping[str, Any], field: str
) -> None:
  saved = read_kinds(folder)
  for name in sorted(saved.keys() | wanted.keys()):
    if field and name.split(".")[0] != field:
      continue
    kind = saved.get(name, "absent")
    kind_here = describe(wanted[name]) if name in wanted else "absent"
    if kind != kind_here:
      other = "optimizer" if name.startswith("opt_state.") else "model"
      raise InputError(
        f"checkpoint {folder.name} is of another {other}: {name} is {kind} there and "
        f"{kind_here} here: use the {other} it was trained with, or another --workdir"
      )


def read_kinds(folder: pathlib.Path) -> dict[str, str]:
  """Reads the dtypes and shapes of a step's arrays, as `describe` formats them.

  Raises Damage if the manifest is unreadable, or if it is of another step.
  """
  kinds = {}
  with _detect_damage("its manifest"):
    manifest = json.loads((folder / "manifest" / "metadata").read_bytes())
    step = manifest["step"]
    for name, description in manifest["arrays"].items():
      kinds[name] = description[0]  # in older checkpoints, a digest follows
  if step != int(folder.name):
    raise Damage(f"it is of step {step}: another step's folder was renamed or copied")
  return kinds


def name_leaves(tree: PyTree) -> dict[str, Any]:
  """Returns the leaves of a tree by dotted path, such as params.kernel."""
  arrays = {}
  for path, leaf in jax.tree.leaves_with_path(tree):
    arrays[jax.tree_util.keystr(path, simple=True, separator=".")] = leaf
  return arrays


def describe(array: Any) -> str:
  """Formats the dtype and shape of an array, such as bfloat16[2,3]."""
  return f"{array.dtype}[{','.join(map(str, array.shape))}]"


@functools.cache
def _checkpointer() -> Any:
  import orbax.checkpoint as ocp

  silence_orbax()
  this = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(primary_host=this, active_processes={this})
  handler = ocp.CompositeCheckpointHandler()
  return ocp.Checkpointer(handler, multiprocessing_options=alone)


@functools.cache
def silence_orbax() -> None:
  """Silences Orbax's log of every save, and the noise after a failed request.

  Orbax sends requests in parallel. After one has failed, the others complain from other
  threads, before or after the error that is reported.
  """
  abandoned = "Event loop is closed|coroutine .* was never awaited"
  logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
  logging.getLogger("asyncio").setLevel(logging.CRITICAL)
  warnings.filterwarnings("ignore", abandoned, RuntimeWarning)
  hook_before = sys.unraisablehook

  def hook(unraisable) -> None:
    # Orbax turns the GeneratorExit that ends a coroutine into an error of reading.
    is_coroutine = isinstance(unraisable.object, types.CoroutineType)
    if not is_coroutine and not re.search(abandoned, str(unraisable.exc_value)):
      hook_before(unraisable)

  sys.unraisablehook = hook
