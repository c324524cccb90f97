"""What the TPU's compiler states: bundles in its text, and the costs of a call.

pip install -e '.[tpu,test]' && pytest -m tpu -n0
"""

import itertools
import json

import numpy as np
import pytest

from experiments.benchmark import tpu_bundles, tpu_costs

# Lines of libtpu 0.0.42.1's text of a forward kernel, with the instructions left out but for jumps.
SAMPLE = """total scheduled bundles: 420
0 :  {}
0x4 LB: > {} /* Start region 88 :: Start region 29 :: Start region 30 */
0xb : > { sbr.rel (%p267_p3) target = $region32 }
0x17 : > { sbr.rel (%p1938_p10) target = $region36 }
0x4d PF: > {} /* Start/End empty region 36 :: Start region 37 :: Start region 38 */
0x128 : > { sbr.rel (%p2043_p11) target = $region40 }
0x19a PF: > {} /* Start/End empty region 40 :: Start/End empty region 32 :: End region 6 */
0x19e :  { sbr.rel (!%p12_p12) target = $region88 }
0x1a2 :  {} /* End region 0 :: End region 4 :: End region 87 */
0x1a3 :  {}
"""


def straight(number: int) -> list[str]:
  return ["{ %v1 = vadd }"] * number


def branch(region: int, *body: str) -> list[str]:
  """Returns six bundles besides its body: the jump, four after it, and its target."""
  jump = f"{{ %9 = sbr.rel (%p{region}) target = $region{region}  ;;  %s1 = smov 0 }}"
  return [jump, *straight(4), *body, f"{{}} /* End region 8 :: Start/End empty region {region} */"]


def loop(region: int, *body: str) -> list[str]:
  """Returns six bundles besides its body: its start, the jump back and four after it."""
  jump = f"{{ %9 = sbr.rel (!%p{region}) target = $region{region} }}"
  return [f"{{}} /* Start region {region} */", *body, jump, *straight(4)]


def text_of(*body: str) -> str:
  """Returns the text of a loop, which has 20 bundles besides its body."""
  first, last = "{} /* Start region 1 */", "{ %9 = sbr.rel (!%p1) target = $region1 }"
  lines = [*straight(3), first, *branch(2, *body), *straight(5), last, *straight(4)]
  return "".join(f"  {number:#x} LB: > {line}\n" for number, line in enumerate(lines))


def test_jumps_are_read_in_a_compilers_text():
  bundles = tpu_bundles._BUNDLE.findall(SAMPLE)
  assert len(bundles) == 10
  assert tpu_bundles._jumps(bundles) == [(2 + 5, 6), (3 + 5, 4), (5 + 5, 6), (7 + 5, 1)]


def test_branches_are_what_jumps_leave_out():
  nested = branch(4, *straight(120), *branch(5, *straight(130)), *straight(7))
  text = text_of(*branch(3, *straight(40)), *nested, *branch(6, *straight(8)))
  assert tpu_bundles.branches(text) == (20 + 6 + 6 + 6 + 8, 40, [120 + 136 + 7])


def test_the_body_of_a_loop_is_a_branch():
  text = text_of(*branch(3, *loop(4, *straight(200))), *straight(150), *loop(5, *straight(300)))
  assert tpu_bundles.branches(text) == (20 + 6 + 150, 0, [206, 306])


def test_long_sequences_take_several_calls_whose_tiles_add_up():
  tiles = {"others right": 1019, "1": 1003, "0": 1007, "-1": 1013, "others left": 1031}
  sizes, plan = [111, 12, 101, *tiles.values(), 103, 113], tpu_bundles.plan_of(16384, False, True)
  kernel = text_of(*itertools.chain(*(branch(n, *straight(x)) for n, x in enumerate(sizes, 3))))
  of_tiles = np.dot([*tiles.values()], [465, 31, 32, 31, 465])
  of_call = 32 * (12 + 101 + 103) + 111 + 113 + 32 * 2 * (20 + 6 * len(sizes))
  assert tpu_bundles.count(plan, "backward", [kernel] * 2) == of_tiles + 2 * of_call
  with pytest.raises(ValueError, match="want start, others right, 1, 0, -1, others left, end"):
    tpu_bundles.count(plan, "forward", [kernel])


@pytest.mark.parametrize("writes", [[], [21, 21]])
def test_a_block_of_queries_is_written_once_to_an_output_on_the_chip(writes):
  tiles, plan = {"0": 1003, "-1": 1007, "others left": 1013}, tpu_bundles.plan_of(4096, True, True)
  sizes = [*tiles.values(), *writes]
  branches = itertools.chain(*(branch(n, *straight(x)) for n, x in enumerate(sizes, 3)))
  kernel = text_of(*straight(101), *branches, *straight(103))
  of_blocks = 8 * (20 + 6 * len(sizes) + 101 + 103 + sum(writes))
  of_tiles = np.dot([*tiles.values()], [8, 7, 21])
  assert tpu_bundles.count(plan, "forward", [kernel]) == of_tiles + of_blocks


def test_the_command_keeps_its_counts_and_their_table(call, monkeypatch, tmp_path):
  calls = itertools.product([1024], (False, True), (False, True))
  monkeypatch.setattr(
    tpu_bundles, "compile_all", lambda *_: ((x, dict(forward="", backward="")) for x in calls)
  )
  monkeypatch.setattr(tpu_bundles, "use_compiler", lambda: None)
  monkeypatch.setattr(tpu_bundles, "count", lambda *_: 500)
  answer = call("benchmark.__main__", "tpu_bundles", "--lengths=1024", f"--out={tmp_path}")
  assert answer.status == 0, answer.err
  results = json.loads((tmp_path / "tpu_bundles.json").read_text())
  assert len(results["counts"]) == 2 * 2 * 2
  row = "| 1,024 | causal | backward | 500 | 500 | 1.000 |"
  assert row in answer.out and row in (tmp_path / "tpu_bundles.md").read_text()


@pytest.mark.parametrize("flag, remedy", [("--lengths=512", "1024"), ("--chip=v9", "v5e, v6e")])
def test_a_mistake_is_one_line(call, flag, remedy):
  answer = call("benchmark.__main__", "tpu_bundles", flag)
  assert (answer.status, answer.err.count("\n"), answer.num_compilations) == (2, 1, 0)
  assert flag in answer.err and remedy in answer.err


@pytest.mark.tpu
def test_all_passes_of_the_loops_of_chunked_are_counted():
  pytest.importorskip("libtpu")
  tpu_costs.use_compiler()
  names = "jax.nn", "chunked", "projected"
  figures = [tpu_costs.cost(name, 64, is_causal=False, backward=False) for name in names]
  for part in ("flops", "hbm_bytes"):
    assert figures[0][part] < figures[1][part], part
  assert figures[1]["flops"] < figures[2]["flops"]  # of lookups as products


def test_costs_of_another_commit_are_not_completed(call, tmp_path):
  elsewhere = dict(tpu_costs.environment("libtpu"), git_commit="8ffa67b")
  (tmp_path / "tpu_costs.json").write_text(text := json.dumps(dict(environment=elsewhere, rows=[])))
  answer = call("benchmark.__main__", "tpu_costs", f"--out={tmp_path}", "--lengths=")
  assert (answer.status, answer.err.count("\n")) == (2, 1) and "another commit" in answer.err
  assert (tmp_path / "tpu_costs.json").read_text() == text
