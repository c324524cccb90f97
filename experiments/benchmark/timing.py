"""Times functions, and reads, writes and describes raw results."""

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
  """Times each function once a round and returns its seconds by name.

  Of n functions, 2 n rounds have n orders and their reverses: each function is as often
  first as any other, and as often before as after its neighbour.
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
  """Returns the seconds of one call, until all arrays that it returns are ready."""
  start = time.perf_counter()
  jax.block_until_ready(function())
  return time.perf_counter() - start


def quartiles(values: Sequence[float] | np.ndarray) -> list[float]:
  """Returns the lower quartile, the median and the upper quartile."""
  return np.quantile(values, (0.25, 0.5, 0.75)).tolist()


class Program(NamedTuple):
  """A compiled function, its temporary memory (None if unknown), and all memory that it needs."""

  run: Callable[..., Any]
  temporary_bytes: int | None
  bytes_needed: int


def free_bytes() -> float:
  """Returns the free memory of the first device; infinity if the machine does not report it."""
  stats = jax.devices()[0].memory_stats()
  if stats and "bytes_limit" in stats:
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
  meminfo = pathlib.Path("/proc/meminfo")
  if not meminfo.exists():
    return float("inf")
  available = re.search(r"MemAvailable:\s*(\d+) kB", meminfo.read_text())
  return 1024 * int(available[1])


def rewrite_page(
  folder: pathlib.Path, block: Callable[[Record], str], prefix: str = ""
) -> None:
  """Rewrites a section of FOLDER.md for each of the folder's raw results.

  `block` is given the results and their `path`.
  """
  sections = {}
  for path in sorted(folder.glob("*.json")):
    results = json.loads(path.read_text("utf-8"))
    sections[prefix + path.stem] = block({**results, "path": path})
  if sections:
    rewrite_sections(folder.with_suffix(".md"), sections)


def provenance(results: Record, packages: Sequence[str] = ("jax", "jaxlib")) -> str:
  """Returns Markdown with the hardware, date, versions and command of a measurement."""
  where = results["environment"]
  facts = [hardware(where), where["date"][:10], f"Python {where['python']}"]
  facts += [f"{name} {where['packages'][name] or 'absent'}" for name in packages]
  facts.append(f"commit {short_commit(where['git_commit'])}")
  return f"{', '.join(facts)}.\n\n```\n{where['command']}\n```\n"
