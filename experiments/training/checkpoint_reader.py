"""Reads a step of a checkpoint folder and compares it with its manifest.

Damage may be visible to one process only, so nothing here waits for other processes.
"""

import functools
import logging
import os
import re
import sys
import textwrap
import time
import warnings
from collections.abc import Mapping

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments.errors import InputError
from experiments.files import Path, check_readable, in_bucket, reading
from experiments.training import manifest
from experiments.training.manifest import Damage, Entry

# Read errors of checkpoints that may be good: these are not renamed as damaged.
_NOT_DAMAGE = (InputError, MemoryError, PermissionError, jax.errors.JaxRuntimeError)
_NOT_DAMAGE_WORDS = re.compile(
  "PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|"
  "Permission denied|Too many open files|Cannot allocate"
)


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
  content = _read_item(path, manifest=ocp.args.JsonRestore())
  return manifest.read_manifest(content, int(path.name))


@functools.cache
def _checkpointer() -> ocp.Checkpointer:
  this = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(primary_host=this, active_processes={this})
  return ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone)


def _read_item(path: Path, **item):
  (name,) = item
  silence_abandoned_requests()
  try:
    with reading(path, name) as folder:
      return _checkpointer().restore(folder, args=ocp.args.Composite(**item))[name]
  except Exception as error:  # Orbax and TensorStore raise many kinds for one broken file.
    _check_access(path)
    reason = _innermost(error)
    if isinstance(error, _NOT_DAMAGE) or _NOT_DAMAGE_WORDS.search(reason):
      raise
    raise Damage(f"its {name} cannot be read ({reason})") from error


def _check_access(path: Path) -> None:
  """Raises InputError for a file or folder without permission, for Orbax a missing file."""
  if in_bucket(path):
    return check_readable(path)
  for file in (path, *path.rglob("*")):
    try:
      os.close(os.open(file, os.O_RDONLY))
    except FileNotFoundError:  # the run deleted it meanwhile
      continue
    except PermissionError as error:
      raise InputError(f"cannot read {file} ({error.strerror}): see to its permissions") from error


def _innermost(error: BaseException) -> str:
  """Returns the first cause of an error, without the details that TensorStore adds."""
  while error.__cause__ is not None:
    error = error.__cause__
  text = re.split(r"\[tensorstore_spec|\[source locations|See full TensorStore", str(error))[0]
  return f"{type(error).__name__}: {textwrap.shorten(text, 200, placeholder=' ...')}"


# When one of many parallel requests fails, Orbax abandons the others. They complain like this.
_ABANDONED = "Event loop is closed|coroutine .* was never awaited"


def silence_abandoned_requests() -> None:
  """Drops the complaints of requests that Orbax abandons, for the rest of the process.

  They come from other threads, before or after the error that is reported.
  """
  logging.getLogger("asyncio").setLevel(logging.CRITICAL)
  warnings.filterwarnings("ignore", _ABANDONED, RuntimeWarning)
  if not hasattr(before := sys.unraisablehook, "silences_orbax"):

    def hook(args) -> None:
      # Orbax renames the GeneratorExit that ends a coroutine as an error of reading.
      is_orbax = "orbax" in getattr(getattr(args.object, "cr_code", None), "co_filename", "")
      if not is_orbax and not re.search(_ABANDONED, str(args.exc_value)):
        before(args)

    hook.silences_orbax = True
    sys.unraisablehook = hook


silence_abandoned_requests()  # here too, below the hooks that commands set and take back
# Orbax logs every phase of every save.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
