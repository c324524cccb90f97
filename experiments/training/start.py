"""Checks inputs, prints sizes and restores the state before the first training step."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from experiments.files import Path
from experiments.training import processes
from experiments.training.checkpoint import Checkpoints
from experiments.training.checkpoint_reader import list_steps
from experiments.training.metrics import read_metrics
from experiments.training.run import Run
from experiments.training.step import TrainState
from experiments.training.workdir import (
  check_not_lost,
  check_shared,
  check_unchanged,
  write_digests,
  write_run_files,
)


def print_sizes(run: Run, batches: Any, valid_batches: Any) -> None:
  """Prints the devices, the number of parameters, and the shapes of batches."""
  mesh = run.mesh
  axes = [f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1]
  devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind}"
  print(f"devices: {devices}, processes: {jax.process_count()}, mesh:", *axes or "1")
  num_parameters = sum(x.size for x in jax.tree.leaves(run.params))
  tokens = run.config.batches.tokens
  print(f"parameters: {num_parameters:,}, tokens of a batch: {tokens:,} at most")
  print(f"training: {batches}")
  print(f"validation: {valid_batches}")


def count_steps(settings: ConfigDict, num_per_epoch: int) -> int:
  """Counts the steps of a training run; prints a note if the warmup never ends."""
  num_steps = settings.num_steps or settings.num_epochs * num_per_epoch
  if num_steps <= settings.warmup_steps:
    print(
      f"note: all steps are in the warmup, {num_steps:,} of {settings.warmup_steps:,}: "
      "the learning rate only rises; for its fall, lower --config.training.warmup_steps"
    )
  return num_steps


def check_inputs(workdir: Path, digests: Mapping[str, str]) -> None:
  """Raises InputError if inputs have changed, or the checkpoints are gone."""
  processes.check_same({f"the digest of the {name}": x for name, x in digests.items()})
  with processes.fail_together():
    check_unchanged(workdir, digests)
    check_not_lost(workdir, read_metrics(workdir))


def write_start(
  run: Run,
  state: TrainState | None,
  workdir: Path,
  num_steps: int,
  digests: Mapping[str, str],
  save_vocabulary: Callable[[], None] = lambda: None,
) -> None:
  """Writes a run's config, environment, vocabulary and digests before it trains.

  `state` is the restored state, if any. All processes must call this, but only the
  first one writes. Raises InputError unless all of them see the files.
  """
  if processes.is_first():
    is_trained = state is not None and int(state.step) >= num_steps
    write_run_files(workdir, run.config.to_dict(), num_steps, is_trained)
    save_vocabulary()
    write_digests(workdir, digests)
  check_shared(workdir)


def open_checkpoints(settings: ConfigDict, workdir: Path) -> Checkpoints:
  """Opens the checkpoints of a run for training."""
  return Checkpoints(
    workdir / "checkpoints",
    settings.keep_checkpoints,
    save_every=settings.save_every,
    rename_damaged=True,
  )


def restore(
  checkpoints: Checkpoints, shapes: TrainState, workdir: Path
) -> TrainState | None:
  """Restores the last checkpoint; returns None if there is none."""
  steps = list_steps(checkpoints.folder)
  processes.check_same({"the list of checkpoints in --workdir": steps})
  state = checkpoints.restore(like=shapes)
  if state:
    print(f"{workdir} is trained to step {int(state.step)}")
  return state
