r"""Trains a model, scores it and draws what it learned.

  python -m experiments.train --config=configs/quickstart.py
  python -m experiments.train --config=configs/multi30k.py:sinusoidal --workdir=runs/sinusoidal
  python -m experiments.train --config=configs/multi30k.py --config.data.multi30k.path=FOLDER
  python -m experiments.train --config=configs/quickstart.py --config.model.max_distance=4 \
      --workdir=runs/k4
  python -m experiments.train --config=configs/quickstart.py --workdir=runs/mine \
      --config.data.source=pairs --config.data.pairs.train=train.en,train.de \
      --config.data.pairs.valid=valid.en,valid.de --config.data.pairs.test=test.en,test.de

The folder --workdir holds the whole run; the same command resumes it from the last checkpoint.
It may be in a bucket, gs://BUCKET/RUN or, for one process, s3://BUCKET/RUN. Only one training at a
time may use the folder: a second one is refused. SIGTERM saves and exits with status 143, Ctrl-C
saves and exits with status 130, and a second Ctrl-C exits at once. Data are downloaded unless
FOLDER holds them.

TensorBoard shows the metrics, with the package xprof also a profile: tensorboard --logdir=FOLDER.
Where the devices' peak is known, mfu is the share of it, in bfloat16, that the products of matrices
reach. Products that the backward pass computes again count again.

With several processes, start each with this command, as srun and mpirun do; experiments/launch/
has recipes. All need the same config, code and data. Only the first process prints and writes.
"""

import contextlib
import functools
import importlib.util
import pathlib
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

import jax
from ml_collections import ConfigDict

from experiments import command
from experiments.config import flatten
from experiments.data.batching import prefetch
from experiments.errors import InputError
from experiments.evaluate import evaluate
from experiments.files import Path, in_bucket
from experiments.plan import peak_operations
from experiments.run import Training, build, defaults, parse_config, with_average
from experiments.training import processes
from experiments.training.checkpoint import Checkpoints
from experiments.training.digests import check_unchanged, data_digests, write_digests
from experiments.training.environment import code_version
from experiments.training.loop import NonFiniteError, profiled, train
from experiments.training.metrics import (
  NoReporter,
  Reporter,
  begin_wandb,
  has_evaluation,
  read_metrics,
)
from experiments.training.sharding import put_batch
from experiments.training.signals import StopOnSignal, Stopped
from experiments.training.step import TrainState, with_operations
from experiments.training.workdir import (
  check_not_lost,
  check_shared,
  claim_workdir,
  list_steps,
  write_refusal,
  write_run_files,
)

FLAGS = dict(
  config=command.CONFIG,
  workdir=command.Flag("", "the run's folder; by default runs/NAME of the config", is_path=True),
  distributed=command.Flag(False, "one of several processes that JAX finds: Cloud TPU VMs, GKE"),
  profile_steps=command.Flag("", "the first and the last step to profile, such as 10:20"),
  wandb=command.Flag("", "the project of Weights & Biases that gets the metrics too"),
)


def main(
  config: ConfigDict, workdir: Path | str, distributed: bool, profile_steps: str, wandb: str
) -> None:
  """Trains to `config.training.num_steps` from the last checkpoint, if any, and evaluates."""
  workdir = workdir or pathlib.Path("runs", config.name)
  if wandb and not importlib.util.find_spec("wandb"):
    raise InputError("--wandb needs its package: pip install wandb")
  if not re.fullmatch(r"([1-9]\d*:[1-9]\d*)?", profile_steps):
    raise InputError(f"--profile_steps={profile_steps}: give two steps, such as 10:20")
  if profile_steps and in_bucket(workdir):
    raise InputError("--profile_steps writes no profile into a bucket: give a local --workdir")
  processes.join_processes(distributed)
  with processes.only_first_prints(), StopOnSignal(at_exit=__name__ == "__main__") as stop:
    try:
      _train_and_evaluate(config, workdir, stop, profile_steps, wandb)
    except NonFiniteError as error:
      sys.exit(f"stopped: {error}")
    except Stopped as stopped:
      done = " ".join(f"stopped by {stop.signal.name} {stopped}".split())
      print(f"{done}: run the same command again to resume", flush=True)
      if stop.signal == signal.SIGINT:
        raise KeyboardInterrupt from stopped
      sys.exit(128 + stop.signal)
    except OSError as error:  # of a write, it does not name the file
      raise (write_refusal(error, workdir) or error) from None


def _train_and_evaluate(
  config: ConfigDict, workdir: Path, stop: StopOnSignal, profile_steps: str, wandb: str
) -> None:
  processes.check_same({f"config.{key}": x for key, x in flatten(config).items()} | code_version())
  with contextlib.ExitStack() as stack:
    with processes.failing_together():
      task = parse_config(config)
      if processes.is_first():
        stack.enter_context(command.lock_folder(workdir, "workdir"))
      claim_workdir(workdir, task.config.to_dict(), defaults(config).to_dict())
      data = task.load_data()
      for note in data.notes:
        print(note)
      training = build(task, task.learn_vocabulary(data, workdir))
    with jax.set_mesh(training.run.mesh):
      _train(training, data, workdir, stop, profile_steps, wandb)
    evaluate(with_average(training.run, workdir), data, workdir)
    processes.wait_for_all("evaluated")


