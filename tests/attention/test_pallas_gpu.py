"""The fused kernel for GPUs: interpreted against the oracle, and lowered for an H100."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from kernel_calls import (
  DROPOUT,
  HIDDEN,
  LENGTHS,
  RELATIONS,
  arrays_of,
  assert_exact,
  assert_finite_where_only_low_rows_are_seen,
  assert_low_rows_hide,
)

from relpos_jax import (
  ContentBias,
  DistanceBias,
  LinearBias,
  RelativePositions,
  dot_product_attention,
  explain,
)
from relpos_jax.attention import pallas_gpu
from relpos_jax.attention.inputs import gather_inputs
from relpos_jax.attention.pallas_gpu_kernels import Blocks

SMALL = Blocks((4, 4, 2), (8, 4, 1), (4, 8, 2))
RANDOM = np.random.default_rng(0)
KEY_MASK = RANDOM.random((2, 1, 1, 20)) < 0.6
SEGMENTS = {
  name: RANDOM.integers(0, 2, 20).astype(np.int32)
  for name in ("query_segment_ids", "key_segment_ids")
}

# T = S = 20: blocks of queries with tiles to the right, on the band and to the left, and padding.
CASES = RELATIONS | {
  "both tables": (dict(rows=3), {}),
  "causal, grouped, per head": (dict(heads=4, per_head=True), dict(is_causal=True)),
  "k = 0": (dict(rows=1), {}),
  "k = 0, causal, more keys": (dict(rows=1, queries=5), dict(is_causal=True)),
  "k larger than a block, more keys": (dict(rows=13, queries=5), {}),
  "k larger than the sequence, zero": (dict(rows=61), dict(beyond="zero")),
  "not symmetric, more queries": (dict(keys=5), dict(left=4)),
  "zero, lengths": ({}, dict(beyond="zero") | LENGTHS),
  "keys only, mask": (dict(tables="k"), dict(mask=KEY_MASK)),
  "values only, segments": (dict(tables="v"), SEGMENTS),
  "window": (dict(rows=7), dict(local_window_size=(5, 2))),
  "narrow window, causal": (dict(rows=9), dict(local_window_size=(1, 6), is_causal=True)),
  "dropout": ({}, DROPOUT),
  "dropout, values only": (dict(tables="v"), dict(mask=KEY_MASK) | DROPOUT),
  "no relations, causal": (dict(tables=""), dict(is_causal=True) | DROPOUT),
  "an offset": (dict(keys=25), dict(query_offset=9) | DROPOUT),
  "an offset, causal, zero": (
    dict(queries=14),
    dict(query_offset=7, is_causal=True, beyond="zero"),
  ),
  "offsets beyond all keys": ({}, dict(query_offset=np.array([30, -26])) | LENGTHS),
  "offsets, causal, dropout": (
    dict(rows=3),
    dict(query_offset=np.array([3, -4]), is_causal=True, mask=KEY_MASK) | DROPOUT,
  ),
  "offsets, window, segments": (
    {},
    dict(query_offset=np.array([-3, 6]), local_window_size=(5, 2)) | SEGMENTS,
  ),
  "no relations, window": (dict(tables=""), dict(local_window_size=(2, 3))),
}


def in_small_blocks(inputs):
  assert pallas_gpu.unsupported(inputs) is None
  return pallas_gpu.attention_in_blocks(inputs, SMALL, interpret=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("float64")
def test_it_is_exact(name):
  sizes, options = CASES[name]
  assert_exact(in_small_blocks, arrays_of(**sizes), options)


@pytest.mark.parametrize("where", HIDDEN)
@pytest.mark.usefixtures("float64")
def test_low_rows_of_tables_hide(where):
  assert_low_rows_hide(in_small_blocks, where)


@pytest.mark.usefixtures("float64")
def test_queries_that_see_only_low_rows():
  assert_finite_where_only_low_rows_are_seen(in_small_blocks)


@pytest.mark.parametrize(
  ("kinds", "found"),
  [
    ("none", ""),
    ("slopes", ""),
    ("all", "; each pass holds arrays of (1, 8, 512, 33) = 0.00054 GB for the band"),
    ("t5", "; the backward pass holds arrays of (1, 8, 512, 257) = 0.0042 GB for the band"),
  ],
)
def test_explain_says_what_memory_the_band_takes(kinds, found):
  *arrays, relations = shapes(kinds=kinds)
  reason = explain(*arrays, relations=relations).reasons["pallas_gpu"]
  assert reason.endswith("interpreted, and slow: no GPU" + found)


def test_a_bias_by_distance_is_not_repeated_for_each_query():
  """The forward pass has no array larger than the query."""
  arrays = shapes(kinds="t5")
  lowered = jax.jit(loss).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
  found = re.findall(r"tensor<((?:\d+x)+)", lowered)
  assert max(math.prod(map(int, x.split("x")[:-1])) for x in found) == arrays[0].size


def test_wide_heads_are_refused():
  x = jnp.zeros((1, 6, 1, 300))
  with pytest.raises(NotImplementedError, match="heads are 300 wide"):
    dot_product_attention(x, x, x, implementation="pallas_gpu")


def loss(query, key, value, relations, **options):
  """Computes a loss with the kernels as compiled for a GPU."""
  inputs = gather_inputs(query, key, value, relations=relations, **options)
  blocks = pallas_gpu.default_blocks(inputs)
  return pallas_gpu.attention_in_blocks(inputs, blocks, interpret=False).astype(jnp.float32).sum()


def shapes(length=512, width=64, k=16, dtype=jnp.bfloat16, kinds="shaw", **more):
  """Returns the shapes of query, key, value and relations: "shaw", "t5" "slopes" or all "kinds"."""
  array = jax.ShapeDtypeStruct((1, length, 8, width), dtype, **more)
  table = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, **more)
  shaw = RelativePositions(*[table(2 * k + 1, width)] * 2)
  content, slopes = ContentBias(array, table(2 * k + 1, width)), LinearBias(table(8))
  every = shaw, DistanceBias(table(2 * k + 1, 8)), content, slopes
  t5 = DistanceBias(table(257, 8))
  relations = dict(none=(), shaw=shaw, t5=t5, slopes=slopes, all=every)
  return array, array, array, relations[kinds]


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
  "sizes, options",
  [
    (dict(), dict()),
    (dict(dtype=jnp.float32, width=128), dict(is_causal=True)),
    (dict(length=500, k=200, dtype=jnp.float16, width=48), dict(DROPOUT, local_window_size=100)),
    (dict(), dict(query_offset=jnp.array([70]), is_causal=True, **DROPOUT)),
    (dict(length=200), dict(query_segment_ids=np.zeros(200), key_segment_ids=np.zeros(200))),
    (dict(kinds="t5"), dict(is_causal=True)),
    (dict(kinds="all"), dict()),
  ],
)
def test_it_lowers_for_an_h100(sizes, options):
  """Checks for three kernels, and no [T, S] around them."""
  options = {n: jnp.asarray(x, int) if n.endswith("ids") else x for n, x in options.items()}
  device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="cuda")
  mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
  gradient = jax.jit(jax.grad(functools.partial(loss, **options), argnums=(0, 1, 2, 3)))
  arrays = shapes(**sizes)
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
  "width, dtype, kinds",
  [
    (64, jnp.bfloat16, "shaw"),
    (64, jnp.bfloat16, "none"),
    (128, jnp.float32, "shaw"),
    (64, jnp.bfloat16, "t5"),
    (64, jnp.bfloat16, "all"),
  ],
)
def test_it_compiles_for_an_h100_in_linear_memory(width, dtype, kinds):
  """Compiles without a GPU: JAX_PLATFORMS=cpu, jax-cuda13-plugin and jax-cuda13-pjrt."""
  pytest.importorskip("jax_plugins.xla_cuda13")
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1")
  mesh = topologies.make_mesh(topology, (1,), ("x",))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  def temporary(length):
    arrays = shapes(length, width, dtype=dtype, kinds=kinds, sharding=sharding)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    with use_abstract_mesh(mesh.abstract_mesh):
      compiled = gradient.lower(*arrays).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  short, long = temporary(8192), temporary(32768)
  assert long <= 4.1 * short
  floats = 8 * 32768 * (width + (257 if kinds == "t5" else 33))  # N T (H + R)
  assert long <= 3 * 4 * floats
