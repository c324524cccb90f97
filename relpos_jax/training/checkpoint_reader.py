"""One step of a folder of checkpoints, read and compared with its manifest."""

import functools
import math
import os
import pathlib
import re
import textwrap
from collections.abc import Mapping

import jax
import numpy as np
import orbax.checkpoint as ocp

from relpos_jax.errors import InputError
from relpos_jax.training import checkpoint_files, manifest, orbax_logging, processes
from relpos_jax.training.manifest import Damage

# Why a read fails though the checkpoint may be good: nothing is set aside for these.
_NOT_DAMAGE = (MemoryError, PermissionError, jax.errors.JaxRuntimeError)
_NOT_DAMAGE_WORDS = re.compile(
  "PERMISSION_DENIED|RESOURCE_EXHAUSTED|Permission denied|Too many open files|Cannot allocate"
)


class Reader:
  """Reads the steps of a folder of checkpoints, each process by itself, and changes nothing.

  Where one finds damage that others do not see, none waits for it: what follows is theirs to agree.

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
    self._told_of_age = False

  def read(
    self, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct], field: str = ""
  ) -> tuple[Mapping, Mapping]:
    """The arrays of a step by name, and their entries; their digests are yet to be compared.

    Args:
      step: whose folder is there.
      wanted: the arrays by name, with the shardings they shall have.
      field: the arrays are those of this field of the state; by default all.

    Raises:
      Damage: what this process reads of it is damaged, partial or of another kind than was saved.
      InputError: it is of another model, or as for `entries`.
    """
    entries = self.entries(step)
    entries = {n: e for n, e in entries.items() if not field or f"{n}.".startswith(f"{field}.")}
    self._compare(step, entries, wanted)
    arrays = self._read_arrays(step, wanted, ocp.checkpoint_utils.construct_restore_args(wanted))
    manifest.check_kinds(arrays, entries)
    if not _have_digests(entries) and not self._told_of_age:
      self._told_of_age = True
      processes.print_once(
        f"checkpoints in {self._folder} are older than digests: none to verify them by"
      )
    return arrays, entries

  def examine(self, step: int) -> str:
    """Reads all of a step and says what there is to say for it; changes nothing.

    Raises:
      Damage: it is damaged, partial or unreadable.
      InputError: it is another program's, or cannot be read for a reason that is not its own.
    """
    entries = self.entries(step)
    self._verify(step, entries)
    return "good" if _have_digests(entries) else "readable; older than digests"

  def check_found(self, step: int) -> None:
    """Reads the smallest array of a step: that it can be found, and is of this step.

    Raises:
      Damage, InputError: as for `examine`.
    """
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
    """What the manifest of a step says of its arrays, by name; they themselves are not read.

    Raises:
      Damage: the manifest is, or is another step's.
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
    """The shapes and dtypes of a step's arrays, by name; errors as for `entries`."""
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
    orbax_logging.silence_abandoned_requests()
    try:
      return self._checkpointer.restore(path.absolute(), args=ocp.args.Composite(**item))[name]
    except Exception as error:  # Orbax and TensorStore raise many kinds for one broken file.
      checkpoint_files.check_access(
        path
      )  # What may not be read is to Orbax as if it were not there.
      reason = _innermost(error)
      if isinstance(error, _NOT_DAMAGE) or _NOT_DAMAGE_WORDS.search(reason):
        raise InputError(
          f"checkpoint {path} cannot be read ({reason}): this need not be damage, see to it first"
        ) from error
      raise Damage(f"its {name} cannot be read ({reason})") from error


def _have_digests(entries: Mapping[str, manifest.Entry]) -> bool:
  return all(entry.digest for entry in entries.values())


def _innermost(error: BaseException) -> str:
  """What went wrong first, without the pages that TensorStore adds."""
  while error.__cause__ is not None:
    error = error.__cause__
  text = re.split(r"\[tensorstore_spec|\[source locations|See full TensorStore", str(error))[0]
  return f"{type(error).__name__}: {textwrap.shorten(text, 200, placeholder=' ...')}"
