"""The page of faults: a table of what was done and whether all held."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.faults.families import FAMILIES
from experiments.faults.tries import Try
from relpos_jax.errors import InputError
from relpos_jax.training.workdir import write_whole

Results = Mapping[str, Any]  # of one kind of fault: environment, seed, and a list of `Try`s


class Row(NamedTuple):
  """What came of the tries of one kind of fault."""

  tries: int
  held: int
  worst: dict[str, float]  # each figure's largest value, or how often it is 1
  problems: list[str]


_COUNTS = ("fell back", "harmless")


def row(name: str, results: Results) -> Row:
  """Sums up.

  >>> row("bits", dict(tries=[Try("a bit", "SILENT"), Try("another")])).held
  1
  """
  tries = results["tries"]
  worst: dict[str, float] = {}
  for figure in dict.fromkeys(figure for each in tries for figure in each.figures):
    values = [each.figures[figure] for each in tries if figure in each.figures]
    worst[figure] = sum(values) if figure in _COUNTS else max(values)
  number = sum(each.number for each in tries)
  problems = [f"{name}: {each.what}: {each.problem}" for each in tries if each.problem]
  return Row(number, max(number - len(problems), 0), worst, problems)


def table(found: Mapping[str, Results]) -> str:
  """In Markdown, in the order of `FAMILIES`."""
  lines = ["| fault | tries | held | worst | what has to hold |", "|---|---|---|---|---|"]
  for name in _in_order(found):
    number, held, worst, _ = row(name, found[name])
    worst = "; ".join(f"{figure} {value:.3g}" for figure, value in worst.items())
    family = FAMILIES[name]
    lines.append(f"| {family.title} | {number} | {held} | {worst} | {family.demand} |")
  return "\n".join(lines) + "\n"


def write(out: pathlib.Path, found: Mapping[str, Results]) -> None:
  """Writes OUT/faults.json, with what is there of other kinds, and the page of all."""
  file = out / "faults.json"
  found = read(file) | found
  plain = {
    name: {**found[name], "tries": [each._asdict() for each in found[name]["tries"]]}
    for name in _in_order(found)
  }
  write_whole(file, json.dumps(plain, indent=1) + "\n")
  write_whole(out / "faults.md", page(found))


def read(file: pathlib.Path) -> dict[str, Results]:
  """What `write` has written; nothing if there is no file.

  Raises:
    InputError: it holds something else.
  """
  if not file.exists():
    return {}
  try:
    found = json.loads(file.read_text(encoding="utf-8"))
    return {
      name: {**found[name], "tries": [Try(**each) for each in found[name]["tries"]]}
      for name in _in_order(found)
    }
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise InputError(f"cannot read {file} ({error}): delete it, or give another --out") from error


def _in_order(found: Mapping[str, Results]) -> list[str]:
  return [name for name in FAMILIES if name in found]


def page(found: Mapping[str, Results]) -> str:
  """All of OUT/faults.md."""
  problems = [
    f"- {problem}" for name in _in_order(found) for problem in row(name, found[name]).problems
  ]
  parts = [
    "# Faults",
    _INTRO.strip(),
    *_wheres(found),
    table(found).strip(),
    "\n".join(["What did not hold:\n", *problems]) if problems else "All held.",
    _NOTES.strip(),
  ]
  return "\n\n".join(parts) + "\n"


def _wheres(found: Mapping[str, Results]) -> list[str]:
  """Each call, with its machine and the kinds that it did."""
  kinds: dict[str, list[str]] = {}
  for name in _in_order(found):
    kinds.setdefault(_where(found[name]["environment"]), []).append(name)
  return [f"{', '.join(names)}: {where}" for where, names in kinds.items()]


def _where(environment: Mapping[str, Any]) -> str:
  packages = environment["packages"]
  return (
    f"{environment['date']}, {environment['cpu_cores']} cores of {environment['cpu']},\njax "
    f"{packages['jax']}, orbax-checkpoint {packages['orbax-checkpoint']}, commit\n"
    f"{environment['git_commit']}\n\n```\n{environment['command']}\n```"
  )


_INTRO = """
Written by `python -m experiments.chaos`: faults done to `experiments.train` on some pairs of the
embedded corpus, a model of one layer, on CPUs. Every try is in [faults.json](faults.json).
"""
_NOTES = """
- A kill is followed by a restart by `experiments.launch`; nobody does anything. One run is killed
  again and again until it reaches its end, and then all its losses and the digests of its
  parameters and optimiser are compared with those of a run that was left alone.
- Saving goes on beside training. A kill in the midst of a save costs that save, and so one
  interval, and the steps that were trained while it went on; these are counted in "steps lost, with
  those during the save".
- SIGTERM comes after a first step, in one process during evaluations too; several processes end an
  evaluation together, at the next point where they can agree, and are not disturbed in it here.
- "Harmless": a bit or a file that nothing depends on; all values were right. "Fell back": the
  damaged step was set aside and the one before taken.
- The disk is full by a limit on the size of files that the process may write, set while it runs.
- "As on a cluster": no launcher ends the survivor, it learns from JAX that the other is dead.
- Each place that a run is moved to starts with a batch that is skipped, so that what was restored
  is saved again as it was; "losses apart" is to a run that was never moved, whose sums have another
  order.
"""
