"""Reads a step of a checkpoint folder and compares it with its manifest."""

import functools
import logging
import math
import os
import pathlib
import re
import sys
import textwrap
import traceback
import types
import warnings
from collections.abc import Mapping

import jax
import numpy as np
import orbax.checkpoint as ocp

from relpos_jax.errors import InputError
from relpos_jax.training import checkpoint_files, manifest, processes
from relpos_jax.training.manifest import Damage

# Read errors of checkpoints that may be good: these are not renamed as damaged.
_NOT_DAMAGE = (MemoryError, PermissionError, jax.errors.JaxRuntimeError)
_NOT_DAMAGE_WORDS = re.compile(
  "PERMISSION_DENIED|RESOURCE_EXHAUSTED|Permission denied|Too many open files|Cannot allocate"
)


class Reader:
  """Reads the steps of a checkpoint folder, each process by itself, and changes nothing.

  Damage may be visible to one process only, so no method waits for other processes.

  >>> from relpos_jax.training.checkpoint import Checkpoints
  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   with Checkpoints(folder) as checkpoints:
  ...     checkpoints.save(7, dict(step=jax.numpy.int32(7)))
  ...   print(Reader(folder).entries(7), Reader(folder).examine(7))
  {'step': Entry(kind='int32[]', digest='7cbdef15cf606302')} good
  """

  def __init__(self, folder: str | pathlib.Path):
    """Raises InputError where Orbax cannot keep checkpoints: see `checkpoint_files.check_path`."""
    self._folder = pathlib.Path(folder)
    checkpoint_files.check_path(self._folder)
    self._has_noted_age = False

  def read(
    self, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct], field: str = ""
  ) -> tuple[Mapping, Mapping]:
    """Returns the arrays of a step by name, and their entries; digests are not compared yet.

    Args:
      step: a step that has a folder.
      wanted: shapes, dtypes and shardings of the arrays by name.
      field: the field of the state that holds the arrays; by default the whole state.

    Raises:
      Damage: the files that this process reads are damaged or partial.
      InputError: the checkpoint is of another model, or as for `entries`.
    """
    entries = self.entries(step)
    entries = {n: e for n, e in entries.items() if not field or f"{n}.".startswith(f"{field}.")}
    self._compare(step, entries, wanted)
    arrays = self._read_arrays(step, wanted, ocp.checkpoint_utils.construct_restore_args(wanted))
    manifest.check_kinds(arrays, entries)
    if not _have_digests(entries) and not self._has_noted_age:
      self._has_noted_age = True
      processes.print_once(
        f"checkpoints in {self._folder} are older than digests: none to verify them by"
      )
    return arrays, entries

  def examine(self, step: int) -> str:
    """Reads all arrays of a step and returns "good", or a note on a step without digests.

    Raises:
      Damage: the step is damaged, partial or unreadable.
      InputError: another program saved it, or it cannot be read for another reason than damage.
    """
    entries = self.entries(step)
    self._verify(step, entries)
    return "good" if _have_digests(entries) else "readable; older than digests"

  def check_found(self, step: int) -> None:
    """Reads the smallest array of a step; raises Damage or InputError as `examine` does."""
    entries = self.entries(step)
    size = lambda name: math.prod(manifest.abstract(entries[name].kind).shape)
    smallest = min(entries, key=size)
    self._verify(step, {smallest: entries[smallest]})

  def _verify(self, step: int, entries: Mapping[str, manifest.Entry]) -> None:
    shapes = {name: manifest.abstract(entry.kind) for name, entry in entries.items()}
    on_host = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in entries}
    arrays = self._read_arrays(step, shapes, on_host)
    manifest.check_kinds(arrays, entries)
    manifest.check_digests(arrays, entries)

  def entries(self, step: int) -> dict[str, manifest.Entry]:
    """Returns the entries of a step's manifest by name; no arrays are read.

    Raises:
      Damage: the manifest is damaged, or of another step.
      InputError: another program saved this step, or there is no access to it.
    """
    path = self._folder / str(step)
    if not os.path.isdir(path / "manifest") and checkpoint_files.is_foreign(path):
      raise InputError(
        f"checkpoint {path} was not saved by relpos_jax (it has no manifest): "
        "delete this folder, or give another --workdir"
      )
    return manifest.read_manifest(self._read_item(step, manifest=ocp.args.JsonRestore()), step)

  def shapes(self, step: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of a step's arrays by name; errors as for `entries`."""
    return {name: manifest.abstract(entry.kind) for name, entry in self.entries(step).items()}

  @functools.cached_property
  def _checkpointer(self) -> ocp.Checkpointer:
    this = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=this, active_processes={this})
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone)

  def _compare(self, step: int, entries: Mapping[str, manifest.Entry], wanted: Mapping) -> None:
    here = {name: manifest.describe(array) for name, array in wanted.items()}
    there = {name: entry.kind for name, entry in entries.items()}
    for name in sorted(here | there):
      if here.get(name) != there.get(name):
        raise InputError(
          f"checkpoint {self._folder / str(step)} is of another model: {name} is "
          f"{there.get(name, 'absent')} there and {here.get(name, 'absent')} here: "
          "use the config it was trained with, or another --workdir"
        )

  def _read_arrays(self, step: int, wanted: Mapping, restore_args: Mapping) -> Mapping:
    request = ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args, partial_restore=True)
    return self._read_item(step, state=request)

  def _read_item(self, step: int, **item):
    (name,), path = item, self._folder / str(step)
    silence_abandoned_requests()
    try:
      return self._checkpointer.restore(path.absolute(), args=ocp.args.Composite(**item))[name]
    except Exception as error:  # Orbax and TensorStore raise many kinds for one broken file.
      checkpoint_files.check_access(path)  # Orbax reports missing permission as a missing file.
      reason = _innermost(error)
      if isinstance(error, _NOT_DAMAGE) or _NOT_DAMAGE_WORDS.search(reason):
        raise InputError(
          f"checkpoint {path} cannot be read ({reason}): this need not be damage, see to it first"
        ) from error
      raise Damage(f"its {name} cannot be read ({reason})") from error


