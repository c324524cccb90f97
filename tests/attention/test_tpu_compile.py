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
from compiling import with_gradients
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from kernel_calls import DROPOUT, shapes_of

from experiments.chips import NO_TPU
from relpos_jax import RelativePositions, dot_product_attention
from relpos_jax.attention import pallas_tpu
from relpos_jax.attention.inputs import gather_inputs

pytestmark = pytest.mark.tpu

CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}
# Temporary bytes of forward and backward together, for each query and head, by the heads' width:
# recorded are at most 523 (v6e) and 780 (v5p).
BUDGET = {64: 600, 128: 850}


@pytest.fixture(scope="module", autouse=True)
def compiler():
  pytest.importorskip("libtpu")
  jax.config.update("jax_platforms", "cpu")
  os.environ.update(NO_TPU)


def _compile(chip, sizes, **options):
  topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
  arrays = shapes_of(**sizes, sharding=SingleDeviceSharding(topology.devices[0]))

  def output_and_gradients(query, key, value, relations):
    def attend(query, key, value, relations):
      inputs = gather_inputs(query, key, value, relations=relations, **options)
      assert pallas_tpu.unsupported(inputs, interpret=False) is None
      return pallas_tpu.attention(inputs, interpret=False)

    output, pull_back = jax.vjp(attend, query, key, value, relations)
    return output, pull_back(output)

  return jax.jit(output_and_gradients).lower(*arrays).compile()


@pytest.mark.parametrize("width, length", [(64, 1024), (64, 32768), (128, 1024), (128, 16384)])
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_in_memory_linear_in_the_length(chip, width, length):
  compiled = _compile(chip, dict(length=length, width=width))
  assert compiled.memory_analysis().temp_size_in_bytes <= BUDGET[width] * 8 * length
  assert not re.search(rf"{length},{length}\]", compiled.as_text())


# By name: the sizes of arrays, and the options of a call.
CALLS = {
  "no relations": (dict(rows=0), {}),
  "causal": ({}, dict(is_causal=True)),
  "float32": (dict(dtype=jnp.float32), {}),
  "grouped heads": (dict(key_heads=2), {}),
  "dropout": ({}, DROPOUT),
  "a length that is no multiple": (dict(length=1000), {}),
  "many rows": (dict(rows=2 * 600 + 1, length=2048), {}),
  "as many as it takes, float32": (dict(rows=2047, length=2048, dtype=jnp.float32), {}),
  "Music Transformer": (
    dict(rows=2 * 1024 + 1, beyond="zero", length=2048),
    dict(is_causal=True),
  ),
  "a table for k = 0": (dict(rows=1), {}),
  "narrow heads": (dict(width=32), {}),
  "uneven heads": (dict(width=80), {}),
  "wide heads": (dict(width=256), {}),
  "as many keys as it takes": (dict(width=128, length=20480), {}),
  "as many keys as it takes, wide, float32": (
    dict(width=256, length=6826, dtype=jnp.float32),
    {},
  ),
  "masks": (
    {},
    dict(key_value_seq_lengths=[700], query_segment_ids=[0, 1] * 512, key_segment_ids=[0] * 1024),
  ),
  "T5": (dict(rows=0, t5=257), {}),
  "T5, causal, float32": (dict(rows=0, t5=129, dtype=jnp.float32), dict(is_causal=True)),
  "all, dropout, float32": (dict(t5=257, dtype=jnp.float32), DROPOUT),
}


@pytest.mark.parametrize("call", CALLS)
def test_compiles(call):
  sizes, options = CALLS[call]
  options = {name: jnp.array(x) if isinstance(x, list) else x for name, x in options.items()}
  _compile("v5e", dict(length=1024) | sizes, **options)


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
    options = dict(relations=relations, is_causal=True, implementation=implementation)
    attend = functools.partial(dot_product_attention, **options)
    return with_gradients(attend, query, key, value)

  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    text = jax.jit(output_and_gradients).lower(x, x, x, table).compile().as_text()
  assert not re.search(r"(all-gather|all-to-all|collective-permute)(-start)?\(", text)
