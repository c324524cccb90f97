r"""Trains every row of a table with several seeds and collects the results.

  python -m experiments.sweep --config=configs/table2.py
  python -m experiments.sweep --config=configs/table2.py --dry_run
  python -m experiments.sweep --config=configs/table3.py --parallel=4 --seeds=1 \
      --config.training.num_steps=500 --config.name=table3-trial
  python -m experiments.sweep --config=configs/table2.py \
      --submit='sbatch --job-name={name} --wrap={command}'
  python -m experiments.sweep --config=configs/table2.py \
      --submit='xpk workload create --workload={name} --command={command}'

A sweep is a config file with a generator `sweep()` of (row, changes). A cell is a row with a seed;
it trains in OUT/SWEEP/CELL and logs to CELL.log. The same command resumes the sweep and skips cells
that are finished, here or in another sweep. If a cell fails, CELL.error.txt keeps the end of its
log, and the sweep continues. With --submit each cell is a job; the same command collects the
results of finished jobs. To submit a cell again, delete its CELL.submitted.

RESULTS/SWEEP.jsonl has a line per cell. To train one again, delete its line and run directory.
"""

import collections
import contextlib
import datetime
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import rich.console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from experiments import command, sweep_cells
from experiments.launch import dying_with_this_process
from experiments.locks import lock_folder
from experiments.sweep_cells import Cell, Key, Record
from relpos_jax.errors import InputError
from relpos_jax.training.metrics import read_metrics
from relpos_jax.training.workdir import write_whole

FLAGS = dict(
  config=command.SWEEP,
  seeds=command.Flag(3, "number of seeds per row, counted up from the config's"),
  out=command.Flag("runs/sweeps", "folder of the run directories"),
  results=command.Flag("results/runs", "folder of the results files"),
  parallel=command.Flag(1, "number of cells at once, each with its share of the cores"),
  submit=command.Flag("", "command that submits one job, with {name} and {command} in it"),
  dry_run=command.Flag(False, "print the commands that would run, and exit"),
)
_POLL_SECONDS, _PRINT_SECONDS, _SECONDS_TO_STOP = 1.0, 60.0, 10.0


def main(
  config: command.ConfigFile,
  seeds: int,
  out: str,
  results: str,
  parallel: int,
  submit: str,
  dry_run: bool,
) -> None:
  """Runs or submits the cells that are not finished; exits with status 1 if one failed."""
  if seeds < 1 or parallel < 1:
    raise InputError(f"--seeds={seeds} --parallel={parallel}: give at least 1")
  jax.config.update("jax_platforms", "cpu")  # leaves the accelerators to the trainings
  sweep = sweep_cells.slug(config.config.name)
  cells = sweep_cells.plan_cells(config, seeds, pathlib.Path(out))
  path = pathlib.Path(results, f"{sweep}.jsonl")
  words_of = lambda cell: sweep_cells.submission(submit, sweep, cell) if submit else cell.command
  commands = {cell.name: words_of(cell) for cell in cells}
  lock = lock_folder(pathlib.Path(out, sweep), "sweep", "out")
  with contextlib.nullcontext() if dry_run else lock:
    records = (sweep_cells.find_records if dry_run else sweep_cells.collect_records)(path, cells)
    waiting = [cell for cell in cells if cell.key not in records]
    waiting = [cell for cell in waiting if not cell.file(".submitted").exists()]
    if dry_run:
      for cell in waiting:
        print(shlex.join(commands[cell.name]))
      return
    progress = ProgressTable(cells)
    with progress.table:
      for cell in (cell for cell in cells if cell not in waiting):
        record = records.get(cell.key)
        progress.update(cell, "finished" if record else "submitted", record)
      if submit:
        _submit(waiting, commands, progress)
      else:
        _train(waiting, parallel, lambda: sweep_cells.collect_records(path, cells), progress)
  print(f"{sweep}: {progress.summary()}; {path}")
  errors = [cell.file(".error.txt") for cell in waiting if cell.file(".error.txt").exists()]
  if errors:
    sys.exit("\n".join(f"failed: {file}: {file.read_text().splitlines()[-1]}" for file in errors))