def _train(
  training: Training, data: Any, workdir: Path, stop: StopOnSignal, profile_steps: str, wandb: str
) -> None:
  """Trains as `config.training` says; writes nothing before all inputs are checked."""
  run, config = training.run, training.run.config.training
  _print_devices(training)
  train_batches, valid_batches = run.task.make_batches(data, run.vocabulary, run.mesh)
  print(f"training: {train_batches}", f"validation: {valid_batches}", sep="\n")
  digests = data_digests(data, train_batches.examples, run.task.name_split)
  processes.check_same({f"the digest of the {name}": x for name, x in digests.items()})
  with processes.failing_together():
    check_unchanged(workdir, digests)
  with contextlib.ExitStack() as stack:
    checkpoints = stack.enter_context(_open_checkpoints(training, workdir))
    reporter = stack.enter_context(_open_reporter(training, workdir))
    state = _first_state(training, checkpoints)
    start = int(state.step)
    evaluate_state = _make_evaluate(training, data, valid_batches, reporter, stop)
    is_due = start and (start % config.eval_every == 0 or start >= config.num_steps)
    # All must agree on what follows. Also waits, before the first process writes.
    is_due = processes.any_process(bool(is_due) and not has_evaluation(workdir, start))
    if processes.is_first():
      write_run_files(workdir, run.config.to_dict())
      checkpoints.folder.mkdir(exist_ok=True)
      run.task.save_vocabulary(run.vocabulary, workdir)
      write_digests(workdir, digests)
      if wandb:
        reporter.log = stack.enter_context(begin_wandb(run.config, workdir, wandb)).log
    check_shared(workdir)
    stop.deferred = True
    if is_due:  # the run was stopped before it
      reporter.resume_after(start)
      evaluate_state(state)

    def save(state: TrainState) -> None:
      reporter.upload()  # no line before a checkpoint may be lost
      checkpoints.save(int(state.step), state)

    if not stop.should_stop():
      put = functools.partial(put_batch, mesh=run.mesh)
      batches = map(put, prefetch(train_batches, start, config.num_steps))
      if profile_steps:
        batches = profiled(batches, start, profile_steps, str(workdir / "tensorboard"))
        stack.enter_context(contextlib.closing(batches))
      state = train(
        state,
        with_operations(training.step),
        batches,
        num_steps=config.num_steps,
        report=reporter.step,
        evaluate=evaluate_state,
        save=save,
        should_stop=stop.should_stop,
        eval_every=config.eval_every,
        save_every=config.save_every,
        max_skipped=config.max_skipped,
      )
    stop.deferred = False
    if stop.should_stop():
      raise Stopped(f"at step {int(state.step)}")


def _print_devices(training: Training) -> None:
  run = training.run
  axes = [f"{axis} {size}" for axis, size in run.mesh.shape.items() if size > 1]
  devices = f"{run.mesh.size} x {run.mesh.devices.flat[0].device_kind}"
  print(f"devices: {devices}, processes: {jax.process_count()}, mesh:", *axes or "1")
  parameters, tokens = sum(x.size for x in jax.tree.leaves(run.params)), run.config.batches.tokens
  print(f"parameters: {parameters:,}, tokens of a batch: {tokens:,} at most")


def _open_checkpoints(training: Training, workdir: Path) -> Checkpoints:
  config = training.run.config.training
  options = dict(save_every=config.save_every, rename_damaged=True)
  return Checkpoints(workdir / "checkpoints", config.keep_checkpoints, **options)


def _open_reporter(training: Training, workdir: Path) -> Reporter | NoReporter:
  if not processes.is_first():
    return NoReporter()
  mesh = training.run.mesh
  peak = mesh.size * peak_operations(mesh.devices.flat[0].device_kind)
  return Reporter(workdir, training.run.config.training.num_steps, peak=peak)


def _first_state(training: Training, checkpoints: Checkpoints) -> TrainState:
  """Restores the newest good checkpoint, or initializes the state if there is no checkpoint."""
  folder = checkpoints.folder
  processes.check_same({"the list of checkpoints in --workdir": list_steps(folder)})
  if checkpoints.latest_step() is None:
    with processes.failing_together():
      check_not_lost(folder.parent, read_metrics(folder.parent))
    checkpoints.check_room(training.shapes)
    return training.init()
  state = checkpoints.restore(like=training.shapes)
  print(f"{folder.parent} is trained to step {int(state.step)}")
  if int(state.step) < training.run.config.training.num_steps:
    checkpoints.check_room(training.shapes)
  return state


def _make_evaluate(
  training: Training, data: Any, batches: Any, reporter: Reporter, stop: StopOnSignal
) -> Callable[[TrainState], None]:
  """Returns the function that reports valid loss and task scores, or nothing once stopped."""
  run = training.run
  put = functools.partial(put_batch, mesh=run.mesh)
  task_report = run.task.make_report(run, data, batches)

  def evaluate_state(state: TrainState) -> None:
    with stop.interruptible():
      losses = []
      for batch in map(put, prefetch(batches, 0, batches.num_per_epoch)):
        losses.append(training.eval_step(state.params, batch))
        if stop.should_stop(losses[-1]):
          return
      total, num_tokens = (sum(map(float, values)) for values in zip(*losses, strict=True))
      values, text = task_report(state.params)
      if stop.should_stop():
        return
      step = int(state.step)
      reporter.values(step, dict(valid_loss=total / num_tokens, **values))
      if text:
        reporter.text(step, "valid", text)

  return evaluate_state


if __name__ == "__main__":
  command.run(main, FLAGS)
