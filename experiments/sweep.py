r"""Trains every configuration of a sweep with several seeds; collects the results.

  python -m experiments.sweep --config=configs/table2.py
  python -m experiments.sweep --config=configs/table2.py --dry_run
  python -m experiments.sweep --config=configs/table3.py --parallel=4 --seeds=1 \
      --config.training.num_steps=500 --config.name=table3-trial
  python -m experiments.sweep --config=configs/table2.py --only=k=16
  python -m experiments.sweep --config=configs/table2.py --dry_run \
      | xargs -d '\n' -n1 sbatch --wrap

A sweep is a config file with a generator `sweep()`, which yields the name of each
configuration and the values that it changes. A run trains a configuration with a seed.
It trains in OUT/SWEEP/RUN and logs to RUN.log. The same command resumes the sweep: it
skips runs that are finished, here or in another sweep. If a run fails, RUN.error.txt
holds the end of its log, and the sweep continues. --dry_run prints the commands of the
unfinished runs, one a line, for example to make them jobs of a cluster. Once the jobs
are finished, the sweep collects their results.

RESULTS/runs/SWEEP.jsonl (or .jsonl.xz) has a line for each run. The results of this
repository are there already. To train a run again, delete its line and its directory,
or give other --out and --results. Do so if files of your own data change, because a
record does not know their content. `python -m experiments.report` with the same
--results writes the tables.
"""

import collections
import contextlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments import command, signals
from experiments.config import flatten, own_values
from experiments.errors import InputError
from experiments.evaluation.records import (
  Record,
  digest,
  index_records,
  read_records,
  record_files,
  runs_folder,
  write_records,
)
from experiments.files import write_whole
from experiments.launch import end_with_parent

OUT = command.Flag("runs/sweeps", "folder of the run directories", is_path=True)
FLAGS = dict(
  config=command.SWEEP,
  seeds=command.Flag(
    3, "number of seeds per configuration, counted up from the config's", least=1
  ),
  only=command.Flag("", "the one configuration to train, by its name"),
  out=OUT,
  results=command.Flag(
    "results", "folder of the results; records are in its folder runs", is_path=True
  ),
  parallel=command.Flag(
    1, "number of runs at a time, each with its share of the cores", least=1
  ),
  dry_run=command.Flag(False, "print the commands that would run, and exit"),
)
TRAIN = ("python", "-m", "experiments.train")
_POLL_SECONDS = 1.0
_SAVE_SECONDS = 60.0  # a run that is asked to end has this long to save

Key = tuple[str, int]  # configuration and seed


class PlannedRun(NamedTuple):
  """Describes one run of a sweep: a configuration that is trained with a seed."""

  configuration: str
  seed: int
  digest: str  # identifies its config
  workdir: pathlib.Path
  command: tuple[str, ...]

  @property
  def key(self) -> Key:
    return self.configuration, self.seed

  def file(self, ending: str) -> pathlib.Path:
    """Returns the path of a file next to the run directory, such as RUN.log."""
    return self.workdir.with_name(self.workdir.name + ending)


def main(
  config: command.ConfigFile,
  seeds: int,
  only: str,
  out: pathlib.Path,
  results: pathlib.Path,
  parallel: int,
  dry_run: bool,
) -> None:
  """Trains the unfinished runs; exits with status 1 if one failed."""
  import jax

  jax.config.update("jax_platforms", "cpu")  # the accelerators are for the runs
  sweep = slug(config.config.name)
  runs = plan_runs(config, seeds, out)
  chosen = _choose(runs, only, config.name)
  folder = runs_folder(results)
  path = record_files(folder).get(sweep, folder / f"{sweep}.jsonl")
  if dry_run:
    waiting = _find_waiting(chosen, find_records(path, runs))
    for run in waiting:
      print(shlex.join(run.command))
    num_finished = len(chosen) - len(waiting)
    print(f"{num_finished} of {len(chosen)} are finished: {path}", file=sys.stderr)
    return
  with command.lock_folder(out / sweep, "out"):
    waiting = _find_waiting(chosen, collect_records(path, runs))
    with signals.handle_signals([signal.SIGTERM, signal.SIGHUP], _stop):
      _train(waiting, parallel, lambda: collect_records(path, runs))
  failures = []
  for run in waiting:
    file = run.file(".error.txt")
    if file.exists():
      failures.append(f"failed: {file}: {file.read_text().splitlines()[-1]}")
  num_finished = len(chosen) - len(failures)
  print(f"{sweep}: {num_finished} of {len(chosen)} are finished; {path}")
  if failures:
    sys.exit("\n".join(failures))


