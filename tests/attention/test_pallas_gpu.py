"""The fused kernels: interpreted, lowered for a GPU, and compiled for it.

No device is there. Tiles are so small that every kind occurs.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_devices import (
  check_kernels,
  lower_for_an_h100,
  make_gradient,
  make_loss,
)
from attention_cases import CASES, CAUSAL, DROPOUT, exact_case
from calls import LOW, assert_exact, make_arrays, make_shapes, normal, run
from compiling import temporary_bytes
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from relpos_jax import DistanceBias
from relpos_jax.attention import pallas_gpu

kernel = functools.partial(pallas_gpu.attention, block=(8, 4))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("case", CASES)
def test_exact(case):
  assert_exact(kernel, *exact_case(case))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
  "first, last, options",
  [
    (0, 2, {}),
    (0, 0, CAUSAL),
    (5, 6, {"key_value_seq_lengths": np.array([20, 18])}),
    (2, 4, {}),
  ],
  ids=["left end", "left end, causal", "right end, lengths", "within"],
)
def test_low_rows_of_tables_mask(first, last, options):
  """Checks float32 with tables whose rows mask keys: each head has another number."""
  heads = len(LOW)
  table = normal(7, heads)
  table[first : last + 1] = LOW
  sizes = {"heads": heads, "key_heads": 1, "more": (DistanceBias(table),)}
  arrays = make_arrays(**sizes, dtype=np.float32)
  assert_exact(kernel, arrays, options, tolerance=2e-6)


@pytest.mark.usefixtures("float64")
def test_queries_that_attend_only_to_low_rows():
  """Checks that such queries have finite gradients, and make no others infinite."""
  more = (DistanceBias(jnp.array([-1e30, 0.0, 0.0])),)
  arrays = make_arrays(more=more, dtype=np.float32)
  arrays["query"] *= 100
  lengths = {
    "query_seq_lengths": np.array([9, 20]),
    "key_value_seq_lengths": np.array([9, 2]),
  }
  for x in jax.tree.leaves(run(kernel, arrays, lengths)):
    assert np.isfinite(x).all()


T5 = {"rows": 0, "t5": 257}
BOTH = {"t5": 33}
IDS = jnp.zeros(200, int)
SEGMENTS = {"query_segment_ids": IDS, "key_segment_ids": IDS}
ignore_deprecation = pytest.mark.filterwarnings(
  "ignore:The Pallas Triton backend is deprecated"
)


@ignore_deprecation
def test_a_bias_by_distance_is_not_repeated_for_each_query():
  """The forward pass has no array larger than the query."""
  arrays = make_shapes(**T5)
  lowered = lower_for_an_h100(make_loss(pallas_gpu.attention), *arrays)
  sizes = []
  for dimensions in re.findall(r"tensor<((?:\d+x)+)", lowered):
    sizes.append(math.prod(map(int, dimensions.split("x")[:-1])))
  assert max(sizes) == arrays[0].size


@ignore_deprecation
@pytest.mark.parametrize(
  "sizes, options",
  [
    ({"dtype": jnp.float32, "width": 128}, CAUSAL),
    ({"length": 500, "rows": 401, "dtype": jnp.float16, "width": 48}, DROPOUT),
    ({"length": 200}, SEGMENTS),
    (T5, CAUSAL),
    (BOTH, {}),
  ],
  ids=["float32, causal", "dropout", "segments", "a bias", "both"],
)
def test_it_lowers_for_an_h100(sizes, options):
  check_kernels(pallas_gpu.attention, "xla.gpu.triton", sizes, options)


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
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  device_memory_size: 84942979072
}
"""


@pytest.mark.gpu
@ignore_deprecation
@pytest.mark.parametrize(
  "sizes",
  [{}, {"rows": 0}, {"width": 256}, {"width": 256, "dtype": jnp.float32}, T5, BOTH],
  ids=str,
)
def test_it_compiles_for_an_h100_in_linear_memory(sizes):
  """Needs no GPU, but jax-cuda13-plugin and -pjrt, and JAX_PLATFORMS=cpu."""
  pytest.importorskip("jax_plugins.xla_cuda13")
  topology = topologies.get_topology_desc(
    platform="cuda", target_config=H100, topology="1x1x1"
  )
  mesh = topologies.make_mesh(topology, (1,), ("x",))
  sharding = NamedSharding(mesh, PartitionSpec())

  def used_bytes(length):
    arrays = make_shapes(length, **sizes, sharding=sharding)
    gradient = jax.jit(make_gradient(pallas_gpu.attention))
    with use_abstract_mesh(mesh.abstract_mesh):
      return temporary_bytes(gradient, *arrays)

  short, long = used_bytes(8192), used_bytes(32768)
  assert long <= 4.1 * short
  width, rows = sizes.get("width", 64), sizes.get("t5", 33)
  assert long <= 3 * 4 * 8 * 32768 * (width + rows)  # three times 4 N T (H + R)
