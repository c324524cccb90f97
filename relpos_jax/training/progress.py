"""Measures the speed of a run and shows its progress."""

import collections
import datetime
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import rich.console
import rich.progress

_Item = TypeVar("_Item")
_SECONDS = 10.0  # between lines where there is no terminal


class Speed:
  """Steps and tokens per second over the last half minute, without pauses."""

  def __init__(self):
    self.num_timed = 0
    self.steps_per_second = 0.0
    self.tokens_per_second: float | None = None  # None until a step is timed
    self._last: float | None = None  # when the last step was done, if the next one is to be timed
    self._seconds = self._tokens = 0.0  # of all timed steps
    self._samples = collections.deque([(0.0, 0, 0.0)])  # (seconds, steps, tokens until then)

  def update(self, num_tokens: float | int) -> None:
    """Counts a step that has just ended."""
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
    """Excludes the time from the last step to the next."""
    self._last = None

  def time_for(self, num_steps: int) -> datetime.timedelta:
    """Returns the time that as many steps will take."""
    return datetime.timedelta(seconds=round(num_steps / self.steps_per_second))


class Display:
  """Shows a progress bar with text on a terminal, and otherwise a line of text now and then."""

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

  def clear(self) -> None:
    """Ends the display without a last line."""
    self._line = ""
    self.stop()

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


def track(items: Sequence[_Item], what: str) -> Iterator[_Item]:
  """Yields the items, and shows on stderr how many are done and the time left.

  Where stderr is no terminal, a line is printed every ten seconds.

  >>> [*track(["a", "b"], "letters")]
  ['a', 'b']
  """
  display = Display(rich.console.Console(stderr=True), len(items), _SECONDS)
  display.start()
  start = time.monotonic()
  try:
    for number, item in enumerate(items, 1):
      yield item
      seconds = (time.monotonic() - start) / number * (len(items) - number)
      left = datetime.timedelta(seconds=round(seconds))
      display.update(number, f"{number}/{len(items)} {what}, {left} left")
  finally:
    display.clear()
