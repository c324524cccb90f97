"""What a run tells while it goes: progress, metrics, sample translations."""

import collections
import datetime
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
import rich.progress
import tensorboardX

from relpos_jax.training.workdir import write_whole

_COMPILED = "/jax/core/compile/backend_compile_duration"  # what JAX calls the event
_ENOUGH_STEPS = 5  # timed, before the time left is told


class Reporter:
  """Writes metrics.jsonl, samples.txt and tensorboard/ in a run's folder, and shows the progress.

  On a terminal a bar, elsewhere a line now and then: step, loss, tokens per second, time left; on
  stderr. Steps during which something is compiled are not timed. The first step reported tells
  where the run goes on: what an interrupted run has already written for that step and later ones is
  dropped, so that no step is there twice.

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
    self._speed = _Speed()
    self._display = _Display(console or rich.console.Console(stderr=True), num_steps, seconds)
    self._tensorboard = None

  def __enter__(self) -> "Reporter":
    self._display.start()
    jax.monitoring.register_event_duration_secs_listener(self._listen)
    return self

  def __exit__(self, *_) -> None:
    jax.monitoring.unregister_event_duration_listener(self._listen)
    self._display.stop()
    if self._tensorboard:
      self._tensorboard.close()

  def go_on_after(self, step: int) -> None:
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
    tensorboard.add_text(tag, re.sub("^", "    ", text, flags=re.MULTILINE), step)
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
    for name, value in values.items():
      tensorboard.add_scalar(name, value, step)

  def _open_tensorboard(self, step: int) -> tensorboardX.SummaryWriter:
    """At the first step reported: where the run goes on."""
    if self._tensorboard is None:
      _drop_from(step, self._workdir)
      self._tensorboard = tensorboardX.SummaryWriter(
        str(self._workdir / "tensorboard"),
        purge_step=step,
        # Files are named by the second: without it a quick restart would overwrite one.
        filename_suffix=f".{step}",
        flush_secs=10,
      )
    return self._tensorboard


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
  """The lines of a run's metrics.jsonl; without a half line that a killed run may have left."""
  path = pathlib.Path(workdir, "metrics.jsonl")
  lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
  return [json.loads(line) for line in lines if line.endswith("\n")]


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

  def go_on_after(self, step: int) -> None: ...

  def step(self, step: int, metrics: Mapping[str, float | int]) -> None: ...

  def values(self, step: int, values: Mapping[str, float | int]) -> None: ...

  def text(self, step: int, tag: str, text: str) -> None: ...


class _Speed:
  """Steps and tokens per second over the last half minute, pauses left out."""

  def __init__(self):
    self.num_timed = 0
    self.steps_per_second = 0.0
    self.tokens_per_second: float | None = None  # until a step is timed
    self._last: float | None = None  # when the last step was done, if the next one is to be timed
    self._seconds = self._tokens = 0.0  # of all timed steps
    self._samples = collections.deque([(0.0, 0, 0.0)])  # (seconds, steps, tokens until then)

  def update(self, num_tokens: float | int) -> None:
    now, last = time.monotonic(), self._last
    self._last = now
    if last is None or now <= last:
      return
    self.num_timed += 1
    self._seconds += now - last
    self._tokens += num_tokens
    self._samples.append((self._seconds, self.num_timed, self._tokens))
    while self._seconds - self._samples[0][0] > 30 and len(self._samples) > 2:
      self._samples.popleft()
    since, steps, tokens = self._samples[0]
    self.steps_per_second = (self.num_timed - steps) / (self._seconds - since)
    self.tokens_per_second = (self._tokens - tokens) / (self._seconds - since)

  def pause(self) -> None:
    """The time from the last step to the next does not count."""
    self._last = None

  def time_for(self, num_steps: int) -> datetime.timedelta:
    return datetime.timedelta(seconds=round(num_steps / self.steps_per_second))


class _Display:
  """A bar with a line of text on a terminal; elsewhere the line alone, now and then."""

  def __init__(self, console: rich.console.Console, num_steps: int, seconds: float):
    self._console, self._seconds = console, seconds
    self._line = ""
    self._started = self._last_shown = time.monotonic()
    columns = rich.progress.BarColumn(20), rich.progress.TextColumn("{task.description}")
    self._bar = rich.progress.Progress(*columns, console=console, disable=not console.is_terminal)
    self._task = self._bar.add_task("starting", total=num_steps)

  def start(self) -> None:
    self._bar.start()

  def stop(self) -> None:
    self._bar.stop()
    self._show_line()

  def update(self, step: int, line: str) -> None:
    self._line = line
    self._bar.update(self._task, completed=step, description=line)
    now = time.monotonic()
    if now - self._last_shown > max(self._seconds, 0.01 * (now - self._started)):
      self._show_line()
      self._last_shown = now

  def print(self, text: str) -> None:
    self._console.print(text, markup=False, highlight=False, soft_wrap=True)

  def _show_line(self) -> None:
    if self._line and not self._console.is_terminal:
      self.print(self._line)
    self._line = ""
