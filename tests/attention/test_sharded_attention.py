"""Laws 11 and 16: several devices give one device's results and gradients.

They share the batch, heads or the sequence, whose keys are gathered or go round a ring.
"""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import as_users_do, quickly, with_gradients
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kernel_calls import DROPOUT

from relpos_jax import (
  ContentBias,
  DistanceBias,
  EdgeLabels,
  FunctionBias,
  KeyBias,
  LinearBias,
  RelativePositions,
  dot_product_attention,
  explain,
  mesh_axes,
)
from relpos_jax.attention import band, chunked, partitioned, ring
from relpos_jax.attention.choice import IMPLEMENTATIONS
from relpos_jax.attention.inputs import gather_inputs

# By the name of an array, the relation of it and others.
RELATIONS = dict(
  value_table=lambda x: RelativePositions(x["key_table"], x["value_table"]),
  bias_table=lambda x: DistanceBias(x["bias_table"], beyond="zero", left=6),
  by_key_table=lambda x: KeyBias(x["by_key_table"]),
  slopes=lambda x: LinearBias(x["slopes"]),
  content=lambda x: ContentBias(x["content"], x["content_table"]),
)


def call(attention, arrays, **options):
  """Calls an attention function with arrays, and the relations of those that are there."""
  relations = tuple(make(arrays) for name, make in RELATIONS.items() if name in arrays)
  names = "query", "key", "value", "bias", "sinks"
  given = {name: arrays[name] for name in names if name in arrays}
  return attention(**given, relations=relations, **options)


def call_by(name, *args, **options):
  return dot_product_attention(*args, **options, implementation=name)


def places_of(axes, mesh, along):
  """Returns the sharding of each array, of whose axes `along` has the mesh axes by letter."""
  spec = lambda letters: PartitionSpec(*map(along.get, letters))
  return {name: NamedSharding(mesh, spec(letters)) for name, letters in axes.items()}


def check_devices_equal_one(
  attend, attention, axes, sizes, along, mesh, kind, is_ring=False
):
  """Checks `attend(attention, arrays)` of arrays with these axes, and returns the
  compiled text.

  `sizes` are those of the axes by letter, 1 if absent, and `mesh` those of the mesh
  axes by name. The mesh is in context if its axes are "explicit", "named", or
  "constrained" in the program alone; "manual" is in `jax.shard_map`. On a ring, keys
  are sharded as queries, and it is in float64.
  """
  dtype, tolerance = (jnp.float64, 1e-10) if is_ring else (jnp.float32, 1e-4)
  random = np.random.default_rng(0).normal
  arrays = {
    name: jnp.asarray(random(size=[sizes.get(x, 1) for x in letters]), dtype)
    for name, letters in axes.items()
  }
  axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
  mesh = jax.make_mesh((*mesh.values(),), (*mesh,), axis_types=(axis_type,) * len(mesh))
  places = places_of(axes, mesh, along)
  output = places_of(dict(output="BTNH"), mesh, along)["output"]
  wanted = functools.partial(attend, functools.partial(call_by, "reference"))
  wanted = quickly(functools.partial(with_gradients, wanted))(arrays)
  attend = functools.partial(attend, attention)
  context = contextlib.nullcontext()
  specs = {name: place.spec for name, place in places.items()}
  if kind == "constrained":
    unplaced = attend
    attend = lambda arrays: unplaced(jax.lax.with_sharding_constraint(arrays, specs))
  elif kind == "manual":
    attend = jax.shard_map(attend, mesh=mesh, in_specs=(specs,), out_specs=output.spec)
  elif kind == "named" or is_ring:
    first = lambda letter: along.get(letter, ())
    keys = dict(keys=first("S")) if is_ring else {}
    context = mesh_axes(batch=first("B"), heads=first("N"), queries=first("T"), **keys)
  is_placed = kind not in ("explicit", "constrained") and not is_ring
  out = dict(out_shardings=(output, (places,))) if is_placed else {}
  is_in_context = kind in ("explicit", "named", "constrained")
  with context, jax.set_mesh(mesh) if is_in_context else contextlib.nullcontext():
    if kind != "constrained":
      arrays = jax.device_put(arrays, places)
    compiled = (
      quickly(functools.partial(with_gradients, attend), **out).lower(arrays).compile()
    )
    found = compiled(arrays)
  close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
  jax.tree.map(close, found, wanted)
  if kind == "explicit":
    assert jax.typeof(found[0]).sharding.spec == output.spec
  return compiled.as_text()


