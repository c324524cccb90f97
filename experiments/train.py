r"""Trains a model, scores it and draws what it learned.

  python -m experiments.train --config=configs/quickstart.py
  python -m experiments.train --config=configs/multi30k.py:sinusoidal --workdir=runs/sinusoidal
  python -m experiments.train --config=configs/multi30k.py --config.data.multi30k.path=FOLDER
  python -m experiments.train --config=configs/quickstart.py --config.model.max_distance=4 \
      --workdir=runs/k4
  python -m experiments.train --config=configs/quickstart.py --workdir=runs/mine \
      --config.data.source=pairs --config.data.pairs.train=train.en,train.de \
      --config.data.pairs.valid=valid.en,valid.de --config.data.pairs.test=test.en,test.de

The folder --workdir holds all of the run; the same command again goes on where it stopped. One
training at a time is at work in it. SIGTERM saves and ends it with status 0, Ctrl-C saves and ends
it with status 130, and Ctrl-C again, once the first was heard, at once. Data are downloaded, but
where a FOLDER has them already.

In several processes the first prints and writes. Each is started with this command, as srun and
mpirun do; experiments/launch/ has recipes.
"""

import contextlib
import functools
import hashlib
import os
import pathlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from configs.default import RETIRED
from experiments import command
from experiments.config import defaults, make_task, validate
from experiments.evaluate import evaluate
from experiments.locks import lock_folder
from experiments.run import init_params, make_optimizer, make_step, plan_run, with_average
from relpos_jax.data.batching import prefetch
from relpos_jax.data.tokenizer import tokenizer_files
from relpos_jax.errors import InputError
from relpos_jax.training.checkpoint import Checkpoints
from relpos_jax.training.checkpoint_files import is_no_room, list_damaged, list_steps, list_unfinished
from relpos_jax.training.loop import NonFiniteError, train
from relpos_jax.training.metrics import NoReporter, Reporter, read_metrics
from relpos_jax.training.processes import (
  anywhere,
  check_same,
  first_message,
  is_first,
  join_processes,
  only_first_prints,
  wait_for_all,
)
from relpos_jax.training.sharding import put_batch, put_parameters, shapes_on
from relpos_jax.training.signals import Stop, Stopped
from relpos_jax.training.step import TrainState, init_state, make_eval_step
from relpos_jax.training.task import Run
from relpos_jax.training.workdir import (
  changed_data,
  check_shared,
  claim_workdir,
  read_json,
  write_digests,
  write_run_files,
)

FLAGS = dict(
  config=command.CONFIG,
  workdir=command.Flag("", "the run's folder; runs/NAME with the config's name if not given"),
  distributed=command.Flag(False, "one of several processes that JAX finds: Cloud TPU VMs, GKE"),
)


def main(config: ConfigDict, workdir: str, distributed: bool) -> None:
  """Trains to `config.training.num_steps` from the last checkpoint, if any, and evaluates."""
  workdir = pathlib.Path(workdir or f"runs/{config.name}")
  join_processes(distributed)
  with only_first_prints(), Stop(is_last=__name__ == "__main__") as stop:
    try:
      _train_and_evaluate(config, workdir, stop)
    except NonFiniteError as error:
      sys.exit(f"stopped: {error}")
    except Stopped as stopped:
      done = " ".join(f"stopped by {stop.signal.name} {stopped}".split())
      print(f"{done}: the same command goes on", flush=True)
      if stop.signal == signal.SIGINT:
        raise KeyboardInterrupt from stopped
    except OSError as error:
      if not is_no_room(error):
        raise
      raise InputError(
        f"no room in {workdir} ({error.strerror}): make room and go on with the same command"
      ) from error


