"""Saves and restores the checkpoints of a run."""

import contextlib
import pathlib
import re
import shutil
import tempfile
import time
import types
from collections.abc import Iterator
from typing import Any

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


class Checkpoints(contextlib.AbstractContextManager):
  """The checkpoints of one run: a folder with one numbered sub-folder per step.

  A state is any pytree of arrays. It is stored as arrays by name
  (`params.encoder.kernel`) with a manifest of their shapes and dtypes, and the digests
  of all files. It is restored bit for bit in the structure and with the shardings of
  `like`, whatever shardings it was saved with. Saving runs in the background and is
  atomic.

  Files are compared with their digests before they are restored. A step that is
  damaged, partial or in the folder of another step is reported in one line on stderr,
  and the step before is restored. The run that owns the folder renames it to
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
    """Writes nothing before the first save.

    Args:
      folder: holds the checkpoints of this run alone.
      keep: the number of checkpoints kept; older ones are deleted after each save.
      save_every: the interval of the saves. A step between, saved because a signal
        came, is marked and deleted after the next save, so that the others are those of
        a run without signals.
      rename_damaged: whether damaged steps are renamed; only for the run that owns the
        folder.

    Raises InputError: Orbax cannot use the path.
    """
    path = folder if in_bucket(folder) else folder.absolute()
    unreadable = re.search(r"[*?\\\[]", str(path))  # Orbax saves there, in vain
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
    self._is_staged = str(folder).startswith("s3://")  # Orbax writes gs:// alone
    self._exit = contextlib.ExitStack()

  def close(self, *_) -> None:
    """Waits for the last save, and raises its error if it failed."""
    with self._exit, self._checking_disk():
      if self._manager:
        self._manager.close()

  __exit__ = close

  def steps(self) -> list[int]:
    """Waits for a save in progress and returns all steps in order, damaged ones too."""
    if self._manager:
      with self._checking_disk():
        self._manager.wait_until_finished()
    return list_steps(self.folder)

  def prepare(self) -> None:
    """Makes the folder for saving; raises InputError if Orbax cannot use it."""
    if not self._manager:
      with self._checking_disk():
        self._manager = self._make_manager()

  def save(self, step: int, state: PyTree) -> None:
    """Saves in the background, but for the first save.

    The arrays of `state` may be donated after the call.

    Raises:
      InputError: the disk is full or read-only, now or during the save before; older
        checkpoints stay good.
      ValueError: `step` is not after all saved steps.
    """
    import orbax.checkpoint as ocp

    arrays = name_leaves(state)
    kinds = {name: [describe(array)] for name, array in arrays.items()}
    manifest = ocp.args.JsonSave({"step": step, "arrays": kinds})
    items = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), manifest=manifest)
    is_first = not self.steps()
    self.prepare()
    self._saving = step
    with self._checking_disk():
      is_saved = self._manager.save(step, args=items)
    if not is_saved:
      raise ValueError(f"step {step} is not after all of those saved, {self.steps()}")
    # A run that fails in its first save can start again: nothing was reported after it.
    if is_first:
      self.steps()

  def restore(self, *, like: PyTree) -> PyTree | None:
    """Restores the newest good state; returns None if nothing was ever saved.

    The result has the shardings of `like`, arrays or `jax.ShapeDtypeStruct`s of the
    same structure, shapes and dtypes, or is on the first device where they have none.

    Raises InputError: there is no good checkpoint, or it is of another model.
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
    """Reads a state or one field; returns None if it is damaged, or was deleted."""
    path = self.folder / str(step)
    try:
      with local_copy(path) as folder:
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
    """Renames a damaged step if this run may; returns what became of it."""
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
    policies = ocp.checkpoint_managers
    # Steps of an earlier interval, which the present one does not count.
    regular = list_regular(self.folder)[-self._keep :]
    earlier = [step for step in regular if step % self._save_every]
    self._policy = policies.AnyPreservationPolicy(
      [
        policies.LatestN(1),
        policies.EveryNSteps(self._save_every, max_to_keep=self._keep),
        policies.CustomSteps(earlier),
      ]
    )
    policy = self._policy
    if self._is_staged:
      if jax.process_count() > 1:
        raise InputError(
          f"several processes cannot save in {folder}: use gs:// or a disk"
        )
      folder = pathlib.Path(self._exit.enter_context(tempfile.TemporaryDirectory()))
      policy = policies.LatestN(1)
    self._orbax_folder = folder
    # Where a folder made in the background cannot be made, Orbax's threads wait for it
    # for minutes.
    in_background = ocp.AsyncOptions(
      create_directories_asynchronously=in_bucket(folder),
      post_finalization_callback=self._finish,
    )
    options = ocp.CheckpointManagerOptions(
      preservation_policy=policy, async_options=in_background
    )
    return ocp.CheckpointManager(folder, options=options)

  def _finish(self) -> None:
    """Adds digests to the files that Orbax is about to make a checkpoint."""
    step = str(self._saving)
    # In gs:// nothing is renamed, and the folder has its name already.
    new, *_ = *self._orbax_folder.glob(f"{step}.*"), self._orbax_folder / step
    write_digests(new)
    if self._saving % self._save_every:
      (new / TEMPORARY).write_text("deleted after the next save\n")
    if self._is_staged:
      self._copy_to_bucket(new)

  def _copy_to_bucket(self, new: pathlib.Path) -> None:
    """Copies a step to s3://, and deletes old ones there."""
    path = self.folder / str(self._saving)
    path.rmtree(missing_ok=True)  # half a copy, by a killed run
    upload(new, path)
    (path / COMPLETE).write_bytes(b"")
    steps = [types.SimpleNamespace(step=step) for step in list_steps(self.folder)]
    is_kept = self._policy.should_preserve(steps, context=None)
    for checkpoint, keep in zip(steps, is_kept, strict=True):
      if not keep:
        old = self.folder / str(checkpoint.step)
        (old / COMPLETE).unlink()
        old.rmtree()

  @contextlib.contextmanager
  def _checking_disk(self) -> Iterator[None]:
    """Raises InputError where the disk is full or read-only, or a bucket fails.

    The files of the failed save are deleted.
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
