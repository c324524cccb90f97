"""Reads the collectives in the text of a compiled program."""

import collections
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

KINDS = (
  *("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
  *("collective-permute", "collective-broadcast"),
)
# A sum over slices is compiled to a reduce-scatter within a slice, a sum across slices over
# another network, and an all-gather.
ACROSS = "all-reduce across slices"
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ACROSS = re.compile(r" = \((.*?), u32\[\].* send\(.*_xla_megascale_target=\"\{([\d,:]+)\}")
_CALLEES = re.compile(r"(?:calls|body)=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+)\w*\[([\d,]*)\]")


class Collective(NamedTuple):
  """One collective of a program.

  Attributes:
    kind: one of `KINDS`, or `ACROSS`.
    num_bytes: of its result on one chip; of a reduce-scatter, of its operand.
    num_chips: that take part together; across slices, one of each.
    times: that it runs in a step.
  """

  kind: str
  num_bytes: int
  num_chips: int
  times: int

  @property
  def sent_bytes(self) -> float:
    """Returns the bytes that a chip sends each time, in a ring over those that take part.

    >>> Collective("all-reduce", 800, num_chips=8, times=1).sent_bytes
    1400.0
    """
    if self.kind in ("collective-permute", "collective-broadcast"):
      return float(self.num_bytes)
    rounds = 2 if self.kind in ("all-reduce", ACROSS) else 1
    return rounds * self.num_bytes * (self.num_chips - 1) / self.num_chips


def find(text: str, num_chips: int) -> list[Collective]:
  """Finds the collectives of a compiled program (`Compiled.as_text()`) that runs on `num_chips`.

  In a loop they run as often as its body, or once if the compiler does not state how often.
  """
  computations, lines = {}, []
  for line in text.splitlines():  # callers stand after those they call, the entry last
    if head := _COMPUTATION.match(line):
      lines = computations[head[2]] = []
    else:
      lines.append(line)
  times = collections.Counter({name: 1 for name in list(computations)[-1:]})
  for name in reversed(computations):
    for line in computations[name]:
      trips = _TRIPS.search(line)
      for callee in _CALLEES.findall(line):
        times[callee] += times[name] * (int(trips[1]) if trips else 1)
  return [
    collective
    for name, lines in computations.items()
    for collective in _in_lines(name, lines, num_chips, times[name])
  ]


def by_kind(found: Iterable[Collective]) -> dict[str, dict[str, float]]:
  """Adds up how often each kind runs in a step, its bytes, and the bytes that a chip sends."""
  total = collections.defaultdict(lambda: dict(times=0, num_bytes=0, sent_bytes=0.0))
  for collective in found:
    row, times = total[collective.kind], collective.times
    row["times"] += times
    row["num_bytes"] += times * collective.num_bytes
    row["sent_bytes"] += times * collective.sent_bytes
  return dict(total)


def _in_lines(
  computation: str, lines: Iterable[str], num_chips: int, times: int
) -> Iterator[Collective]:
  for line in lines:
    if across := _ACROSS.search(line):
      ends = [[int(end) for end in part.split(":")] for part in across[2].split(",")]  # "1,4:6"
      slices = sum(end[-1] - end[0] + 1 for end in ends)
      yield Collective(ACROSS, _bytes(across[1]), slices, times)
    if found := _COLLECTIVE.search(line):
      kind, starts = found[2], bool(found[3])
      chips = _num_chips(line, num_chips)
      # The shape of a start is a tuple of operands and results, but for an all-reduce.
      num_bytes = _bytes(_parts(found[1])[1] if starts and kind != "all-reduce" else found[1])
      if computation.startswith("all-reduce-scatter"):  # A fusion: each chip keeps its part.
        kind = "reduce-scatter"
      elif kind == "reduce-scatter":
        num_bytes *= chips
      yield Collective(kind, num_bytes, chips, times)


def _parts(shape: str) -> list[str]:
  """Splits the shape of a tuple into those of its parts.

  >>> _parts("((f32[2]{0}, u8[3]{0}), f32[4,2]{1,0})")
  ['(f32[2]{0}, u8[3]{0})', ' f32[4,2]{1,0}']
  """
  parts, depth = [""], 0
  for letter in shape[1:-1]:
    depth += (letter in "([{") - (letter in ")]}")
    if letter == "," and not depth:
      parts.append("")
    else:
      parts[-1] += letter
  return parts


def _bytes(shape: str) -> int:
  """Returns the bytes of a shape's arrays.

  >>> _bytes("(f32[2,3]{1,0:T(8,128)}, bf16[5]{0}, pred[])")
  35
  """
  width = lambda kind: 1 if kind == "pred" else math.ceil(int(re.sub(r"\D", "", kind)) / 8)
  return sum(
    math.prod(map(int, filter(None, sizes.split(",")))) * width(kind)
    for kind, sizes in _ARRAY.findall(shape)
  )


def _num_chips(line: str, num_chips: int) -> int:
  """Returns the chips of a group: {{0,1},{2,3}}, [2,2]<=[4] or mesh['x'=2,'y'=2] {'y'}."""
  if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
    return listed[1].count(",") + 1
  if tiled := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
    return int(tiled[1])
  if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
    # 'x':(2)4 is a part of 'x', four long.
    parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
    return math.prod(int(part or sizes[name]) for name, part in parts)
  return num_chips
