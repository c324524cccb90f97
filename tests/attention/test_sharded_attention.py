"""Law 11: sharded over batch, heads or the sequence the result is one device's."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quickly
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from relpos_jax import RelativePositions, dot_product_attention
from relpos_jax.attention import chunked, pallas_tpu
from relpos_jax.attention.choice import IMPLEMENTATIONS
from relpos_jax.attention.inputs import gather_inputs

# Of the axes by letter; others have size 1.
SIZES = dict(B=8, T=24, S=24, P=24, N=4, K=2, H=16, R=9)
HEADS_TOO = dict(B="data", N="model", K="model")
BATCH_ALONE = dict(B=("data", "model"))


def check_eight_devices_equal_one(attend, axes, along, stays=True, in_context=False):
  """Checks `attend` of a dict of arrays with these axes, and returns the compiled text.

  `along` has the mesh axes of a letter; if the arrays stay, devices exchange nothing but sums.
  """
  random = np.random.default_rng(0).normal
  shape = lambda letters: [SIZES.get(letter, 1) for letter in letters]
  arrays = {name: jnp.asarray(random(size=shape(x)), jnp.float32) for name, x in axes.items()}

  def output_and_gradients(arrays):
    output, pull_back = jax.vjp(attend, arrays)
    return output, *pull_back(output)

  names = ("sequence" if "T" in along else "data", "model")
  mesh = jax.make_mesh((4, 2), names, axis_types=(AxisType.Auto,) * 2)
  place = lambda letters: NamedSharding(mesh, PartitionSpec(*map(along.get, letters)))
  places = {name: place(letters) for name, letters in axes.items()}
  jit = functools.partial(quickly, output_and_gradients)
  sharded = jit(in_shardings=(places,), out_shardings=(place("BTNH"), places))
  with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
    compiled = sharded.lower(arrays).compile()
  moves = "(all-gather|all-to-all|collective-permute)"
  assert not stays or not re.findall(rf"= .*? {moves}(?:-start)?\(", compiled.as_text())
  for one, eight in zip(
    jax.tree.leaves(jit()(arrays)),
    jax.tree.leaves(compiled(arrays)),
    strict=True,
  ):
    np.testing.assert_allclose(eight, one, rtol=1e-4, atol=1e-4)
  return compiled.as_text()


def call(attention, arrays, **options):
  arrays = dict(arrays)
  relations = RelativePositions(arrays.pop("key_table"), arrays.pop("value_table"))
  return attention(**arrays, relations=relations, **options)


def in_blocks(*args, **options):
  return chunked.attention(gather_inputs(*args, **options), block=8)


def in_tiles(*args, **options):
  return pallas_tpu.attention(gather_inputs(*args, **options), block=2, lanes=2)


@pytest.mark.parametrize("table", ["RH", "RNH"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_eight_devices_equal_one(implementation, table):
  axes = dict(query="BTNH", key="BSNH", value="BSNH", key_table=table, value_table=table)
  if table == "RH" and IMPLEMENTATIONS[implementation].device is None:  # the kernels take none
    axes |= dict(bias="1NTS")
  options = dict(is_causal=True, implementation=implementation)
  attend = lambda arrays: call(dot_product_attention, arrays, **options)
  check_eight_devices_equal_one(attend, axes, HEADS_TOO)


@pytest.mark.parametrize("along", [HEADS_TOO, BATCH_ALONE])
def test_a_mesh_in_context_determines_the_shards(along):
  axes = dict(query="BTNH", key="BSKH", value="BSKH", key_table="RNH", value_table="RH")
  attend = lambda arrays: call(in_tiles, arrays, is_causal=True)
  check_eight_devices_equal_one(attend, axes, along, along is HEADS_TOO, in_context=True)


@pytest.mark.parametrize("attention", [in_blocks, in_tiles])
@pytest.mark.parametrize("in_context", [False, True])
def test_each_device_has_the_offsets_of_its_sequences(in_context, attention):
  axes = dict(query="BTNH", key="BSKH", value="BSKH", key_table="RNH", value_table="RH")
  options = dict(is_causal=True, dropout_rate=0.3, dropout_key=jax.random.key(0))
  attend = lambda arrays: call(attention, arrays, query_offset=jnp.arange(-8, 24, 4), **options)
  check_eight_devices_equal_one(attend, axes, HEADS_TOO, in_context=in_context)


def test_no_axis_of_a_mesh_is_left_to_the_compiler():
  # XLA refuses kernels for TPUs under a mesh with an automatic axis, even one of size 1.
  mesh = jax.make_mesh((8, 1, 1), ("data", "tensor", "other"), (AxisType.Auto,) * 3)
  x = jax.ShapeDtypeStruct((8, 32, 2, 16), jnp.float32)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    jaxpr = jax.make_jaxpr(in_tiles)(x, x, x)
  found = re.search(r"manual_axes=frozenset\(\{([^}]*)\}", str(jaxpr))
  assert found and {*re.findall(r"\w+", found[1])} == {*mesh.axis_names}


@pytest.mark.parametrize(
  "bias, heads, along",
  [(bias, heads, HEADS_TOO) for bias in ("BNTS", "1NTS", "11TS") for heads in "NK"]
  + [("11TS", "K", BATCH_ALONE)],
)
def test_each_device_has_its_part_of_a_bias(bias, heads, along):
  key = f"BS{heads}H"
  axes = dict(query="BTNH", key=key, value=key, bias=bias, key_table="RNH", value_table="RH")
  options = {}
  if heads == "K":
    mask = np.random.default_rng(1).random([SIZES[letter] for letter in "BNTS"]) < 0.8
    options = dict(mask=mask, dropout_rate=0.3, dropout_key=jax.random.key(0))
  attend = lambda arrays: call(in_blocks, arrays, **options)
  check_eight_devices_equal_one(attend, axes, along)


def test_a_sum_over_an_uneven_batch_counts_nothing_else():
  # Six sequences on four devices: the last one has two of padding.
  axes = dict(query="BTNH", key="BSNH", value="BSNH", bias="11TS", key_table="RH", value_table="RH")

  def attend(arrays):
    six = {name: arrays[name][:6] for name in ("query", "key", "value")}
    output = call(in_blocks, arrays | six)
    return jnp.pad(output, ((0, 2), (0, 0), (0, 0), (0, 0)), constant_values=1)

  check_eight_devices_equal_one(attend, axes, HEADS_TOO, stays=False)


ALONG_A_SEQUENCE = dict(T="sequence", S="sequence", N="model", K="model")


@pytest.mark.parametrize("in_context", [False, True])
@pytest.mark.parametrize(
  "heads, implementation, is_causal, offset",
  [
    ("N", "chunked", True, 0),
    ("K", "chunked", False, 0),
    ("K", "pallas_tpu", True, 0),
    ("N", "chunked", True, 7),
    ("N", "chunked", True, np.arange(-8, 24, 4)),
    ("K", "pallas_tpu", True, 6),
  ],
)
def test_a_sequence_may_lie_on_several_devices(
  heads, implementation, is_causal, offset, in_context
):
  # Keys and values are gathered and their gradients scattered; queries stay.
  key = f"BS{heads}H"
  axes = dict(query="BTNH", key=key, value=key, key_table="RNH", value_table="RH")
  options = dict(is_causal=is_causal, query_offset=offset)
  attention = in_blocks if implementation == "chunked" else in_tiles
  if implementation == "chunked":
    axes |= dict(bias="BNTP")
  elif heads == "K":
    options |= dict(query_segment_ids=jnp.arange(24) // 7, key_segment_ids=jnp.arange(24) // 7)
  if heads == "K":
    options |= dict(dropout_rate=0.3, dropout_key=jax.random.key(0))
  attend = lambda arrays: call(attention, arrays, **options)
  along = ALONG_A_SEQUENCE
  text = check_eight_devices_equal_one(attend, axes, along, stays=False, in_context=in_context)
  moved = lambda name: re.findall(rf"= f32\[([\d,]+)\]\S* {name}(?:-start)?\(", text)
  sizes = lambda shape: sorted(map(int, shape.split(",")))
  keys = sorted([SIZES["B"], SIZES["S"], SIZES[heads] // 2, SIZES["H"]])
  assert all(sizes(shape) == keys for shape in moved("all-gather"))
  assert len(moved("reduce-scatter")) == 2 and not moved("all-to-all")


def test_tables_learn_from_all_devices_of_a_sequence_though_keys_do_not_divide():
  axes = dict(query="BTNH", key="BSNH", value="BSNH", key_table="RNH", value_table="RH")

  def attend(arrays):
    fewer = {name: arrays[name][:, :21] for name in ("key", "value")}
    return call(in_blocks, arrays | fewer)

  check_eight_devices_equal_one(attend, axes, dict(T="sequence", N="model"), stays=False)


def test_explicit_mesh_axes_are_refused():
  mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
  query = jax.device_put(jnp.ones((2, 3, 1, 4)), NamedSharding(mesh, PartitionSpec("data")))
  table = RelativePositions(jnp.ones((3, 4)), None)
  with pytest.raises(ValueError, match=r"query is sharded over explicit .*AxisType.Auto"):
    dot_product_attention(query, query, query, relations=table)
