"""Runs the loop over training steps, with evaluations and checkpoints."""

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from experiments.data.batching import first_steps
from experiments.files import Path
from experiments.training import processes
from experiments.training.batches import load_batches
from experiments.training.checkpoint import Checkpoints
from experiments.training.compiling import (
  announce_attention,
  compile_ahead,
  open_compiler,
)
from experiments.training.metrics import (
  NoReporter,
  Reporter,
  read_metrics,
  wandb_run,
)
from experiments.training.processes import StopOnSignal, Stopped
from experiments.training.run import Run
from experiments.training.sharding import put_batch
from experiments.training.step import Steps, TrainState
from relpos_jax.typing import PyTree

# Maps parameters to scores by name, and a text to show.
ScoreFunction = Callable[[PyTree], tuple[dict[str, float], str]]


class Flags(NamedTuple):
  """Holds what the command `experiments.train` passes to the loop."""

  stop: StopOnSignal
  profile_steps: str = ""
  wandb: str = ""


class NonFiniteError(RuntimeError):
  """Ends a run after too many steps in a row with a non-finite loss or gradient."""


def train(
  run: Run,
  steps: Steps,
  state: TrainState | None,
  batches: Any,
  valid_batches: Any,
  *,
  num_steps: int,
  checkpoints: Checkpoints,
  workdir: Path,
  flags: Flags,
  score: ScoreFunction = lambda params: ({}, ""),
) -> TrainState:
  """Trains from a restored state, or from the beginning; returns the last state.

  Args:
    batches: `batches[step]` is the batch of a step; see `experiments.data.batching`.
    score: called with the parameters at each evaluation. Returns scores by name, and a
      text to show.

  Raises NonFiniteError as `take_steps` does. After a signal, saves the state and raises
  Stopped.
  """
  settings = run.config.training
  first_step = int(state.step) if state else 0
  lacks_evaluation = _lacks_evaluation(
    workdir, first_step, num_steps, settings.eval_every
  )
  if first_step >= num_steps and not lacks_evaluation:
    return state
  checkpoints.prepare()
  stop = flags.stop
  stop.deferred = True
  on_devices = load_batches(batches, run.mesh, first_step, num_steps)
  if flags.profile_steps:
    folder = str(workdir / "tensorboard")
    on_devices = profile(on_devices, first_step, flags.profile_steps, folder)
  with (
    _open_reporter(run, workdir, first_step, num_steps, flags.wandb) as reporter,
    announce_attention(),
    open_compiler() as compiler,
    contextlib.closing(on_devices),
  ):
    examples = _first_batches(batches, run, first_step, num_steps)
    train_step = compile_ahead(steps.train, compiler, steps.shapes, examples)
    valid_examples = _first_batches(valid_batches, run, 0, valid_batches.num_per_epoch)
    eval_step = compile_ahead(
      steps.evaluate, compiler, steps.shapes.params, valid_examples
    )
    evaluate = functools.partial(
      _evaluate, run, eval_step, valid_batches, score, reporter, stop
    )

    def save(state: TrainState) -> None:
      reporter.upload()  # first, so that no metrics before a checkpoint are lost
      checkpoints.save(int(state.step), state)

    state = state or steps.init()
    if lacks_evaluation:
      evaluate(state)
    if not stop.should_stop():
      state = take_steps(
        state,
        train_step,
        on_devices,
        num_steps=num_steps,
        report=reporter.step,
        evaluate=evaluate,
        save=save,
        should_stop=stop.should_stop,
        eval_every=settings.eval_every,
        save_every=settings.save_every,
        max_skipped=settings.max_skipped,
      )
  checkpoints.wait()  # while signals are deferred: none may interrupt the last save
  stop.deferred = False
  if stop.should_stop():
    raise Stopped(f"at step {int(state.step)}")
  return state


def _lacks_evaluation(
  workdir: Path, step: int, num_steps: int, eval_every: int
) -> bool:
  """Checks whether a run was stopped between a save and its evaluation."""
  is_due = step > 0 and (_is_due(step, eval_every, num_steps) or step > num_steps)
  lines = read_metrics(workdir)
  evaluated = [line["step"] for line in lines if "valid_loss" in line]
  return processes.any_process(is_due and step not in evaluated)


@contextlib.contextmanager
def _open_reporter(
  run: Run, workdir: Path, start: int, num_steps: int, wandb: str
) -> Iterator[Reporter | NoReporter]:
  """Yields a reporter; only the first process reports anything."""
  if not processes.is_first():
    yield NoReporter()
    return
  with contextlib.ExitStack() as stack:
    options = {}
    if wandb:
      remote = wandb_run(run.config.to_dict(), workdir, wandb)
      options["log"] = stack.enter_context(remote).log
    yield stack.enter_context(Reporter(workdir, start, num_steps, **options))


def _first_batches(batches: Any, run: Run, start: int, stop: int) -> Iterator[Any]:
  """Yields the first batch of each shape, sharded over the devices."""
  for step in first_steps(batches, start, stop):
    yield put_batch(batches[step], run.mesh)


