"""Checkpoints of a training state: the only module that knows Orbax."""

import contextlib
import functools
import itertools
import json
import logging
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from relpos_jax.errors import InputError
from relpos_jax.training import manifest, shelf
from relpos_jax.training.manifest import Damage
from relpos_jax.typing import PyTree

# Orbax logs every phase of every save, and errors that it raises as well: not for the user's eyes.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


# Why a read fails though the checkpoint may be good: nothing is set aside for these.
_NOT_DAMAGE = (MemoryError, PermissionError, jax.errors.JaxRuntimeError)
_NOT_DAMAGE_WORDS = re.compile(
  "PERMISSION_DENIED|RESOURCE_EXHAUSTED|Permission denied|Too many open files|Cannot allocate"
)


class Checkpoints:
  """The checkpoints of one run: a folder with one numbered sub-folder a step.

  A state is any pytree of arrays. It is stored as arrays by name (`params.encoder.kernel`) with a
  manifest of their shapes, dtypes and digests, and comes back, bit for bit, in the structure and
  with the shardings of `like`, whatever shardings it was saved with. Saving goes on in the
  background, and a step is there entirely or not at all.

  What is read is compared with its digests. A step that is damaged, partial or unreadable is set
  aside, `damaged-STEP` with a `reason.txt`, told in one line on stderr, and the one before is
  taken. It is read twice before: what failed once may have been a file system's hiccup, or a step
  that its run deleted meanwhile, which is none of the reader's business.

  >>> import tempfile
  >>> state = dict(params=dict(kernel=jnp.ones((2, 3))), step=jnp.int32(7))
  >>> with tempfile.TemporaryDirectory() as folder, Checkpoints(folder, keep=2) as checkpoints:
  ...   for step in (1, 2, 3):
  ...     checkpoints.save(step, state)
  ...   restored = checkpoints.restore(like=state)
  ...   print(checkpoints.steps(), restored["step"])
  [2, 3] 7
  """

  def __init__(self, folder: str | pathlib.Path, keep: int = 5):
    """Nothing is touched before the first save.

    Args:
      folder: of this run's checkpoints alone.
      keep: how many of the last checkpoints stay; older ones are deleted after each save.
    """
    if keep < 1:
      raise ValueError(f"keep must be at least 1, not {keep}")
    self.folder = pathlib.Path(folder)
    self._keep = keep
    self._under_way = (0, 0)  # the step that is being written, and the bytes it needs

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def close(self) -> None:
    """Waits for the last save; raises what made it fail."""
    if self.folder.is_dir():
      with self._writing():
        self._manager.close()

  def steps(self) -> list[int]:
    """The steps there are, in order, whole or not; waits for a save under way."""
    if self.folder.is_dir():
      with self._writing():
        self._manager.wait_until_finished()
    return shelf.numbered(self.folder)

  def latest_step(self) -> int | None:
    """The last step there is, or None if none was ever saved.

    Raises:
      InputError: there were some, and all of them have been set aside.
    """
    steps = self.steps()
    if not steps and shelf.aside(self.folder):
      raise self._none_good()
    return max(steps, default=None)

  def save(self, step: int, state: PyTree) -> None:
    """Saves in the background; only copies are read after the call, so `state` may be donated.

    Raises:
      InputError: the disk is full, now or when the save before went on; older ones stay good.
      ValueError: `step` is not after all those saved.
    """
    arrays = _by_name(state)
    self.steps()  # The save before must be done before room is looked for.
    self.check_room(state)
    items = ocp.args.Composite(
      state=ocp.args.PyTreeSave(arrays), manifest=ocp.args.JsonSave(manifest.make_manifest(arrays))
    )
    self._under_way = step, _num_bytes(arrays)
    with self._writing():
      if not self._manager.save(step, args=items):
        raise ValueError(f"step {step} is not after the last one saved, {self.latest_step()}")

  def check_room(self, like: PyTree) -> None:
    """Raises InputError unless the disk has room for such a state once more."""
    shelf.check_room(self.folder, _num_bytes(_by_name(like)))

  def restore(self, step: int | None = None, *, like: PyTree, field: str = "") -> PyTree:
    """The state at `step`, or the newest good one; damaged ones are set aside.

    Args:
      like: a state of the same structure, shapes and dtypes: arrays, or `jax.ShapeDtypeStruct`s.
        Their shardings are those of the result; without one, the first device.
      field: with the name of a field of the state, only that field is read and `like` is like it.

    Raises:
      InputError: there is no such checkpoint, or none that is good, or it is of something else.
    """
    if step is not None and step not in (steps := self.steps()):
      there = ", ".join(map(str, steps)) or "none"
      raise InputError(f"no checkpoint of step {step} in {self.folder}: there are {there}")
    return next(self._good(like, field, None if step is None else [step]))

  def average(self, num: int, *, like: PyTree, field: str = "params") -> PyTree:
    """The mean of a field over the last `num` good checkpoints, or all if there are fewer.

    Summed in float32, in the dtypes of `like`. Vaswani et al. 2017, section 6.1.

    Raises:
      InputError: as for `restore`.
    """
    if num < 1:
      raise ValueError(f"num must be at least 1, not {num}")
    total, count = None, 0
    for part in itertools.islice(self._good(like, field), num):
      total, count = part if total is None else _add(total, part), count + 1
    if count < num:
      _tell(f"{self.folder} has {count} good checkpoints: the mean is of these, not of {num}")
    mean = lambda x, to: (x.astype(jnp.float32) / count).astype(to.dtype)
    return jax.jit(lambda total: jax.tree.map(mean, total, like))(total)

  def examine(self, step: int) -> str:
    """Reads all of a step and says what there is to say for it; changes nothing.

    Raises:
      Damage: it is damaged, partial or unreadable.
      InputError: it is another program's, or cannot be read for a reason that is not its own.
    """
    entries = self._entries(step)
    wanted = {name: manifest.abstract(entry.kind) for name, entry in entries.items()}
    on_host = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in wanted}
    manifest.check_arrays(self._read_arrays(step, wanted, on_host), entries)
    has_digests = all(entry.digest for entry in entries.values())
    return "good" if has_digests else "readable; older than digests"

  @functools.cached_property
  def _manager(self) -> ocp.CheckpointManager:
    latest = ocp.checkpoint_managers.preservation_policy.LatestN(self._keep)
    options = ocp.CheckpointManagerOptions(preservation_policy=latest)
    return ocp.CheckpointManager(self.folder.absolute(), options=options)

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    """Tells of a full disk in one line, and frees what the save that failed took of it."""
    try:
      yield
    except Exception as error:
      if not shelf.is_no_room(error):
        raise
      step, needed = self._under_way
      for unfinished in self.folder.glob(f"{step}.orbax-checkpoint-tmp*"):
        shutil.rmtree(unfinished, ignore_errors=True)
      raise shelf.no_room(self.folder / str(step), needed) from error

  def _good(self, like: PyTree, field: str, steps: list[int] | None = None) -> Iterator[PyTree]:
    """The states that are good, newest first; the others are set aside on the way."""
    wanted = {name: _abstract(leaf) for name, leaf in _by_name(like, field).items()}
    found = False
    for step in reversed(self.steps() if steps is None else steps):
      arrays = self._read_or_set_aside(step, wanted, field)
      if arrays is not None:
        found = True
        yield jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])
    if not found:
      raise self._none_good()

  def _none_good(self) -> InputError:
    damaged = [path.name for path in shelf.aside(self.folder)]
    if not damaged:
      return InputError(f"no checkpoint in {self.folder}: train first, or give another --workdir")
    left = ", ".join(map(str, self.steps())) or "none"
    return InputError(
      f"no good checkpoint in {self.folder}: {', '.join(damaged)} set aside (see reason.txt in each)"
      f", left to be tried: {left}: put back a good copy, or delete {self.folder} to start anew"
    )

  def _read_or_set_aside(self, step: int, wanted: Mapping, field: str) -> Mapping | None:
    for _ in range(2):
      problem = None
      try:
        arrays = self._read(step, wanted, field)
      except Damage as damage:
        problem = str(damage)
      if not _anywhere(problem is not None):
        return arrays
    if (self.folder / str(step)).is_dir():
      self._set_aside(step, problem or "another process found it damaged")
    return None

  def _set_aside(self, step: int, reason: str) -> None:
    path = self.folder / str(step)
    try:
      where = f"set aside as {shelf.set_aside(path, reason).name}" if _is_first() else ""
    except OSError as error:
      where = f"passed over ({error.strerror})"
    _anywhere(False)  # None goes on before the first process has renamed it.
    self._manager.reload()
    _tell(f"checkpoint {path} is damaged: {reason}: {where}")

  def _read(self, step: int, wanted: Mapping, field: str) -> Mapping:
    """The arrays of a step, compared with the manifest and its digests."""
    entries = self._entries(step)
    entries = {n: e for n, e in entries.items() if not field or f"{n}.".startswith(f"{field}.")}
    self._compare(step, entries, wanted)
    arrays = self._read_arrays(step, wanted, ocp.checkpoint_utils.construct_restore_args(wanted))
    manifest.check_arrays(arrays, entries)
    if not all(entry.digest for entry in entries.values()):
      _tell_once(f"checkpoints in {self.folder} are older than digests: they cannot be verified")
    return arrays

  def _entries(self, step: int) -> dict[str, manifest.Entry]:
    path = self.folder / str(step)
    if not (path / "manifest").is_dir() and _is_foreign(path):
      raise InputError(
        f"checkpoint {path} was not saved by relpos_jax (it has no manifest): "
        "delete this folder, or give another --workdir"
      )
    return manifest.read_manifest(self._read_item(step, manifest=ocp.args.JsonRestore()))

  def _compare(self, step: int, entries: Mapping[str, manifest.Entry], wanted: Mapping) -> None:
    here = {name: manifest.describe(array) for name, array in wanted.items()}
    there = {name: entry.kind for name, entry in entries.items()}
    for name in sorted(here | there):
      if here.get(name) != there.get(name):
        raise InputError(
          f"checkpoint {self.folder / str(step)} is of another model: {name} is "
          f"{there.get(name, 'absent')} there and {here.get(name, 'absent')} here: "
          "use the config it was trained with, or another --workdir"
        )

  def _read_arrays(self, step: int, wanted: Mapping, restore_args: Mapping) -> Mapping:
    request = ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args, partial_restore=True)
    return self._read_item(step, state=request)

  def _read_item(self, step: int, **item):
    (name,) = item
    try:
      return self._manager.restore(step, args=ocp.args.Composite(**item))[name]
    except Exception as error:  # Orbax and TensorStore raise many kinds for one broken file.
      reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
      if isinstance(error, _NOT_DAMAGE) or _NOT_DAMAGE_WORDS.search(str(error)):
        path = self.folder / str(step)
        raise InputError(
          f"checkpoint {path} cannot be read ({reason}): this need not be damage, see to it first"
        ) from error
      raise Damage(f"its {name} cannot be read ({reason})") from error