def _have_digests(entries: Mapping[str, manifest.Entry]) -> bool:
  return all(entry.digest for entry in entries.values())


def _innermost(error: BaseException) -> str:
  """Returns the first cause of an error, without the details that TensorStore adds."""
  while error.__cause__ is not None:
    error = error.__cause__
  text = re.split(r"\[tensorstore_spec|\[source locations|See full TensorStore", str(error))[0]
  return f"{type(error).__name__}: {textwrap.shorten(text, 200, placeholder=' ...')}"


# Orbax's messages ---------------------------------------------------------------------------------

_ORBAX = re.compile("orbax|tensorstore|ocdbt", re.IGNORECASE)
# When one of many parallel requests fails, Orbax abandons the others. They complain like this.
_ABANDONED = re.compile("Event loop is closed|coroutine .* was never awaited")


def silence_abandoned_requests() -> None:
  """Drops the complaints of requests that Orbax abandons, for the rest of the process.

  They come from other threads, before or after the error that is reported.
  """
  logging.getLogger("asyncio").addFilter(_is_not_orbax)
  warnings.filterwarnings("ignore", _ABANDONED.pattern, RuntimeWarning)
  before = sys.unraisablehook
  if not hasattr(before, "silences_orbax"):
    hook = lambda args: None if _is_abandoned(args) else before(args)
    hook.silences_orbax = True
    sys.unraisablehook = hook


def _is_not_orbax(record: logging.LogRecord) -> bool:
  if record.name != "asyncio":
    return not _ORBAX.search(record.pathname)
  *_, trace = record.exc_info or (None,)
  return not (_ORBAX.search(record.getMessage()) or _passes_orbax(trace))


def _is_abandoned(args) -> bool:
  return bool(_ABANDONED.search(str(args.exc_value))) or _passes_orbax(args.exc_traceback)


def _passes_orbax(trace: types.TracebackType | None) -> bool:
  return any(_ORBAX.search(frame.filename) for frame in traceback.extract_tb(trace))


logging.getLogger("absl").addFilter(_is_not_orbax)  # Orbax logs every phase of every save.
