"""The page of faults: a table of what was done and whether all held."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.faults.families import FAMILIES
from experiments.faults.subject import Try


class Row(NamedTuple):
  """A kind of fault, and what came of its tries."""

  name: str
  tries: int
  held: int
  worst: dict[str, float]  # each figure's largest value, or how often it is 1
  problems: list[str]


_COUNTS = ("fell back", "harmless")


def rows(found: Mapping[str, Sequence[Try]]) -> list[Row]:
  """A row a kind."""
  return [_row(name, tries) for name, tries in found.items()]


def _row(name: str, tries: Sequence[Try]) -> Row:
  worst: dict[str, float] = {}
  for figure in dict.fromkeys(figure for each in tries for figure in each.figures):
    values = [each.figures[figure] for each in tries if figure in each.figures]
    worst[figure] = sum(values) if figure in _COUNTS else max(values)
  number = sum(each.number for each in tries)
  problems = [f"{each.what}: {each.problem}" for each in tries if each.problem]
  return Row(name, number, max(number - len(problems), 0), worst, problems)


def table(rows: Sequence[Row]) -> str:
  """In Markdown.

  >>> print(table([Row("bits", 2, 2, {"fell back": 2}, [])]).splitlines()[-1][:55])
  | one bit of a checkpoint flipped | 2 | 2 | fell back 2
  """
  lines = ["| fault | tries | held | worst | what has to hold |", "|---|---|---|---|---|"]
  for row in rows:
    family = FAMILIES[row.name]
    worst = ", ".join(f"{name} {value:.3g}" for name, value in row.worst.items())
    lines.append(f"| {family.title} | {row.tries} | {row.held} | {worst} | {family.demand} |")
  return "\n".join(lines) + "\n"


def page(results: Mapping[str, Any], found: Mapping[str, Sequence[Try]]) -> str:
  """All of results/faults.md."""
  where, settings, those = results["environment"], results["settings"], rows(found)
  problems = [f"- {row.name}: {problem}" for row in those for problem in row.problems]
  parts = [
    "# Faults",
    _INTRO.strip(),
    f"{where['date']}, {where['cpu_cores']} cores of {where['cpu']}, commit {where['git_commit']}, "
    f"jax {where['packages']['jax']}, orbax-checkpoint {where['packages']['orbax-checkpoint']}, "
    f"{settings['minutes']:.0f} minutes:",
    f"```\n{where['command']}\n```",
    table(those).strip(),
    "\n".join(["What did not hold:", *problems]) if problems else "All held.",
    _NOTES.strip(),
  ]
  return "\n\n".join(parts) + "\n"


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
- "Harmless": a bit or a file that nothing depends on; all values were right. "Fell back": the
  damaged step was set aside and the one before taken.
- The disk is full by a limit on the size of files that the process may write, set while it runs.
- "As on a cluster": no launcher ends the survivor, it learns from JAX that the other is dead.
- Each place that a run is moved to starts with a batch that is skipped, so that what was restored
  is saved again as it was; "losses apart" is to a run that was never moved, whose sums have another
  order.
"""
