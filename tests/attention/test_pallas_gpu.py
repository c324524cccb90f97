"""The fused kernel for GPUs: interpreted against the oracle, and lowered for an H100."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quickly
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jax.test_util import check_grads

from relpos_jax import (
  ContentBias,
  DistanceBias,
  KeyBias,
  LinearBias,
  RelativePositions,
  dot_product_attention,
)
from relpos_jax.attention import pallas_gpu, reference
from relpos_jax.attention.inputs import gather_inputs
from relpos_jax.attention.pallas_gpu_kernels import Blocks

SMALL = Blocks((4, 4, 2), (8, 4, 1), (4, 8, 2))
RANDOM = np.random.default_rng(0)
KEY_MASK = RANDOM.random((2, 1, 1, 14)) < 0.6
SEGMENTS = {name: RANDOM.integers(0, 2, 14) for name in ("query_segment_ids", "key_segment_ids")}
LENGTHS = dict(query_seq_lengths=np.array([5, 14]), key_value_seq_lengths=np.array([3, 0]))
DROPOUT = dict(dropout_rate=0.4, dropout_key=jax.random.key(0))
NO_TABLES = dict(key_table=False, value_table=False)


def normal(*shape):
  return RANDOM.normal(size=shape)


# T = S = 14: blocks of queries with tiles to the right, on the band and to the left, and padding.
CASES = {
  "both tables": dict(k=1),
  "causal, grouped, per head": dict(k=2, is_causal=True, heads=4, per_head=True),
  "k = 0": dict(k=0),
  "k = 0, causal, more keys": dict(k=0, is_causal=True, queries=5),
  "k larger than a block, more keys": dict(k=6, queries=5),
  "k larger than the sequence, zero": dict(k=20, beyond="zero"),
  "not symmetric, more queries": dict(k=2, left=4, keys=5),
  "zero, lengths": dict(k=2, beyond="zero", **LENGTHS),
  "keys only, mask": dict(k=2, value_table=False, mask=KEY_MASK),
  "values only, segments": dict(k=2, key_table=False, **SEGMENTS),
  "window": dict(k=3, local_window_size=(5, 2)),
  "narrow window, causal": dict(k=4, local_window_size=(1, 6), is_causal=True),
  "dropout": dict(k=2, **DROPOUT),
  "dropout, values only": dict(k=2, key_table=False, mask=KEY_MASK, **DROPOUT),
  "no relations, causal": dict(NO_TABLES, is_causal=True, **DROPOUT),
  "an offset": dict(k=2, query_offset=9, keys=25, **DROPOUT),
  "an offset, causal, zero": dict(k=2, query_offset=7, keys=20, is_causal=True, beyond="zero"),
  "offsets beyond all keys": dict(k=2, query_offset=np.array([30, -20]), **LENGTHS),
  "offsets, causal, dropout": dict(
    k=1, query_offset=np.array([3, -4]), is_causal=True, mask=KEY_MASK, **DROPOUT
  ),
  "offsets, window, segments": dict(
    k=2, query_offset=np.array([-3, 6]), local_window_size=(5, 2), **SEGMENTS
  ),
  "no relations, window": dict(NO_TABLES, local_window_size=(2, 3)),
  "a bias": dict(NO_TABLES, more=(DistanceBias(normal(7)),)),
  "a bias per head, causal": dict(
    NO_TABLES, is_causal=True, heads=4, more=(DistanceBias(normal(6, 4), left=4),)
  ),
  "contents, mask": dict(
    NO_TABLES,
    mask=KEY_MASK,
    more=(
      ContentBias(normal(2, 14, 2, 5), normal(5, 2, 5)),
      ContentBias(normal(2, 14, 2, 3), normal(4, 3), "zero", left=1),
    ),
  ),
  "slopes, window": dict(NO_TABLES, local_window_size=(9, 6), more=(LinearBias(normal(2)),)),
  "slopes, values, dropout": dict(k=2, key_table=False, more=(LinearBias(normal(2)),), **DROPOUT),
  "all, offsets, dropout, lengths": dict(
    k=2,
    heads=4,
    scale=-0.7,
    query_offset=np.array([3, -4]),
    more=(
      DistanceBias(normal(5, 4), "zero"),
      LinearBias(normal(4)),
      ContentBias(normal(2, 14, 4, 3), normal(3, 3)),
      RelativePositions(normal(9, 4, 3), normal(9, 4, 3), "zero"),
      DistanceBias(normal(3)),
    ),
    **(DROPOUT | LENGTHS),
  ),
}


def arrays_of(
  *,
  queries=14,
  keys=14,
  heads=2,
  width=3,
  k=1,
  per_head=False,
  key_table=True,
  value_table=True,
  more=(),
  dtype=np.float64,
):
  """Returns the differentiable arrays."""
  random = np.random.default_rng(1).normal
  table = (2 * k + 1, *([heads] if per_head else []), width)
  arrays = dict(
    query=random(size=(2, queries, heads, width)),
    key=random(size=(2, keys, 2, width)),
    value=random(size=(2, keys, 2, width)),
    key_table=random(size=table) if key_table else None,
    value_table=random(size=table) if value_table else None,
    more=more,
  )
  return jax.tree.map(lambda x: jnp.asarray(x, dtype), arrays)


def attend(attention, arrays, beyond="clip", left=None, **options):
  tables = [arrays[name] for name in ("key_table", "value_table")]
  given = any(table is not None for table in tables)
  relations = (*[RelativePositions(*tables, beyond, left)] * given, *arrays["more"])
  inputs = gather_inputs(
    *(arrays[x] for x in ("query", "key", "value")), relations=relations, **options
  )
  return attention(inputs)


def in_small_blocks(inputs):
  assert pallas_gpu.unsupported(inputs) is None
  return pallas_gpu.attention_in_blocks(inputs, SMALL, interpret=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("float64")
def test_it_is_exact(name):
  options = dict(CASES[name])
  sizes = {n: options.pop(n) for n in [*options] if n in arrays_of.__kwdefaults__}
  arrays = arrays_of(**sizes)

  @functools.partial(quickly, static_argnums=0)
  def output_and_gradients(attention, arrays):
    call = functools.partial(attend, attention, **options)
    output, pull_back = jax.vjp(call, arrays)
    cotangent = np.random.default_rng(7).normal(size=output.shape)
    return dict(output=output, **pull_back(jnp.asarray(cotangent))[0])

  wanted = output_and_gradients(reference.attention, arrays)
  actual = output_and_gradients(in_small_blocks, arrays)
  for name in wanted:
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-10, err_msg=name)
    jax.tree.map(same, actual[name], wanted[name])


@pytest.mark.usefixtures("float64")
def test_its_gradients_are_those_of_its_output():
  arrays = arrays_of(queries=6, keys=6)
  call = functools.partial(attend, in_small_blocks)
  check_grads(jax.jit(call), (arrays,), order=1, modes=["rev"])


@pytest.mark.usefixtures("float64")
def test_a_scale_may_be_traced():
  arrays = arrays_of(queries=6, keys=6)

  def slope(attention):
    call = lambda scale: (attend(attention, arrays, scale=scale) ** 2).sum()
    return jax.jit(jax.grad(call))(0.3)

  np.testing.assert_allclose(slope(in_small_blocks), slope(reference.attention), rtol=1e-10)


def test_a_query_that_sees_no_key_gives_zero_and_takes_no_gradient():
  arrays = arrays_of(queries=6, keys=6, dtype=np.float32)
  segments = dict(query_segment_ids=np.arange(6) == 2, key_segment_ids=np.zeros(6))
  segments = {name: jnp.asarray(x, jnp.int32) for name, x in segments.items()}

  @quickly
  def output_and_gradients(arrays):
    output, pull_back = jax.vjp(lambda x: attend(in_small_blocks, x, **segments), arrays)
    return output, pull_back(jnp.zeros_like(output).at[:, 2].set(1))[0]

  output, gradients = output_and_gradients(arrays)
  assert not output[:, 2].any() and output[:, :2].all()
  assert not any(gradient.any() for gradient in jax.tree.leaves(gradients))


def test_devices_that_share_a_sequence_gather_its_queries():
  arrays = arrays_of(dtype=np.float32)
  call = quickly(lambda: attend(in_small_blocks, arrays, is_causal=True))
  wanted = call()
  mesh = jax.make_mesh((2,), ("sequence",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
  with jax.set_mesh(mesh):
    np.testing.assert_allclose(call(), wanted, atol=1e-5)


@pytest.mark.parametrize(
  "options, reason",
  [
    (dict(bias=np.zeros((1, 1, 6, 6))), "bias is given"),
    (dict(mask=np.ones((1, 1, 6, 1), bool)), r"mask has shape \(1, 1, 6, 1\)"),
    (dict(query_positions=np.arange(6)), "positions are given"),
    (dict(width=300), "heads are 300 wide"),
    (dict(relations=KeyBias(np.ones((3, 3), np.float32))), "it has no KeyBias"),
  ],
)
def test_unsupported_calls_are_refused(options, reason):
  options = dict(options)
  arrays = arrays_of(queries=6, keys=6, width=options.pop("width", 3), dtype=np.float32)
  call = functools.partial(dot_product_attention, implementation="pallas_gpu", **options)
  with pytest.raises(NotImplementedError, match=reason):
    call(*(arrays[name] for name in ("query", "key", "value")))


def loss(query, key, value, relations, **options):
  """Computes a loss with the kernels as compiled for a GPU."""
  inputs = gather_inputs(query, key, value, relations=relations, **options)
  blocks = pallas_gpu.default_blocks(inputs)
  return pallas_gpu.attention_in_blocks(inputs, blocks, interpret=False).astype(jnp.float32).sum()


def shapes(length=512, width=64, k=16, dtype=jnp.bfloat16, kinds="shaw", **more):
  """Returns the shapes of query, key, value and relations: "shaw", "t5" or all "kinds"."""
  array = jax.ShapeDtypeStruct((1, length, 8, width), dtype, **more)
  table = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, **more)
  shaw = RelativePositions(*[table(2 * k + 1, width)] * 2)
  content, slopes = ContentBias(array, table(2 * k + 1, width)), LinearBias(table(8))
  every = shaw, DistanceBias(table(2 * k + 1, 8)), content, slopes
  relations = dict(none=(), shaw=shaw, t5=DistanceBias(table(257, 8)), all=every)
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
