"""The fused kernels lowered, and compiled for chips that are not there; test_kernels.py runs them.

pip install -e '.[tpu,test]' && pytest -m tpu -n0
"""

import functools
import math
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import with_gradients
from jax.experimental import topologies
from jax.sharding import (
  AbstractDevice,
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
  SingleDeviceSharding,
  use_abstract_mesh,
)
from kernel_calls import DROPOUT, shapes_of

from experiments.plan import NO_TPU
from relpos_jax import RelativePositions, dot_product_attention
from relpos_jax.attention import pallas_gpu, pallas_tpu
from relpos_jax.attention.inputs import gather_inputs

T5 = dict(rows=0, t5=257)
BOTH = dict(t5=33)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_a_bias_by_distance_is_not_repeated_for_each_query():
  """The forward pass has no array larger than the query."""
  arrays = shapes_of(**T5)
  lowered = lower_for_an_h100(jax.jit(loss), *arrays)
  found = re.findall(r"tensor<((?:\d+x)+)", lowered)
  assert max(math.prod(map(int, x.split("x")[:-1])) for x in found) == arrays[0].size


def loss(query, key, value, relations, **options):
  """Computes a loss with the kernels as compiled for a GPU."""
  inputs = gather_inputs(query, key, value, relations=relations, **options)
  return pallas_gpu.attention(inputs, interpret=False).astype(jnp.float32).sum()


def lower_for_an_h100(function, *arrays):
  device = AbstractDevice(
    device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="cuda"
  )
  mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
  with use_abstract_mesh(mesh):
    return function.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
  "sizes, options",
  [
    (dict(), dict()),
    (dict(dtype=jnp.float32, width=128), dict(is_causal=True)),
    (dict(length=500, rows=401, dtype=jnp.float16, width=48), DROPOUT),
    (
      dict(length=200),
      dict(query_segment_ids=np.zeros(200), key_segment_ids=np.zeros(200)),
    ),
    (T5, dict(is_causal=True)),
    (BOTH, dict()),
  ],
)
def test_it_lowers_for_an_h100(sizes, options):
  """Checks for three kernels, and no [T, S] around them."""
  options = {
    n: jnp.asarray(x, int) if n.endswith("ids") else x for n, x in options.items()
  }
  gradient = jax.jit(jax.grad(functools.partial(loss, **options), argnums=(0, 1, 2, 3)))
  arrays = shapes_of(**sizes)
  lowered = lower_for_an_h100(gradient, *arrays)
  assert lowered.count("xla.gpu.triton") == 3
  length = arrays[0].shape[1]
  assert f"x{length}x{length}x" not in lowered


# What the compiler asks to know about an H100.
H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 8 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84942979072
}
"""


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
  "sizes",
  [dict(), dict(rows=0), dict(width=256), dict(width=256, dtype=jnp.float32), T5, BOTH],
)
def test_it_compiles_for_an_h100_in_linear_memory(sizes):
  """Compiles without a GPU: JAX_PLATFORMS=cpu, jax-cuda13-plugin and jax-cuda13-pjrt."""
  pytest.importorskip("jax_plugins.xla_cuda13")
  topology = topologies.get_topology_desc(
    platform="cuda", target_config=H100, topology="1x1x1"
  )
  mesh = topologies.make_mesh(topology, (1,), ("x",))
  sharding = NamedSharding(mesh, PartitionSpec())

  def temporary(length):
    arrays = shapes_of(length, **sizes, sharding=sharding)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    with use_abstract_mesh(mesh.abstract_mesh):
      compiled = gradient.lower(*arrays).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  short, long = temporary(8192), temporary(32768)
  assert long <= 4.1 * short
  floats = 8 * 32768 * (sizes.get("width", 64) + sizes.get("t5", 33))  # N T (H + R)
  assert long <= 3 * 4 * floats


CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}
# Temporary bytes of forward and backward together, for each query and head, by the heads' width:
# recorded are at most 523 (v6e) and 780 (v5p).
BUDGET = {64: 600, 128: 850}


@pytest.fixture(scope="module")
def tpu_compiler():
  pytest.importorskip("libtpu")
  jax.config.update("jax_platforms", "cpu")
  os.environ.update(NO_TPU)


def for_tpus(test):
  """Marks a test that needs the compiler for TPUs."""
  return pytest.mark.tpu(pytest.mark.usefixtures("tpu_compiler")(test))


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


@for_tpus
@pytest.mark.parametrize(
  "width, length", [(64, 1024), (64, 32768), (128, 1024), (128, 16384)]
)
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
    dict(
      key_value_seq_lengths=[700],
      query_segment_ids=[0, 1] * 512,
      key_segment_ids=[0] * 1024,
    ),
  ),
  "T5": (dict(rows=0, t5=257), {}),
  "T5, causal, float32": (
    dict(rows=0, t5=129, dtype=jnp.float32),
    dict(is_causal=True),
  ),
  "all, dropout, float32": (dict(t5=257, dtype=jnp.float32), DROPOUT),
}


@for_tpus
@pytest.mark.parametrize("call", CALLS)
def test_compiles(call):
  sizes, options = CALLS[call]
  options = {
    name: jnp.array(x) if isinstance(x, list) else x for name, x in options.items()
  }
  _compile("v5e", dict(length=1024) | sizes, **options)


@for_tpus
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("implementation", ["chunked", "pallas_tpu"])
def test_no_chip_gathers_what_the_heads_shard(implementation, kind):
  names = ("fsdp", "tp") if kind == AxisType.Auto else ("rows", "megatron")
  topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS["v5e"])
  mesh = Mesh(np.array(topology.devices).reshape(2, 2), names, axis_types=(kind,) * 2)
  place = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
  x = jax.ShapeDtypeStruct(
    (4, 1024, 8, 64), jnp.bfloat16, sharding=place(names[0], None, names[1])
  )
  table = jax.ShapeDtypeStruct((33, 64), jnp.float32, sharding=place())

  def output_and_gradients(query, key, value, table):
    relations = RelativePositions(table, table)
    options = dict(relations=relations, is_causal=True, implementation=implementation)
    attend = functools.partial(dot_product_attention, **options)
    return with_gradients(attend, query, key, value)

  with use_abstract_mesh(mesh.abstract_mesh):
    text = jax.jit(output_and_gradients).lower(x, x, x, table).compile().as_text()
  assert not re.search(r"(all-gather|all-to-all|collective-permute)(-start)?\(", text)
