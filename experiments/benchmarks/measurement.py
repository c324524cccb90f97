"""The course of the operator's benchmark: who can do each case, how often it runs, what it took."""

import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from experiments.benchmarks import contestants
from experiments.benchmarks.contestants import AGAIN, BLOCKWISE, STOCK, Case, Contestant, Prepared
from experiments.benchmarks.tables import describe_kind
from experiments.benchmarks.torch_peers import TORCH_PEERS
from relpos_jax.evaluation.cost import Pair, compare, run_time

PEERS: Mapping[str, Contestant] = contestants.JAX_PEERS | TORCH_PEERS


class Effort(NamedTuple):
  """At least so many repetitions of every pair, and more for cases that take less time."""

  repetitions: int
  seconds: int


class Runner(NamedTuple):
  """What computes a case once, and how long it took."""

  run: Callable[[], Any]
  seconds: float


def measure(
  cases: Sequence[Case],
  memory_cases: Sequence[Case],
  entrants: Mapping[str, Contestant],
  effort: Effort,
) -> Iterator[dict[str, Any]]:
  """All that is measured so far, to be written as JSON, each time that there is more.

  All cases are compiled before the first is timed: then the time left is known.
  """
  kinds = {name: dict(relations=of.relations, what=of.what) for name, of in entrants.items()}
  results: dict[str, Any] = dict(contestants=kinds, cases=[], memory=[])
  for case in memory_cases:
    _say(f"compiling for its memory: {_describe(case)}")
    results["memory"].append(case._asdict() | dict(contestants=_memory(case, entrants)))
    yield results
  plans = []
  for number, case in enumerate(cases, 1):
    _say(f"compiling {number}/{len(cases)}: {_describe(case)}")
    plans.append(_plan(case, entrants, effort))
  progress = _Progress(plans)
  for plan in plans:
    results["cases"].append(_measure(plan, progress))
    yield results


def entrants(implementations: Sequence[str], peers: Sequence[str]) -> dict[str, Contestant]:
  """By name: jax.nn's first, then ours, with and without relations, then the peers."""
  found = {STOCK: contestants.stock(), AGAIN: contestants.stock()}
  for name in implementations:
    found[name] = contestants.implementation(name)
    if name in BLOCKWISE:
      found[_bare(name)] = contestants.without_relations(name)
  return found | {name: PEERS[name] for name in peers}


def _bare(name: str) -> str:
  return f"{name} (no relations)"


def pairs_of(names: Sequence[str]) -> list[Pair]:
  """All against jax.nn; the blockwise ones also against what they should be held against."""
  pairs = [(name, STOCK) for name in names if name != STOCK]
  for name in BLOCKWISE:
    others = (_bare(name), "per_position", "flex_attention") if name in names else ()
    pairs += [(name, other) for other in others if other in names]
  return pairs


def _memory(case: Case, entrants: Mapping[str, Contestant]) -> dict[str, Any]:
  """The compiler's account of all that have one."""
  compiled = {
    name: entrant
    for name, entrant in entrants.items()
    if name != AGAIN and not entrant.runs_to_prepare
  }
  return {name: _prepare(entrant, case)[0] for name, entrant in compiled.items()}


def _prepare(entrant: Contestant, case: Case) -> tuple[dict[str, Any], Prepared | None]:
  """A row, and what is ready to run unless the row says why nothing is."""
  try:
    prepared = entrant.prepare(case)
  except RuntimeError as error:  # NotImplementedError and lack of memory among them
    return _row(refused=_first_line(error)), None
  return _row(prepared.temporary_bytes), prepared


def _warm_up(entrant: Contestant, case: Case) -> tuple[dict[str, Any], Runner | None]:
  """The same, run twice if it has room: the first run may compile."""
  row, prepared = _prepare(entrant, case)
  if not prepared:
    return row, None
  free = free_bytes()
  if prepared.bytes_needed > free:
    gibibytes = f"{prepared.bytes_needed / 2**30:.1f} GiB of {free / 2**30:.1f} GiB"
    return row | dict(refused=f"it needs {gibibytes}"), None
  try:
    prepared.run()
    return row, Runner(prepared.run, run_time(prepared.run))
  except RuntimeError as error:
    return row | dict(refused=_first_line(error)), None


def _row(temporary_bytes: int | None = None, refused: str | None = None) -> dict[str, Any]:
  return dict(temporary_bytes=temporary_bytes, refused=refused)


def _first_line(error: RuntimeError) -> str:
  """The first line of an error, without what the row says anyway."""
  line = (str(error).splitlines() or [type(error).__name__])[0]
  return line.partition("cannot do this call: ")[2] or line


def free_bytes() -> float:
  """What a computation may take here; no limit where the machine does not say."""
  stats = jax.devices()[0].memory_stats()
  if stats and "bytes_limit" in stats:
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
  meminfo = pathlib.Path("/proc/meminfo")
  found = meminfo.exists() and re.search(r"MemAvailable:\s*(\d+) kB", meminfo.read_text())
  return 1024 * int(found[1]) if found else float("inf")


class Plan(NamedTuple):
  """A case made ready: who does not run and why, who runs, in which pairs, how often."""

  case: Case
  rows: dict[str, dict[str, Any]]
  functions: dict[str, Callable[[], Any]]
  pairs: list[Pair]
  repetitions: int
  seconds: float


def _plan(case: Case, entrants: Mapping[str, Contestant], effort: Effort) -> Plan:
  ready = {name: _warm_up(entrant, case) for name, entrant in entrants.items()}
  runners = {name: runner for name, (_, runner) in ready.items() if runner}
  pairs = pairs_of(list(runners))
  seconds = sum(runners[name].seconds for pair in pairs for name in pair)
  repetitions = effort.repetitions
  if seconds:
    repetitions = max(repetitions, min(10 * repetitions, round(effort.seconds / seconds)))
  return Plan(
    case=case,
    rows={name: row for name, (row, _) in ready.items()},
    functions={name: runner.run for name, runner in runners.items()},
    pairs=pairs,
    repetitions=repetitions,
    seconds=repetitions * seconds,
  )


def _measure(plan: Plan, progress: "_Progress") -> dict[str, Any]:
  """The record of a case."""
  tick = lambda seconds: progress.tick(seconds, plan)
  times = compare(plan.functions, plan.pairs, plan.repetitions, tick)
  pairs = [dict(name=name, against=of) | times[name, of]._asdict() for name, of in times]
  return plan.case._asdict() | dict(contestants=plan.rows, pairs=pairs)


def _describe(case: Case) -> str:
  kind = describe_kind(case.is_causal, case.backward)
  return f"T = {case.length:,}, {kind}"


class _Progress:
  """Says now and then how long what is planned will still take."""

  def __init__(self, plans: Sequence[Plan]):
    self._seconds, self._total = 0.0, sum(plan.seconds for plan in plans)
    self._said = 0.0

  def tick(self, seconds: float, plan: Plan) -> None:
    self._seconds += seconds
    if time.monotonic() - self._said > 10:
      self._said = time.monotonic()
      minutes, rest = divmod(round(max(0.0, self._total - self._seconds)), 60)
      _say(f"measuring {_describe(plan.case)}; about {minutes}:{rest:02} left in all")


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
