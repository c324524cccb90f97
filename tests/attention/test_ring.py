"""Law 16: keys that go round a ring of devices give one device's result and gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import as_users_do, with_gradients
from device_calls import call_by, check_devices_equal_one, places_of
from jax.sharding import AxisType

from relpos_jax import (
  ContentBias,
  DistanceBias,
  EdgeLabels,
  FunctionBias,
  KeyBias,
  LinearBias,
  RelativePositions,
  dot_product_attention,
  explain,
  mesh_axes,
)
from relpos_jax.attention import chunked_block, ring

SIZES = dict(B=2, T=32, S=32, N=4, K=2, H=8, V=6, R=9, P=3)
AXES = dict(query="BTNH", key="BSKH", value="BSKV")
VECTORS = dict(key_table="RNH", value_table="RV")
CONTENT = dict(content="BTNP", content_table="RP")
ALONG = dict(B="data", N="tensor", K="tensor", T="sequence", S="sequence")
RELATIONS = dict(
  vectors=lambda x: RelativePositions(x["key_table"], x["value_table"]),
  bias=lambda x: DistanceBias(x["bias_table"], beyond="zero", left=6),
  keys=lambda x: KeyBias(x["by_key_table"]),
  slopes=lambda x: LinearBias(x["slopes"]),
  content=lambda x: ContentBias(x["content"], x["content_table"]),
)
MOVES = r"= .*? (all-\w+|reduce-scatter|collective-\w+?)(?:-start)?\("
IDS = jnp.arange(32, dtype=jnp.int32) // 11


def lay_out(devices: int):
  """Returns a mesh, and the context in which its axis "sequence" shards queries and keys."""
  mesh = jax.make_mesh((devices,), ("sequence",), axis_types=(AxisType.Auto,))
  return mesh, mesh_axes(queries="sequence", keys="sequence")


@pytest.mark.parametrize(
  "relations, axes, mesh, options",
  [
    ("vectors", VECTORS, dict(sequence=8), dict(is_causal=True)),
    ("vectors", VECTORS, dict(data=2, sequence=4), dict(query_offset=np.array([5, -9]))),
    (
      "vectors",
      VECTORS | dict(sinks="N"),
      dict(sequence=8),
      dict(dropout_rate=0.3, query_segment_ids=IDS, key_segment_ids=IDS, return_residual=True),
    ),
    ("bias", dict(bias_table="RN"), dict(sequence=8), dict(is_causal=True, query_offset=-7)),
    (
      "bias",
      dict(bias_table="R"),
      dict(sequence=4, tensor=2),
      dict(local_window_size=(9, 3), key_value_seq_lengths=np.array([32, 13])),
    ),
    (
      "slopes",
      dict(slopes="N"),
      dict(sequence=8),
      dict(is_causal=True, logits_soft_cap=2.0, local_window_size=12, return_residual=True),
    ),
    (
      "content slopes bias keys vectors",
      CONTENT | VECTORS | dict(slopes="N", bias_table="RN", by_key_table="RNH"),
      dict(data=2, sequence=2, tensor=2),
      dict(is_causal=True, dropout_rate=0.3, mask=np.arange(32) % 7 > 0),
    ),
    ("", {}, dict(data=1, sequence=3), dict(is_causal=True)),
  ],
)
def test_a_ring_equals_one_device(relations, axes, mesh, options, float64):
  check(relations, AXES | axes, mesh, **options)


def test_a_ring_of_explicit_axes_equals_one_device(float64):
  check("vectors", AXES | VECTORS, dict(data=2, sequence=4), "explicit", is_causal=True)


def check(relations, axes, mesh, kind="named", **options):
  """Checks results and the gradients of all arrays, and that keys go round."""
  sizes = SIZES if 32 % mesh["sequence"] == 0 else SIZES | dict(T=30, S=30)
  along = {letter: name for letter, name in ALONG.items() if name in mesh}
  if "dropout_rate" in options:
    options["dropout_key"] = jax.random.key(0)

  def attend(attention, arrays):
    found = tuple(RELATIONS[name](arrays) for name in relations.split())
    given = [arrays[name] for name in AXES]
    return attention(*given, sinks=arrays.get("sinks"), relations=found, **options)

  precisely = dict(ring=True, dtype=jnp.float64, tolerance=1e-10)
  attention = functools.partial(call_by, None)
  text = check_devices_equal_one(attend, attention, axes, sizes, along, mesh, kind, **precisely)
  moves = {*re.findall(MOVES, text)}
  assert "collective-permute" in moves <= {"collective-permute", "all-reduce"}


def test_memory_falls_with_the_number_of_devices_and_keys_travel_in_their_own_dtype():
  axes = AXES | dict(value="BSKH", key_table="RH", value_table="RH")
  shapes = dict(key_table=jax.ShapeDtypeStruct((9, 32), jnp.float32))
  shapes |= dict(value_table=shapes["key_table"])
  shapes |= dict.fromkeys(AXES, jax.ShapeDtypeStruct((1, 4096, 2, 32), jnp.bfloat16))

  def attend(arrays):
    relations = RelativePositions(arrays["key_table"], arrays["value_table"])
    return dot_product_attention(*map(arrays.get, AXES), relations=relations, is_causal=True)

  def temporary_bytes(devices):
    mesh, context = lay_out(devices)
    with context, jax.set_mesh(mesh):
      run = functools.partial(with_gradients, attend)
      along = dict.fromkeys("TS", "sequence")
      lowered = as_users_do(run, in_shardings=(places_of(axes, mesh, along),)).lower(shapes)
    part = rf"collective_permute.*-> tensor<1x{4096 // devices}x2x32xbf16>"
    assert len(re.findall(part, lowered.as_text())) == 2 * 2  # keys and values, twice round
    return lowered.compile().memory_analysis().temp_size_in_bytes

  assert 8 * temporary_bytes(8) <= 1.1 * 2 * temporary_bytes(2)


def test_causal_work_is_the_same_on_all_devices_in_every_round():
  plan = chunked_block.ChunkPlan(**dict.fromkeys(chunked_block.ChunkPlan._fields))
  plan = plan._replace(is_causal=True, num_keys=4, offset=0)
  places = [[int(ring._chunk(device, chunk, 2, 8)) for chunk in (0, 1)] for device in range(8)]
  assert sorted(early + late for early, late in places) == [15] * 8

  def num_visible(device, owner):
    firsts = [4 * (query - key) for query in places[device] for key in places[owner]]
    return sum(bool(ring._is_visible(plan, {}, jnp.int32(first), 4)) for first in firsts)

  assert all(num_visible(i, j) == (3 if i == j else 2) for i in range(8) for j in range(8))


def test_the_ring_says_what_it_does_not_take_and_gathers_nothing_instead():
  x, odd = jnp.ones((2, 32, 4, 8)), jnp.ones((2, 36, 4, 8))
  mesh, context = lay_out(8)
  refused = [
    ("no FunctionBias", x, dict(relations=FunctionBias(lambda params, *_: params, jnp.ones(4)))),
    (
      "no EdgeLabels",
      x,
      dict(relations=EdgeLabels(jnp.ones((32, 32), int), jnp.ones((3, 8)), None)),
    ),
    ("bias", x, dict(bias=jnp.ones((1, 1, 32, 32)))),
    ("mask has shape", x, dict(mask=jnp.ones((32, 32), bool))),
    ("positions", x, dict(key_positions=jnp.arange(32))),
    ("36 queries", odd, {}),
  ]
  with context, jax.set_mesh(mesh):
    assert explain(x, x, x).reasons["chunked"].startswith("chosen, mesh_axes shards the keys")
    for message, q, options in refused:
      with pytest.raises(NotImplementedError, match=rf"mesh_axes.*sequence.*{message}"):
        dot_product_attention(q, q, q, **options)
      why = explain(q, q, q, implementation="projected", **options).reasons["chunked"]
      assert message in why
  with pytest.raises(ValueError, match=r"keys is 'sequence'.*queries, None"):
    mesh_axes(keys="sequence")
  with context:  # without a mesh there is nothing to go round
    assert explain(x, x, x).implementation == "jax.nn"
