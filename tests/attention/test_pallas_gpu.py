"""The fused kernel for GPUs lowered and compiled for an H100; test_kernels.py interprets it."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from kernel_calls import DROPOUT, shapes_of

from relpos_jax import explain
from relpos_jax.attention import pallas_gpu
from relpos_jax.attention.inputs import gather_inputs

T5 = dict(rows=0, t5=257)
BOTH = dict(t5=33)


@pytest.mark.parametrize(
  ("sizes", "found"),
  [
    (dict(rows=0), ""),
    (BOTH, "; each pass holds arrays of (1, 8, 512, 33) = 0.5 MiB for the band"),
    (T5, "; the backward pass holds arrays of (1, 8, 512, 257) = 4.0 MiB for the band"),
  ],
)
def test_explain_says_what_memory_the_band_takes(sizes, found):
  *arrays, relations = shapes_of(**sizes)
  reason = explain(*arrays, relations=relations).reasons["pallas_gpu"]
  assert reason.endswith("interpreted, and slow: no GPU" + found)


def test_a_bias_by_distance_is_not_repeated_for_each_query():
  """The forward pass has no array larger than the query."""
  arrays = shapes_of(**T5)
  lowered = jax.jit(loss).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
  found = re.findall(r"tensor<((?:\d+x)+)", lowered)
  assert max(math.prod(map(int, x.split("x")[:-1])) for x in found) == arrays[0].size


def loss(query, key, value, relations, **options):
  """Computes a loss with the kernels as compiled for a GPU."""
  inputs = gather_inputs(query, key, value, relations=relations, **options)
  return pallas_gpu.attention(inputs, interpret=False).astype(jnp.float32).sum()


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
  "sizes, options",
  [
    (dict(), dict()),
    (dict(dtype=jnp.float32, width=128), dict(is_causal=True)),
    (dict(length=500, rows=401, dtype=jnp.float16, width=48), DROPOUT),
    (dict(length=200), dict(query_segment_ids=np.zeros(200), key_segment_ids=np.zeros(200))),
    (T5, dict(is_causal=True)),
    (BOTH, dict()),
  ],
)
def test_it_lowers_for_an_h100(sizes, options):
  """Checks for three kernels, and no [T, S] around them."""
  options = {n: jnp.asarray(x, int) if n.endswith("ids") else x for n, x in options.items()}
  device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="cuda")
  mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
  gradient = jax.jit(jax.grad(functools.partial(loss, **options), argnums=(0, 1, 2, 3)))
  arrays = shapes_of(**sizes)
  with use_abstract_mesh(mesh):
    lowered = gradient.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
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
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1")
  mesh = topologies.make_mesh(topology, (1,), ("x",))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

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
