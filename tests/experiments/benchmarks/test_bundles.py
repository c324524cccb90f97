"""Counting bundles: what is made of a compiler's text, and of a kernel's tiles.

The texts in `bundles/` were made by libtpu 0.0.42.1 for v5e of `pallas_tpu.attention` with tiles of
128 by 128, 512 tokens, H = 64 and k = 16. Of their instructions only jumps are left; the first line
is the compiler's own total.
"""

import itertools
import json
import pathlib
import re

import numpy as np
import pytest

from experiments import tpu_bundles
from experiments.benchmarks import bundles
from experiments.tpu_bundles import Call

_FILES = pathlib.Path(__file__).parent.glob("bundles/*.txt")
TEXTS = {path.stem: path.read_text() for path in sorted(_FILES)}
LONG = Call(16384, is_causal=False, relations=True)


# Texts -------------------------------------------------------------------------------------------


def straight(number: int) -> list[str]:
  return ["{ %v1 = vadd }"] * number


def branch(region: int, *body: str) -> list[str]:
  """Six bundles besides its body: the jump, four after it, and the one that it leads to."""
  jump = f"{{ %9 = sbr.rel (%p{region}) target = $region{region}  ;;  %s1 = smov 0 }}"
  return [jump, *straight(4), *body, f"{{}} /* End region 8 :: Start/End empty region {region} */"]


def text_of(*body: str) -> str:
  """Of a loop, which has 20 bundles besides its body."""
  first, last = "{} /* Start region 1 */", "{ %9 = sbr.rel (!%p1) target = $region1 }"
  lines = [*straight(3), first, *branch(2, *body), *straight(5), last, *straight(4)]
  return "".join(f"  {number:#x} LB: > {line}\n" for number, line in enumerate(lines))


def test_branches_are_what_jumps_leave_out():
  nested = branch(4, *straight(20), *branch(5, *straight(30)), *straight(7))
  text = text_of(*branch(3, *straight(40)), *nested, *branch(6, *straight(8)))
  assert bundles.branches(text) == (20 + 6 + 6 + 6 + 8, [40, 20 + 36 + 7])


def test_what_always_runs_between_branches_is_one_too():
  text = text_of(*branch(3, *straight(40)), *straight(200), *branch(4, *straight(50)))
  every_step, sizes = bundles.branches(text)
  assert sizes == [40, 1 + 200 + 5, 50] and every_step == 20 + 5 + 1


@pytest.mark.parametrize("name", TEXTS)
def test_every_bundle_is_in_one_place(name):
  every_step, sizes = bundles.branches(TEXTS[name])
  assert f"total scheduled bundles: {every_step + sum(sizes)}\n" in TEXTS[name]


def walk(text: str, *runs: bool) -> int:
  """Goes through a text as a core does, once, with what each branch in it decides."""
  lines = text.splitlines()[1:]
  starts = {
    region: number
    for number, line in enumerate(lines)
    for region in re.findall(r"Start\S*(?: empty)? region (\d+)", line)
  }
  number, count, decisions = 0, 0, iter((True, *runs))
  while number < len(lines):
    jump = re.search(r"sbr.*region(\d+) }", lines[number])
    if jump and starts[jump[1]] > number and not next(decisions):
      count, number = count + 5, starts[jump[1]]
    else:
      count, number = count + 1, number + 1
  assert next(decisions, None) is None
  return count


def decisions_of(name: str, query: int, key: int) -> list[bool]:
  """Which branches run for a tile of four by four: keys come from the right to the left."""
  offset, first, last = key - query, key == 3, key == 0
  if name == "plain_forward":
    return [first, last]
  if name == "relations_forward":
    return [first, offset == 1, offset == 0, offset == -1, abs(offset) > 1, last]
  tiles = [offset == 0, offset == -1, offset < -1]
  once = first and query == 0
  return [once, once, first, *tiles, last, last and query == 3]


