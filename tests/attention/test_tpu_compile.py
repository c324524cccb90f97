"""The kernel for TPUs through the TPU's own compiler, without a TPU.

  pip install -e '.[tpu,test]' && pytest -m tpu -n0

The compiler refuses what does not fit a chip's memories, and says how much memory it takes.
"""

import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from experiments.chips import NO_TPU
from relpos_jax import (
  ContentBias,
  DistanceBias,
  LinearBias,
  RelativePositions,
  dot_product_attention,
)
from relpos_jax.attention import pallas_tpu
from relpos_jax.attention.inputs import gather_inputs

pytestmark = pytest.mark.tpu

HEADS, K = 8, 16
CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}
# Temporary bytes of forward and backward together, for each query and head, by the heads' width:
# recorded are at most 904 and 2215 (v5p, T = 32768).
BUDGET = {64: 1000, 128: 2400}


@pytest.fixture(scope="module", autouse=True)
def compiler():
  pytest.importorskip("libtpu")
  jax.config.update("jax_platforms", "cpu")
  os.environ.update(NO_TPU)


def _compile(
  chip,
  length,
  width,
  rows=2 * K + 1,
  dtype=jnp.bfloat16,
  key_heads=HEADS,
  beyond="clip",
  contents=(),
  t5=0,
  slopes=False,
  **options,
):
  topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
  sharding = SingleDeviceSharding(topology.devices[0])
  array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
  query = array((1, length, HEADS, width), dtype)
  key = array((1, length, key_heads, width), dtype)
  table = lambda *shape: array(shape, jnp.float32)
  relations = [RelativePositions(*[table(rows, width)] * 2, beyond=beyond)] * (rows > 0)
  relations += [DistanceBias(table(t5, HEADS))] * (t5 > 0) + [LinearBias(table(HEADS))] * slopes
  for size in contents:
    content = array((1, length, HEADS, size), dtype)
    relations.append(ContentBias(content, table(max(rows, 3), size)))

  def output_and_gradients(query, key, value, relations):
    def attend(query, key, value, relations):
      inputs = gather_inputs(query, key, value, relations=relations, **options)
      assert pallas_tpu.unsupported(inputs, interpret=False) is None
      return pallas_tpu.attention(inputs, interpret=False)

    output, pull_back = jax.vjp(attend, query, key, value, relations)
    return output, pull_back(output)

  return jax.jit(output_and_gradients).lower(query, key, key, tuple(relations)).compile()


@pytest.mark.parametrize("length", [1024, 32768])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_in_memory_linear_in_the_length(chip, width, length):
  compiled = _compile(chip, length, width)
  assert compiled.memory_analysis().temp_size_in_bytes <= BUDGET[width] * HEADS * length
  assert not re.search(rf"{length},{length}\]", compiled.as_text())


CALLS = {
  "no relations": dict(rows=0),
  "causal": dict(is_causal=True),
  "float32": dict(dtype=jnp.float32),
  "grouped heads": dict(key_heads=2),
  "window": dict(local_window_size=(300, 100)),
  "dropout": dict(dropout_rate=0.1, dropout_key=None),
  "a length that is no multiple": dict(length=1000),
  "many rows": dict(rows=2 * 600 + 1, length=2048),
  "Music Transformer": dict(rows=2 * 1024 + 1, beyond="zero", is_causal=True, length=2048),
  "a table for k = 0": dict(rows=1),
  "an offset, causal": dict(query_offset=700, is_causal=True),
  "an offset per sequence": dict(query_offset=[700], dropout_rate=0.1, dropout_key=None),
  "narrow heads": dict(width=32),
  "uneven heads": dict(width=80),
  "wide heads": dict(width=256),
  "masks": dict(
    key_value_seq_lengths=[700], query_segment_ids=[0, 1] * 512, key_segment_ids=[0] * 1024
  ),
}


CALLS |= {
  "T5": dict(rows=0, t5=257),
  "T5, causal, float32": dict(rows=0, t5=129, dtype=jnp.float32, is_causal=True),
  "slopes": dict(rows=0, slopes=True, is_causal=True),
  "all": dict(t5=257, contents=(64,), slopes=True),
  "narrow contents": dict(rows=0, contents=(16, 3)),
  "many rows of a content": dict(rows=2 * 600 + 1, contents=(64,), length=2048),
}


@pytest.mark.parametrize("call", CALLS)
def test_compiles(call):
  options = dict(length=1024, width=64) | CALLS[call]
  if "dropout_key" in options:
    options["dropout_key"] = jax.random.key(0)
  arrays = {name: jnp.array(x) for name, x in options.items() if isinstance(x, list)}
  _compile("v5e", **options | arrays)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("implementation", ["chunked", "pallas_tpu"])
def test_no_chip_gathers_what_the_heads_shard(implementation, kind):
  names = ("fsdp", "tp") if kind == AxisType.Auto else ("rows", "megatron")
  topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS["v5e"])
  mesh = Mesh(np.array(topology.devices).reshape(2, 2), names, axis_types=(kind,) * 2)
  place = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
  x = jax.ShapeDtypeStruct((4, 1024, 8, 64), jnp.bfloat16, sharding=place(names[0], None, names[1]))
  table = jax.ShapeDtypeStruct((33, 64), jnp.float32, sharding=place())

  def output_and_gradients(query, key, value, table):
    relations = RelativePositions(table, table)
    attend = functools.partial(dot_product_attention, implementation=implementation)
    output, pull_back = jax.vjp(
      lambda *x: attend(*x, relations=relations, is_causal=True), query, key, value
    )
    return output, pull_back(output)

  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    text = jax.jit(output_and_gradients).lower(x, x, x, table).compile().as_text()
  assert not re.search(r"(all-gather|all-to-all|collective-permute)(-start)?\(", text)
