"""Saves, restores and averages the checkpoints of a run."""

import contextlib
import functools
import pathlib
import re
import shutil
import tempfile
import time
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from experiments.errors import InputError
from experiments.files import Path, checking_bucket, in_bucket, upload, write_refusal
from experiments.training import checkpoint_reader, processes
from experiments.training.checkpoint_reader import (
  Damage,
  by_name,
  list_damaged,
  list_steps,
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
    """Writes nothing before the first save; raises InputError for a path that Orbax
    cannot use.

    Args:
      folder: holds the checkpoints of this run alone.
      keep: the number of checkpoints kept; older ones are deleted after each save.
      save_every: the interval of the saves. A step between, saved because a signal
        came, is marked and deleted after the next save, so that the others are those of
        a run without signals.
      rename_damaged: whether damaged steps are renamed; only for the run that owns the
        folder.
    """
    path = str(folder if in_bucket(folder) else folder.absolute())
    if found := re.search(r"[*?\\\[]", path):  # where Orbax cannot read what it saves
      raise InputError(
        f"cannot keep checkpoints in {folder}: its path holds {found[0]!r}: give another --workdir"
      )
    self.folder = folder
    self._keep, self._save_every = keep, save_every
    self._rename_damaged = rename_damaged
    self._exit = contextlib.ExitStack()

  def close(self, *_) -> None:
    """Waits for the last save, and raises its error if it failed."""
    with self._exit:
      if "_manager" in vars(self):  # a new manager would wait for the other processes
        with self._checking_disk():
          self._manager.close()

  __exit__ = close

  def steps(self) -> list[int]:
    """Waits for a save in progress and returns the steps in order, damaged ones included."""
    if "_manager" in vars(self):
      with self._checking_disk():
        self._manager.wait_until_finished()
    return list_steps(self.folder)

  def save(self, step: int, state: PyTree) -> None:
    """Saves in the background, but for the first save; `state` may be donated after the
    call.

    Raises:
      InputError: the disk is full or read-only, now or during the save before; older
        checkpoints stay good.
      ValueError: `step` is not after all saved steps.
    """
    import orbax.checkpoint as ocp

    arrays = by_name(state)
    kinds = {
      name: [checkpoint_reader.describe(array)] for name, array in arrays.items()
    }
    manifest = ocp.args.JsonSave(dict(step=step, arrays=kinds))
    items = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), manifest=manifest)
    is_first = not self.steps()
    self._saving = step
    with self._checking_disk():
      is_saved = self._manager.save(step, args=items)
    if not is_saved:
      raise ValueError(f"step {step} is not after all of those saved, {self.steps()}")
    if (
      is_first
    ):  # a run whose first save fails can start again: nothing was reported after it
      self.steps()

  def prepare(self) -> None:
    """Makes the folder for saving; raises InputError if Orbax cannot use its bucket."""
    with checking_bucket(self.folder):
      _ = self._manager

  def restore(self, *, like: PyTree) -> PyTree | None:
    """Restores the newest good state; returns None if nothing was ever saved.

    The result has the shardings of `like`, arrays or `jax.ShapeDtypeStruct`s of the
    same structure, shapes and dtypes, or is on the first device where they have none.

    Raises InputError: there is no good checkpoint, or it is of another model.
    """
    steps = self.steps()
    for step in reversed(steps):
      if (state := self._read(step, like)) is not None:
        return state
    if steps or list_damaged(self.folder):
      raise self._none_good()
    return None

  def average(
    self,
    num: int,
    *,
    like: PyTree,
    part: float = 0.2,
    since: int = 0,
    keep: Path | None = None,
  ) -> tuple[PyTree, list[int]]:
    """Averages `params` over the last good checkpoints; returns the average and their
    steps.

    At most `num` are averaged: those in the last `part` of the steps of the newest,
    from step `since` on, or the newest alone. Parameters that still change fast have a
    mean worse than the last. A step between two saves counts only while it is the
    newest. Vaswani et al. 2017, section 6.1.

    Only the field `params` of the states is read, and `like` is like it. The sum is in
    float32, the result in the dtypes of `like`. Errors are as for `restore`. The local
    file `keep` holds the last average, which is read again if it is of the same steps,
    all of them good.
    """
    steps = self._regular(self.steps())[::-1]

    def belongs(step: int, averaged: list[int]) -> bool:
      is_near = not averaged or step >= max(since, (1 - part) * averaged[0])
      return is_near and len(averaged) < num

    wanted, averaged, total = [], [], None
    for step in steps:
      wanted += [step] * belongs(step, wanted)
    key = checkpoint_reader.key_of(self.folder, wanted) if keep else ""
    average = checkpoint_reader.read_average(keep, key, like) if keep else None
    if average is not None:
      averaged = wanted
    else:
      for step in steps:
        params = self._read(step, like, "params") if belongs(step, averaged) else None
        if params is not None:
          total = _add(total, params) if averaged else params
          averaged.append(step)
      if not averaged:
        raise self._none_good()
      average = _mean(total, like, len(averaged))
      if keep and averaged == wanted:
        checkpoint_reader.write_average(keep, key, average)
    averaged = averaged[::-1]
    if len(averaged) < num:
      processes.print_once(
        f"averages {', '.join(map(str, averaged))} alone: {self.folder} has fewer than {num} good "
        f"checkpoints in the last {part:.0%} of the steps, after the warmup"
      )
    return average, averaged

  def _regular(self, steps: list[int]) -> list[int]:
    """Returns the newest step, and those that an undisturbed run saves too.

    Those were multiples of the interval when they were saved; it may be another one
    now.
    """
    regular = []
    for step in steps[:-1]:
      if not (self.folder / str(step) / checkpoint_reader.TEMPORARY).exists():
        regular.append(step)
    return regular + steps[-1:]

  def _kept(self, steps: list[int]) -> list[int]:
    return self._regular(steps)[-self._keep :]

  @functools.cached_property
  def _orbax_folder(self) -> Path:
    """Returns where Orbax saves, which knows gs:// but not s3://."""
    if not in_bucket(self.folder):
      return self.folder.absolute()
    if str(self.folder).startswith("gs://"):
      return self.folder
    if jax.process_count() > 1:
      raise InputError(
        f"several processes cannot save in {self.folder}: use gs:// or a disk"
      )
    return pathlib.Path(self._exit.enter_context(tempfile.TemporaryDirectory()))

  @functools.cached_property
  def _manager(self) -> Any:
    import orbax.checkpoint as ocp

    checkpoint_reader.silence_orbax()

    def should_preserve(checkpoints, *, context):
      steps = [checkpoint.step for checkpoint in checkpoints]
      kept = self._kept(steps)
      return [step in kept for step in steps]

    policy = types.SimpleNamespace(should_preserve=should_preserve)
    # Where a folder made in the background cannot be made, Orbax's threads wait for it
    # for minutes.
    is_remote = in_bucket(self._orbax_folder)
    options = ocp.AsyncOptions(create_directories_asynchronously=is_remote)
    options.post_finalization_callback = self._finish
    if in_bucket(self.folder) and not is_remote:
      policy = ocp.checkpoint_managers.preservation_policy.LatestN(1)
    options = ocp.CheckpointManagerOptions(
      preservation_policy=policy, async_options=options
    )
    return ocp.CheckpointManager(self._orbax_folder, options=options)

  def _finish(self) -> None:
    """Adds digests to the files that Orbax is about to make a checkpoint; copies them to s3://."""
    step = str(self._saving)
    unfinished = self._orbax_folder.glob(
      f"{step}.*"
    )  # none in gs://, where nothing is renamed
    new = next(iter(unfinished), self._orbax_folder / step)
    checkpoint_reader.write_digests(new)
    if self._saving % self._save_every:
      (new / checkpoint_reader.TEMPORARY).write_text("deleted after the next save\n")
    if in_bucket(self.folder) and not in_bucket(new):
      path = self.folder / step
      path.rmtree(missing_ok=True)  # half a copy, by a killed run
      upload(new, path)
      (path / checkpoint_reader.COMPLETE).write_bytes(b"")
      steps = list_steps(self.folder)
      for old in (self.folder / str(step) for step in {*steps} - {*self._kept(steps)}):
        (old / checkpoint_reader.COMPLETE).unlink()
        old.rmtree()

  @contextlib.contextmanager
  def _checking_disk(self) -> Iterator[None]:
    """Raises InputError where the disk is full or read-only, and deletes files of the
    failed save.

    In a bucket, raises it for every error.
    """
    try:
      with checking_bucket(self.folder):
        yield
    except Exception as error:
      if not (refusal := write_refusal(error, f"a checkpoint in {self.folder}")):
        raise
      for _ in range(10):  # other files of the save may still be written
        for unfinished in (found := [*self.folder.glob("*.orbax-checkpoint-tmp*")]):
          shutil.rmtree(unfinished, ignore_errors=True)
        if not found:
          break
        time.sleep(0.1)
      raise InputError(f"{refusal}; the checkpoints there are intact") from error

  def _none_good(self) -> InputError:
    damaged = [path.name for path in list_damaged(self.folder)]
    damaged += map(str, self.steps())
    if not damaged:
      return InputError(
        f"no checkpoint in {self.folder}: train first, or give another --workdir"
      )
    return InputError(
      f"no good checkpoint in {self.folder}: damaged are {', '.join(damaged)}: "
      "put back a good copy, or delete that folder to start again"
    )

  def _read(self, step: int, like: PyTree, field: str = "") -> PyTree | None:
    """Returns a state or its field; None if the step is damaged, or was deleted meanwhile."""
    wanted = {name: _abstract(leaf) for name, leaf in by_name(like, field).items()}
    path = self.folder / str(step)
    try:
      with checkpoint_reader.local_copy(path) as folder:
        with processes.failing_together(Damage):
          if processes.is_first():
            checkpoint_reader.check_digests(folder)
        with processes.failing_together(Damage):
          arrays = checkpoint_reader.read(folder, wanted, field)
      return jax.tree.unflatten(
        jax.tree.structure(like), [arrays[name] for name in wanted]
      )
    except Damage as damage:
      problem, outcome = str(damage), "passed over"
    if not processes.any_process(path.exists()):
      return None
    if self._rename_damaged:
      if processes.is_first():
        outcome = f"renamed to {checkpoint_reader.mark_damaged(path, problem).name}"
      processes.wait_for_all("damaged checkpoint renamed")
      if "_manager" in vars(self):
        self._manager.reload()
    processes.print_once(f"checkpoint {path} is damaged: {problem}: {outcome}")
    return None


@jax.jit
def _add(total: PyTree, part: PyTree) -> PyTree:
  return jax.tree.map(
    lambda t, x: t.astype(jnp.float32) + x.astype(jnp.float32), total, part
  )


def _mean(total: PyTree, like: PyTree, count: int) -> PyTree:
  def mean(x, to):
    return (x.astype(jnp.float32) / count).astype(to.dtype)

  return jax.jit(lambda total: jax.tree.map(mean, total, like))(total)


def _abstract(leaf) -> jax.ShapeDtypeStruct:
  sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(
    jax.devices()[0]
  )
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
