"""The report of the operator's benchmark: every number in it comes from the raw JSON files."""

import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.benchmarks.contestants import AGAIN, STOCK
from relpos_jax.errors import InputError
from relpos_jax.evaluation.cost import ratio_quartiles
from relpos_jax.evaluation.pictures import CostPanel, cost_curves
from relpos_jax.evaluation.record import hardware
from relpos_jax.training.workdir import short_commit, write_whole

_INTRO = f"""# What attention costs

Written by `python -m experiments.benchmark` from the times in `attention/*.json`; its `--help` says
how it measures. `{STOCK}` is `jax.nn.dot_product_attention` without relations, its median in
milliseconds. All others are ratios of two neighbouring runs, below 1 where they are faster: the
median, and in brackets the quartiles. `{AGAIN}` shows the noise. Bold is the fastest that has
relations on keys and values. Memory is what the compiler sets aside beyond arguments and results,
in brackets its ratio to `{STOCK}`.
"""
Record = Mapping[str, Any]


def write(out: pathlib.Path) -> None:
  """Writes out/attention.md and a picture for each out/attention/*.json.

  Raises:
    InputError: there is none.
  """
  files = sorted((out / "attention").glob("*.json"))
  if not files:
    raise InputError(f"no results in {out / 'attention'}: measure first, with --lengths=512,1024")
  sections = [_INTRO]
  for file in files:
    results = json.loads(file.read_text(encoding="utf-8"))
    picture = cost_curves(_panels(results), _peers(results), file.with_suffix(".png"))
    sections.append(_section(file.stem, results, f"attention/{picture.name}"))
  write_whole(out / "attention.md", "\n".join(sections))


def describe_kind(is_causal: bool, backward: bool) -> str:
  """The words for what a case computes."""
  passes = "forward and backward" if backward else "forward"
  return f"{passes}, {'causal' if is_causal else 'bidirectional'}"


def _section(name: str, results: Record, picture: str) -> str:
  lines = [f"## {name}", "", *_header(results), f"![Time and memory over length]({picture})", ""]
  cases, memory = results["cases"], results["memory"]
  for kind, of_kind in _by_kind(cases).items():
    lines += [f"### Time, {kind}", "", *_time_table(of_kind, results["contestants"]), ""]
  if any(_other_pairs(case) for case in cases):
    lines += ["### One against another", "", *_pairs_table(cases), ""]
  for kind, of_kind in _by_kind(cases).items():
    lines += [f"### Temporary memory, {kind}", "", *_memory_table(of_kind), ""]
  for kind, of_kind in _by_kind(memory).items():
    title = f"### Temporary memory of one sequence, {kind}"
    lines += [title, "", *_memory_table(of_kind, _growth), ""]
  lines += ["### What they are", "", *_what(results["contestants"]), ""]
  if refusals := _refusals([*cases, *memory]):
    lines += ["### What was left out", "", *refusals, ""]
  return "\n".join(lines)


def _header(results: Record) -> list[str]:
  """Where, when and by what command it was measured, and what all cases have in common."""
  where, settings = results["environment"], results["settings"]
  return [
    f"{hardware(where)}, {where['date'][:10]}, "
    f"Python {where['python']}, {_packages(where)}, "
    f"commit {short_commit(where['git_commit'])}. "
    f"{settings['dtype']}, N = {settings['heads']}, H = {settings['width']}, "
    f"k = {settings['max_distance']}, B T = {settings['tokens']:,}, "
    f"{_repetitions(results['cases'])}.",
    "",
    f"```\n{where['command']}\n```",
    "",
  ]


def _packages(where: Record) -> str:
  versions = where["packages"]
  return ", ".join(f"{name} {versions[name] or 'absent'}" for name in ("jax", "jaxlib", "torch"))


def _repetitions(cases: Sequence[Record]) -> str:
  counts = [len(pair["seconds"]) for case in cases for pair in case["pairs"]] or [0]
  return " to ".join(map(str, sorted({min(counts), max(counts)}))) + " repetitions"


# Tables ------------------------------------------------------------------------------------------