def _train_and_evaluate(config: ConfigDict, workdir: pathlib.Path, stop: Stop) -> None:
  validate(config)
  # An older run may still have the retired keys: then with the values that are left.
  if claim_workdir(workdir, config.to_dict() | RETIRED, defaults(config).to_dict() | RETIRED):
    _check_checkpoints_are_there(workdir)
  with _alone_in(workdir):
    task = make_task(config)
    data = task.load_data()
    for note in data.notes:
      print(note)
    run = plan_run(task, task.learn_vocabulary(data, workdir))
    _check_processes(run)
    with jax.set_mesh(run.mesh):
      run_training(run, data, workdir, stop)
    evaluate(with_average(run, workdir), data, workdir)
    wait_for_all("evaluated")


def _check_checkpoints_are_there(workdir: pathlib.Path) -> None:
  """Refuses to start anew where checkpoints are lost, as on a disk that is not mounted.

  Their folder is made at the start of a run. It stays empty until the first save is over, and no
  later step is reported before that, nor an evaluation of that step.
  """
  folder = workdir / "checkpoints"
  lines = read_metrics(workdir)
  if folder.is_dir():
    first = read_json(workdir / "config.json")["training"]["save_every"]
    is_past = lambda line: line["step"] >= first + ("valid_loss" not in line)
    is_empty = not (list_steps(folder) or list_damaged(folder) or list_unfinished(folder))
    is_lost = is_empty and any(map(is_past, lines))
  else:
    is_lost = bool(lines) or os.path.lexists(folder)
  if is_lost:
    step = max((line["step"] for line in lines), default=0)
    raise InputError(
      f"the checkpoints in {folder} are gone, and the run has reached step {step}: bring that "
      f"folder back, or delete {workdir} to start anew"
    )


@contextlib.contextmanager
def _alone_in(workdir: pathlib.Path) -> Iterator[None]:
  """Keeps every other training out: the first of several processes does, and all are refused."""
  with contextlib.ExitStack() as stack:
    refusal = ""
    if is_first():
      try:
        stack.enter_context(lock_folder(workdir, "training", "workdir"))
      except InputError as error:
        refusal = str(error)
    if refusal := first_message(refusal):
      raise InputError(refusal)
    yield


def _check_processes(run: Run) -> None:
  missing = jax.process_count() - len({d.process_index for d in run.mesh.devices.flat})
  if missing:
    raise InputError(
      f"a mesh of {run.mesh.size} devices leaves {missing} of "
      f"{jax.process_count()} processes without any: give --config.mesh.data=-1, for all"
    )


def run_training(run: Run, data: Any, workdir: pathlib.Path, stop: Stop | None = None) -> None:
  """Puts the parts of `config.training` together and trains.

  Nothing is written before all that may be a user's mistake has been looked at.
  """
  config, stop = run.config.training, stop or Stop()
  train_batches, valid_batches = run.task.make_batches(data, run.vocabulary, run.mesh)
  print(f"training: {train_batches}", f"validation: {valid_batches}", sep="\n")
  training_data = _digest(train_batches.examples)
  if refusal := first_message(changed_data(workdir, _digests(training_data, workdir))):
    raise InputError(refusal)
  with (
    Checkpoints(
      workdir / "checkpoints", keep=config.keep_checkpoints, rename_damaged=True
    ) as checkpoints,
    Reporter(workdir, config.num_steps) if is_first() else NoReporter() as reporter,
  ):
    state = _first_state(run, checkpoints)
    report_valid = _report_valid(run, data, valid_batches, reporter, stop)
    # Each process reads the file by itself, but what follows is for all or none.
    lacks_evaluation = any_process(_lacks_evaluation(config, int(state.step), workdir))
    check_same("the first batch", train_batches[0])  # and wait, before one of them writes
    _write_what_it_is(run, training_data, workdir)
    stop.waits = True
    if lacks_evaluation:
      reporter.resume_after(int(state.step))
      with stop.cutting_short():
        report_valid(state)
      if stop.hear(stop.ask()):
        raise Stopped(f"at step {int(state.step)}")
    _train_from(state, run, train_batches, reporter.step, report_valid, checkpoints, stop)
    stop.waits = False
    if stop.hear(stop.ask()):
      raise Stopped(f"at step {config.num_steps}")


