"""Reports metrics, samples and the progress of a run; reads the metrics back."""

import collections
import contextlib
import datetime
import json
import math
import pathlib
import re
import secrets
import socket
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import rich.console
import rich.progress

from experiments.errors import InputError
from experiments.files import Path, in_bucket, upload, write_whole
from experiments.training.processes import is_first

# JAX's names of two events: a program was compiled, and a program was lowered, which
# comes before compiling.
_COMPILED = "/jax/core/compile/backend_compile_duration"
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_FEW = 5  # the time left is unreliable after fewer steps
_PAUSE = 5.0  # seconds between the lines that are printed without a terminal


class Reporter:
  """Writes metrics.jsonl, samples.txt and tensorboard/ of a run, and shows progress.

  Shows step, loss, tokens per second and time left on stderr, and what is being
  compiled. On a terminal there is a progress bar. Steps that include compilation are
  not timed. The run continues after the step `start`; lines of later steps, from an
  interrupted run, are removed.

  A line of metrics.jsonl is an object with "step", "time" and values by name. The time
  is in seconds since 1970 and never decreases. A value that is not finite is null, and
  is left out for TensorBoard. Write errors are raised as OSError. Files in a bucket
  cannot grow, so they grow on this machine, and `upload` copies them.
  """

  def __init__(
    self,
    workdir: Path,
    start: int,
    num_steps: int,
    *,
    log: Callable[..., None] = lambda values, step: None,
    console: rich.console.Console | None = None,
  ):
    """Prepares a reporter; nothing is written before the context is entered.

    Progress is shown on `console`, by default stderr. Without a terminal, a line is
    printed every five seconds, or after 1% of the elapsed time if that is longer.
    `log` is called with the values of each line.
    """
    self._workdir = self._folder = workdir
    self._exit = contextlib.ExitStack()
    self._start, self._num_steps, self._log = start, num_steps, log
    # Writes about a thousand steps, and the last.
    self._log_every = max(1, num_steps // 1000)
    self._num_skipped = 0  # since this start
    # When the last step ended; None if the next step must not be timed.
    self._last: float | None = None
    self._timed = collections.deque(maxlen=100)  # seconds, tokens
    self._display = _Display(num_steps, console)

  def __enter__(self) -> "Reporter":
    import tensorboardX  # here, because only training needs it

    self._tensorboard = tensorboardX
    if in_bucket(self._workdir):
      folder = self._exit.enter_context(tempfile.TemporaryDirectory())
      self._folder = pathlib.Path(folder)
      self._exit.callback(self.upload)
    lines = _copy_until(self._start, self._workdir, self._folder)
    last_time = lines[-1]["time"] if lines else 0.0
    # The clock may be set back during a run, or be behind another machine's.
    self._clock_offset = max(time.time(), last_time) - time.monotonic()
    folder = self._folder / "tensorboard"
    folder.mkdir(exist_ok=True)
    # Not SummaryWriter: its thread hangs once the disk is full. The step in the file's
    # name distinguishes restarts within one second. START makes TensorBoard drop later
    # steps of earlier files.
    name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{self._start}"
    self._events = tensorboardX.record_writer.RecordWriter(str(folder / name))
    self._exit.callback(self._events.close)
    self._add_event(self._start, file_version="brain.Event:2")
    session_log = tensorboardX.proto.event_pb2.SessionLog
    self._add_event(self._start + 1, session_log=session_log(status=session_log.START))
    jax.monitoring.register_event_duration_secs_listener(self._listen)
    self._display.start()
    return self

  def __exit__(self, *_) -> None:
    jax.monitoring.unregister_event_duration_listener(self._listen)
    self._display.stop()
    self._display.show_last_line()
    self._exit.close()

  def step(self, step: int, metrics: Mapping[str, float | int]) -> None:
    """Reports the metrics of a step, counted from 1: "loss", "num_tokens" and others.

    About a thousand steps of a run are written. So is every step whose update was
    skipped, and the last step. Speeds are means over the last 100 steps since
    anything was compiled.
    """
    now = time.monotonic()
    if self._last is not None and now > self._last:
      self._timed.append((now - self._last, metrics["num_tokens"]))
    self._last = now
    shown, values = f"step {step}/{self._num_steps}  loss {metrics['loss']:.3f}", {}
    timed = [*self._timed]  # a copy: `_listen` may be called in a compiling thread
    if timed:
      seconds, num_tokens = map(sum, zip(*timed, strict=True))
      seconds_per_step, speed = seconds / len(timed), num_tokens / seconds
      values = {"tokens_per_second": speed, "seconds_per_step": seconds_per_step}
      shown += f"  {speed:,.0f} tokens/s"
      if len(timed) >= _FEW:
        shown += f"  {_format_time((self._num_steps - step) * seconds_per_step)} left"
    skipped = metrics.get("skipped", 0)
    self._num_skipped += skipped
    if self._num_skipped:
      shown += f"  {self._num_skipped} skipped"
    if step % self._log_every == 0 or step == self._num_steps or skipped:
      self._write(step, {**metrics, **values})
    self._display.show(shown, step)

  def values(self, step: int, values: Mapping[str, float | int]) -> None:
    """Writes and shows numbers by name, for example the scores of an evaluation."""
    self._write(step, values)
    parts = [f"step {step}", *(f"{name} {x:.4g}" for name, x in values.items())]
    self._display.print_text("  ".join(parts))
    self._last = None

  def text(self, step: int, tag: str, text: str) -> None:
    """Writes and shows a text, for example sample translations."""
    with open(self._folder / "samples.txt", "a", encoding="utf-8") as file:
      file.write(f"=== step {step}, {tag}\n{text}\n\n")
    # TensorBoard renders Markdown: indented lines appear unchanged.
    indented = textwrap.indent(text, "    ")
    self._add_event(step, summary=self._tensorboard.summary.text(tag, indented))
    self._display.print_text(text)
    self._last = None

  def upload(self) -> None:
    """Copies the files into the bucket, if the run directory is in one.

    If that fails, the run goes on: its checkpoints matter more.
    """
    if not in_bucket(self._workdir):
      return
    try:
      upload(self._folder, self._workdir)
    except InputError as error:
      print(f"note: {error}; tried again at the next checkpoint")
    self._last = None  # do not time the next step, which includes the upload

  def _listen(self, event: str, seconds: float, fun_name: str = "", **_) -> None:
    if event == _COMPILED:  # steps before it may have waited for it
      self._last = None
      self._timed.clear()
    elif event == _LOWERED and seconds > 0.1:  # shorter lowering means short compiling
      self._display.show(f"compiling {fun_name}", at_once=True)

  def _write(self, step: int, values: Mapping[str, float | int]) -> None:
    now = round(self._clock_offset + time.monotonic(), 3)
    line = {name: float(x) if math.isfinite(x) else None for name, x in values.items()}
    with open(self._folder / "metrics.jsonl", "a", encoding="utf-8") as file:
      file.write(json.dumps({"step": step, "time": now, **line}) + "\n")
    self._log(line, step=step)
    for name, value in line.items():
      if value is not None:
        self._add_event(step, summary=self._tensorboard.summary.scalar(name, value))

  def _add_event(self, step: int, **content) -> None:
    event = self._tensorboard.proto.event_pb2.Event(
      step=step, wall_time=time.time(), **content
    )
    self._events.write(event.SerializeToString())
    self._events.flush()


class NoReporter:
  """Reports nothing; for all processes of a run except the first."""

  def _ignore(self, *_) -> None: ...

  step = values = text = upload = _ignore


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
  """Reads a run's metrics.jsonl; ignores a last line that a kill cut short.

  Raises InputError if another line is damaged.
  """
  path = workdir / "metrics.jsonl"
  if not path.exists():
    return []
  # What follows the last end of a line was cut short.
  *texts, _ = path.read_bytes().split(b"\n")
  try:
    return [_read_line(text) for text in texts]
  except ValueError as error:
    remedy = "delete the lines that are damaged"
    raise InputError(f"damaged {path} ({error}): {remedy}") from error


def _read_line(text: bytes) -> dict[str, Any]:
  """Parses a line of metrics.jsonl; raises ValueError if it has wrong values."""
  line = json.loads(text)
  if not isinstance(line, dict) or not isinstance(line.get("step"), int):
    raise ValueError("a line without a step")
  if not isinstance(line.get("time"), int | float):
    raise ValueError("a line without a time")
  for name, value in line.items():
    if not isinstance(value, int | float | None):
      raise ValueError(f"{name} is {value!r}")
  return line


def wandb_run(config: Mapping[str, Any], workdir: Path, project: str) -> Any:
  """Starts a run of Weights & Biases, or resumes the one that the folder names."""
  import wandb

  file = workdir / "wandb_id.txt"
  if not file.exists():
    write_whole(file, secrets.token_hex(8))
  return wandb.init(
    project=project,
    id=file.read_text(),
    name=config["name"],
    config=config,
    resume="allow",
  )


def _copy_until(last: int, workdir: Path, target: Path) -> list[dict[str, Any]]:
  """Copies metrics and samples up to the step `last`; returns the lines of metrics."""
  lines = [line for line in read_metrics(workdir) if line["step"] <= last]
  text = "".join(f"{json.dumps(line)}\n" for line in lines)
  write_whole(target / "metrics.jsonl", text)
  samples = workdir / "samples.txt"
  if samples.exists():
    text = samples.read_bytes().decode()
    end = None
    for header in re.finditer(r"^=== step (\d+), ", text, flags=re.MULTILINE):
      if int(header[1]) > last:
        end = header.start()
        break
    write_whole(target / samples.name, text[:end])
  return lines


class _Display(rich.progress.Progress):
  """Shows a progress bar on a terminal; elsewhere prints a line now and then."""

  def __init__(self, total: int, console: rich.console.Console | None = None):
    console = console or rich.console.Console(stderr=True)
    bar = rich.progress.BarColumn(20)
    text = rich.progress.TextColumn("{task.description}")
    super().__init__(bar, text, console=console, disable=not console.is_terminal)
    self._bar = self.add_task("starting", total=total)
    self._line = ""
    self._since = self._last_shown = time.monotonic()

  def show(
    self, line: str, completed: int | None = None, at_once: bool = False
  ) -> None:
    self._line = line
    self.update(self._bar, completed=completed, description=line)
    now = time.monotonic()
    pause = max(_PAUSE, 0.01 * (now - self._since))
    if at_once or now - self._last_shown > pause:
      self.show_last_line()
      self._last_shown = now

  def show_last_line(self) -> None:
    if self._line and not self.console.is_terminal:
      self.print_text(self._line)
    self._line = ""

  def print_text(self, text: str) -> None:
    self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def track(items: Iterable, total: int, what: str) -> Iterator:
  """Iterates with progress on stderr: count, items per second, time left.

  If stderr is not a terminal, a line is printed every five seconds. Only the first
  process shows anything.
  """
  if not is_first():
    yield from items
    return
  # The first items wait for compilation.
  start = 0.0
  with _Display(total) as display:
    for done, item in enumerate(items, 1):
      yield item
      shown = f"{done}/{total} {what}"
      if done == _FEW:
        start = time.monotonic()
      elif done > _FEW:
        speed = (done - _FEW) / max(time.monotonic() - start, 1e-9)
        shown += f", {speed:,.1f} a second, {_format_time((total - done) / speed)} left"
      display.show(shown, done)


def _format_time(seconds: float) -> datetime.timedelta:
  return datetime.timedelta(seconds=round(seconds))
