"""Plans: what a step is compiled to, what chips send, and estimates.

pip install -e '.[tpu,test]' && pytest -m tpu -n0
"""

import importlib.util
import math
import pathlib

import jax
import pytest

from experiments import command
from experiments.plan import CHIPS, Chip
from experiments.plan import __main__ as plan
from experiments.plan.__main__ import Collective, by_kind, find
from experiments.run import build, parse_config
from experiments.training.sharding import make_mesh

ROOT = pathlib.Path(__file__).parents[2]
WMT14, LONG = f"--config={ROOT}/configs/wmt14.py", f"--config={ROOT}/configs/long.py"
SMALL = (
  *("model.num_layers=1", "model.width=64", "model.num_heads=2", "model.feed_forward=96"),
  *("batches.num_shapes=2", "model.dtype=float32"),
)
WORDS, KERNEL = "vocabulary.size=500", "model.implementation=pallas_tpu"


def load(file: str, *changes: str):
  flags = [file, *(f"--config.{change}" for change in (*SMALL, *changes))]
  return command.parse(dict(config=command.CONFIG), flags)["config"]


TEXT = """HloModule jit_step, is_scheduled=true

%async_computation (p: bf16[64]) -> bf16[8] {
  ROOT %rs = bf16[8]{0:T(8)} reduce-scatter(%p), replica_groups=[1,8]<=[8], to_apply=%add
}

%body (carry: (s32[], f32[16])) -> (s32[], f32[16]) {
  %of_a_part = f32[16]{0} all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}

%before (carry: (s32[], f32[16])) -> pred[] {
  %end = s32[]{:T(128)} constant(4)
  ROOT %less = pred[] compare(%number, %end), direction=LT
}

%round (carry: (s32[], f32[16])) -> (s32[], f32[16]) {
  %passed_on = f32[7]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
}

ENTRY %main (a: f32[100]) -> f32[100] {
  %both = (f32[2,8]{1,0:T(8,128)}, bf16[4]{0}) all-reduce(%a, %b), to_apply=%add
  %started = f32[10]{0} all-reduce-start(%a), replica_groups=[2,4]<=[8], to_apply=%add
  %done = f32[10]{0} all-reduce-done(%started)
  %gather = (f32[5]{0}, f32[40]{0}) all-gather-start(%c), replica_groups=[1,8]<=[8], dimensions={0}
  %rs-start = ((bf16[64]{0}), bf16[8]{0}) async-start(%d), calls=%async_computation
  %shift = (f32[6]{0}, f32[6]{0}, u32[], u32[]) collective-permute-start(%e), source_target_pairs={{0,1}}
  %loop = (s32[], f32[16]) while(%t), condition=%before, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %ring = (s32[], f32[16]) while(%t), condition=%before, body=%round
  %named = f32[24,2]{1,0} all-gather(%f), replica_groups=mesh['x'=2,'y'=4] {'y'}, dimensions={0}
  %part = f32[8]{0} all-reduce(%c), replica_groups=mesh['x'=2,'y'=4] {'x','y':(2)2}, to_apply=%add
  %read = f32[9]{0} fusion(%both, %all-reduce.7), kind=kLoop, calls=%add
}
"""  # noqa: E501


def test_each_collective_counts_once_with_its_bytes_and_its_chips():
  assert find(TEXT, 8) == [
    Collective("reduce-scatter", 2 * 64, 8, 1),
    Collective("all-reduce", 4 * 16, 4, 3),
    Collective("collective-permute", 4 * 7, 8, 4),
    Collective("all-reduce", 4 * 16 + 2 * 4, 8, 1),
    Collective("all-reduce", 4 * 10, 4, 1),
    Collective("all-gather", 4 * 40, 8, 1),
    Collective("collective-permute", 4 * 6, 8, 1),
    Collective("all-gather", 4 * 48, 4, 1),
    Collective("all-reduce", 4 * 8, 4, 1),
  ]
  row = by_kind(find(TEXT, 8))["all-reduce"]
  assert (row["times"], row["num_bytes"]) == (3 + 1 + 1 + 1, 3 * 64 + 72 + 40 + 32)
  assert row["sent_bytes"] == pytest.approx(2 * (3 * 48 + 63 + 30 + 24))


