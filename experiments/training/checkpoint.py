"""Saves and restores the checkpoints of a run."""

import contextlib
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from experiments.errors import InputError
from experiments.files import (
  Path,
  explain_bucket_errors,
  explain_write_error,
  in_bucket,
  upload,
)
from experiments.training import processes
from experiments.training.checkpoint_reader import (
  COMPLETE,
  TEMPORARY,
  Damage,
  check_digests,
  describe,
  explain_missing,
  list_damaged,
  list_regular,
  list_steps,
  local_copy,
  mark_damaged,
  name_leaves,
  read,
  silence_orbax,
  write_digests,
)
from relpos_jax.typing import PyTree


class _Policy(NamedTuple):
  """Keeps the newest step and the last `num` regular ones; deletes all others.

  A step is regular if it is a multiple of `interval`. Steps in `earlier` are regular,
  too: the run saved them at another interval before it was resumed.
  """

  num: int
  interval: int
  earlier: Sequence[int]

  def choose(self, steps: Sequence[int]) -> set[int]:
    """Returns the steps to keep."""
    regular = [x for x in steps if x % self.interval == 0 or x in self.earlier]
    return {*regular[-self.num :], *steps[-1:]}

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    """Returns whether to keep each checkpoint; implements a policy of Orbax."""
    steps = [checkpoint.step for checkpoint in checkpoints]
    chosen = self.choose(steps)
    return [step in chosen for step in steps]


