"""The fused kernels lowered for a GPU, and "chunked" and "projected" compiled for TPUs.

No device is there; test_kernels.py runs the kernels, interpreted.

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
from relpos_jax.attention import pallas_gpu
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


@pytest.fixture(scope="module")
def tpu_compiler():
  pytest.importorskip("libtpu")
  jax.config.update("jax_platforms", "cpu")
  os.environ.update(NO_TPU)


def for_tpus(test):
  """Marks a test that needs the compiler for TPUs."""
  return pytest.mark.tpu(pytest.mark.usefixtures("tpu_compiler")(test))


@for_tpus
@pytest.mark.parametrize("implementation", ["chunked", "projected"])
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles(chip, implementation):
  topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
  arrays = shapes_of(length=1024, sharding=SingleDeviceSharding(topology.devices[0]))

  def output_and_gradients(query, key, value, relations):
    options = dict(relations=relations, is_causal=True, implementation=implementation)
    attend = functools.partial(dot_product_attention, **options)
    return with_gradients(attend, query, key, value)

  text = jax.jit(output_and_gradients).lower(*arrays).compile().as_text()
  assert implementation == "projected" or "1024,1024]" not in text


@for_tpus
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_no_chip_gathers_what_the_heads_shard(kind):
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
    options = dict(relations=relations, is_causal=True, implementation="chunked")
    attend = functools.partial(dot_product_attention, **options)
    return with_gradients(attend, query, key, value)

  with use_abstract_mesh(mesh.abstract_mesh):
    text = jax.jit(output_and_gradients).lower(x, x, x, table).compile().as_text()
  assert not re.search(r"(all-gather|all-to-all|collective-permute)(-start)?\(", text)
