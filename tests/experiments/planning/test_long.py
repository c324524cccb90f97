"""The plan of a language model: its parts, and that a sequence lies on several devices."""

import pathlib

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from experiments import command, plan
from experiments.planning import compiling, tables
from experiments.tasks.music import MusicTask
from relpos_jax.training.sharding import make_mesh

LONG = pathlib.Path(__file__).parents[3] / "configs" / "long.py"
SMALL = (
  *("model.num_layers=1", "model.width=32", "model.num_heads=2", "model.feed_forward=64"),
  *("batches.tokens=512", "batches.max_length=256", "model.dtype=float32"),
  *("mesh.sequence=4", "model.positions=none"),
)


@pytest.fixture(scope="module")
def config():
  arguments = [f"--config={LONG}", *(f"--config.{change}" for change in SMALL)]
  return command.parse(dict(config=command.CONFIG), arguments)["config"]


def test_the_state_is_that_of_the_model_and_cut_by_the_rules(config):
  _, state = compiling.first_state(config, make_mesh(fsdp=2, tensor=2, sequence=2))
  model = nnx.eval_shape(lambda: MusicTask(config).make_model(MusicTask(config).codec, nnx.Rngs(0)))
  shapes = lambda tree: sorted(leaf.shape for leaf in jax.tree.leaves(tree))
  assert shapes(state.params) == shapes(nnx.state(model))
  hidden = state.params["layers"][0]["feed_forward"]["hidden"]["kernel"]
  assert jax.tree.leaves(hidden)[0].sharding.spec == PartitionSpec("fsdp", "tensor")


def test_a_batch_has_whole_rows_for_all_devices(config):
  for mesh in (make_mesh(sequence=4), make_mesh(data=1, sequence=8)):
    assert MusicTask(config).mock_batches(mesh).shapes == ((2, 256),)


def test_a_sequence_lies_on_several_devices(config, fast, monkeypatch):
  """Keys are gathered, and their gradients scattered; every device has its part of the tokens."""
  monkeypatch.setattr(plan, "compiler_version", lambda: "none")
  mesh = make_mesh(sequence=4)
  with fast():
    found = plan.make_plan(config, "v5e:2x4", mesh, MusicTask(config).mock_batches(mesh).shapes)
  (step,) = found["steps"]
  assert {"all-reduce", "all-gather"} < {*step["collectives"]} <= tables.expected(found)
  of_the_state = 4 * (3 * found["parameters"] + 3)
  of_the_batch = 2 * 4 * step["rows"] * step["length"] / 8
  assert step["argument_bytes"] <= of_the_state + of_the_batch + 64


@pytest.mark.parametrize(
  "flags, words",
  [
    (["config.batches.max_length=131080"], "config.batches.max_length 131088"),
    (["config.batches.tokens=4096"], "config.batches.tokens 4096 131072"),
    (["topology=v5e:2x2"], "mesh sequence=16 fit 4"),
    (["config.model.num_heads=3"], "config.model num_heads, 3"),
    (["config.model.implementation=fast"], "config.model implementation fast"),
    (["config.model.width=wide"], "config.model.width wide"),
  ],
)
def test_a_mistake_is_one_line_and_nothing_is_compiled(call, monkeypatch, flags, words):
  monkeypatch.setattr(plan, "compiler_version", lambda: "none")
  flags = ["topology=v5e:4x4", *flags]
  answer = call("plan", f"--config={LONG}", *(f"--{flag}" for flag in flags))
  assert (answer.status, answer.err.count("\n"), answer.num_compilations) == (2, 1, 0), answer.err
  assert not [word for word in words.split() if word not in answer.err], answer.err