# Of the axes by letter; others have size 1.
SIZES = dict(A=2, B=8, T=24, S=24, P=24, N=4, K=2, H=16, R=9)
AXES = dict(query="BTNH", key="BSKH", value="BSKH", key_table="RNH", value_table="RH")
ALL_HEADS = dict(key="BSNH", value="BSNH")
# Names of mesh axes that the package does not know.
HEADS_TOO = dict(B="rows", N="megatron", K="megatron")
BATCH_ALONE = dict(B=("megatron", "rows"))
ALONG_A_SEQUENCE = dict(T="tokens", S="tokens", N="megatron", K="megatron")


def check(attend, attention, axes, along=HEADS_TOO, stays=True, kind="auto"):
  """Checks 4 x 2 devices against one; if the arrays stay, they exchange nothing but sums."""
  mesh = {"tokens" if "T" in along else "rows": 4, "megatron": 2}
  text = check_devices_equal_one(
    attend, attention, AXES | axes, SIZES, along, mesh, kind
  )
  moves = "(all-gather|all-to-all|collective-permute)"
  assert not stays or not re.findall(rf"= .*? {moves}(?:-start)?\(", text)
  return text


PROJECTED, SKEW, CHUNKED, ON_GPUS = (
  functools.partial(call_by, name)
  for name in ("projected", "skew", "chunked", "pallas_gpu")
)


def in_blocks(*args, **options):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(band, "_choose_sizes", lambda *_: (8, 16, None))
    return chunked.attention(gather_inputs(*args, **options))


