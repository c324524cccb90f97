"""What the bundles of a TPU's kernel add up to: its compiled text, and the loop that it is.

The kernels of `pallas_tpu` are a loop over tiles with branches in it: for each kind of tile, for
the start and the end of a block of queries, for what is done once. Which tile takes which branch is
asked of the kernel's own `dispatch`.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from relpos_jax.attention import pallas_tpu, pallas_tpu_tiles
from relpos_jax.attention.pallas_tpu_tiles import Plan

# A line: its number, what begins there, a sign for each loop it is in, its instructions.
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})?: +>* *\{(.*)", re.M)
# So many bundles after a jump run whether or not it is taken.
_DELAY = 4


class Count(NamedTuple):
  """The bundles of a kernel, for one head.

  Attributes:
    every_step: of what runs for every tile, also for one that causality hides.
    start: of the start of a block of queries.
    tiles: of a tile, by its kind: its offset from the diagonal, or "others".
    end: of the end of a block of queries.
    whole_call: of all that is run.
  """

  every_step: int
  start: int
  tiles: dict[str, int]
  end: int
  whole_call: int


def count(plan: Plan, direction: str, texts: Sequence[str]) -> Count:
  """Counts the kernel "forward" or "backward" of a plan, whose every call has a text of its own.

  Raises:
    ValueError: there are more or fewer texts than calls, or one has other branches than the plan.
  """
  calls = _calls(plan, direction)
  counts = [_count(*call, direction, text) for call, text in zip(calls, texts, strict=True)]
  return counts[0]._replace(whole_call=sum(each.whole_call for each in counts))


def _calls(plan: Plan, direction: str) -> list[tuple[Plan, int]]:
  """The plan of each call, and how many blocks of keys it has."""
  last = plan.num_blocks[1]
  most = pallas_tpu.KEYS_A_CALL // plan.block if direction == "backward" else last
  firsts = range(0, last, most)
  return [(plan._replace(key_block=first), min(most, last - first)) for first in firsts]


def _count(plan: Plan, num_key_blocks: int, direction: str, text: str) -> Count:
  every_step, sizes = branches(text)
  names = _names(plan, direction)
  if len(sizes) != len(names):
    raise ValueError(f"the text has branches of {sizes} bundles; want those of {', '.join(names)}")
  once = dict(zip(names, sizes, strict=True))
  start, end = once.pop("start"), once.pop("end")
  tiles = {kind: once.pop(kind) for kind in _kinds(plan, direction)}
  steps = _steps(plan, num_key_blocks, direction)
  of_tiles = len(steps) * every_step + sum(tiles[kind] for kind in steps if kind)
  of_blocks = plan.num_blocks[0] * (start + end)
  return Count(every_step, start, tiles, end, of_tiles + of_blocks + sum(once.values()))


def _steps(plan: Plan, num_key_blocks: int, direction: str) -> list[str | None]:
  """The kind of every tile of a call."""
  offsets = (
    plan.key_block + key - query
    for query in range(plan.num_blocks[0])
    for key in range(num_key_blocks)
  )
  return [_kind(plan, direction, offset) for offset in offsets]


def _names(plan: Plan, direction: str) -> list[str]:
  """The branches of a kernel in the order of its program."""
  names = ["start", *_kinds(plan, direction), "end"]
  if direction == "forward":
    return names
  return ["clear keys", *["clear tables"] * (plan.period > 0), *names, "write keys"]


def _kinds(plan: Plan, direction: str) -> list[str]:
  """The kinds of tiles: those with code of their own, then the others."""
  num_queries, num_keys = plan.num_blocks
  offsets = [*plan.special_offsets(), *range(num_keys - 1, -num_queries, -1)]
  return list(filter(None, dict.fromkeys(_kind(plan, direction, offset) for offset in offsets)))


def _kind(plan: Plan, direction: str, offset: int) -> str | None:
  """The kind of the tile at an offset; None where the kernel runs none."""
  sides = []
  by_side = direction == "backward" and plan.period > 0
  tile = lambda offset, is_right: sides.append("right" if is_right else "left")
  pallas_tpu_tiles.dispatch(plan, offset, tile, by_side=by_side)
  if not sides:
    return None
  if offset in plan.special_offsets():
    return str(offset)
  return f"others {sides[0]}" if by_side else "others"


def branches(text: str) -> tuple[int, list[int]]:
  """Bundles that run in every step of the grid, and those of the branches in it, in order.

  A branch always taken leaves no jump: it is the long stretch between two others.
  """
  bundles = [bundle[1] for bundle in _BUNDLE.finditer(text)]
  jumps = _jumps(bundles)
  first, last = max(jumps, key=lambda jump: jump[1] - jump[0])
  sizes, every_step, here = [], len(bundles) - (last - first), first
  for start, end in [*jumps, (last, last)]:
    if start < here or start == first:
      continue
    for size, least in ((start - here, 100), (end - start, 10)):
      if size > least:
        sizes.append(size)
      else:
        every_step += size
    here = end
  return every_step, sizes


def _jumps(bundles: Sequence[str]) -> list[tuple[int, int]]:
  """The first bundle that each jump ahead leaves out, and the first after those."""
  starts = {
    region: number
    for number, bundle in enumerate(bundles)
    for region in re.findall(r"Start(?:/End empty)? region (\d+)", bundle)
  }
  found = []
  for number, bundle in enumerate(bundles):
    jump = re.search(r"sbr\.rel \(!?%p\w+\) target = \$region(\d+)", bundle)
    if jump and starts[jump[1]] > number:
      found.append((number + 1 + _DELAY, starts[jump[1]]))
  return found