def _time_table(cases: Sequence[Record], contestants: Record) -> list[str]:
  """A row for each contestant, a column for each length."""
  ratios = [_ratios(case) for case in cases]
  complete = [name for name, of in contestants.items() if of["relations"] == "keys and values"]
  fastest = [min((m for n, (_, m, _) in of.items() if n in complete), default=0) for of in ratios]
  rows = [[STOCK, "none", *map(_stock_milliseconds, cases)]]
  for name, of in contestants.items():
    cells = [
      _ratio_cell(ratios[name], bold=name in complete and ratios[name][1] == best)
      if name in ratios
      else "-"
      for ratios, best in zip(ratios, fastest, strict=True)
    ]
    if name != STOCK and set(cells) != {"-"}:
      rows.append([name, of["relations"], *cells])
  return _table(["", "relations", *map(_length, cases)], rows)


def _stock_milliseconds(case: Record) -> str:
  runs = _stock_seconds(case)
  if not runs:
    return "-"
  milliseconds = 1e3 * np.median(runs)
  return f"{milliseconds:.1f} ms" if milliseconds < 100 else f"{milliseconds:,.0f} ms"


def _stock_seconds(case: Record) -> list[float]:
  """Of its runs beside all others."""
  pairs = [pair for pair in case["pairs"] if pair["against"] == STOCK]
  return [seconds for pair in pairs for seconds in pair["against_seconds"]]


def _ratios(case: Record, against: str = STOCK) -> dict[str, tuple[float, float, float]]:
  return {pair["name"]: _quartiles(pair) for pair in case["pairs"] if pair["against"] == against}


def _quartiles(pair: Record) -> tuple[float, float, float]:
  return ratio_quartiles(pair["seconds"], pair["against_seconds"])


def _ratio_cell(quartiles: tuple[float, float, float], bold: bool = False) -> str:
  low, median, high = quartiles
  median = f"**{median:.2f}**" if bold else f"{median:.2f}"
  return f"{median} ({low:.2f} to {high:.2f})"


def _pairs_table(cases: Sequence[Record]) -> list[str]:
  """The ratios of pairs without jax.nn."""
  lengths = list(dict.fromkeys(map(_length, cases)))
  cells = {}
  for case in cases:
    for pair in _other_pairs(case):
      row = cells.setdefault((pair["name"], pair["against"], _kind(case)), {})
      row[_length(case)] = _ratio_cell(_quartiles(pair))
  rows = [
    [name, against, kind, *(row.get(length, "-") for length in lengths)]
    for (name, against, kind), row in cells.items()
  ]
  return _table(["", "against", "", *lengths], rows)


def _other_pairs(case: Record) -> list[Record]:
  return [pair for pair in case["pairs"] if pair["against"] != STOCK]


def _memory_table(
  cases: Sequence[Record], summary: Callable[[list[tuple[int, int]]], str] | None = None
) -> list[str]:
  """What the compiler sets aside, and its ratio to jax.nn's."""
  stock = [case["contestants"][STOCK]["temporary_bytes"] for case in cases]
  names = dict.fromkeys(name for case in cases for name in case["contestants"])
  rows = []
  for name in names:
    sizes = [case["contestants"].get(name, {}).get("temporary_bytes") for case in cases]
    if name == AGAIN or all(size is None for size in sizes):
      continue
    cells = [_memory_cell(size, of) for size, of in zip(sizes, stock, strict=True)]
    points = [(c["length"], s) for c, s in zip(cases, sizes, strict=True) if s is not None]
    rows.append([name, *cells, *([summary(points)] if summary else [])])
  return _table(["", *map(_length, cases), *(["doubling T"] if summary else [])], rows)


def _memory_cell(size: int | None, stock: int | None) -> str:
  if size is None:
    return "-"
  share = "" if not stock or not size or size == stock else f" ({_share(size / stock)})"
  unit, name = (2**20, "MiB") if size < 2**30 else (2**30, "GiB")
  return f"{size / unit:,.{0 if size >= 100 * unit else 1}f} {name}{share}"


def _share(ratio: float) -> str:
  return f"1/{1 / ratio:.3g}" if ratio < 1 else f"x {ratio:.3g}"


