"""Lists the checkpoints in a folder, reads them and finds their damage.

Damage may be visible to one process only, so nothing here waits for other processes.
"""

import contextlib
import functools
import itertools
import logging
import os
import pathlib
import re
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from experiments.errors import InputError
from experiments.files import (
  Path,
  checking_bucket,
  download,
  in_bucket,
  list_folder,
  rename,
  write_whole,
)
from experiments.training import manifest
from experiments.training.manifest import Damage, Entry

COMPLETE = "commit_success.txt"  # the last file of a step in a bucket, written by Orbax into gs://

# Read errors of checkpoints that may be good: these are not renamed as damaged.
_NOT_DAMAGE = (InputError, MemoryError, PermissionError, jax.errors.JaxRuntimeError)
_NOT_DAMAGE_WORDS = re.compile(
  "PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|"
  "Permission denied|Too many open files|Cannot allocate"
)


def list_steps(folder: Path) -> list[int]:
  """Returns the steps that have a complete folder, in order; links to folders do not count."""
  names = (path.name for path in _folders(folder))
  return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def list_damaged(folder: Path) -> dict[Path, str]:
  """Returns the folders that were renamed as damaged, each with its reason."""
  reasons = {}
  for path in _folders(folder):
    if path.name.startswith("damaged-"):
      file = path / "reason.txt"
      reasons[path] = file.read_text().strip() if file.exists() else "unknown"
  return reasons


def list_unfinished(folder: Path) -> list[Path]:
  """Returns the folders of saves that are in progress or were interrupted."""
  return sorted(folder.glob("*.orbax-checkpoint-tmp*"))


def _folders(folder: Path) -> list[Path]:
  def is_complete(path):
    if in_bucket(path):
      return path / COMPLETE in list_folder(path)
    return path.is_dir() and not path.is_symlink()

  return list(filter(is_complete, list_folder(folder)))


def mark_damaged(path: Path, reason: str) -> Path:
  """Renames the folder of a step to `damaged-STEP`, adds the reason and returns the new path."""
  suffixes = itertools.chain([""], (f"-{index}" for index in itertools.count(2)))
  paths = (path.with_name(f"damaged-{path.name}{suffix}") for suffix in suffixes)
  new = next(path for path in paths if not path.exists())
  rename(path, new)
  write_whole(new / "reason.txt", f"{reason}\n")
  return new


def read(
  path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct] | None = None, field: str = ""
) -> tuple[Mapping, dict[str, Entry]]:
  """Reads the arrays of a step by name, and their entries; digests are not compared yet.

  Args:
    path: the folder of the step.
    wanted: shapes, dtypes and shardings of the arrays by name; by default all, on the host.
    field: the field of the state that holds the arrays; by default the whole state.

  Raises:
    Damage: the files that this process reads are damaged or partial.
    InputError: the checkpoint is of another model.
  """
  import orbax.checkpoint as ocp

  entries = read_entries(path)
  entries = {n: e for n, e in entries.items() if not field or f"{n}.".startswith(f"{field}.")}
  if wanted is None:
    wanted = {name: manifest.abstract(entry.kind) for name, entry in entries.items()}
    restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in entries}
  else:
    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
  there = {name: entry.kind for name, entry in entries.items()}
  here = {name: manifest.describe(array) for name, array in wanted.items()}
  for name in sorted(here | there):
    if here.get(name) != there.get(name):
      raise InputError(
        f"checkpoint {path} is of another model: {name} is {there.get(name, 'absent')} there and "
        f"{here.get(name, 'absent')} here: use the config it was trained with, or another --workdir"
      )
  request = ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args, partial_restore=True)
  arrays = _read_item(path, state=request)
  manifest.check_kinds(arrays, entries)
  return arrays, entries


def examine(path: Path) -> None:
  """Reads all arrays of a step; raises Damage if it is damaged, partial or unreadable."""
  manifest.check_digests(*read(path))


def is_deleted(path: Path) -> bool:
  """Returns whether the run has deleted a step, after waiting while its files become fewer."""
  before, now = -1, 0
  while now != before:
    time.sleep(0.2)
    before, now = now, sum(len(files) for *_, files in os.walk(path))
  return not path.exists()


def read_entries(path: Path) -> dict[str, Entry]:
  """Reads the manifest of a step; raises Damage if it is damaged or of another step."""
  import orbax.checkpoint as ocp

  content = _read_item(path, manifest=ocp.args.JsonRestore())
  return manifest.read_manifest(content, int(path.name))


@functools.cache
def _checkpointer() -> Any:
  import orbax.checkpoint as ocp

  silence_orbax()
  this = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(primary_host=this, active_processes={this})
  return ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone)


def _read_item(path: Path, **item):
  import orbax.checkpoint as ocp

  (name,) = item
  try:
    with _readable(path, name) as folder:
      return _checkpointer().restore(folder, args=ocp.args.Composite(**item))[name]
  except Exception as error:  # Orbax and TensorStore raise many kinds for one broken file.
    _check_access(path)
    reason = _innermost(error)
    if isinstance(error, _NOT_DAMAGE) or _NOT_DAMAGE_WORDS.search(reason):
      raise
    raise Damage(f"its {name} cannot be read ({reason})") from error


@contextlib.contextmanager
def _readable(path: Path, name: str) -> Iterator[Path]:
  """Yields a folder that Orbax can read; for s3://, a local one with a copy of one sub-folder."""
  if str(path).startswith("s3://"):
    with tempfile.TemporaryDirectory() as local:
      download(path / name, pathlib.Path(local, name))
      yield pathlib.Path(local)
  else:
    yield path if in_bucket(path) else path.absolute()


def _check_access(path: Path) -> None:
  """Raises an error where a file or folder may not be read, which for Orbax is a missing file."""
  # The run may delete it meanwhile.
  with checking_bucket(path), contextlib.suppress(FileNotFoundError):
    if path.is_dir():
      for inner in list_folder(path):
        _check_access(inner)
    else:
      with path.open("rb") as content:
        content.read(1)


def _innermost(error: BaseException) -> str:
  """Returns the first cause of an error, without the details that TensorStore adds."""
  while error.__cause__ is not None:
    error = error.__cause__
  text = re.split(r"\[tensorstore_spec|\[source locations|See full TensorStore", str(error))[0]
  return f"{type(error).__name__}: {textwrap.shorten(text, 200, placeholder=' ...')}"


@functools.cache
def silence_orbax() -> None:
  """Drops the log of every save, and what requests say that Orbax abandons.

  When one of many parallel requests fails, the others complain, from other threads, before or after
  the error that is reported.
  """
  abandoned = "Event loop is closed|coroutine .* was never awaited"
  logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
  logging.getLogger("asyncio").setLevel(logging.CRITICAL)
  warnings.filterwarnings("ignore", abandoned, RuntimeWarning)
  before = sys.unraisablehook

  def hook(args) -> None:
    # Orbax renames the GeneratorExit that ends a coroutine as an error of reading.
    is_orbax = "orbax" in getattr(getattr(args.object, "cr_code", None), "co_filename", "")
    if not is_orbax and not re.search(abandoned, str(args.exc_value)):
      before(args)

  sys.unraisablehook = hook