@jax.jit
def _add(total: PyTree, part: PyTree) -> PyTree:
  return jax.tree.map(lambda t, x: t.astype(jnp.float32) + x.astype(jnp.float32), total, part)


def _by_name(tree: PyTree, field: str = "") -> dict[str, object]:
  """The leaves by their dotted paths."""
  field_path = (jax.tree_util.GetAttrKey(field),) if field else ()
  paths, _ = jax.tree.flatten_with_path(tree)
  name = lambda path: jax.tree_util.keystr(field_path + path, simple=True, separator=".")
  leaves = {name(path): leaf for path, leaf in paths}
  if len(leaves) != len(paths):
    raise ValueError("two leaves of the state have the same name: rename a key that has a dot")
  return leaves


def _num_bytes(arrays: Mapping) -> int:
  """What a checkpoint takes of a disk at most; arrays that can be are stored smaller."""
  blocks = 4096 * (len(arrays) + 16)  # a file takes whole blocks, and there are a dozen small ones
  return blocks + sum(array.size * array.dtype.itemsize for array in arrays.values())


def _is_foreign(path: pathlib.Path) -> bool:
  """Whether another program saved a checkpoint: Orbax keeps the names of what was saved."""
  try:
    metadata = json.loads((path / "_CHECKPOINT_METADATA").read_text(encoding="utf-8"))
    return "manifest" not in (metadata["item_handlers"] or {})
  except (OSError, ValueError, KeyError, TypeError):
    return False


def _is_first() -> bool:
  return jax.process_index() == 0


def _anywhere(flag: bool) -> bool:
  """Whether `flag` is true in any process; all of them wait for each other."""
  if jax.process_count() == 1:
    return flag
  return bool(multihost_utils.process_allgather(np.array(flag)).any())


def _tell(line: str) -> None:
  if _is_first():
    print(line, file=sys.stderr)


_tell_once = functools.cache(_tell)


def _abstract(leaf) -> jax.ShapeDtypeStruct:
  sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
