"""Law 16: keys that go round a ring of devices give one device's results."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import DROPOUT
from calls import set_tiles
from compiling import compile_fusing, with_gradients
from devices import Devices, attend, attention_by, check_devices_equal_one, shardings
from jax.sharding import AxisType, PartitionSpec

from relpos_jax import (
  EdgeLabels,
  FunctionBias,
  RelativePositions,
  dot_product_attention,
  explain,
  mesh_axes,
)
from relpos_jax.attention import ring

SIZES = {"B": 2, "T": 32, "S": 32, "N": 4, "K": 2, "H": 8, "V": 6, "R": 9, "P": 3}
AXES = {"query": "BTNH", "key": "BSKH", "value": "BSKV"}
ALONG = {"B": "data", "N": "tensor", "K": "tensor", "T": "sequence", "S": "sequence"}
MOVES = r"= .*? (all-\w+|reduce-scatter|collective-\w+?)(?:-start)?\("
VECTORS = {"key_table": "RNH", "value_table": "RV"}
SINKS = VECTORS | {"sinks": "N"}
SUM = VECTORS | {
  "content": "BTNP",
  "content_table": "RP",
  "slopes": "N",
  "bias_table": "RN",
  "by_key_table": "RNH",
}
ALL = {"sequence": 8}
TWO_ROWS = {"data": 2, "sequence": 4}
CAUSAL = {"is_causal": True}
IDS = jnp.arange(32, dtype=jnp.int32) // 11
RESIDUAL = {"return_residual": True}
SEGMENTS = {"query_segment_ids": IDS, "key_segment_ids": IDS}
WINDOW = {
  "local_window_size": (9, 3),
  "key_value_seq_lengths": np.array([32, 13]),
}
CAPPED = {"logits_soft_cap": 2.0, "local_window_size": 12} | CAUSAL | RESIDUAL
MASK = {"mask": np.arange(32) % 7 > 0} | CAUSAL | DROPOUT
OFFSETS = {"query_offset": np.array([5, -9])}


BEFORE = {"query_offset": -7} | CAUSAL
WIDE_TABLES = "wide tables"  # have more rows than a tile has distances
# By name: the axes of arrays, the mesh, how it is known, and the options.
RINGS = {}
RINGS["causal"] = VECTORS, ALL, "named", CAUSAL
RINGS["explicit, offsets"] = VECTORS, TWO_ROWS, "explicit", OFFSETS
RINGS["sinks, residual"] = SINKS, ALL, "named", RESIDUAL | SEGMENTS | DROPOUT
RINGS["a bias by head"] = {"bias_table": "RN"}, ALL, "named", BEFORE
RINGS["a window"] = {"bias_table": "R"}, {"sequence": 4, "tensor": 2}, "named", WINDOW
RINGS["a soft cap"] = {"slopes": "N"}, ALL, "named", CAPPED
RINGS["a sum"] = SUM, {"data": 2, "sequence": 2, "tensor": 2}, "named", MASK
RINGS[WIDE_TABLES] = RINGS["a sum"]
RINGS["three devices"] = {}, {"data": 1, "sequence": 3}, "named", CAUSAL


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", RINGS)
def test_a_ring_equals_one_device(name, monkeypatch):
  """Checks results and the gradients of all arrays, and that keys go round."""
  axes, mesh, kind, options = RINGS[name]
  if name == WIDE_TABLES:
    set_tiles(monkeypatch, 2)
  sizes = SIZES
  if 32 % mesh["sequence"]:
    sizes = SIZES | {"T": 30, "S": 30}
  along = {letter: name for letter, name in ALONG.items() if name in mesh}
  call = functools.partial(attend, **options)
  devices = Devices(mesh, along, kind)
  text = check_devices_equal_one(
    call, attention_by(None), AXES | axes, sizes, devices, is_ring=True
  )
  moves = {*re.findall(MOVES, text)}
  assert "collective-permute" in moves <= {"collective-permute", "all-reduce"}


def lay_out(num_devices):
  """Returns a mesh, and the context in which its axis shards queries and keys."""
  mesh = jax.make_mesh((num_devices,), ("sequence",), axis_types=(AxisType.Auto,))
  return mesh, mesh_axes(queries="sequence", keys="sequence")


def test_memory_falls_with_the_number_of_devices_and_keys_travel_in_their_own_dtype():
  length = 4096
  x = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.bfloat16)
  table = jax.ShapeDtypeStruct((9, 32), jnp.float32)
  arrays = {"query": x, "key": x, "value": x, "table": table}

  def call(arrays):
    relations = RelativePositions(arrays["table"], arrays["table"])
    tensors = [arrays[name] for name in AXES]
    return dot_product_attention(*tensors, relations=relations, is_causal=True)

  def temporary_bytes(num_devices):
    mesh, context = lay_out(num_devices)
    along = {"T": "sequence", "S": "sequence"}
    places = shardings(AXES | {"table": "RH"}, mesh, along)
    program = compile_fusing(
      functools.partial(with_gradients, call), in_shardings=(places,)
    )
    with context, jax.set_mesh(mesh):
      lowered = program.lower(arrays)
    part = rf"collective_permute.*-> tensor<1x1x{length // num_devices}x2x32xbf16>"
    keys_and_values_twice_round = 2 * 2
    assert len(re.findall(part, lowered.as_text())) == keys_and_values_twice_round
    return lowered.compile().memory_analysis().temp_size_in_bytes

  assert 8 * temporary_bytes(8) <= 1.1 * 2 * temporary_bytes(2)


def test_causal_work_is_the_same_on_all_devices_in_every_round():
  """Deals 16 chunks to 8 devices: each attends to two pairs in each round.

  Each device has an early chunk and a late one. In the round of its own keys it also
  attends to a third pair, within a chunk.
  """
  mesh, _ = lay_out(8)
  spec = PartitionSpec(None, "sequence")
  deal = functools.partial(ring.exchange_halves, ("sequence",))
  on_devices = jax.shard_map(deal, mesh=mesh, in_specs=spec, out_specs=spec)
  chunks = on_devices(jnp.arange(16)[None]).reshape(8, 2)
  pairs = sorted(sorted(pair) for pair in chunks.tolist())
  assert pairs == [[i, 15 - i] for i in range(8)]
  attends = chunks[:, None, :, None] >= chunks[None, :, None]
  assert (attends.sum((2, 3)) == 2 + jnp.eye(8, dtype=int)).all()


X = jnp.ones((2, 32, 4, 8))
LABELS = EdgeLabels(jnp.ones((32, 32), int), jnp.ones((3, 8)), None)
FUNCTION = FunctionBias(lambda params, *_: params, jnp.ones(4))


@pytest.mark.parametrize(
  "x, options, message",
  [
    (X, {"relations": FUNCTION}, "no FunctionBias"),
    (X, {"relations": LABELS}, "no EdgeLabels"),
    (X, {"bias": jnp.ones((1, 1, 32, 32))}, "bias"),
    (X, {"mask": jnp.ones((32, 32), bool)}, "mask has shape"),
    (X, {"key_positions": jnp.arange(32)}, "positions"),
    (jnp.ones((2, 36, 4, 8)), {}, "36 queries"),
  ],
)
def test_the_ring_says_what_it_does_not_take_and_gathers_nothing_instead(
  x, options, message
):
  mesh, context = lay_out(8)
  with context, jax.set_mesh(mesh):
    with pytest.raises(NotImplementedError, match=rf"mesh_axes.*sequence.*{message}"):
      dot_product_attention(x, x, x, **options)
    explanation = explain(x, x, x, implementation="projected", **options)
    assert message in explanation.reasons["chunked"]


def test_a_ring_is_chosen_where_a_mesh_shards_the_keys():
  mesh, context = lay_out(8)
  with context:
    assert explain(X, X, X).implementation == "projected"
    with jax.set_mesh(mesh):
      reason = explain(X, X, X).reasons["chunked"]
  assert reason.startswith("chosen, mesh_axes shards the keys")


def test_keys_are_sharded_as_the_queries():
  with pytest.raises(ValueError, match=r"keys is 'sequence'.*queries, None"):
    mesh_axes(keys="sequence")