def _choose(runs: Sequence[PlannedRun], only: str, name: str) -> Sequence[PlannedRun]:
  """Returns the runs of the configuration `only`; all runs if it is empty.

  Raises InputError if there is no such configuration.
  """
  if not only:
    return runs
  chosen = [run for run in runs if run.configuration == only]
  if not chosen:
    known = "; ".join(dict.fromkeys(run.configuration for run in runs))
    raise InputError(f"--only={only}: give a configuration of {name}: {known}")
  return chosen


def _find_waiting(
  chosen: Sequence[PlannedRun], records: Mapping[Key, Any]
) -> list[PlannedRun]:
  """Returns the runs without a record; if all have one, prints how to train again."""
  waiting = [run for run in chosen if run.key not in records]
  if not waiting:
    remedy = "give --results=FOLDER --out=FOLDER to train again"
    print(f"every run has a record: {remedy}", file=sys.stderr)
  return waiting


def plan_runs(
  file: command.ConfigFile, num_seeds: int, out: pathlib.Path
) -> list[PlannedRun]:
  """Returns the runs of a sweep in order: all with the first seed, then the next.

  The first seed is the config's. Raises InputError if the file has no `sweep()`, if a
  config is invalid, or if every configuration overrides a value of the command line.
  """
  if not hasattr(file.module, "sweep"):
    wanted = "a generator of (configuration, changes): see configs/table1.py"
    raise InputError(f"{file.name} has no sweep(), {wanted}")
  configurations = [*file.module.sweep()]
  for key in file.changed_keys:
    if all(key in changes for _, changes in configurations):
      problem = f"--config.{key} has no effect"
      raise InputError(f"{problem}: every configuration of {file.name} sets it")
  first = file.config.seed
  runs = []
  for seed in range(first, first + num_seeds):
    for configuration, changes in configurations:
      runs.append(_plan_run(file, out, configuration, changes, seed))
  workdirs = {run.workdir for run in runs}
  digests = {run.digest for run in runs}
  if min(len(workdirs), len(digests)) < len(runs):
    problem = f"two configurations of {file.name} have the same name or config"
    raise InputError(f"{problem}: make them differ")
  return runs


def slug(text: str) -> str:
  """Makes a folder name from a text: lower-case letters, digits and single hyphens."""
  return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _plan_run(
  file: command.ConfigFile,
  out: pathlib.Path,
  configuration: str,
  changes: Mapping[str, Any],
  seed: int,
) -> PlannedRun:
  from experiments.systems import parse_config

  all_values = flatten(file.config)
  given = {key: all_values[key] for key in file.changed_keys}
  values = given | changes | {"seed": seed}
  arguments = [f"--config={file.name}"]
  arguments += [f"--config.{key}={value}" for key, value in values.items()]
  try:
    config = command.parse(dict(config=command.CONFIG), arguments)["config"]
    parse_config(config, num_devices=0)  # it may train on another machine
    if config.data.source == "pairs" and not config.data.pairs.test:
      raise InputError("no test scores to compare: give config.data.pairs.test")
  except InputError as error:
    raise InputError(f"configuration {configuration!r}: {error}") from error
  workdir = out / slug(file.config.name) / f"{slug(configuration)}-seed{seed}"
  words = (*TRAIN, *arguments, f"--workdir={workdir}")
  return PlannedRun(configuration, seed, digest(own_values(config)), workdir, words)


def collect_records(
  path: pathlib.Path, runs: Sequence[PlannedRun]
) -> dict[Key, Record]:
  """Finds the records of a sweep, and writes them to its results file."""
  command.make_folder(path.parent, "results")
  records = find_records(path, runs)
  if records:
    write_records(path, records.values())
  return records


