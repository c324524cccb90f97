"""Times functions, and writes pages of the results."""

import json
import pathlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.evaluation.records import Record, hardware
from experiments.evaluation.tables import rewrite_sections
from experiments.training.environment import short_commit


def time_rounds(
  functions: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
  """Times each function once a round; returns the seconds by name.

  The order changes from round to round, so that no function gains by its place. In 2 n
  rounds, n functions run in n rotated orders and in the reverse of each order, so that
  each function is first twice.
  """
  names = list(functions)
  seconds = {name: [] for name in names}
  for number in range(rounds):
    first = number // 2 % len(names)
    order = names[first:] + names[:first]
    for name in reversed(order) if number % 2 else order:
      seconds[name].append(run_time(functions[name]))
  return seconds


def run_time(function: Callable[[], Any]) -> float:
  """Times one call in seconds, until its arrays are ready."""
  start = time.perf_counter()
  jax.block_until_ready(function())
  return time.perf_counter() - start


def quartiles(values: Sequence[float] | np.ndarray) -> list[float]:
  """Computes the lower quartile, the median and the upper quartile."""
  return np.quantile(values, (0.25, 0.5, 0.75)).tolist()


class Program(NamedTuple):
  """Holds a compiled function and its memory; None means unknown."""

  run: Callable[..., Any]
  temporary_bytes: int | None
  bytes_needed: int


def free_bytes() -> float:
  """Returns the free memory of the first device, or infinity if it is unknown."""
  stats = jax.devices()[0].memory_stats()
  if stats and "bytes_limit" in stats:
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
  meminfo = pathlib.Path("/proc/meminfo")
  if not meminfo.exists():
    return float("inf")
  available = re.search(r"MemAvailable:\s*(\d+) kB", meminfo.read_text())
  return 1024 * int(available[1])


def rewrite_page(
  folder: pathlib.Path, make_section: Callable[[Record], str], prefix: str = ""
) -> None:
  """Rewrites a section of FOLDER.md for each file of results in a folder.

  `make_section` is called with the results in a file, and their "path". The section is
  named after the file, with `prefix` before its name.
  """
  sections = {}
  for path in sorted(folder.glob("*.json")):
    results = json.loads(path.read_text("utf-8"))
    sections[prefix + path.stem] = make_section({**results, "path": path})
  if sections:
    rewrite_sections(folder.with_suffix(".md"), sections)


def provenance(results: Record, packages: Sequence[str]) -> str:
  """Formats hardware, date, versions and command of a measurement as Markdown."""
  machine = results["environment"]
  facts = [hardware(machine), machine["date"][:10], f"Python {machine['python']}"]
  facts += [f"{name} {machine['packages'][name] or 'absent'}" for name in packages]
  facts.append(f"commit {short_commit(machine['git_commit'])}")
  return f"{', '.join(facts)}.\n\n```\n{machine['command']}\n```\n"
