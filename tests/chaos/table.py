"""The faults, what has to hold after each, and the table of what came of them."""

import json
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from relpos_jax.training.workdir import environment, write_whole

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


class Fault(NamedTuple):
  """A kind of fault: `test_NAME`, run `short` or `long` times."""

  title: str
  demand: str
  short: int = 1
  long: int = 1


FAULTS = {
  "kill": Fault(
    "SIGKILL, twice, while it starts, trains, saves or evaluates",
    "started again by itself, it ends with the bits of the undisturbed run, losses included; at "
    "most one save interval, 20 steps, is lost, and what was trained beside a save cut short",
    *(2, 25),
  ),
  "term": Fault(
    "SIGTERM in one process and in two",
    "the step reached is saved and good, exit status 0 in 10 s; the same command ends with the "
    "bits of the undisturbed run",
    *(2, 20),
  ),
  "bits": Fault(
    "one bit of the newest checkpoint flipped",
    "the right values come back, or those of the step before, and stderr is one line that says why",
    *(20, 100),
  ),
  "files": Fault(
    "a file of the newest checkpoint cut short, or removed",
    "the right values come back, or those of the step before, and stderr is one line that says why",
  ),
  "swapped": Fault(
    "folders of checkpoints swapped, or one copied over another",
    "never another step's values in silence: a line of stderr for each damaged folder that was "
    "read, a good step is taken, and the end has the bits of the undisturbed run; `checkpoints "
    "--verify` names all of them",
  ),
  "missing": Fault(
    "the folder of the checkpoints moved away, or a dangling link, beside metrics",
    "refused with one line and exit status 2, the metrics untouched; put back, the end has the "
    "bits of the undisturbed run",
  ),
  "links": Fault(
    "links to checkpoints among the checkpoints, then `checkpoints --prune`",
    "the checkpoints that stay without the links stay, and are good",
  ),
  "paths": Fault(
    "a --workdir whose absolute path has one of the characters [ ] * ? \\",
    "refused with one line and exit status 2 before anything is compiled; nothing is written",
  ),
  "vocabulary": Fault(
    "SIGKILL between the files that a run writes at its start",
    "the same command ends with the bits of the undisturbed run",
  ),
  "disk": Fault(
    "disk full during a save",
    "one line, a non-zero exit status, the older steps good; with room again the same command ends "
    "with the bits of the undisturbed run",
    *(1, 5),
  ),
  "workers": Fault(
    "one of two processes killed, coordinator or not",
    "no process is left after 15 s; started again, they end with the bits of the undisturbed run",
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


def table(record: Mapping[str, Any]) -> str:
  """Returns the table of a record in Markdown; a figure is the largest one, or how often true."""
  lines = ["| fault | tries | held | worst | what has to hold |", "|---|---|---|---|---|"]
  for name in [name for name in FAULTS if name in record]:
    tries = record[name]["tries"]
    figures: dict[str, list] = {}
    for each in tries:
      for figure, value in each["figures"].items():
        figures.setdefault(figure, []).append(value)
    worst = "; ".join(f"{name} {_worst(values):.3g}" for name, values in figures.items())
    held = sum(not each["problem"] for each in tries)
    title, demand = record[name]["title"], record[name]["demand"]
    lines.append(f"| {title} | {len(tries)} | {held} | {worst} | {demand} |")
  return "\n".join(lines)


def _worst(values: Sequence[float | bool]) -> float:
  return sum(values) if isinstance(values[0], bool) else max(values)


def sources(record: Mapping[str, Any]) -> str:
  """Returns a line a command: its faults, command, date, hardware, versions and commit."""
  names: dict[str, list[str]] = {}
  for name in [name for name in FAULTS if name in record]:
    where = record[name]["environment"]
    versions = ", ".join(f"{p} {where['packages'][p]}" for p in ("jax", "orbax-checkpoint"))
    line = f"{where['date']}, {where['cpu_cores']} cores of {where['cpu']}, {versions}"
    line += f", commit {where['git_commit']}, `{where['command']}`"
    names.setdefault(line, []).append(name)
  return "\n".join(f"- {', '.join(of)}: {line}" for line, of in names.items())


def write(folder: pathlib.Path, record: Mapping[str, Any]) -> None:
  """Writes faults.json, with the faults that it has and `record` lacks, and the table of all.

  Of faults.md only what is between the markers is replaced.
  """
  folder.mkdir(parents=True, exist_ok=True)
  file, page = folder / "faults.json", folder / "faults.md"
  record = (json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}) | record
  write_whole(file, json.dumps(record, indent=1) + "\n")
  text = page.read_text(encoding="utf-8") if page.exists() else f"# Faults\n\n{BEGIN}\n{END}\n"
  block = f"{BEGIN}\n{sources(record)}\n\n{table(record)}\n{END}"
  write_whole(page, re.sub(f"{BEGIN}.*{END}", lambda _: block, text, flags=re.DOTALL))


class Recorder:
  """Collects the tries that tests report, in the process that the user started."""

  def __init__(self, folder: str, words: Sequence[str]):
    self._folder, self._command = pathlib.Path(folder), shlex.join(["pytest", *words])
    self._tries: dict[str, list] = {}

  def pytest_runtest_logreport(self, report) -> None:
    name = re.search("::test_([a-z]+)", report.nodeid)
    is_fault = "chaos/" in report.nodeid and name and name[1] in FAULTS
    if not is_fault or (report.when != "call" and report.passed) or report.when == "teardown":
      return
    tries = dict(report.user_properties).get("tries") or [dict(what="", problem="", figures={})]
    if report.failed:
      crash = getattr(report.longrepr, "reprcrash", None)
      said = crash.message if crash else str(report.longrepr)
      tries[-1]["problem"] = " ".join(said.split())[:500] or "failed"
    self._tries.setdefault(name[1], []).extend(tries)

  def pytest_sessionfinish(self) -> None:
    where = environment() | dict(command=self._command)
    texts = {name: dict(title=FAULTS[name].title, demand=FAULTS[name].demand) for name in FAULTS}
    done = self._tries.items()
    write(
      self._folder,
      {name: texts[name] | dict(environment=where, tries=tries) for name, tries in done},
    )