def find_records(path: pathlib.Path, runs: Sequence[PlannedRun]) -> dict[Key, Record]:
  """Finds the records of a sweep; returns them by configuration and seed.

  A record may be in the run directory, in the sweep's results file, or in the results
  of another sweep that trained the same config. A line is printed for each record from
  another sweep. The results file may also hold records of other configurations and
  seeds. They come last.

  Raises InputError if a file is damaged, or if a record is of another config.
  """
  collected = index_records(path, read_records(path))
  for run in runs:
    if run.key in collected and collected[run.key]["digest"] != run.digest:
      raise InputError(
        f"{path} has {run.configuration!r}, seed {run.seed}, with another config, or "
        "by older code: delete that line, or give another --results or --config.name"
      )
  sweep = path.name.partition(".jsonl")[0]
  others = _read_others(path.parent, sweep)
  records = {}
  for run in runs:
    record = collected.pop(run.key, None)
    for new in read_records(run.workdir / "record.json"):
      if new["digest"] == run.digest:
        record = new
    if not record and run.digest in others:
      file, record = others[run.digest]
      source = f"{record['row']!r}, seed {record['seed']}, of {file.name}"
      # On stderr, because --dry_run prints commands on stdout.
      print(f"{run.workdir.name} is {source}", file=sys.stderr)
    if record:
      records[run.key] = {**record, "sweep": sweep, "row": run.configuration}
  return records | collected


def _read_others(
  folder: pathlib.Path, sweep: str
) -> dict[str, tuple[pathlib.Path, Record]]:
  """Reads the records of all other sweeps; returns files and records by digest."""
  records = {}
  for name, file in sorted(record_files(folder).items()):
    if name != sweep:
      for record in read_records(file):
        records[record["digest"]] = file, record
  return records


def _train(
  waiting: Sequence[PlannedRun], parallel: int, collect: Callable[[], Mapping]
) -> None:
  """Trains up to `parallel` runs at a time; calls `collect` whenever one ends."""
  queue = collections.deque(waiting)
  running = {}  # run and process by share of the machine

  def report(run: PlannedRun, state: str) -> None:
    counts = f"{len(running)} running, {len(queue)} waiting"
    print(f"{run.workdir.name}: {state} ({counts})", file=sys.stderr, flush=True)

  try:
    while queue or running:
      for share in range(parallel):
        if queue and share not in running:
          run = queue.popleft()
          running[share] = run, _start(run, share, parallel)
          report(run, "running")
      time.sleep(_POLL_SECONDS)
      for share, (run, process) in [*running.items()]:
        if process.poll() is not None:
          del running[share]
          report(run, _finish(run, process.returncode, collect()))
  finally:
    _end([process for _, process in running.values()])


def _finish(run: PlannedRun, status: int, records: Mapping[Key, Any]) -> str:
  """Returns how a run ended; saves the end of its log if it failed."""
  if run.key in records:
    return "finished"
  log = run.file(".log").read_text(encoding="utf-8", errors="replace").splitlines()
  lines = [f"exit status {status}", *log[-40:], ""]
  write_whole(run.file(".error.txt"), "\n".join(lines))
  return "failed"


def _end(processes: Sequence[subprocess.Popen]) -> None:
  """Asks running processes to save and end; kills a process that hangs."""
  for process in processes:
    process.terminate()
  for process in processes:
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(_SAVE_SECONDS)
    process.kill()
    process.wait()


def _stop(number: int, _) -> None:
  """Ends a sweep; ignores further signals while its runs save."""
  for other in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(other, signal.SIG_IGN)
  sys.exit(128 + number)


def _start(run: PlannedRun, share: int, parallel: int) -> subprocess.Popen:
  """Starts the process of a run.

  `parallel` runs at a time have equal parts of the cores and of a GPU's memory. `share`
  is the number of this run's part, counted from 0.
  """
  run.file(".error.txt").unlink(missing_ok=True)
  env, words = dict(os.environ), end_with_parent()
  if parallel > 1:
    env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / parallel:.3f}")
    if shutil.which("taskset"):
      cores = sorted(os.sched_getaffinity(0))
      own = cores[share::parallel] or cores
      words += ["taskset", "--cpu-list", ",".join(map(str, own))]
  words += [sys.executable, *run.command[1:]]
  with open(run.file(".log"), "wb") as log:
    return subprocess.Popen(
      words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
    )


if __name__ == "__main__":
  command.run(main, FLAGS)
