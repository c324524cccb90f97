"""What a run tells while it goes: progress, metrics, sample translations."""

import json
import math
import os
import pathlib
import re
import time
from collections.abc import Mapping
from typing import Any

import jax
import rich.console

from relpos_jax.errors import InputError
from relpos_jax.training.progress import Display, Speed
from relpos_jax.training.tensorboard import EventFile
from relpos_jax.training.workdir import write_whole

_COMPILED = "/jax/core/compile/backend_compile_duration"  # what JAX calls the event
_ENOUGH_STEPS = 5  # timed, before the time left is told


class Reporter:
  """Writes metrics.jsonl, samples.txt and tensorboard/ in a run's folder, and shows the progress.

  On a terminal a bar, elsewhere a line now and then: step, loss, tokens per second, time left; on
  stderr. Steps during which something is compiled are not timed. The first step reported tells
  where the run goes on: what an interrupted run has already written for that step and later ones is
  dropped, so that no step is there twice.

  What cannot be written, for want of room or else, is an OSError of the step or at the end.

  A line of metrics.jsonl is an object with "step", "time" (seconds since 1970) and the values by
  name, null where one is not finite.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as workdir:
  ...   with Reporter(workdir, num_steps=2) as reporter:
  ...     reporter.step(1, dict(loss=4.0, num_tokens=900))
  ...     reporter.step(2, dict(loss=3.5, num_tokens=1000))
  ...     reporter.values(2, dict(valid_loss=3.75))
  ...   [(line["step"], line.get("loss"), line.get("valid_loss")) for line in read_metrics(workdir)]
  [(1, 4.0, None), (2, 3.5, None), (2, None, 3.75)]
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    num_steps: int,
    *,
    log_every: int | None = None,
    console: rich.console.Console | None = None,
    seconds: float = 5.0,
  ):
    """Nothing is written before the first step.

    Args:
      workdir: the run's folder, which exists.
      num_steps: of the whole run.
      log_every: the metrics of every so many steps, and of the last, are kept; by default so many
        that there are about a thousand.
      console: where the progress is shown; stderr by default.
      seconds: between two lines of progress where there is no terminal; more, 1% of the time gone
        by, in long runs.
    """
    self._workdir = pathlib.Path(workdir)
    self._num_steps = num_steps
    self._log_every = log_every or max(1, num_steps // 1000)
    self._num_skipped = 0  # since this start
    self._speed = Speed()
    self._display = Display(console or rich.console.Console(stderr=True), num_steps, seconds)
    self._tensorboard: EventFile | None = None

  def __enter__(self) -> "Reporter":
    self._display.start()
    jax.monitoring.register_event_duration_secs_listener(self._listen)
    return self

  def __exit__(self, *_) -> None:
    jax.monitoring.unregister_event_duration_listener(self._listen)
    self._display.stop()
    if self._tensorboard:
      self._tensorboard.close()

  def resume_after(self, step: int) -> None:
    """Keeps what is written for this step, to be added to, and drops what is of later ones."""
    self._open_tensorboard(step + 1)

  def step(self, step: int, metrics: Mapping[str, float | int]) -> None:
    """Reports a step of training, counted from 1: its "loss", "num_tokens" and whatever else.

    A step that was "skipped" is always kept, and counted.
    """
    self._speed.update(metrics["num_tokens"])
    speed = self._speed.tokens_per_second
    skipped = metrics.get("skipped", 0)
    self._num_skipped += skipped
    if step % self._log_every == 0 or step == self._num_steps or skipped:
      self._write(step, metrics if speed is None else {**metrics, "tokens_per_second": speed})
    line = f"step {step}/{self._num_steps}  loss {metrics['loss']:.3f}"
    if speed is not None:
      line += f"  {speed:,.0f} tokens/s"
    if self._speed.num_timed >= _ENOUGH_STEPS:
      line += f"  {self._speed.time_for(self._num_steps - step)} left"
    if self._num_skipped:
      line += f"  {self._num_skipped} skipped"
    self._display.update(step, line)

  def values(self, step: int, values: Mapping[str, float | int]) -> None:
    """Reports numbers now and then, such as those of an evaluation, and shows them."""
    self._write(step, values)
    self._display.print(f"step {step}  {'  '.join(f'{n} {v:.4g}' for n, v in values.items())}")
    self._speed.pause()

  def text(self, step: int, tag: str, text: str) -> None:
    """Reports a text, such as sample translations, and shows it."""
    tensorboard = self._open_tensorboard(step)
    with open(self._workdir / "samples.txt", "a", encoding="utf-8") as file:
      file.write(f"=== step {step}, {tag}\n{text}\n\n")
    # TensorBoard renders Markdown, where four spaces keep lines as they are.
    tensorboard.text(step, tag, re.sub("^", "    ", text, flags=re.MULTILINE))
    self._display.print(text)
    self._speed.pause()

  def _listen(self, event: str, seconds: float, **_) -> None:
    if event == _COMPILED:
      self._speed.pause()

  def _write(self, step: int, values: Mapping[str, float | int]) -> None:
    tensorboard = self._open_tensorboard(step)
    finite = {
      name: float(value) if math.isfinite(value) else None for name, value in values.items()
    }
    with open(self._workdir / "metrics.jsonl", "a", encoding="utf-8") as file:
      file.write(json.dumps(dict(step=step, time=round(time.time(), 3)) | finite) + "\n")
    tensorboard.scalars(step, values)

  def _open_tensorboard(self, step: int) -> EventFile:
    """At the first step reported: where the run goes on."""
    if self._tensorboard is None:
      _drop_from(step, self._workdir)
      self._tensorboard = EventFile(self._workdir / "tensorboard", step)
    return self._tensorboard


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
  """The lines of a run's metrics.jsonl; without a half line that a killed run may have left.

  Raises:
    InputError: another line is damaged.
  """
  path = pathlib.Path(workdir, "metrics.jsonl")
  try:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
  except ValueError as error:
    raise InputError(f"damaged {path} ({error}): delete the lines that are not JSON") from error


def _drop_from(step: int, workdir: pathlib.Path) -> None:
  """Removes what was written for `step` and later ones."""
  kept = [json.dumps(line) + "\n" for line in read_metrics(workdir) if line["step"] < step]
  write_whole(workdir / "metrics.jsonl", "".join(kept))
  samples = workdir / "samples.txt"
  if samples.exists():
    text = samples.read_text(encoding="utf-8")
    headers = re.finditer(r"^=== step (\d+), ", text, flags=re.MULTILINE)
    later = (header.start() for header in headers if int(header[1]) >= step)
    write_whole(samples, text[: next(later, len(text))])


class NoReporter:
  """Says and writes nothing: for the other processes of a run."""

  def __enter__(self) -> "NoReporter":
    return self

  def __exit__(self, *_) -> None:
    pass

  def resume_after(self, step: int) -> None: ...

  def step(self, step: int, metrics: Mapping[str, float | int]) -> None: ...

  def values(self, step: int, values: Mapping[str, float | int]) -> None: ...

  def text(self, step: int, tag: str, text: str) -> None: ...
