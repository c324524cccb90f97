"""The checkpoints of a run: saved, chosen, restored, averaged."""

import contextlib
import functools
import itertools
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from relpos_jax.errors import InputError
from relpos_jax.training import checkpoint_files, manifest, orbax_logging, processes
from relpos_jax.training.checkpoint_reader import Reader
from relpos_jax.training.manifest import Damage, by_name
from relpos_jax.typing import PyTree

orbax_logging.silence_orbax()


class Checkpoints:
  """The checkpoints of one run: a folder with one numbered sub-folder a step.

  A state is any pytree of arrays. It is stored as arrays by name (`params.encoder.kernel`) with a
  manifest of their shapes, dtypes and digests, and comes back, bit for bit, in the structure and
  with the shardings of `like`, whatever shardings it was saved with. Saving goes on in the
  background, and a step is there entirely or not at all.

  What is read is compared with its digests. A step that is damaged, partial, unreadable or in the
  folder of another step is reported in one line on stderr, and the one before is restored; the run
  that owns the folder renames it to `damaged-STEP`, with a `reason.txt`. It is read twice
  before: what failed once may have been a file system's hiccup, or a step that its run deleted
  meanwhile, which is none of the reader's business. A step that may not be read is an error.

  >>> import tempfile
  >>> state = dict(params=dict(kernel=jnp.ones((2, 3))), step=jnp.int32(7))
  >>> with tempfile.TemporaryDirectory() as folder, Checkpoints(folder, keep=2) as checkpoints:
  ...   for step in (1, 2, 3):
  ...     checkpoints.save(step, state)
  ...   restored = checkpoints.restore(like=state)
  ...   print(checkpoints.steps(), restored["step"])
  [2, 3] 7
  """

  def __init__(self, folder: str | pathlib.Path, keep: int = 5, *, rename_damaged: bool = False):
    """Nothing is touched before the first save.

    Args:
      folder: of this run's checkpoints alone.
      keep: how many of the last checkpoints stay; older ones are deleted after each save.
      rename_damaged: whether damaged steps are renamed: for the run that owns the folder alone.

    Raises:
      InputError: Orbax cannot keep checkpoints under this path.
    """
    if keep < 1:
      raise ValueError(f"keep must be at least 1, not {keep}")
    self.folder = pathlib.Path(folder)
    self._keep = keep
    self._rename_damaged = rename_damaged
    self._is_read_back = False
    self._under_way = (0, 0)  # the step that is being written, and the bytes it needs
    self._reader = Reader(folder)

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def close(self) -> None:
    """Waits for the last save; raises what made it fail."""
    if "_manager" in vars(self):  # one made now would wait for the other processes
      with self._writing():
        self._manager.close()

  def steps(self) -> list[int]:
    """The steps there are, in order, whole or not; waits for a save under way."""
    if "_manager" in vars(self):
      with self._writing():
        self._manager.wait_until_finished()
    return checkpoint_files.list_steps(self.folder)

  def latest_step(self) -> int | None:
    """The last step there is, or None if none was ever saved.

    Raises:
      InputError: there were some, and all of them have been set aside.
    """
    steps = self.steps()
    if not steps and checkpoint_files.list_damaged(self.folder):
      raise self._none_good()
    return max(steps, default=None)

  def save(self, step: int, state: PyTree) -> None:
    """Saves in the background; only copies are read after the call, so `state` may be donated.

    The first save is waited for, and a part of it read back: whatever makes checkpoints of this
    folder unreadable is known before any is needed.

    Raises:
      InputError: the disk is full, now or when the save before went on; older ones stay good. Or
        the first save cannot be read back.
      ValueError: `step` is not after all those saved.
    """
    arrays = by_name(state)
    self.steps()  # The save before must be done before room is looked for.
    self.check_room(state)
    items = ocp.args.Composite(
      state=ocp.args.PyTreeSave(arrays),
      manifest=ocp.args.JsonSave(manifest.make_manifest(arrays, step)),
    )
    self._under_way = step, manifest.num_bytes(arrays)
    orbax_logging.silence_abandoned_requests()
    with self._writing():
      if not self._manager.save(step, args=items):
        raise ValueError(f"step {step} is not after the last one saved, {self.latest_step()}")
    if not self._is_read_back:
      self._read_back(step)
      self._is_read_back = True

  def _read_back(self, step: int) -> None:
    self.steps()  # waits
    problem = ""
    if processes.is_first():
      try:
        self._reader.check_found(step)
      except (Damage, InputError) as error:
        problem = str(error)
    if problem := processes.first_message(problem):
      path = self.folder / str(step)
      raise InputError(
        f"checkpoint {path} was saved but cannot be read back: {problem}: give another --workdir"
      )

  def check_room(self, like: PyTree) -> None:
    """Raises InputError unless the disk has room for such a state once more."""
    checkpoint_files.check_room(self.folder, manifest.num_bytes(by_name(like)))

  def restore(self, step: int | None = None, *, like: PyTree, field: str = "") -> PyTree:
    """The state at `step`, or the newest good one; damaged ones are passed over.

    Args:
      like: a state of the same structure, shapes and dtypes: arrays, or `jax.ShapeDtypeStruct`s.
        Their shardings are those of the result; without one, the first device.
      field: with the name of a field of the state, only that field is read and `like` is like it.

    Raises:
      InputError: there is no such checkpoint, or none that is good, or it is of something else, or
        there is no access to it.
    """
    steps = self.steps()
    if step is not None and step not in steps:
      there = ", ".join(map(str, steps)) or "none"
      raise InputError(f"no checkpoint of step {step} in {self.folder}: there are {there}")
    for state in self._good(steps if step is None else [step], like, field):
      return state
    if step is None:
      raise self._none_good()
    there = ", ".join(str(other) for other in self.steps() if other != step) or "none"
    raise InputError(f"checkpoint {self.folder / str(step)} is damaged: there are {there}")

  def average(self, num: int, *, like: PyTree, field: str = "params") -> PyTree:
    """The mean of a field over the last `num` good checkpoints, or all if there are fewer.

    Summed in float32, in the dtypes of `like`. Vaswani et al. 2017, section 6.1.

    Raises:
      InputError: as for `restore`.
    """
    if num < 1:
      raise ValueError(f"num must be at least 1, not {num}")
    total, count = None, 0
    for part in itertools.islice(self._good(self.steps(), like, field), num):
      total, count = part if total is None else _add(total, part), count + 1
    if not count:
      raise self._none_good()
    if count < num:
      processes.print_once(
        f"{self.folder} has {count} good checkpoints: the mean is of these, not of {num}"
      )
    mean = lambda x, to: (x.astype(jnp.float32) / count).astype(to.dtype)
    return jax.jit(lambda total: jax.tree.map(mean, total, like))(total)

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
      if not checkpoint_files.is_no_room(error):
        raise
      step, needed = self._under_way
      for unfinished in checkpoint_files.list_unfinished(self.folder, step):
        shutil.rmtree(unfinished, ignore_errors=True)
      raise checkpoint_files.no_room(self.folder / str(step), needed) from error

  def _good(self, steps: list[int], like: PyTree, field: str) -> Iterator[PyTree]:
    """The states of those steps that are good, newest first; others are passed over."""
    wanted = {name: _abstract(leaf) for name, leaf in by_name(like, field).items()}
    for step in reversed(steps):
      arrays = self._read_or_pass_over(step, wanted, field)
      if arrays is not None:
        yield jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])

  def _none_good(self) -> InputError:
    damaged = [path.name for path in checkpoint_files.list_damaged(self.folder)] + [
      *map(str, self.steps())
    ]
    if not damaged:
      return InputError(f"no checkpoint in {self.folder}: train first, or give another --workdir")
    return InputError(
      f"no good checkpoint in {self.folder}: damaged are {', '.join(damaged)}: "
      "put back a good copy, or delete that folder to start anew"
    )

  def _read_or_pass_over(self, step: int, wanted: Mapping, field: str) -> Mapping | None:
    for _ in range(2):
      arrays, problem = _everywhere(self._reader.read, step, wanted, field)
      if not problem:  # All have read their parts: digests are of the whole.
        _, problem = _everywhere(manifest.check_digests, *arrays)
      if not problem:
        return arrays[0]
    if processes.any_process((self.folder / str(step)).is_dir()):
      path = self.folder / str(step)
      where = self._set_aside(path, problem) if self._rename_damaged else "passed over"
      processes.print_once(f"checkpoint {path} is damaged: {problem}: {where}")
    return None

  def _set_aside(self, path: pathlib.Path, reason: str) -> str:
    try:
      new = checkpoint_files.mark_damaged(path, reason) if processes.is_first() else path
      where = f"renamed to {new.name}"
    except OSError as error:
      where = f"passed over, for it cannot be set aside ({error.strerror})"
    processes.wait_for_all("set aside")  # None goes on before the first process has renamed it.
    if "_manager" in vars(self):
      self._manager.reload()
    return where


def _everywhere(function: Callable, *args) -> tuple[Any, str]:
  """What a function returns, and the damage that it found in any process; all call this."""
  result, problem = None, ""
  try:
    result = function(*args)
  except Damage as damage:
    problem = str(damage)
  return result, processes.first_message(problem)


@jax.jit
def _add(total: PyTree, part: PyTree) -> PyTree:
  return jax.tree.map(lambda t, x: t.astype(jnp.float32) + x.astype(jnp.float32), total, part)


def _abstract(leaf) -> jax.ShapeDtypeStruct:
  sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