def test_parts_of_a_step_take_their_time_at_the_peak():
  chip = Chip(100.0, 8.0, 10.0, 4, 1.0, "")
  rows = {"all-reduce": dict(sent_bytes=2.0)}
  seconds = plan.estimate(chip, dict(flops=200.0, hbm_bytes=30.0, collectives=rows))
  assert [*seconds.values()] == [2.0, 3.0, 1.0]


def test_a_chip_holds_the_state_and_its_rows_and_sums_the_gradients(fast):
  rates = "model.positions=none", "model.dropout_rate=0", "model.embedding_dropout_rate=0"
  config = load(WMT14, WORDS, "batches.tokens=256", "batches.max_length=16", *rates)
  task, mesh, shape = (
    parse_config(config),
    make_mesh(),
    (128 // 8, 16),
  )  # the simulated devices as chips
  with fast():
    step = plan.compile_step(task, mesh, shape)
  num = sum(x.size for x in jax.tree.leaves(build(task, task.mock_vocabulary()).shapes.params))
  tokens = math.prod(shape) / 8
  state_and_batch = 4 * (3 * num + 3) + 2 * 4 * tokens  # with two moments, and three counts
  assert step["argument_bytes"] == pytest.approx(state_and_batch, abs=64)
  assert step["peak_bytes"] > step["argument_bytes"]
  assert 0.8 < step["flops"] / (6 * num * tokens) < 2  # attention's come on top
  # The embedding's gradient comes from source, target and softmax, which XLA may sum separately.
  assert {*step["collectives"]} == {"all-reduce"}
  others = step["collectives"]["all-reduce"]["num_bytes"] - 4 * num - 2 * 4
  assert others in (0, 4 * 500 * 64, 2 * 4 * 500 * 64)
  shown = plan.figures(CHIPS["v5e"], step | dict(flops=197e12, hbm_bytes=819e9 / 2), 3600)
  assert (shown["time of compute"], shown["time of memory"]) == ("1000.0 ms", "500.0 ms")
  assert shown["time"].startswith("1000.0 to 15") and shown["all updates"].startswith("1.0 to 1.5")


@pytest.mark.parametrize(
  "file, flags, words",
  [
    (WMT14, ["topology=v9:2x2"], "--topology=v9:2x2 v4, v5e, v5p, v6e v5e:2x4"),
    (WMT14, ["config.batches.tokens=100"], "config.batches.tokens is 100 8 devices 128"),
    (LONG, ["config.batches.max_length=131080"], "config.batches.max_length 131088"),
    (LONG, ["topology=v5e:2x2"], "mesh sequence=16 fit 4"),
  ],
)
def test_a_mistake_is_one_line_and_nothing_is_compiled(call, monkeypatch, file, flags, words):
  monkeypatch.setattr(plan, "use_compiler", lambda: None)
  small = ["config.batches.max_length=16", "config.model.positions=none"]
  flags = [*(small if file == WMT14 else ["topology=v5e:4x4"]), *flags]
  answer = call("plan.__main__", file, *(f"--{flag}" for flag in flags))
  assert (answer.status, answer.err.count("\n"), answer.num_compilations) == (2, 1, 0), answer.err
  assert not [word for word in words.split() if word not in answer.err], answer.err


def test_no_compiler_for_tpus(call, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  answer = call("plan.__main__", WMT14)
  expected = "error: no libtpu, the TPU's compiler: pip install -e '.[tpu]'\n"
  assert (answer.status, answer.err, answer.num_compilations) == (2, expected, 0)


@pytest.mark.tpu
@pytest.mark.parametrize(
  "file, name, changes",
  [
    (WMT14, "v5e:2x4", [WORDS, "batches.max_length=128"]),
    (WMT14, "v5e:2x4", [WORDS, "batches.max_length=256", KERNEL]),
    (LONG, "v5e:2x2", ["mesh.sequence=4", "batches.max_length=4096", KERNEL]),
    (LONG, "v5e:2x2", ["mesh.sequence=4", "batches.max_length=4096", "mesh.ring=True"]),
  ],
)
def test_steps_compile_for_chips(file, name, changes, call):
  pytest.importorskip("libtpu")
  changes = [f"--config.{change}" for change in (*SMALL, *changes)]
  flags = f"--topology={name}", "--effort=least"
  answer = call("plan.__main__", file, *changes, *flags)
  assert answer.status == 0, answer.err
  assert "all-reduce" in answer.out and "| all updates |" in answer.out
