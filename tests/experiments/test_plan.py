"""Plans: what a step is compiled to, and estimates.

pip install -e '.[tpu,test]' && pytest -m tpu -n0
"""

import importlib.util
import pathlib

import jax
import pytest

from experiments import command, plan
from experiments.systems import find_system, parse_config
from experiments.training.sharding import make_mesh

ROOT = pathlib.Path(__file__).parents[2]
WMT14, LONG = f"--config={ROOT}/configs/wmt14.py", f"--config={ROOT}/configs/long.py"
GRAPH = f"--config={ROOT}/configs/graph.py"
SMALL = """
model.num_layers=1 model.width=64 model.num_heads=2 model.feed_forward=96
model.dtype=float32 batches.num_shapes=2
"""
PLAIN = """
model.positions=none model.dropout_rate=0 model.embedding_dropout_rate=0
batches.tokens=256 batches.max_length=16
"""
WORDS = "vocabulary.size=500"
CHUNKED = "model.implementation=chunked"


def flags(changes: str):
  return [f"--config.{change}" for change in (SMALL + changes).split()]


def test_a_chip_holds_the_state_and_its_rows_and_takes_its_time_at_the_peak(fast):
  words = [WMT14, *flags(f"{WORDS} {PLAIN}")]
  config = parse_config(command.parse({"config": command.CONFIG}, words)["config"])
  mesh = make_mesh()  # simulated devices as chips
  with fast():
    step = plan.compile_step(config, mesh, (16, 16))
  system = find_system(config.task)
  steps = system.build(config, system.mock_vocabulary(config), mesh)
  num = sum(x.size for x in jax.tree.leaves(steps.shapes.params))
  tokens = 16 * 16 / 8

  state = 4 * (3 * num + 3)  # with two moments, and three counts
  wanted = pytest.approx(state + 2 * 4 * tokens, abs=64)
  assert step.memory_analysis().argument_size_in_bytes == wanted
  flops, traffic = (step.cost_analysis()[name] for name in ("flops", "bytes accessed"))
  assert 0.8 < flops / (6 * num * tokens) < 2  # attention's come on top
  # Computing takes a second, memory traffic half of one.
  chip = plan.Chip(flops=flops, hbm=16e9, hbm_bandwidth=2 * traffic)
  figures = plan.figures(chip, step, 3600)
  assert figures["time without the network"] == "1000.0 to 1500.0 ms"
  assert figures["all updates"] == "1.0 to 1.5 h"


@pytest.mark.parametrize(
  "file, topology, words",
  [
    (WMT14, "v9:2x2", "--topology=v9:2x2 v4, v5e, v5p, v6e v5e:2x4"),
    (LONG, "v5e:2x2", "mesh sequence=16 fit 4"),
    (GRAPH, "v5e:2x4", "--config is of graphs give translation or music"),
  ],
)
def test_a_mistake_is_one_line_and_nothing_is_compiled(
  call, monkeypatch, file, topology, words
):
  monkeypatch.setattr(plan, "use_compiler", lambda: None)
  call("plan", file, f"--topology={topology}").assert_refused(words)


def test_no_compiler_for_tpus(call, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  call("plan", WMT14).assert_refused("no libtpu pip install '.[tpu]'")


@pytest.mark.tpu
@pytest.mark.parametrize(
  "file, name, changes",
  [
    (WMT14, "v5e:2x4", f"{WORDS} batches.max_length=128"),
    (WMT14, "v5e:2x4", f"{WORDS} batches.max_length=256 {CHUNKED}"),
    (LONG, "v5e:2x2", "mesh.sequence=4 batches.max_length=4096 mesh.ring=True"),
  ],
)
def test_steps_compile_for_chips(file, name, changes, call):
  pytest.importorskip("libtpu")
  options = f"--topology={name}", "--effort=least"
  answer = call("plan", file, *flags(changes), *options)
  assert answer.status == 0, answer.err
  assert "| all updates |" in answer.out
