"""Where arrays live: the mesh asked for, and what its axes cut."""

import dataclasses

import jax
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from experiments.errors import InputError
from experiments.training.sharding import (
  _arrange_devices,
  make_mesh,
  parameter_sharding,
)
from experiments.training.step import init_state, inverse_sqrt
from relpos_jax.models.seq2seq import Transformer, TransformerConfig


@dataclasses.dataclass(frozen=True)
class Chip:
  id: int
  slice_index: int
  process_index: int = 0
  platform: str = "cpu"
  device_kind: str = "cpu"


def test_slices_of_tpus_are_parts_of_the_batch():
  chips = [Chip(id, id // 4) for id in range(8)]
  assert [chip.id for chip in _arrange_devices((8, 1, 1, 1), chips).flat] == [*range(8)]
  for part in _arrange_devices((2, 2, 1, 2), chips[::2] + chips[1::2]):
    assert len({chip.slice_index for chip in part.flat}) == 1
  with pytest.raises(
    InputError, match=r"mesh\.data is 1: give a multiple of 2, the slices"
  ):
    _arrange_devices((1, 1, 1, 8), chips)


def specs(mesh, **values) -> dict[str, PartitionSpec]:
  config = TransformerConfig(
    12, 12, num_layers=1, width=16, num_heads=4, feed_forward=8, **values
  )
  params = nnx.state(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
  state = jax.eval_shape(
    lambda p: init_state(p, optax.adam(inverse_sqrt(1.0, 1))), params
  )
  leaves = jax.tree.flatten_with_path(parameter_sharding(state, mesh))[0]
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
  return {name(path).removesuffix(".value"): place.spec for path, place in leaves}


def test_all_that_is_large_is_cut_by_fsdp_and_by_tensor_and_so_are_its_moments():
  found, P = specs(make_mesh(data=2, fsdp=2, tensor=2)), PartitionSpec
  small = ("count", "step", "norm.bias", "norm.scale", "out.bias")
  assert all(path.endswith(small) for path, spec in found.items() if not any(spec))
  wanted = {
    "self_attention.query.kernel": P("fsdp", "tensor", None),
    "self_attention.out.kernel": P("tensor", None, "fsdp"),
    "self_attention.tables.value": P(None, "tensor", None),
    "feed_forward.hidden.bias": P("tensor"),
    "feed_forward.out.kernel": P("tensor", "fsdp"),
    "softmax.table": P("tensor", "fsdp"),
  }
  for end, spec in wanted.items():
    of_end = {path: found[path] for path in found if path.endswith(end)}
    assert {path.split(".")[2] for path in of_end if path[0] == "o"} == {"mu", "nu"}
    assert any(path[0] == "p" for path in of_end) and {*of_end.values()} == {spec}


def test_what_does_not_divide_is_whole():
  embedding = lambda **sizes: specs(make_mesh(**sizes), tables_per_head=False)[
    "params.softmax.table"
  ]
  assert embedding(data=1, fsdp=2, tensor=4) == PartitionSpec("tensor", "fsdp")
  assert embedding(data=1, tensor=8) == PartitionSpec()
  found = specs(make_mesh(data=1, tensor=8), tables_per_head=False)
  assert found["params.encoder.layers.0.self_attention.tables.key"] == PartitionSpec()