def _evaluate(
  run: Run,
  eval_step: Callable,
  batches: Any,
  score: ScoreFunction,
  reporter: Reporter | NoReporter,
  stop: StopOnSignal,
  state: TrainState,
) -> None:
  """Reports the validation loss and the scores of a state, unless a signal comes."""
  with stop.interruptible():
    total = num_tokens = 0.0
    for batch in load_batches(batches, run.mesh, 0, batches.num_per_epoch):
      loss = eval_step(state.params, batch)
      # float() waits for each batch: on CPUs, concurrent sums over processes may
      # deadlock.
      total += float(loss.sum)
      num_tokens += float(loss.num_tokens)
      if stop.should_stop():
        return
    values, text = score(state.params)
  if stop.should_stop():
    return
  step = int(state.step)
  reporter.values(step, {"valid_loss": total / num_tokens, **values})
  if text:
    reporter.text(step, "valid", text)
  reporter.upload()


def take_steps(
  state: TrainState,
  train_step: Callable,
  batches: Iterator,
  *,
  num_steps: int,
  report: Callable[[int, dict], None],
  evaluate: Callable[[TrainState], None],
  save: Callable[[TrainState], None],
  should_stop: Callable[[], bool] = lambda: False,
  eval_every: int,
  save_every: int,
  max_skipped: int = 10,
) -> TrainState:
  """Takes the steps from `state.step` to `num_steps`; returns the last state.

  Args:
    train_step: `(state, batch) -> (state, metrics)`.
    batches: yields the batches of steps `state.step`, `state.step + 1`, ...
    report: called with each step, counted from 1, and its metrics.
    evaluate, save: called every `eval_every` and `save_every` steps, and after the last
      step. A step is saved before its evaluation, so that an error there loses nothing.
    should_stop: called after each step, save and evaluation. Once it returns True, the
      state is saved and returned.
    max_skipped: this many skipped steps in a row end the run.

  Raises NonFiniteError, which names the step and its batch.
  """
  in_flight = _StepsInFlight(report, max_skipped)
  first = int(state.step) + 1
  for step in range(first, num_steps + 1):
    batch = next(batches)
    state, metrics = train_step(state, batch)
    in_flight.add(step, batch, metrics)
    save_now = _is_due(step, save_every, num_steps)
    evaluate_now = _is_due(step, eval_every, num_steps)
    # One step stays in flight, so that the device never waits until the host has read
    # its metrics. The first is reported at once, because compiling the next may take
    # long.
    is_reported_now = step == first or evaluate_now or save_now
    in_flight.report_all_but(0 if is_reported_now else 1)
    if save_now:
      save(state)
    if evaluate_now and not should_stop():
      evaluate(state)
    if should_stop():
      in_flight.report_all_but(0)
      if not save_now:
        save(state)
      break
  return state


def _is_due(step: int, every: int, num_steps: int) -> bool:
  return step % every == 0 or step == num_steps


class _StepsInFlight:
  """Holds steps until the host reads their metrics."""

  def __init__(self, report: Callable[[int, dict], None], max_skipped: int):
    self._report = report
    self._max_skipped = max_skipped
    self._num_skipped = 0  # in a row
    self._steps = collections.deque()

  def add(self, step: int, batch: Any, metrics: dict[str, jax.Array]) -> None:
    self._steps.append((step, batch, metrics))

  def report_all_but(self, num_left: int) -> None:
    """Reports all steps except the newest `num_left`; raises NonFiniteError."""
    while len(self._steps) > num_left:
      step, batch, arrays = self._steps.popleft()
      metrics = {name: value.item() for name, value in jax.device_get(arrays).items()}
      self._report(step, metrics)
      self._num_skipped = self._num_skipped + 1 if metrics["skipped"] else 0
      if self._num_skipped >= self._max_skipped:
        shape = jax.tree.leaves(batch)[-1].shape  # pairs end with their targets
        raise NonFiniteError(
          f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']} "
          f"on batch {step - 1} of shape {'x'.join(map(str, shape))}, number "
          f"{self._num_skipped} skipped in a row: start again with a lower learning "
          "rate and another --workdir, or look at these batches"
        )


def profile(batches: Iterator, start: int, asked: str, folder: str) -> Iterator:
  """Yields the batches after step `start`; profiles the steps that `asked` names.

  `asked` is the first and the last step to profile, such as "10:20". The profile is
  written into `folder`.
  """
  first, last = map(int, asked.split(":"))
  yield from itertools.islice(batches, max(first - start - 1, 0))
  steps = range(max(first, start + 1), last + 2)
  is_due = len(steps) > 1
  with jax.profiler.trace(folder) if is_due else contextlib.nullcontext():
    # One step more is profiled, because the device may still compute the last one when
    # the host starts the next.
    for step, batch in zip(steps, batches, strict=False):
      with jax.profiler.StepTraceAnnotation("train", step_num=step):
        yield batch
  yield from batches