class Checkpoints(contextlib.AbstractContextManager):
  """Saves and restores the checkpoints of one run, in a sub-folder for each step.

  A state is any pytree of arrays. A checkpoint stores them by name
  (`params.encoder.kernel`), with a manifest of their shapes and dtypes, and the digests
  of all files. Restoring is exact, bit for bit. The argument `like` gives the structure
  of the state and its shardings. The shardings may differ from those at saving. Saving
  is atomic, and runs in the background.

  Before restoring, files are compared with their digests. If a step is damaged,
  incomplete or in the folder of another step, one line on stderr reports it, and the
  step before is restored. The run that owns the folder renames the bad step to
  `damaged-STEP` and adds a `reason.txt`.
  """

  def __init__(
    self,
    folder: Path,
    keep: int = 5,
    *,
    save_every: int = 1,
    rename_damaged: bool = False,
  ):
    """Prepares the folder; nothing is written before the first save.

    Args:
      folder: holds the checkpoints of this run alone.
      keep: how many checkpoints to keep. Older ones are deleted after each save.
      save_every: the number of steps between regular saves. A signal may cause another
        save between two of them. Its checkpoint is marked, and deleted after the next
        save. So signals do not change which checkpoints are kept.
      rename_damaged: renames damaged steps. Only the run that owns the folder may
        do so.

    Raises InputError if Orbax cannot use the path.
    """
    path = folder if in_bucket(folder) else folder.absolute()
    unreadable = re.search(r"[*?\\\[]", str(path))  # Orbax could save but not read
    if unreadable:
      raise InputError(
        f"cannot keep checkpoints in {folder}: its path holds {unreadable[0]!r}: "
        "give another --workdir"
      )
    self.folder = folder
    self._keep = keep
    self._save_every = save_every
    self._rename_damaged = rename_damaged
    self._manager: Any = None
    self._is_staged = str(folder).startswith("s3://")  # Orbax cannot write s3://
    self._exit = contextlib.ExitStack()

  def close(self, *_) -> None:
    """Waits for the last save; raises its error if it failed."""
    with self._exit, self._check_disk():
      if self._manager:
        self._manager.close()

  __exit__ = close

  def wait(self) -> None:
    """Waits for a running save; raises its error if it failed."""
    if self._manager:
      with self._check_disk():
        self._manager.wait_until_finished()

  def steps(self) -> list[int]:
    """Waits for a running save; returns all steps in order, including damaged ones."""
    self.wait()
    return list_steps(self.folder)

  def prepare(self) -> None:
    """Creates the folder for saving; raises InputError if Orbax cannot use it."""
    if not self._manager:
      with self._check_disk():
        self._manager = self._make_manager()

  def save(self, step: int, state: PyTree) -> None:
    """Saves a state in the background; only waits for the first save to finish.

    The arrays of `state` may be donated after the call.

    Raises:
      InputError: the disk is full or read-only, now or during the previous save. Older
        checkpoints stay intact.
      ValueError: `step` is not later than all saved steps.
    """
    import orbax.checkpoint as ocp

    arrays = name_leaves(state)
    kinds = {name: [describe(array)] for name, array in arrays.items()}
    manifest = ocp.args.JsonSave({"step": step, "arrays": kinds})
    items = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), manifest=manifest)
    is_first = not self.steps()
    self.prepare()
    self._saving = step
    with self._check_disk():
      is_saved = self._manager.save(step, args=items)
    if not is_saved:
      raise ValueError(f"step {step} is not after all of those saved, {self.steps()}")
    # If the first save fails, the run can start anew, since it has reported no metrics.
    if is_first:
      self.wait()

  def restore(self, *, like: PyTree) -> PyTree | None:
    """Restores the newest good state; returns None if nothing was ever saved.

    `like` has arrays or `jax.ShapeDtypeStruct`s with the state's structure, shapes and
    dtypes. The result has their shardings; an array without a sharding is put on the
    first device.

    Raises InputError if no checkpoint is good, or if they are of another model.
    """
    steps = self.steps()
    for step in reversed(steps):
      state = self.read(step, like)
      if state is not None:
        return state
    if steps or list_damaged(self.folder):
      raise explain_missing(self.folder)
    return None

  def read(self, step: int, like: PyTree, field: str = "") -> PyTree | None:
    """Reads a state, or one field of it; returns None if it is damaged or deleted."""
    path = self.folder / str(step)
    try:
      with contextlib.ExitStack() as stack:
        with processes.fail_together():  # each process downloads from a bucket
          folder = stack.enter_context(local_copy(path))
        with processes.fail_together(Damage):
          if processes.is_first():
            check_digests(folder)
        with processes.fail_together(Damage):
          return read(folder, like, field)
    except Damage as damage:
      problem = str(damage)
    if processes.any_process(path.exists()):
      outcome = self._set_aside(path, problem)
      processes.print_once(f"checkpoint {path} is damaged: {problem}: {outcome}")
    return None

  def _set_aside(self, path: Path, problem: str) -> str:
    """Renames a damaged step, if this object was made with `rename_damaged`.

    Returns words for the report: "passed over", or the new name.
    """
    if not self._rename_damaged:
      return "passed over"
    name = ""
    if processes.is_first():
      name = mark_damaged(path, problem).name
    processes.wait_for_all("damaged checkpoint renamed")
    if self._manager:
      self._manager.reload()
    return f"renamed to {name}"

  def _make_manager(self) -> Any:
    import orbax.checkpoint as ocp

    silence_orbax()
    folder = self.folder if in_bucket(self.folder) else self.folder.absolute()
    # Regular saves at an earlier interval; the present one does not divide their steps.
    regular = list_regular(self.folder)[-self._keep :]
    earlier = [step for step in regular if step % self._save_every]
    policy = self._policy = _Policy(self._keep, self._save_every, earlier)
    if self._is_staged:
      if jax.process_count() > 1:
        raise InputError(
          f"several processes cannot save in {folder}: use gs:// or a disk"
        )
      folder = pathlib.Path(self._exit.enter_context(tempfile.TemporaryDirectory()))
      policy = ocp.checkpoint_managers.LatestN(1)
    self._orbax_folder = folder
    # If Orbax creates a folder in the background and fails, its threads wait for
    # minutes.
    in_background = ocp.AsyncOptions(
      create_directories_asynchronously=in_bucket(folder),
      post_finalization_callback=self._finish,
    )
    options = ocp.CheckpointManagerOptions(
      preservation_policy=policy, async_options=in_background
    )
    manager = ocp.CheckpointManager(folder, options=options)
    # Orbax would ask for signals with the step's number, and `StopOnSignal` asks with
    # the number of its calls: processes would stop at different steps, or never.
    manager.reached_preemption = lambda step: False
    return manager

  def _finish(self) -> None:
    """Adds digests to a checkpoint just before Orbax makes it final."""
    step = str(self._saving)
    # On a disk the folder is renamed at the end. In gs:// it has its final name.
    temporary = iter(self._orbax_folder.glob(f"{step}.*"))
    new = next(temporary, self._orbax_folder / step)
    write_digests(new)
    if self._saving % self._save_every:
      (new / TEMPORARY).write_text("deleted after the next save\n")
    if self._is_staged:
      self._copy_to_bucket(new)

  def _copy_to_bucket(self, new: pathlib.Path) -> None:
    """Copies a checkpoint to s3://, and deletes old ones there."""
    path = self.folder / str(self._saving)
    path.rmtree(missing_ok=True)  # a killed run may have left half a copy
    upload(new, path)
    (path / COMPLETE).write_bytes(b"")
    steps = list_steps(self.folder)
    for step in {*steps} - self._policy.choose(steps):
      old = self.folder / str(step)
      (old / COMPLETE).unlink()
      old.rmtree()

  @contextlib.contextmanager
  def _check_disk(self) -> Iterator[None]:
    """Turns errors of the disk or the bucket within a `with` block into InputError.

    If the disk is full or read-only, deletes the files of the failed save first.
    """
    try:
      with explain_bucket_errors(self.folder):
        yield
    except Exception as error:
      refusal = explain_write_error(error, f"a checkpoint in {self.folder}")
      if not refusal:
        raise
      for _ in range(10):  # other files of the save may still be written
        for unfinished in self.folder.glob("*.orbax-checkpoint-tmp*"):
          shutil.rmtree(unfinished, ignore_errors=True)
        time.sleep(0.1)
      raise InputError(f"{refusal}; the checkpoints there are intact") from error