@pytest.mark.parametrize("kind", ["auto", "explicit", "manual"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_eight_devices_equal_one(implementation, kind):
  axes = ALL_HEADS | dict(key_table="RH", value_table="RNH")
  if IMPLEMENTATIONS[implementation].device is None:  # the kernels take none
    axes |= dict(bias="1NTS")
  elif kind == "auto":  # they need the mesh in context
    kind = "named"
  attend = functools.partial(call, is_causal=True)
  check(attend, functools.partial(call_by, implementation), axes, kind=kind)


IDS = jnp.arange(24, dtype=jnp.int32) // 7
SEGMENTS = dict(query_segment_ids=IDS, key_segment_ids=IDS)
MASK = dict(mask=np.random.default_rng(1).random((8, 4, 24, 24)) < 0.8)
OFFSETS = dict(query_offset=jnp.arange(-8, 24, 4), is_causal=True)
SUM = dict(
  content="BTNH", content_table="RH", bias_table="RN", slopes="N", by_key_table="RNH"
)

# By name: the implementation, axes, mesh axes along them, how these are known, and the
# options.
CASES = {
  "explicit": (ON_GPUS, {}, HEADS_TOO, "explicit", {}),
  "named": (ON_GPUS, {}, BATCH_ALONE, "named", {}),
  "constrained": (CHUNKED, {}, HEADS_TOO, "constrained", {}),
  "offsets": (in_blocks, {}, HEADS_TOO, "auto", OFFSETS | DROPOUT),
  "offsets, named": (in_blocks, {}, HEADS_TOO, "named", OFFSETS | DROPOUT),
  "a bias of pairs": (in_blocks, dict(bias="BNTS"), HEADS_TOO, "auto", MASK | DROPOUT),
  "a bias by head": (in_blocks, dict(bias="1NTS") | ALL_HEADS, HEADS_TOO, "auto", {}),
  "a bias of all": (in_blocks, dict(bias="11TS"), BATCH_ALONE, "auto", MASK | DROPOUT),
  "a sum, projected": (PROJECTED, SUM, HEADS_TOO, "auto", {}),
  "a sum, skew": (SKEW, SUM, HEADS_TOO, "explicit", {}),
  "a sum": (in_blocks, SUM, HEADS_TOO, "auto", {}),
  "a sum along a sequence": (in_blocks, SUM, ALONG_A_SEQUENCE, "auto", {}),
}
options = dict(is_causal=True) | SEGMENTS | DROPOUT
CASES["kernels for GPUs"] = (
  ON_GPUS,
  dict(bias_table="RN"),
  HEADS_TOO,
  "named",
  options,
)


@pytest.mark.parametrize("name", CASES)
def test_each_device_has_its_part(name):
  attention, axes, along, kind, options = CASES[name]
  stays = along is not ALONG_A_SEQUENCE
  check(functools.partial(call, **options), attention, axes, along, stays, kind)


def test_some_axes_may_be_manual():
  mesh = jax.make_mesh((4, 2), ("stage", "tp"), axis_types=(AxisType.Auto,) * 2)
  query = jnp.asarray(np.random.default_rng(0).normal(size=(8, 24, 4, 16)), jnp.float32)
  table = jnp.ones((9, 16)).at[3:].set(2.0)
  attend = lambda q, table: dot_product_attention(
    q, q, q, relations=RelativePositions(table, table), implementation="chunked"
  )
  rows = PartitionSpec("stage")
  sides = dict(mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows)
  one_stage = jax.shard_map(attend, axis_names={"stage"}, **sides)
  both = lambda attend: quickly(functools.partial(with_gradients, attend))(query, table)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
  jax.tree.map(close, both(one_stage), both(attend))


@pytest.mark.parametrize("num_biases, bias", [(4, "BNTS"), (2, "ANTS")])
def test_each_device_has_the_biases_of_its_sequences(num_biases, bias):
  """Gathers sequences if their biases are too few to be shared out."""

  def attend(attention, arrays):
    biases = arrays["bias"].reshape(num_biases, -1, 4, 24, 24)[:, :1]
    split = lambda x: x.reshape(num_biases, -1, *x.shape[1:])
    parts = {name: split(arrays[name]) for name in ("query", "key", "value")}
    return call(attention, arrays | parts | dict(bias=biases)).reshape(8, 24, 4, 16)

  stays = num_biases == 4
  check(attend, in_blocks, dict(bias=bias) | ALL_HEADS, dict(B="rows"), stays=stays)


def test_a_sum_over_an_uneven_batch_counts_nothing_else():
  # Six sequences on four devices: the last one has two of padding.
  def attend(attention, arrays):
    six = {name: arrays[name][:6] for name in ("query", "key", "value")}
    output = call(attention, arrays | six)
    return jnp.pad(output, ((0, 2), (0, 0), (0, 0), (0, 0)), constant_values=1)

  check(attend, in_blocks, dict(bias="11TS") | ALL_HEADS, stays=False)


@pytest.mark.parametrize(
  "heads, is_causal, offset, kind",
  [
    ("N", True, 0, "named"),
    ("K", False, 0, "named"),
    ("N", True, 7, "named"),
    ("N", True, np.arange(-8, 24, 4), "named"),
    ("K", True, 6, "named"),
  ],
)
def test_a_sequence_may_lie_on_several_devices(heads, is_causal, offset, kind):
  # Keys and values are gathered and their gradients scattered; queries stay.
  axes = dict(bias="BNTP") | (ALL_HEADS if heads == "N" else {})
  options = dict(is_causal=is_causal, query_offset=offset)
  options |= SEGMENTS | DROPOUT if heads == "K" else {}
  attend = functools.partial(call, **options)
  text = check(attend, in_blocks, axes, ALONG_A_SEQUENCE, stays=False, kind=kind)
  moved = lambda name: re.findall(rf"= f32\[([\d,]+)\]\S* {name}(?:-start)?\(", text)
  sizes = lambda shape: sorted(map(int, shape.split(",")))
  keys = sorted([SIZES["B"], SIZES["S"], SIZES[heads] // 2, SIZES["H"]])
  assert all(sizes(shape) == keys for shape in moved("all-gather"))
  assert len(moved("reduce-scatter")) == 2 and not moved("all-to-all")


def test_tables_learn_from_all_devices_of_a_sequence_though_keys_do_not_divide():
  def attend(attention, arrays):
    fewer = {name: arrays[name][:, :21] for name in ("key", "value")}
    return call(attention, arrays | fewer)

  check(attend, in_blocks, ALL_HEADS, dict(T="tokens", N="megatron"), stays=False)


@pytest.mark.parametrize("attention", [SKEW, CHUNKED])
def test_callers_may_shard_a_sequence_themselves(attention):
  def attend(attention, arrays):
    offset = jax.lax.axis_index("tokens") * 6 if arrays["query"].shape[1] == 6 else 0
    return call(attention, arrays, is_causal=True, query_offset=offset)

  along = dict(T="tokens", N="megatron", K="megatron")
  check(attend, attention, {}, along, kind="manual")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_kernels_refuse_a_mesh_that_shards_the_queries(kind):
  mesh = jax.make_mesh((8,), ("tokens",), (kind,))
  with jax.set_mesh(mesh), mesh_axes(queries="tokens"):
    x = jax.device_put(
      np.ones((2, 32, 2, 16)), jax.NamedSharding(mesh, jax.P(None, "tokens"))
    )
    with pytest.raises(NotImplementedError, match=r"shards queries over \('tokens',\)"):
      dot_product_attention(x, x, x, implementation="pallas_gpu")


def test_mesh_axes_have_usual_names_by_default_and_refuse_those_that_the_mesh_lacks():
  x = jnp.ones((8, 32, 2, 16))
  mesh = jax.make_mesh((4, 2), ("rows", "tensor"), (AxisType.Auto,) * 2)
  with jax.set_mesh(mesh), mesh_axes(batch="rows"):
    assert partitioned.axes_in_context() == dict(B=("rows",), N=("tensor",), T=())
  with (
    jax.set_mesh(mesh),
    mesh_axes(batch="row"),
    pytest.raises(ValueError, match=r"row.*rows"),
  ):
    dot_product_attention(x, x, x, implementation="chunked")


# A ring.
RING_SIZES = dict(B=2, T=32, S=32, N=4, K=2, H=8, V=6, R=9, P=3)
RING_AXES = dict(query="BTNH", key="BSKH", value="BSKV")
VECTORS = dict(key_table="RNH", value_table="RV")
CONTENT = dict(content="BTNP", content_table="RP")
RING_ALONG = dict(B="data", N="tensor", K="tensor", T="sequence", S="sequence")
MOVES = r"= .*? (all-\w+|reduce-scatter|collective-\w+?)(?:-start)?\("
RING_IDS = jnp.arange(32, dtype=jnp.int32) // 11


def lay_out(devices: int):
  """Returns a mesh, and the context in which its axis "sequence" shards queries and keys."""
  mesh = jax.make_mesh((devices,), ("sequence",), axis_types=(AxisType.Auto,))
  return mesh, mesh_axes(queries="sequence", keys="sequence")


ALL = dict(sequence=8)
RING_SUM = CONTENT | VECTORS | dict(slopes="N", bias_table="RN", by_key_table="RNH")
RING_SEGMENTS = dict(query_segment_ids=RING_IDS, key_segment_ids=RING_IDS)
LENGTHS = dict(key_value_seq_lengths=np.array([32, 13]))


@pytest.mark.parametrize(
  "axes, mesh, options",
  [
    (VECTORS, ALL, dict(is_causal=True)),
    (VECTORS, dict(data=2, sequence=4), dict(query_offset=np.array([5, -9]))),
    (
      VECTORS | dict(sinks="N"),
      ALL,
      dict(return_residual=True) | RING_SEGMENTS | DROPOUT,
    ),
    (VECTORS, dict(data=2, sequence=4), dict(kind="explicit", is_causal=True)),
    (dict(bias_table="RN"), ALL, dict(is_causal=True, query_offset=-7)),
    (
      dict(bias_table="R"),
      dict(sequence=4, tensor=2),
      dict(local_window_size=(9, 3)) | LENGTHS,
    ),
    (
      dict(slopes="N"),
      ALL,
      dict(
        is_causal=True, logits_soft_cap=2.0, local_window_size=12, return_residual=True
      ),
    ),
    (
      RING_SUM,
      dict(data=2, sequence=2, tensor=2),
      dict(is_causal=True, mask=np.arange(32) % 7 > 0) | DROPOUT,
    ),
    ({}, dict(data=1, sequence=3), dict(is_causal=True)),
  ],
)
@pytest.mark.usefixtures("float64")
def test_a_ring_equals_one_device(axes, mesh, options):
  """Checks results and the gradients of all arrays, and that keys go round."""
  sizes = RING_SIZES if 32 % mesh["sequence"] == 0 else RING_SIZES | dict(T=30, S=30)
  along = {letter: name for letter, name in RING_ALONG.items() if name in mesh}
  kind = options.get("kind", "named")
  attend = functools.partial(call, **{n: x for n, x in options.items() if n != "kind"})
  attention, axes = functools.partial(call_by, None), RING_AXES | axes
  text = check_devices_equal_one(
    attend, attention, axes, sizes, along, mesh, kind, is_ring=True
  )
  moves = {*re.findall(MOVES, text)}
  assert "collective-permute" in moves <= {"collective-permute", "all-reduce"}


def test_memory_falls_with_the_number_of_devices_and_keys_travel_in_their_own_dtype():
  axes = RING_AXES | dict(value="BSKH", key_table="RH", value_table="RH")
  shapes = dict(key_table=jax.ShapeDtypeStruct((9, 32), jnp.float32))
  shapes |= dict(value_table=shapes["key_table"])
  shapes |= dict.fromkeys(
    RING_AXES, jax.ShapeDtypeStruct((1, 4096, 2, 32), jnp.bfloat16)
  )

  def attend(arrays):
    relations = RelativePositions(arrays["key_table"], arrays["value_table"])
    return dot_product_attention(
      *map(arrays.get, RING_AXES), relations=relations, is_causal=True
    )

  def temporary_bytes(devices):
    mesh, context = lay_out(devices)
    with context, jax.set_mesh(mesh):
      run = functools.partial(with_gradients, attend)
      along = dict.fromkeys("TS", "sequence")
      lowered = as_users_do(run, in_shardings=(places_of(axes, mesh, along),)).lower(
        shapes
      )
    part = rf"collective_permute.*-> tensor<1x1x{4096 // devices}x2x32xbf16>"
    assert (
      len(re.findall(part, lowered.as_text())) == 2 * 2
    )  # keys and values, twice round
    return lowered.compile().memory_analysis().temp_size_in_bytes

  assert 8 * temporary_bytes(8) <= 1.1 * 2 * temporary_bytes(2)


def test_causal_work_is_the_same_on_all_devices_in_every_round():
  """Deals 16 chunks to 8 devices: of each, and of each round, two pairs are visible."""
  mesh, _ = lay_out(8)
  deal = jax.shard_map(
    functools.partial(ring._exchange_halves, ("sequence",)),
    mesh=mesh,
    in_specs=PartitionSpec(None, "sequence"),
    out_specs=PartitionSpec(None, "sequence"),
  )
  chunks = deal(jnp.arange(16)[None]).reshape(8, 2)
  pairs = sorted(sorted(pair) for pair in chunks.tolist())
  assert pairs == [[i, 15 - i] for i in range(8)]
  visible = (chunks[:, None, :, None] >= chunks[None, :, None]).sum((2, 3))
  assert (visible == 2 + jnp.eye(8, dtype=int)).all()


def test_the_ring_says_what_it_does_not_take_and_gathers_nothing_instead():
  x, odd = jnp.ones((2, 32, 4, 8)), jnp.ones((2, 36, 4, 8))
  mesh, context = lay_out(8)
  labels = EdgeLabels(jnp.ones((32, 32), int), jnp.ones((3, 8)), None)
  refused = [
    (
      "no FunctionBias",
      x,
      dict(relations=FunctionBias(lambda params, *_: params, jnp.ones(4))),
    ),
    ("no EdgeLabels", x, dict(relations=labels)),
    ("bias", x, dict(bias=jnp.ones((1, 1, 32, 32)))),
    ("mask has shape", x, dict(mask=jnp.ones((32, 32), bool))),
    ("positions", x, dict(key_positions=jnp.arange(32))),
    ("36 queries", odd, {}),
  ]
  with context, jax.set_mesh(mesh):
    assert (
      explain(x, x, x)
      .reasons["chunked"]
      .startswith("chosen, mesh_axes shards the keys")
    )
    for message, q, options in refused:
      with pytest.raises(NotImplementedError, match=rf"mesh_axes.*sequence.*{message}"):
        dot_product_attention(q, q, q, **options)
      why = explain(q, q, q, implementation="projected", **options).reasons["chunked"]
      assert message in why
  with pytest.raises(ValueError, match=r"keys is 'sequence'.*queries, None"):
    mesh_axes(keys="sequence")
  with context:  # without a mesh there is nothing to go round
    assert explain(x, x, x).implementation == "jax.nn"