def _growth(points: list[tuple[int, int]]) -> str:
  """By what factor memory grows where the length doubles, between the last two lengths."""
  if len(points) < 2 or points[-2][1] == 0:
    return "-"
  (short, little), (long, much) = points[-2:]
  return f"x {2 ** (math.log(much / little) / math.log(long / short)):.2f}"


def _what(contestants: Record) -> Iterable[str]:
  return [
    f"- {name}: {of['what']}; relations: {of['relations']}" for name, of in contestants.items()
  ]


def _refusals(cases: Sequence[Record]) -> list[str]:
  """Who did not run, why, and in which cases if it ran in others."""
  where = {}
  for case in cases:
    for name, row in case["contestants"].items():
      if row["refused"]:
        where.setdefault((name, row["refused"]), []).append(case)
  return [
    f"- {name}: {reason}" + _which(those, [case for case in cases if name in case["contestants"]])
    for (name, reason), those in where.items()
  ]


def _which(those: Sequence[Record], cases: Sequence[Record]) -> str:
  """In brackets, by what those differ from all cases: the kind, the length."""
  differences = []
  for describe in (_kind, _length):
    found, all_of_them = (list(dict.fromkeys(map(describe, of))) for of in (those, cases))
    if found != all_of_them:
      differences.append("; ".join(found))
  return f" ({'; '.join(differences)})" if differences else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
  lines = [head, ["---"] * len(head), *rows]
  return [f"| {' | '.join(cells)} |" for cells in lines]


def _by_kind(cases: Sequence[Record]) -> dict[str, list[Record]]:
  kinds = dict.fromkeys(map(_kind, cases))
  return {kind: [case for case in cases if _kind(case) == kind] for kind in kinds}


def _kind(case: Record) -> str:
  return describe_kind(case["is_causal"], case["backward"])


def _length(case: Record) -> str:
  return f"T = {case['length']:,}"


# Picture -----------------------------------------------------------------------------------------


def _panels(results: Record) -> list[list[CostPanel]]:
  """A row for each mask, with the backward pass where there is one: time, then memory."""
  rows = []
  every = [*results["cases"], *results["memory"]]
  backward = any(case["backward"] for case in every)
  for is_causal in sorted({case["is_causal"] for case in every}):
    kind = describe_kind(is_causal, backward)
    cases, memory = (
      [case for case in results[part] if _kind(case) == kind] for part in ("cases", "memory")
    )
    tokens = f"B T = {results['settings']['tokens']:,}"
    panels = [
      CostPanel(f"{kind}, {tokens}", "milliseconds", _curves(cases, _milliseconds)),
      CostPanel(f"{kind}, {tokens}", "temporary memory, MiB", _curves(cases, _mebibytes)),
      CostPanel(f"{kind}, B = 1", "temporary memory, MiB", _curves(memory, _mebibytes)),
    ]
    rows.append([panel for panel, of in zip(panels, (cases, cases, memory), strict=True) if of])
  return rows


def _curves(cases: Sequence[Record], measure: Callable[[Record, str], float | None]):
  names = dict.fromkeys(name for case in cases for name in case["contestants"] if name != AGAIN)
  points = {name: [(case["length"], measure(case, name)) for case in cases] for name in names}
  known = {name: [(x, y) for x, y in of if y] for name, of in points.items()}
  return {name: of for name, of in known.items() if of}


def _milliseconds(case: Record, name: str) -> float | None:
  """jax.nn's median times the ratio's, which drifts less than the time itself."""
  runs = _stock_seconds(case)
  ratio = 1.0 if name == STOCK else _ratios(case).get(name, (0, 0, 0))[1]
  return 1e3 * float(np.median(runs)) * ratio if runs else None


def _mebibytes(case: Record, name: str) -> float | None:
  size = case["contestants"].get(name, {}).get("temporary_bytes")
  return size and size / 2**20


def _peers(results: Record) -> list[str]:
  """Drawn with broken lines: all that have not the relations of keys and values."""
  contestants = results["contestants"]
  return [name for name, of in contestants.items() if of["relations"] != "keys and values"]