class ProgressTable:
  """A table of cells on a terminal; elsewhere a line per change and per minute."""

  def __init__(self, cells: Sequence[Cell], console: rich.console.Console | None = None):
    self._console = console or rich.console.Console(stderr=True)
    columns = "{task.description}", "{task.fields[state]}", MofNCompleteColumn()
    self.table = Progress(
      *(*columns, TimeRemainingColumn(), "{task.fields[numbers]}"),
      console=self._console,
      auto_refresh=False,
      disable=not self._console.is_terminal,
      speed_estimate_period=float("inf"),
    )
    add = lambda name, steps: self.table.add_task(name, total=steps, state="waiting", numbers="")
    self._rows = {cell.name: add(cell.name, cell.num_steps) for cell in cells}
    self._all = add("all", None)
    self._printed = dict.fromkeys(self._rows, 0.0)
    self._starts: dict[str, int] = {}  # steps from which this sweep trains

  def update(self, cell: Cell, state: str, record: Record | None = None) -> None:
    """Shows the state of a cell, the last numbers of its metrics, and its test score."""
    last = {}
    for line in read_metrics(cell.workdir):
      last |= {name: x for name, x in line.items() if x is not None}
    step = cell.num_steps if record else last.get("step", 0)
    numbers = {name: x for name, x in last.items() if name == "loss" or name.startswith("valid_")}
    scores = record["scores"].get("test", {}) if record else {}
    numbers |= {f"test {name}": scores[name] for name in [*scores][:1]}
    text = "  ".join(f"{name.replace('_', ' ')} {x:.3f}" for name, x in numbers.items())
    row = self._rows[cell.name]
    has_changed = self.table.tasks[row].fields["state"] != state
    self.table.update(row, completed=step, state=state, numbers=text)
    if state == "running":
      self._starts.setdefault(cell.name, step)
    *cells, _ = self.table.tasks
    done = sum(t.completed - self._starts.get(t.description, t.completed) for t in cells)
    left = sum(t.remaining for t in cells if t.fields["state"] in ("waiting", "running"))
    self.table.update(self._all, completed=done, total=done + left, state="")
    if self._console.is_terminal:
      self.table.refresh()
    elif has_changed or time.monotonic() - self._printed[cell.name] > _PRINT_SECONDS:
      self._printed[cell.name] = time.monotonic()
      line = f"{cell.name}  {state}  step {step}/{cell.num_steps}  {text}  ({self.summary()})"
      self._console.print(line, markup=False, highlight=False, soft_wrap=True)

  def summary(self) -> str:
    """Returns a text such as "3 of 12 finished, 1 failed, 0:10:00 left"."""
    *cells, total = self.table.tasks
    counts = collections.Counter(task.fields["state"] for task in cells)
    text = f"{counts['finished']} of {len(cells)} finished"
    for state in ("failed", "submitted"):
      text += f", {counts[state]} {state}" if counts[state] else ""
    left = total.time_remaining
    return f"{text}, {datetime.timedelta(seconds=left)} left" if left else text


def _submit(
  cells: Sequence[Cell], commands: Mapping[str, Sequence[str]], progress: ProgressTable
) -> None:
  """Submits each cell; keeps the cluster's answer in CELL.submitted."""
  for cell in cells:
    try:
      answer = subprocess.run(commands[cell.name], capture_output=True, text=True)
    except OSError as error:
      raise InputError(
        f"--submit: cannot run {commands[cell.name][0]} ({error.strerror})"
      ) from error
    output = answer.stdout + answer.stderr
    if answer.returncode:
      _fail(cell, answer.returncode, output, progress)
    else:
      cell.file(".error.txt").unlink(missing_ok=True)
      write_whole(cell.file(".submitted"), output)
      progress.update(cell, "submitted")


def _train(
  waiting: Sequence[Cell],
  parallel: int,
  collect: Callable[[], Mapping[Key, Record]],
  progress: ProgressTable,
) -> None:
  """Trains cells on this machine; collects the records whenever a training ends."""
  queue, running = collections.deque(waiting), {}
  before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  try:
    while queue or running:
      for share in range(parallel):
        if queue and share not in running:
          cell = queue.popleft()
          running[share] = cell, _start(cell, share, parallel)
      for cell, _ in running.values():
        progress.update(cell, "running")
      time.sleep(_POLL_SECONDS)
      for share, (cell, process) in [*running.items()]:
        if process.poll() is None:
          continue
        del running[share]
        if record := collect().get(cell.key):
          progress.update(cell, "finished", record)
        else:
          log = cell.file(".log").read_text(encoding="utf-8", errors="replace")
          _fail(cell, process.returncode, log, progress)
  finally:
    for _, process in running.values():
      process.terminate()
    for _, process in running.values():
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_STOP)
      process.kill()
      process.wait()
    signal.signal(signal.SIGTERM, before)


def _start(cell: Cell, share: int, parallel: int) -> subprocess.Popen:
  """Starts a training with its share of the cores and of a GPU's memory."""
  cell.file(".error.txt").unlink(missing_ok=True)
  env, words = dict(os.environ), dying_with_this_process()
  if parallel > 1:
    env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / parallel:.3f}")
    if shutil.which("taskset"):
      cores = sorted(os.sched_getaffinity(0))
      words += ["taskset", "--cpu-list", ",".join(map(str, cores[share::parallel] or cores))]
  words += [sys.executable, *cell.command[1:]]
  with open(cell.file(".log"), "wb") as log:
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)


def _fail(cell: Cell, status: int, output: str, progress: ProgressTable) -> None:
  """Keeps the end of a failed cell's output in CELL.error.txt."""
  lines = [f"exit status {status}", *output.splitlines()[-40:]]
  write_whole(cell.file(".error.txt"), "".join(f"{line}\n" for line in lines))
  progress.update(cell, "failed")


if __name__ == "__main__":
  command.run(main, FLAGS)
