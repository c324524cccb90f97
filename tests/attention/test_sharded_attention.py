"""Law 11: sharded over batch, heads or the sequence the result is one device's."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quickly
from device_calls import call_by, check_devices_equal_one
from jax.sharding import AxisType, PartitionSpec

from relpos_jax import (
  ContentBias,
  DistanceBias,
  KeyBias,
  LinearBias,
  RelativePositions,
  dot_product_attention,
  mesh_axes,
)
from relpos_jax.attention import chunked, pallas_tpu, partitioned
from relpos_jax.attention.choice import IMPLEMENTATIONS
from relpos_jax.attention.inputs import gather_inputs

# Of the axes by letter; others have size 1.
SIZES = dict(A=2, B=8, T=24, S=24, P=24, N=4, K=2, H=16, R=9)
# Names of mesh axes that the package does not know.
HEADS_TOO = dict(B="rows", N="megatron", K="megatron")
BATCH_ALONE = dict(B=("megatron", "rows"))


def check_eight_devices_equal_one(attend, attention, axes, along, stays=True, kind="auto"):
  """Checks a mesh of 4 x 2; if the arrays stay, devices exchange nothing but sums."""
  mesh = {"tokens" if "T" in along else "rows": 4, "megatron": 2}
  text = check_devices_equal_one(attend, attention, axes, SIZES, along, mesh, kind)
  moves = "(all-gather|all-to-all|collective-permute)"
  assert not stays or not re.findall(rf"= .*? {moves}(?:-start)?\(", text)
  return text


def call(attention, arrays, **options):
  arrays = dict(arrays)
  relations = RelativePositions(arrays.pop("key_table"), arrays.pop("value_table"))
  return attention(**arrays, relations=relations, **options)


PROJECTED, SKEW, CHUNKED, ON_GPUS, ON_TPUS = (
  functools.partial(call_by, name)
  for name in ("projected", "skew", "chunked", "pallas_gpu", "pallas_tpu")
)


def in_blocks(*args, **options):
  return chunked.attention(gather_inputs(*args, **options), block=8, group=2)


def in_tiles(*args, **options):
  return pallas_tpu.attention(gather_inputs(*args, **options), block=8)


@pytest.mark.parametrize("kind", ["auto", "explicit", "manual"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_eight_devices_equal_one(implementation, kind):
  axes = dict(query="BTNH", key="BSNH", value="BSNH", key_table="RH", value_table="RNH")
  if IMPLEMENTATIONS[implementation].device is None:  # the kernels take none
    axes |= dict(bias="1NTS")
  attend = functools.partial(call, is_causal=True)
  attention = functools.partial(call_by, implementation)
  check_eight_devices_equal_one(attend, attention, axes, HEADS_TOO, kind=kind)


@pytest.mark.parametrize(
  "along, kind",
  [(HEADS_TOO, "explicit"), (BATCH_ALONE, "named"), (HEADS_TOO, "constrained")],
)
def test_the_shards_are_the_querys_whatever_the_axes_are_called(along, kind):
  axes = dict(query="BTNH", key="BSKH", value="BSKH", key_table="RNH", value_table="RH")
  attention = ON_TPUS if kind == "explicit" else in_tiles
  check_eight_devices_equal_one(call, attention, axes, along, kind=kind)


def test_tpus_follow_explicit_axes_and_usual_names_and_warn_of_others(monkeypatch):
  monkeypatch.setattr(partitioned, "target_platform", lambda: "tpu")
  axes = dict(query="BTNH", key="BSKH", value="BSKH", key_table="RNH", value_table="RH")
  check_eight_devices_equal_one(call, CHUNKED, axes, HEADS_TOO, kind="explicit")
  x = jax.ShapeDtypeStruct((8, 32, 2, 16), jnp.float32)
  for names in (("fsdp", "tp"), ("fsdp", "megatron")):
    mesh = jax.make_mesh((4, 2), names, axis_types=(AxisType.Auto,) * 2)
    is_usual = "tp" in names
    warns = contextlib.nullcontext() if is_usual else pytest.warns(match="megatron.*mesh_axes")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), warns:
      jaxpr = jax.make_jaxpr(functools.partial(dot_product_attention, implementation="chunked"))
      specs = re.search(r"in_specs=.*", str(jaxpr(x, x, x)))
    assert specs and ("tp" in specs[0]) == is_usual and "fsdp" in specs[0]


def test_some_axes_may_be_manual():
  mesh = jax.make_mesh((4, 2), ("stage", "tp"), axis_types=(AxisType.Auto,) * 2)
  query = jnp.asarray(np.random.default_rng(0).normal(size=(8, 24, 4, 16)), jnp.float32)
  table = jnp.ones((9, 16)).at[3:].set(2.0)
  attend = lambda q, table: dot_product_attention(
    q, q, q, relations=RelativePositions(table, table), implementation="chunked"
  )
  one_stage = jax.shard_map(
    attend,
    mesh=mesh,
    axis_names={"stage"},
    in_specs=(PartitionSpec("stage"), PartitionSpec()),
    out_specs=PartitionSpec("stage"),
  )
  loss = lambda attend: quickly(jax.grad(lambda *args: jnp.sum(attend(*args) ** 2), (0, 1)))
  found, wanted = loss(one_stage)(query, table), loss(attend)(query, table)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3), found, wanted)


@pytest.mark.parametrize("kind", ["auto", "named"])
def test_each_device_has_the_offsets_of_its_sequences(kind):
  axes = dict(query="BTNH", key="BSKH", value="BSKH", key_table="RNH", value_table="RH")
  options = dict(is_causal=True, dropout_rate=0.3, dropout_key=jax.random.key(0))
  attend = functools.partial(call, query_offset=jnp.arange(-8, 24, 4), **options)
  check_eight_devices_equal_one(attend, in_blocks, axes, HEADS_TOO, kind=kind)


def test_no_axis_of_a_mesh_is_left_to_the_compiler():
  # XLA refuses kernels for TPUs under a mesh with an automatic axis, even one of size 1.
  mesh = jax.make_mesh((8, 1, 1), ("rows", "tensor", "other"), (AxisType.Auto,) * 3)
  x = jax.ShapeDtypeStruct((8, 32, 2, 16), jnp.float32)
  attend = functools.partial(dot_product_attention, implementation="pallas_tpu")
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), mesh_axes(batch="rows"):
    jaxpr = jax.make_jaxpr(attend)(x, x, x)
  found = re.search(r"manual_axes=frozenset\(\{([^}]*)\}", str(jaxpr))
  assert found and {*re.findall(r"\w+", found[1])} == {*mesh.axis_names}


@pytest.mark.parametrize(
  "bias, heads, along",
  [("BNTS", "K", HEADS_TOO), ("1NTS", "N", HEADS_TOO), ("11TS", "K", BATCH_ALONE)],
)
def test_each_device_has_its_part_of_a_bias(bias, heads, along):
  key = f"BS{heads}H"
  axes = dict(query="BTNH", key=key, value=key, bias=bias, key_table="RNH", value_table="RH")
  options = {}
  if heads == "K":
    mask = np.random.default_rng(1).random([SIZES[letter] for letter in "BNTS"]) < 0.8
    options = dict(mask=mask, dropout_rate=0.3, dropout_key=jax.random.key(0))
  attend = functools.partial(call, **options)
  check_eight_devices_equal_one(attend, in_blocks, axes, along)


@pytest.mark.parametrize("num_biases, bias", [(4, "BNTS"), (2, "ANTS")])
def test_each_device_has_the_biases_of_its_sequences(num_biases, bias):
  """Gathers sequences if their biases are too few to be shared out."""
  axes = dict(query="BTNH", key="BSNH", value="BSNH", bias=bias, key_table="RH", value_table="RH")

  def attend(attention, arrays):
    arrays = dict(arrays)
    biases = arrays.pop("bias").reshape(num_biases, -1, 4, 24, 24)[:, :1]
    for name in ("query", "key", "value"):
      arrays[name] = arrays[name].reshape(num_biases, -1, *arrays[name].shape[1:])
    return call(attention, arrays | dict(bias=biases)).reshape(8, 24, 4, 16)

  stays = num_biases == 4
  check_eight_devices_equal_one(attend, in_blocks, axes, dict(B="rows"), stays=stays)


def test_a_sum_over_an_uneven_batch_counts_nothing_else():
  # Six sequences on four devices: the last one has two of padding.
  axes = dict(query="BTNH", key="BSNH", value="BSNH", bias="11TS", key_table="RH", value_table="RH")

  def attend(attention, arrays):
    six = {name: arrays[name][:6] for name in ("query", "key", "value")}
    output = call(attention, arrays | six)
    return jnp.pad(output, ((0, 2), (0, 0), (0, 0), (0, 0)), constant_values=1)

  check_eight_devices_equal_one(attend, in_blocks, axes, HEADS_TOO, stays=False)


ALONG_A_SEQUENCE = dict(T="tokens", S="tokens", N="megatron", K="megatron")


@pytest.mark.parametrize(
  "heads, is_causal, offset, kind",
  [
    ("N", True, 0, "named"),
    ("K", False, 0, "auto"),
    ("N", True, 7, "auto"),
    ("N", True, np.arange(-8, 24, 4), "auto"),
    ("K", True, 6, "named"),
  ],
)
def test_a_sequence_may_lie_on_several_devices(heads, is_causal, offset, kind):
  # Keys and values are gathered and their gradients scattered; queries stay.
  key = f"BS{heads}H"
  axes = dict(query="BTNH", key=key, value=key, key_table="RNH", value_table="RH", bias="BNTP")
  options = dict(is_causal=is_causal, query_offset=offset)
  if heads == "K":
    ids = jnp.arange(24, dtype=jnp.int32) // 7
    options |= dict(query_segment_ids=ids, key_segment_ids=ids)
    options |= dict(dropout_rate=0.3, dropout_key=jax.random.key(0))
  attend, along = functools.partial(call, **options), ALONG_A_SEQUENCE
  text = check_eight_devices_equal_one(attend, in_blocks, axes, along, stays=False, kind=kind)
  moved = lambda name: re.findall(rf"= f32\[([\d,]+)\]\S* {name}(?:-start)?\(", text)
  sizes = lambda shape: sorted(map(int, shape.split(",")))
  keys = sorted([SIZES["B"], SIZES["S"], SIZES[heads] // 2, SIZES["H"]])
  assert all(sizes(shape) == keys for shape in moved("all-gather"))
  assert len(moved("reduce-scatter")) == 2 and not moved("all-to-all")


@pytest.mark.parametrize(
  "attention, along, kind",
  [
    (PROJECTED, HEADS_TOO, "auto"),
    (SKEW, HEADS_TOO, "explicit"),
    *((in_blocks, along, "auto") for along in (HEADS_TOO, ALONG_A_SEQUENCE)),
  ],
)
def test_a_sum_of_relations(attention, along, kind):
  axes = dict(query="BTNH", key="BSKH", value="BSKH", content="BTNH")
  axes |= dict(table="RH", bias="RN", slopes="N", key_table="RNH")

  def attend(attention, arrays):
    query, key, value, content, table, bias, slopes, key_table = map(arrays.get, axes)
    relations = ContentBias(content, table), DistanceBias(bias, left=2), LinearBias(slopes)
    relations += (KeyBias(key_table),)
    return attention(query, key, value, relations=relations)

  stays = along is HEADS_TOO
  check_eight_devices_equal_one(attend, attention, axes, along, stays, kind)


@pytest.mark.parametrize("along", [HEADS_TOO, ALONG_A_SEQUENCE])
@pytest.mark.parametrize("attention", [ON_GPUS, in_tiles])
def test_kernels_gather_the_queries_of_a_sequence(attention, along):
  axes = dict(query="BTNH", key="BSKH", value="BSKH", key_table="RNH", value_table="RH", bias="RN")
  ids = jnp.arange(24, dtype=jnp.int32) // 7
  options = dict(is_causal=True, dropout_rate=0.3, dropout_key=jax.random.key(0))
  options |= dict(query_segment_ids=ids, key_segment_ids=ids)

  def attend(attention, arrays):
    query, key, value, *tables, bias = map(arrays.get, axes)
    relations = RelativePositions(*tables), DistanceBias(bias)
    return attention(query, key, value, relations=relations, **options)

  check_eight_devices_equal_one(attend, attention, axes, along, stays=along is HEADS_TOO)


def test_tables_learn_from_all_devices_of_a_sequence_though_keys_do_not_divide():
  axes = dict(query="BTNH", key="BSNH", value="BSNH", key_table="RNH", value_table="RH")

  def attend(attention, arrays):
    fewer = {name: arrays[name][:, :21] for name in ("key", "value")}
    return call(attention, arrays | fewer)

  along = dict(T="tokens", N="megatron")
  check_eight_devices_equal_one(attend, in_blocks, axes, along, stays=False)


@pytest.mark.parametrize("attention", [SKEW, CHUNKED])
def test_callers_may_shard_a_sequence_themselves(attention):
  axes = dict(query="BTNH", key="BSKH", value="BSKH", key_table="RNH", value_table="RH")

  def attend(attention, arrays):
    offset = jax.lax.axis_index("tokens") * 6 if arrays["query"].shape[1] == 6 else 0
    return call(attention, arrays, is_causal=True, query_offset=offset)

  along = dict(T="tokens", N="megatron", K="megatron")
  check_eight_devices_equal_one(attend, attention, axes, along, kind="manual")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_kernels_refuse_a_mesh_that_shards_the_queries(kind):
  mesh = jax.make_mesh((8,), ("tokens",), (kind,))
  with jax.set_mesh(mesh), mesh_axes(queries="tokens"):
    x = jax.device_put(np.ones((2, 32, 2, 16)), jax.NamedSharding(mesh, jax.P(None, "tokens")))
    for name in ("pallas_tpu", "pallas_gpu"):
      with pytest.raises(NotImplementedError, match=r"shards queries over \('tokens',\)"):
        dot_product_attention(x, x, x, implementation=name)


def test_mesh_axes_have_usual_names_by_default_and_refuse_those_that_the_mesh_lacks():
  x = jnp.ones((8, 32, 2, 16))
  mesh = jax.make_mesh((4, 2), ("rows", "tensor"), (AxisType.Auto,) * 2)
  with jax.set_mesh(mesh), mesh_axes(batch="rows"):
    assert partitioned.axes_in_context() == dict(B=("rows",), N=("tensor",), T=())
  with jax.set_mesh(mesh), mesh_axes(batch="row"), pytest.raises(ValueError, match=r"row.*rows"):
    dot_product_attention(x, x, x, implementation="chunked")