@pytest.mark.parametrize("name", TEXTS)
def test_a_count_is_the_length_of_the_walk_through_the_text(name):
  causal, relations = "causal" in name, "relations" in name
  plan = tpu_bundles.plan_of(Call(512, causal, relations), block=128)
  tiles = itertools.product(range(4), repeat=2)
  wanted = sum(walk(TEXTS[name], *decisions_of(name, *tile)) for tile in tiles)
  count = bundles.count(plan, name.rpartition("_")[2], [TEXTS[name]])
  assert count.whole_call == wanted


# Tiles -------------------------------------------------------------------------------------------

TILES = {"1": 1003, "0": 1007, "-1": 1013, "others right": 1019, "others left": 1031}
BACKWARD = [11, 12, 101, *TILES.values(), 103, 13]


def kernel(sizes) -> str:
  branches = (branch(region, *straight(size)) for region, size in enumerate(sizes, 3))
  return text_of(*itertools.chain(*branches))


def test_long_sequences_take_several_calls_whose_tiles_add_up():
  count = bundles.count(tpu_bundles.plan_of(LONG), "backward", [kernel(BACKWARD)] * 2)
  every_step = 20 + 6 * len(BACKWARD)
  assert count[:4] == (every_step, 101, TILES, 103)
  of_tiles = np.dot([*TILES.values()], [31, 32, 31, 465, 465])
  of_blocks = 32 * (101 + 103) + 11 + 12 + 13
  assert count.whole_call == of_tiles + 2 * of_blocks + 32 * 32 * every_step


def test_a_text_of_something_else_is_refused():
  plan, text = tpu_bundles.plan_of(LONG), kernel(BACKWARD)
  with pytest.raises(ValueError, match="shorter"):
    bundles.count(plan, "backward", [text])
  with pytest.raises(ValueError, match="want those of start, 1, 0, -1, others, end"):
    bundles.count(plan, "forward", [text])


@pytest.mark.parametrize("k", [1, 16, 600])
def test_kinds_follow_the_width_of_the_band(k):
  """A kind of its own is a tile that crosses the band, or has the diagonal."""
  plan = tpu_bundles.plan_of(LONG)._replace(first=1 - k, last=k, period=1280)
  kinds = bundles._kinds(plan, "forward")
  crosses = lambda offset: offset * 512 - 511 < k and offset * 512 + 511 > -k
  assert kinds == [*(str(offset) for offset in range(31, -32, -1) if crosses(offset)), "others"]


# The command -------------------------------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch):
  """A compiler whose branches have 200 bundles each, and 50 more with relations."""

  def dump(call, chip):
    plan, size = tpu_bundles.plan_of(call), 250 if call.relations else 200
    directions = ("forward", "backward")
    return {of: [kernel([size] * len(bundles._names(plan, of)))] for of in directions}

  monkeypatch.setattr(tpu_bundles, "_dump", dump)
  monkeypatch.setattr(tpu_bundles, "compiler_version", lambda: "1.2.3")


def test_the_command_leaves_its_counts_and_their_tables(call, compiler, tmp_path):
  answer = call("tpu_bundles", "--lengths=1024,2048", "--chip=v6e", f"--out={tmp_path}/new")
  assert answer.status == 0, answer.err
  report = (tmp_path / "new" / "tpu_bundles.md").read_text()
  assert answer.out == f"{report}\n"
  results = json.loads((tmp_path / "new" / "tpu_bundles.json").read_text())
  assert results["environment"]["command"] in report
  assert "\nv6e, " in report and "libtpu 1.2.3, commit " in report
  sections = dict(section.split("\n", 1) for section in report.split("## ")[1:])
  assert [*sections] == [
    f"T = {length}, {mask}" for length in ("1,024", "2,048") for mask in ("bidirectional", "causal")
  ]
  plain = {}
  for row in results["counts"]:
    case = f"T = {row['length']:,}, {'causal' if row['is_causal'] else 'bidirectional'}"
    whole = row["whole_call"]
    ratio = whole / plain.setdefault((case, row["direction"]), whole)
    cells = [row["direction"], "yes" if row["relations"] else "no", str(row["every_step"])]
    assert f"| {' | '.join(cells)} | " in sections[case]
    assert f" | {row['end']} | {whole:,} | {ratio:.3f} |\n" in sections[case]
    assert (ratio > 1.2) == row["relations"]
