"""The faults, what must hold after each, and the table of the results."""

import collections
import json
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.evaluation.tables import markdown_table, rewrite_blocks
from experiments.files import write_whole
from experiments.training.environment import environment

_BITS = "the bits of the undisturbed run"
_RIGHT = (
  "the right values come back, or those of the step before, and stderr is one line that says why"
)


class Fault(NamedTuple):
  """A kind of fault: `test_NAME(number)` is run `short` or `long` times."""

  title: str
  demand: str
  short: int = 1
  long: int = 1


FAULTS = {
  "kill": Fault(
    "SIGKILL while it starts, trains, saves or evaluates",
    f"started again by itself, it ends with {_BITS}, losses included; at most one save interval, "
    "20 steps, is lost, and the steps trained during a save that was killed",
    *(2, 25),
  ),
  "vocabulary": Fault(
    "SIGKILL between the files that a run writes at its start",
    f"the same command ends with {_BITS}",
  ),
  "term": Fault(
    "SIGTERM in one process and in two",
    f"the step reached is saved and good, exit status 143 in 10 s; then it ends with {_BITS}",
    *(2, 20),
  ),
  "bits": Fault("one bit of the newest checkpoint flipped", _RIGHT, 20, 100),
  "files": Fault("a file of the newest checkpoint truncated, or removed", _RIGHT),
  "disk": Fault(
    "disk full during a save",
    "stderr is one line, exit status 2, the older steps good; with room again it ends with "
    f"{_BITS}",
    *(1, 5),
  ),
  "workers": Fault(
    "one of two processes killed, coordinator or not",
    f"no process is left after 15 s; started again, they end with {_BITS}",
    *(2, 10),
  ),
  "devices": Fault(
    "restored on 8, 4, 2, 8 devices and in 2, 1, 2 processes",
    "parameters and optimiser are the same bits, and the pairs of each batch the same",
    *(2, 5),
  ),
  "nan": Fault(
    "a batch whose loss is not a number, and a run of them",
    "skipped, counted, and nothing changed; 3 in a row end the run with exit status 1, step and "
    "batch named, and finite parameters saved",
    *(2, 4),
  ),
}


def rows(record: Mapping[str, Any]) -> str:
  """Returns where each fault was tried, and the table: a figure is the largest, or a count."""
  sources, cells = collections.defaultdict(list), []
  for name in [name for name in FAULTS if name in record]:
    found, figures = record[name], collections.defaultdict(list)
    sources[_source(found["environment"])].append(name)
    for figure, value in [item for each in found["tries"] for item in each["figures"].items()]:
      figures[figure].append(value)
    worst = {figure: sum(x) if isinstance(x[0], bool) else max(x) for figure, x in figures.items()}
    held = sum(not each["problem"] for each in found["tries"])
    of_figures = "; ".join(f"{figure} {value:.3g}" for figure, value in worst.items())
    cells.append([found["title"], str(len(found["tries"])), str(held), of_figures, found["demand"]])
  table = markdown_table(["fault", "tries", "held", "worst", "what has to hold"], cells)
  return "\n".join([*(f"- {', '.join(n)}: {where}" for where, n in sources.items()), "", table])


def _source(where: Mapping[str, Any]) -> str:
  versions = ", ".join(f"{name} {where['packages'][name]}" for name in ("jax", "orbax-checkpoint"))
  machine = f"{where['date']}, {where['cpu_cores']} cores of {where['cpu']}, {versions}"
  return f"{machine}, commit {where['git_commit']}, `{where['command']}`"


def write(folder: pathlib.Path, record: Mapping[str, Any]) -> None:
  """Writes faults.json and the block of faults.md; faults that were not tried stay as they are."""
  folder.mkdir(parents=True, exist_ok=True)
  file = folder / "faults.json"
  record = (json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}) | record
  write_whole(file, json.dumps(record, indent=1) + "\n")
  rewrite_blocks(folder / "faults.md", dict(faults=rows(record)))


class Recorder:
  """A pytest plugin that collects the tries of all tests, also of pytest-xdist's workers."""

  def __init__(self, folder: str, words: Sequence[str]):
    self._folder, self._command = pathlib.Path(folder), shlex.join(["pytest", *words])
    self._tries: dict[str, list] = {}

  def pytest_runtest_logreport(self, report) -> None:
    name = re.search("chaos/.*::test_([a-z]+)", report.nodeid)
    is_try = report.when == "call" or (report.when == "setup" and report.failed)
    if not (is_try and name and name[1] in FAULTS):
      return
    tries = dict(report.user_properties).get("tries") or [dict(what="", problem="", figures={})]
    if report.failed:
      crash = getattr(report.longrepr, "reprcrash", None)
      message = crash.message if crash else str(report.longrepr)
      tries[-1]["problem"] = " ".join(message.split())[:500] or "failed"
    self._tries.setdefault(name[1], []).extend(tries)

  def pytest_sessionfinish(self) -> None:
    where, record = environment() | dict(command=self._command), {}
    for name, tries in self._tries.items():
      title, demand, *_ = FAULTS[name]
      record[name] = dict(title=title, demand=demand, environment=where, tries=tries)
    write(self._folder, record)