def _train_from(
  state: TrainState, run: Run, batches: Any, report, evaluate, checkpoints: Checkpoints, stop
) -> None:
  config = run.config.training
  arrays = prefetch(batches, int(state.step), config.num_steps)
  train(
    state,
    make_step(run.task, run.graphdef),
    map(functools.partial(put_batch, mesh=run.mesh), arrays),
    num_steps=config.num_steps,
    report=report,
    evaluate=evaluate,
    save=lambda state: checkpoints.save(int(state.step), state),
    eval_every=config.eval_every,
    save_every=config.save_every,
    max_skipped=config.max_skipped,
    stop=stop,
  )


def _lacks_evaluation(config: ConfigDict, step: int, workdir: pathlib.Path) -> bool:
  """Whether the run was stopped after this step and before the evaluation that was due."""
  if step == 0 or (step % config.eval_every and step < config.num_steps):
    return False
  lines = read_metrics(workdir)
  return not any(line["step"] == step and "valid_loss" in line for line in lines)


def _write_what_it_is(run: Run, training_data: str, workdir: pathlib.Path) -> None:
  if is_first():
    write_run_files(workdir, run.config.to_dict())
    (workdir / "checkpoints").mkdir(exist_ok=True)
    run.task.save_vocabulary(run.vocabulary, workdir)
    write_digests(workdir, _digests(training_data, workdir))
  check_shared(workdir)


def _digests(training_data: str, workdir: pathlib.Path) -> dict[str, str]:
  """Returns what the steps of a run depend on besides its config; the tokenizer if there is one."""
  contents = [np.frombuffer(file.read_bytes(), np.uint8) for file in tokenizer_files(workdir)]
  tokenizer = dict(tokenizer=_digest(contents)) if contents else {}
  return tokenizer | {"training data": training_data}


def _digest(arrays: Any) -> str:
  """Returns the SHA-256 of a tree of arrays."""
  found = hashlib.sha256()
  for array in jax.tree.leaves(arrays):
    found.update(f"{array.dtype}{array.shape}".encode())
    found.update(np.ascontiguousarray(array))
  return found.hexdigest()


def _first_state(run: Run, checkpoints: Checkpoints) -> TrainState:
  """That of the newest good checkpoint, if there is any checkpoint."""
  start = lambda: init_state(init_params(run), make_optimizer(run.config))
  like = shapes_on(run.mesh, jax.eval_shape(start))
  check_same(f"what is in {checkpoints.folder}", [np.array(list_steps(checkpoints.folder))])
  if checkpoints.latest_step() is None:
    checkpoints.check_room(like)
    return put_parameters(start(), run.mesh)
  state = checkpoints.restore(like=like)
  print(f"{checkpoints.folder.parent} is trained to step {int(state.step)}")
  if int(state.step) < run.config.training.num_steps:
    checkpoints.check_room(like)
  return state


def _report_valid(run: Run, data: Any, batches: Any, reporter: Reporter, stop: Stop):
  """What each evaluation during training does: the valid loss, and what the task reports.

  One that is asked to stop reports nothing.
  """
  eval_step = make_eval_step(run.graphdef, run.task.loss)
  report = run.task.make_report(run, data, batches)
  place = functools.partial(put_batch, mesh=run.mesh)

  def report_valid(state: TrainState) -> None:
    losses = []
    for batch in prefetch(batches, 0, batches.num_per_epoch):
      losses.append(eval_step(state.params, place(batch)))
      if stop.hear(stop.ask(losses[-1])):
        return
    total, num_tokens = (sum(map(float, values)) for values in zip(*losses, strict=True))
    values, text = report(state.params)
    if stop.hear(stop.ask()):
      return
    step = int(state.step)
    reporter.values(step, dict(valid_loss=total / num_tokens, **values))
    if text:
      reporter.text(step, "valid", text)

  return report_valid


if __name__ == "__main__":
  command.run(main, FLAGS)
