"""Trains a model as its config says, and evaluates it: what `experiments.train` runs."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from ml_collections import ConfigDict

from experiments import command
from experiments.config import flatten
from experiments.data.batching import prefetch
from experiments.data.upstream import write_skipped
from experiments.evaluate import evaluate
from experiments.files import Path
from experiments.run import Training, build, defaults, parse_config, with_average
from experiments.training import processes
from experiments.training.checkpoint import Checkpoints
from experiments.training.checkpoint_reader import list_steps
from experiments.training.environment import code_version
from experiments.training.loop import NonFiniteError, profiled, train
from experiments.training.metrics import NoReporter, Reporter, read_metrics, wandb_run
from experiments.training.processes import StopOnSignal, Stopped
from experiments.training.sharding import put_batch
from experiments.training.step import TrainState, compiling_ahead, naming_attention
from experiments.training.task import Run
from experiments.training.workdir import (
  check_not_lost,
  check_shared,
  check_unchanged,
  claim_workdir,
  data_digests,
  training_digest,
  write_digests,
  write_run_files,
)


def run(
  config: ConfigDict, workdir: Path, distributed: bool, profile_steps: str, wandb: str
) -> None:
  """Trains from the last checkpoint in the run directory, if any, and evaluates.

  Exits if it is stopped. The arguments are those of the command.
  """
  processes.join_processes(distributed)
  output = None  # one process prints
  if processes.is_first() and sys.stdout:
    output = command.DisplayStream(sys.stdout)
  with contextlib.redirect_stdout(output), StopOnSignal() as stop:
    try:
      with contextlib.ExitStack() as stack:
        values = {f"config.{key}": x for key, x in flatten(config).items()}
        processes.check_same(values | code_version())
        with processes.failing_together():
          task = parse_config(config)
          if processes.is_first():
            stack.enter_context(command.lock_folder(workdir, "workdir"))
          claim_workdir(workdir, flatten(task.config), flatten(defaults(config)))
          data = task.load_data()
          for note in data.notes:
            print(note)
          training = build(task, task.learn_vocabulary(data, workdir))
        with jax.set_mesh(training.run.mesh):
          _train(training, data, workdir, stop, profile_steps, wandb)
        evaluate(with_average(training.run, workdir), data, workdir)
        processes.wait_for_all("evaluated")
    except NonFiniteError as error:
      sys.exit(f"stopped: {error}")
    except Stopped as stopped:
      done = " ".join(f"stopped by {stop.signal.name} {stopped}".split())
      print(f"{done}: run the same command again to resume", flush=True)
      sys.exit(128 + stop.signal)


def _train(
  training: Training,
  data: Any,
  workdir: Path,
  stop: StopOnSignal,
  profile_steps: str,
  wandb: str,
) -> None:
  """Trains as `config.training` says; writes nothing before all inputs are checked."""
  run, config = training.run, training.run.config.training
  _print_devices(run)
  batches, valid_batches = run.task.make_batches(data, run.vocabulary, run.mesh)
  print(f"training: {batches}", f"validation: {valid_batches}", sep="\n")
  num_steps = config.num_steps or config.num_epochs * batches.num_per_epoch
  if num_steps <= config.warmup_steps:
    shares = f"{num_steps:,} of {config.warmup_steps:,}"
    print(
      f"note: all steps are in the warmup, {shares}: the learning rate only rises; "
      "for its fall, lower --config.training.warmup_steps"
    )
  digests = training_digest(batches.examples) | data_digests(data, run.task.name_split)
  processes.check_same({f"the digest of the {name}": x for name, x in digests.items()})
  with processes.failing_together():
    check_unchanged(workdir, digests)
    lines = read_metrics(workdir)
    check_not_lost(workdir, lines)
  options = dict(save_every=config.save_every, rename_damaged=True)
  with Checkpoints(
    workdir / "checkpoints", config.keep_checkpoints, **options
  ) as checkpoints:
    processes.check_same(
      {"the list of checkpoints in --workdir": list_steps(checkpoints.folder)}
    )
    state = checkpoints.restore(like=training.shapes)
    start = int(state.step) if state else 0
    if state:
      print(f"{workdir} is trained to step {start}")
    # A run that was stopped after a save may lack the evaluation of that step.
    is_due = start > 0 and (start % config.eval_every == 0 or start >= num_steps)
    is_there = any(line["step"] == start and "valid_loss" in line for line in lines)
    lacks_evaluation = processes.any_process(is_due and not is_there)
    if processes.is_first():
      write_run_files(workdir, run.config.to_dict(), num_steps)
      run.task.save_vocabulary(run.vocabulary, workdir)
      write_digests(workdir, digests)
      write_skipped(data, workdir)
    check_shared(workdir)
    checkpoints.prepare()
    stop.deferred = True
    if start < num_steps or lacks_evaluation:
      on_devices = (
        put_batch(batch, run.mesh) for batch in prefetch(batches, start, num_steps)
      )
      if profile_steps:
        on_devices = profiled(
          on_devices, start, profile_steps, str(workdir / "tensorboard")
        )
      with contextlib.ExitStack() as stack:
        reporter = NoReporter()
        if processes.is_first():
          options = {}
          if wandb:
            remote = stack.enter_context(
              wandb_run(run.config.to_dict(), workdir, wandb)
            )
            options["log"] = remote.log
          reporter = stack.enter_context(Reporter(workdir, start, num_steps, **options))
        compiler = stack.enter_context(compiling_ahead())
        stack.enter_context(contextlib.closing(on_devices))
        step = _compile_ahead(
          training, batches, valid_batches, start, num_steps, compiler
        )
        evaluate_state = _make_evaluate(training, data, valid_batches, reporter, stop)

        def save(state: TrainState) -> None:
          reporter.upload()  # no line before a checkpoint may be lost
          checkpoints.save(int(state.step), state)

        state = state or training.init()
        if lacks_evaluation:
          evaluate_state(state)
        if not stop.should_stop():
          state = train(
            state,
            step,
            on_devices,
            num_steps=num_steps,
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


def _compile_ahead(
  training: Training,
  batches: Any,
  valid: Any,
  start: int,
  num_steps: int,
  compiler: Callable,
) -> Callable:
  """Starts compiling the steps of training and evaluation; returns the first."""

  def firsts(batches: Any, start: int, stop: int) -> Iterator[Any]:
    return (
      put_batch(batches[i], training.run.mesh) for i in batches.first_steps(start, stop)
    )

  first = firsts(batches, start, num_steps)
  step = naming_attention(training.step, compiler, training.shapes, first)
  params, eval_step = training.shapes.params, training.eval_step
  for batch in firsts(valid, 0, valid.num_per_epoch):
    compiler(lambda batch: eval_step.lower(params, batch).compile(), batch)
  return step


def _print_devices(run: Run) -> None:
  axes = [f"{axis} {size}" for axis, size in run.mesh.shape.items() if size > 1]
  devices = f"{run.mesh.size} x {run.mesh.devices.flat[0].device_kind}"
  print(f"devices: {devices}, processes: {jax.process_count()}, mesh:", *axes or "1")
  parameters, tokens = (
    sum(x.size for x in jax.tree.leaves(run.params)),
    run.config.batches.tokens,
  )
  print(f"parameters: {parameters:,}, tokens of a batch: {tokens:,} at most")


def _make_evaluate(
  training: Training,
  data: Any,
  batches: Any,
  reporter: Reporter | NoReporter,
  stop: StopOnSignal,
) -> Callable[[TrainState], None]:
  """Returns the function that reports valid loss and task scores, or nothing once stopped."""
  run = training.run
  task_report = run.task.make_report(run, data, batches)

  def evaluate_state(state: TrainState) -> None:
    with stop.interruptible():
      losses = []
      for batch in prefetch(batches, 0, batches.num_per_epoch):
        losses.append(training.eval_step(state.params, put_batch(batch, run.mesh)))
        if stop.should_stop():
          return
      total, num_tokens = (
        sum(map(float, values)) for values in zip(*losses, strict=True)
      )
      values, text = task_report(state.params)
      if stop.should_stop():
        return
      step = int(state.step)
      reporter.values(step, dict(valid_loss=total / num_tokens, **values))
      if text:
        reporter.text(step, "valid", text)
      reporter.upload()

  return evaluate_state
