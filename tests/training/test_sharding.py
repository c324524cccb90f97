"""Where arrays live: the mesh asked for, and what its axes cut."""

import dataclasses

import jax
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from experiments.training.sharding import make_mesh, parameter_sharding
from experiments.training.step import init_state, inverse_sqrt
from relpos_jax.models.seq2seq import Transformer, TransformerConfig


@dataclasses.dataclass(frozen=True)
class Chip:
  id: int
  slice_index: int
  process_index: int = 0
  platform: str = "cpu"
  device_kind: str = "cpu"


@pytest.fixture
def arrange(monkeypatch):
  """Arranges chips as the devices of a mesh."""

  def arrange(chips, **sizes):
    monkeypatch.setattr(jax, "devices", lambda: chips)
    return make_mesh(**sizes).devices

  return arrange


CHIPS = [Chip(id, id // 4) for id in range(8)]


def test_slices_of_tpus_are_parts_of_the_batch(arrange):
  whole = arrange(CHIPS, data=8)
  assert [chip.id for chip in whole.flat] == [*range(8)]
  first, second = arrange(CHIPS[::2] + CHIPS[1::2], data=2, fsdp=2, sequence=2)
  assert {chip.slice_index for chip in first.flat} == {0}
  assert {chip.slice_index for chip in second.flat} == {1}


def specs(mesh, **values) -> dict[str, PartitionSpec]:
  """Returns how each array of a training's state is cut, by its path."""
  values |= dict(num_layers=1, width=16, num_heads=4, feed_forward=8)
  config = TransformerConfig(12, 12, **values)
  params = nnx.state(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
  optimizer = optax.adam(inverse_sqrt(1.0, 1))
  state = jax.eval_shape(lambda params: init_state(params, optimizer), params)
  found = {}
  for path, place in jax.tree.leaves_with_path(parameter_sharding(state, mesh)):
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    found[name.removesuffix(".value")] = place.spec
  return found


@pytest.fixture(scope="module")
def cut():
  return specs(make_mesh(data=2, fsdp=2, tensor=2))


@pytest.mark.parametrize(
  "end, spec",
  [
    ("self_attention.query.kernel", PartitionSpec("fsdp", "tensor", None)),
    ("self_attention.out.kernel", PartitionSpec("tensor", None, "fsdp")),
    ("self_attention.tables.value", PartitionSpec(None, "tensor", None)),
    ("feed_forward.hidden.bias", PartitionSpec("tensor")),
    ("feed_forward.out.kernel", PartitionSpec("tensor", "fsdp")),
    ("softmax.table", PartitionSpec("tensor", "fsdp")),
  ],
)
def test_what_is_large_is_cut_by_fsdp_and_by_tensor_and_so_are_its_moments(
  cut, end, spec
):
  places = [path for path in cut if path.endswith(end)]
  assert {cut[path] for path in places} == {spec}
  for start in ("params.", "opt_state.0.mu.", "opt_state.0.nu."):
    assert any(path.startswith(start) for path in places)


def test_what_does_not_divide_is_whole():
  eight = specs(make_mesh(data=1, tensor=8), tables_per_head=False)
  assert eight["params.softmax.table"] == PartitionSpec()
  key = "params.encoder.layers.0.self_attention.tables.key"
  assert eight[key] == PartitionSpec()
