"""The progress table of a sweep."""

import datetime
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import rich.console
import rich.live
import rich.table
from rich.text import Text

from experiments.sweeps.cells import Cell
from relpos_jax.evaluation.record import valid_score
from relpos_jax.training.reporting import read_metrics
from relpos_jax.training.workdir import write_whole

_ENOUGH = 10  # updates: the first ones are compiled


class State(NamedTuple):
  """How far a cell is."""

  word: str = "waiting"  # running, finished, failed, submitted
  step: int = 0
  loss: float | None = None
  valid_loss: float | None = None
  valid_score: float | None = None  # where the task reports one during training
  test_score: float | None = None  # when finished


def read_state(workdir: pathlib.Path, word: str) -> State:
  """What the metrics of a run's folder say, none where there are none yet."""
  last = {}
  for line in read_metrics(workdir):
    last |= {name: value for name, value in line.items() if value is not None}
  losses = last.get("loss"), last.get("valid_loss")
  return State(word, last.get("step", 0), *losses, valid_score(last))


def finished_state(cell: Cell, record: Mapping[str, Any]) -> State:
  """What a finished cell's record says; the training loss where its folder is here."""
  loss = read_state(cell.workdir, "finished").loss
  _, *valid = record["curve"][-1] if record["curve"] else (None, None, None)
  test_score = next(iter(record["scores"].get("test", {}).values()), None)
  return State("finished", cell.num_steps, loss, *valid, test_score)


class Progress:
  """A table of all cells on a terminal; elsewhere a line for each change, and one now and then.

  A column that has no number in any cell is not shown: not every task has every score.

  The time left is that of the updates left at the pace of this sweep so far, all its cells and
  their evaluations together, and a cell's at its own pace; none is told before there are enough
  updates to go by.
  """

  def __init__(
    self,
    cells: Sequence[Cell],
    *,
    score: str = "BLEU",
    console: rich.console.Console | None = None,
    seconds: float = 60.0,
  ):
    """Shows nothing yet.

    Args:
      cells: in the order of the table.
      score: what scores are called.
      console: stderr by default.
      seconds: between two lines that tell of running cells, where there is no terminal.
    """
    self._columns = ("left", "step", "loss", "valid loss", f"valid {score}", f"test {score}")
    self._console = console or rich.console.Console(stderr=True)
    self._seconds = seconds
    self._num_steps = {cell.name: cell.num_steps for cell in cells}
    self._states = {cell.name: State() for cell in cells}
    self._starts: dict[str, tuple[int, float]] = {}  # step and time, of cells that run here
    self._started = self._last_shown = time.monotonic()
    self._live = rich.live.Live(console=self._console, auto_refresh=False, transient=False)

  def __enter__(self) -> "Progress":
    self._started = time.monotonic()
    if self._console.is_terminal:
      self._live.start()
    return self

  def __exit__(self, *_) -> None:
    if self._console.is_terminal:
      self._live.stop()

  @property
  def states(self) -> Mapping[str, State]:
    """Of each cell by name."""
    return self._states

  def update(self, name: str, state: State) -> None:
    """Tells the state of a cell."""
    before, self._states[name] = self._states[name], state
    if state.word == "running":
      self._starts.setdefault(name, (state.step, time.monotonic()))
    if self._console.is_terminal:
      self._live.update(self.table(), refresh=True)
    elif state.word != before.word:
      self._print(name)
    elif time.monotonic() - self._last_shown > self._seconds:
      self._last_shown = time.monotonic()
      for running in [name for name, state in self._states.items() if state.word == "running"]:
        self._print(running)

  def table(self) -> rich.table.Table:
    """All cells, and beneath them how many are done and the time left."""
    table = rich.table.Table(caption=self.summary(), caption_justify="left")
    table.add_column("cell")
    table.add_column("state")
    names, states, *columns = zip(*map(self._cells_of, self._states), strict=True)
    shown = [x for x in zip(self._columns, columns, strict=True) if any(x[1])]
    for title, _ in shown:
      table.add_column(title, justify="right")
    for cells in zip(names, states, *(column for _, column in shown), strict=True):
      table.add_row(*map(Text, cells))
    return table

  def summary(self) -> str:
    """Such as "3 of 12 finished, 1 failed, 0:10:00 left"."""
    words = [state.word for state in self._states.values()]
    text = f"{words.count('finished')} of {len(words)} finished"
    for word in ("failed", "submitted"):
      text += f", {words.count(word)} {word}" if word in words else ""
    left = self.time_left()
    return f"{text}, {left} left" if left else text

  def time_left(self) -> datetime.timedelta | None:
    """Until all cells that run here are finished."""
    done = sum(self._states[name].step - first for name, (first, _) in self._starts.items())
    left = sum(
      self._num_steps[name] - state.step
      for name, state in self._states.items()
      if state.word in ("waiting", "running")
    )
    return _time_for(left, done, self._started)

  def _time_left_of(self, name: str) -> datetime.timedelta | None:
    state = self._states[name]
    if state.word != "running":
      return None
    first, started = self._starts[name]
    return _time_for(self._num_steps[name] - state.step, state.step - first, started)

  def _cells_of(self, name: str) -> list[str]:
    state = self._states[name]
    step = f"{state.step}/{self._num_steps[name]}" if state.step else ""
    losses = (_rounded(loss, 3) for loss in (state.loss, state.valid_loss))
    scores = _rounded(state.valid_score, 1), _rounded(state.test_score, 2)
    left = self._time_left_of(name)
    return [name, state.word, "" if left is None else str(left), step, *losses, *scores]

  def _print(self, name: str) -> None:
    names = ("", "", *(f"{column} " for column in self._columns))
    cells = zip(names, self._cells_of(name), strict=True)
    line = "  ".join(f"{column}{text}" for column, text in cells if text)
    self._console.print(
      f"{line}  ({self.summary()})", markup=False, highlight=False, soft_wrap=True
    )


def fail(cell: Cell, lines: Sequence[str], progress: Progress) -> None:
  """Keeps what a failed cell said, and shows that it failed."""
  write_whole(cell.beside(".error.txt"), "".join(f"{line}\n" for line in lines))
  progress.update(cell.name, read_state(cell.workdir, "failed"))


def _time_for(left: int, done: int, started: float) -> datetime.timedelta | None:
  """For the updates left, at the pace of those done since, once there are enough to go by."""
  if done < _ENOUGH:
    return None
  return datetime.timedelta(seconds=round(left * (time.monotonic() - started) / done))


def _rounded(x: float | None, decimals: int) -> str:
  """Numbers below 1 to three decimals at least: of them the first ones may be zeros."""
  if x is None:
    return ""
  return f"{x:.{decimals if abs(x) >= 1 else max(3, decimals)}f}"
