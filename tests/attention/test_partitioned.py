"""Law 11: several devices give one device's results and gradients.

They share the batch, heads or the sequence, whose keys are gathered.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import DROPOUT
from calls import ANY_DTYPE
from comparing import assert_close
from compiling import run_with_gradients
from devices import Devices, attend, attention_by, check_devices_equal_one
from jax.sharding import AxisType, PartitionSpec

from relpos_jax import RelativePositions, dot_product_attention, mesh_axes
from relpos_jax.attention import band, chunked, partitioned
from relpos_jax.attention.choice import IMPLEMENTATIONS
from relpos_jax.attention.inputs import gather_inputs

# Of the axes by letter; others have size 1.
SIZES = {"A": 2, "B": 8, "T": 24, "S": 24, "P": 24, "N": 4, "K": 2, "H": 16, "R": 9}
AXES = {
  "query": "BTNH",
  "key": "BSKH",
  "value": "BSKH",
  "key_table": "RNH",
  "value_table": "RH",
}
ALL_HEADS = {"key": "BSNH", "value": "BSNH"}
# Names of mesh axes that the package does not know.
HEADS_TOO = {"B": "rows", "N": "megatron", "K": "megatron"}
BATCH_ALONE = {"B": ("megatron", "rows")}
QUERIES = {"T": "tokens", "N": "megatron"}
QUERIES_OF_ALL_HEADS = QUERIES | {"K": "megatron"}
ALONG_A_SEQUENCE = QUERIES_OF_ALL_HEADS | {"S": "tokens"}
MOVES = "(all-gather|all-to-all|collective-permute)"


def check(call, attention, axes, along=HEADS_TOO, stays=True, kind="auto"):
  """Checks 4 x 2 devices; if the arrays stay, they exchange nothing but sums."""
  rows = "tokens" if "T" in along else "rows"
  devices = Devices({rows: 4, "megatron": 2}, along, kind)
  text = check_devices_equal_one(call, attention, AXES | axes, SIZES, devices)
  if stays:
    assert not re.findall(rf"= .*? {MOVES}(?:-start)?\(", text)
  return text


def in_blocks(*args, block=8, tile=16, **options):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(band, "choose_sizes", lambda *_: (block, tile, None))
    return chunked.attention(gather_inputs(*args, **options))


# In tiles with fewer distances than tables have rows.
in_small_tiles = functools.partial(in_blocks, block=4, tile=4)


attend_causally = functools.partial(attend, is_causal=True)


# Explicit axes become automatic ones, whatever the implementation.
KINDS = [("projected", "explicit"), ("chunked", "explicit")]
for kind in ("auto", "manual"):
  KINDS += [(name, kind) for name in ANY_DTYPE]


@pytest.mark.parametrize("implementation, kind", KINDS)
def test_eight_devices_equal_one(implementation, kind):
  axes = ALL_HEADS | {"key_table": "RH", "value_table": "RNH"}
  is_kernel = IMPLEMENTATIONS[implementation].device is not None
  if not is_kernel:  # they take no bias
    axes["bias"] = "1NTS"
  elif kind == "auto":  # they need the mesh in context
    kind = "named"
  check(attend_causally, attention_by(implementation), axes, kind=kind)


IDS = jnp.arange(24, dtype=jnp.int32) // 7
SEGMENTS = {"query_segment_ids": IDS, "key_segment_ids": IDS}
MASK = {"mask": np.random.default_rng(1).random((8, 4, 24, 24)) < 0.8}
OFFSETS = {"query_offset": jnp.arange(-8, 24, 4), "is_causal": True}
SUM = {
  "content": "BTNH",
  "content_table": "RH",
  "bias_table": "RN",
  "slopes": "N",
  "by_key_table": "RNH",
}
CHUNKED, SKEW, KERNELS, PROJECTED = map(
  attention_by, ("chunked", "skew", "pallas_gpu", "projected")
)
IN_KERNELS = {"is_causal": True} | SEGMENTS | DROPOUT
A_BIAS = {"bias": "BNTS"}

# By name: the implementation, axes, mesh axes along them, how these are known, and the
# options.
CASES = {}
CASES["explicit"] = KERNELS, {}, HEADS_TOO, "explicit", {}
CASES["named"] = KERNELS, {}, BATCH_ALONE, "named", {}
CASES["constrained"] = CHUNKED, {}, HEADS_TOO, "constrained", {}
CASES["offsets"] = in_blocks, {}, HEADS_TOO, "auto", OFFSETS | DROPOUT
CASES["a bias of pairs"] = in_blocks, A_BIAS, HEADS_TOO, "auto", MASK | DROPOUT
CASES["a bias by head"] = in_blocks, {"bias": "1NTS"} | ALL_HEADS, HEADS_TOO, "auto", {}
CASES["a bias of all"] = (
  in_blocks,
  {"bias": "11TS"},
  BATCH_ALONE,
  "auto",
  MASK | DROPOUT,
)
CASES["a sum, projected"] = PROJECTED, SUM, HEADS_TOO, "auto", {}
CASES["a sum, skew"] = SKEW, SUM, HEADS_TOO, "explicit", {}
CASES["a sum"] = in_blocks, SUM, HEADS_TOO, "auto", {}
CASES["wide tables"] = in_small_tiles, SUM, HEADS_TOO, "auto", {}
CASES["wide tables along a sequence"] = (
  in_small_tiles,
  SUM,
  ALONG_A_SEQUENCE,
  "auto",
  {},
)
CASES["a sum along a sequence"] = in_blocks, SUM, ALONG_A_SEQUENCE, "auto", {}
CASES["kernels for GPUs"] = (
  KERNELS,
  {"bias_table": "RN"},
  HEADS_TOO,
  "named",
  IN_KERNELS,
)


@pytest.mark.parametrize("name", CASES)
def test_each_device_has_its_part(name):
  attention, axes, along, kind, options = CASES[name]
  stays = along is not ALONG_A_SEQUENCE
  call = functools.partial(attend, **options) if options else attend
  check(call, attention, axes, along, stays, kind)


def test_some_axes_may_be_manual():
  mesh = jax.make_mesh((4, 2), ("stage", "tp"), axis_types=(AxisType.Auto,) * 2)
  query = jnp.asarray(np.random.default_rng(0).normal(size=(8, 24, 4, 16)), jnp.float32)
  table = jnp.ones((9, 16)).at[3:].set(2.0)

  def call(query, table):
    relations = RelativePositions(table, table)
    return CHUNKED(query, query, query, relations=relations)

  rows = PartitionSpec("stage")
  sides = {"in_specs": (rows, PartitionSpec()), "out_specs": rows}
  on_stages = jax.shard_map(call, mesh=mesh, axis_names={"stage"}, **sides)
  actual = run_with_gradients(on_stages, query, table)
  wanted = run_with_gradients(call, query, table)
  assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_biases, bias", [(4, "BNTS"), (2, "ANTS")])
def test_each_device_has_the_biases_of_its_sequences(num_biases, bias):
  """Gathers sequences if their biases are too few to be shared out."""

  def call(attention, arrays):
    parts = {}
    for name in ("query", "key", "value", "bias"):
      x = arrays[name]
      parts[name] = x.reshape(num_biases, -1, *x.shape[1:])
    parts["bias"] = parts["bias"][:, :1]
    return attend(attention, arrays | parts).reshape(8, 24, 4, 16)

  axes = {"bias": bias} | ALL_HEADS
  check(call, in_blocks, axes, {"B": "rows"}, stays=num_biases == 4)


def test_a_sum_over_an_uneven_batch_counts_nothing_else():
  # Six sequences on four devices: the last one has two of padding.
  def call(attention, arrays):
    six = {name: arrays[name][:6] for name in ("query", "key", "value")}
    output = attend(attention, arrays | six)
    return jnp.pad(output, ((0, 2), (0, 0), (0, 0), (0, 0)), constant_values=1)

  check(call, in_blocks, {"bias": "11TS"} | ALL_HEADS, stays=False)


OFFSETS_OF_ALL = np.arange(-8, 24, 4)


@pytest.mark.parametrize(
  "heads, is_causal, offset",
  [
    ("N", True, 0),
    ("K", False, 0),
    ("N", True, 7),
    ("N", True, OFFSETS_OF_ALL),
    ("K", True, 6),
  ],
  ids=str,
)
def test_a_sequence_may_lie_on_several_devices(heads, is_causal, offset):
  """Gathers keys and values, and scatters their gradients; queries stay."""
  axes, options = {"bias": "BNTP"}, {"is_causal": is_causal, "query_offset": offset}
  if heads == "N":
    axes |= ALL_HEADS
  else:
    options |= SEGMENTS | DROPOUT
  call = functools.partial(attend, **options)
  text = check(call, in_blocks, axes, ALONG_A_SEQUENCE, stays=False, kind="named")

  def shapes_moved(by):
    shapes = re.findall(rf"= f32\[([\d,]+)\]\S* {by}(?:-start)?\(", text)
    return [sorted(map(int, shape.split(","))) for shape in shapes]

  keys = sorted([SIZES["B"], SIZES["S"], SIZES[heads] // 2, SIZES["H"]])
  assert all(shape == keys for shape in shapes_moved("all-gather"))
  assert len(shapes_moved("reduce-scatter")) == 2
  assert not shapes_moved("all-to-all")


def test_a_mask_of_whole_sequences_masks_all_keys_on_several_devices():
  mask = (np.arange(8) % 2 == 0).reshape(8, 1, 1, 1)
  call = functools.partial(attend, mask=mask)
  check(call, in_blocks, ALL_HEADS, ALONG_A_SEQUENCE, stays=False, kind="named")


def test_axes_that_shard_the_batch_do_not_shard_queries_by_their_usual_names():
  mesh = jax.make_mesh((4, 2), ("data", "sequence"), (AxisType.Auto,) * 2)
  with jax.set_mesh(mesh), mesh_axes(batch=("data", "sequence")):
    axes = partitioned.axes_in_context()
  assert axes == {"B": ("data", "sequence"), "N": (), "T": ()}
  along = {"B": ("data", "sequence")}
  devices = Devices({"data": 4, "sequence": 2}, along, "explicit")
  check_devices_equal_one(attend_causally, CHUNKED, AXES, SIZES, devices)


def test_tables_learn_from_all_devices_of_a_sequence_though_keys_do_not_divide():
  def call(attention, arrays):
    fewer = {name: arrays[name][:, :21] for name in ("key", "value")}
    return attend(attention, arrays | fewer)

  check(call, in_blocks, ALL_HEADS, QUERIES, stays=False)


@pytest.mark.parametrize("attention", [SKEW, CHUNKED], ids=["skew", "chunked"])
def test_callers_may_shard_a_sequence_themselves(attention):
  def call(attention, arrays):
    is_part = arrays["query"].shape[1] == 6
    offset = jax.lax.axis_index("tokens") * 6 if is_part else 0
    return attend(attention, arrays, is_causal=True, query_offset=offset)

  check(call, attention, {}, QUERIES_OF_ALL_HEADS, kind="manual")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_kernels_refuse_a_mesh_that_shards_the_queries(kind):
  mesh = jax.make_mesh((8,), ("tokens",), (kind,))
  sharding = jax.NamedSharding(mesh, jax.P(None, "tokens"))
  message = r"shards queries over \('tokens',\)"
  with jax.set_mesh(mesh), mesh_axes(queries="tokens"):
    x = jax.device_put(np.ones((2, 32, 2, 16)), sharding)
    with pytest.raises(NotImplementedError, match=message):
      KERNELS(x, x, x)


def test_mesh_axes_have_usual_names_by_default_and_refuse_those_that_the_mesh_lacks():
  x = jnp.ones((8, 32, 2, 16))
  mesh = jax.make_mesh((4, 2), ("rows", "tensor"), (AxisType.Auto,) * 2)
  with jax.set_mesh(mesh):
    with mesh_axes(batch="rows"):
      axes = partitioned.axes_in_context()
      assert axes == {"B": ("rows",), "N": ("tensor",), "T": ()}
    with mesh_axes(batch="row"), pytest.raises(ValueError, match=r"row.*rows"):
      dot_product_attention(x, x, x, implementation="chunked")


@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_explicit_axes_may_shard_queries_with_two_axes_of_batch(axis):
  mesh = jax.make_mesh((2,), ("rows",), (AxisType.Explicit,))
  query = np.random.default_rng(0).normal(size=(2, 3, 8, 4, 16)).astype(np.float32)
  relations = RelativePositions(np.ones((9, 16), np.float32), None)
  wanted = dot_product_attention(query, query, query, relations=relations)
  names = jax.P("rows") if axis == "batch" else jax.P(None, None, None, "rows")
  with jax.set_mesh(mesh):
    x = jax.device_put(query, jax.NamedSharding(mesh, names))
    actual = dot_product_attention(x, x, x, relations=relations)
  assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
