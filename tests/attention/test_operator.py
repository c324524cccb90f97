"""The operator's arguments and errors, the choice of the implementation, and jvp."""

import dataclasses
import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxtyping
import kernel_calls
import numpy as np
import pytest
from compiling import quickly, with_gradients
from flax import nnx
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from relpos_jax import (
  ContentBias,
  DistanceBias,
  EdgeFeatures,
  EdgeLabels,
  FunctionBias,
  KeyBias,
  LinearBias,
  RelativePositions,
  attention_weights,
  dot_product_attention,
  edge_attention,
  explain,
  rotate,
)
from relpos_jax.attention import partitioned
from relpos_jax.attention.choice import IMPLEMENTATIONS
from relpos_jax.nn import RelativePositionTables

QUERY = np.ones((2, 5, 4, 8), np.float32)
KEY = np.ones((2, 7, 2, 8), np.float32)
TABLE = np.ones((5, 8), np.float32)
RELATIONS = RelativePositions(TABLE, TABLE)
OWN_VJP = ["chunked", "pallas_gpu"]


def call(query=QUERY, key=KEY, value=KEY, relations=RELATIONS, **options):
  return dot_product_attention(query, key, value, relations=relations, **options)


CONTENT = np.ones((2, 5, 4, 3), np.float32)
LABELS = np.arange(35).reshape(5, 7)
TABLES = RelativePositionTables(2, 8, rngs=nnx.Rngs(0))


def on_edges(senders=(0, 1), receivers=(1, 0), labels=(0, 1), features=TABLE[:2, :2]):
  """Attends over two edges of four nodes."""
  tokens, table = np.ones((4, 2, 3)), np.ones((2, 3))
  senders, receivers, labels = map(np.array, (senders, receivers, labels))
  relations = dict(labels=EdgeLabels(labels, table, None))
  relations |= dict(features=EdgeFeatures(np.array(features), table, None))
  return edge_attention(tokens, tokens, tokens, senders, receivers, **relations)


WRONG_RELATIONS = {
  "relations is of type list; want RelativePositions, EdgeLabels, Ed": [RELATIONS],
  "relations[0] is float32 of shape (5, 8); want RelativePositions": (TABLE,),
  "relations is of type RelativePositionTables: call it; want RelativePositions": TABLES,
  "relations[1].table is float32 of shape (5, 3); want floating numbers of shape [R], shared by "
  "the heads, or [R, 4]": (RELATIONS, DistanceBias(TABLE[:, :3])),
  "relations.query has shape (5, 4, 3); want (2, 5, 4, 3)": ContentBias(
    CONTENT[0], TABLE[:, :3]
  ),
  "relations[1].slopes has shape (3,); want (4,)": (RELATIONS, LinearBias(np.ones(3))),
  "relations[1] has 4 rows; want an odd number, 2k + 1": (
    RELATIONS,
    KeyBias(TABLE[:4]),
  ),
  "relations.beyond is 'wrap'; want": ContentBias(CONTENT, TABLE[:, :3], "wrap"),
  "relations[0] has neither a key nor a value table": (
    RelativePositions(None, None),
    RELATIONS,
  ),
  "relations.key and relations.value have shapes (5, 8) and (3, 8)": RelativePositions(
    TABLE, TABLE[:3]
  ),
  "relations.labels go from 0 to 34; want 0 to 4, or -1": EdgeLabels(
    LABELS, TABLE, None
  ),
  "relations.labels has shape (7, 5); want (2, 5, 7) or (5, 7)": EdgeLabels(
    LABELS.T, TABLE, None
  ),
  "relations.function returns float32 of shape (3,); want a number, or [4]": FunctionBias(
    lambda *_: jnp.ones(3)
  ),
  "relations.of_query has an array of shape (4,); want [5, ": FunctionBias(
    lambda *_: 1.0, of_query=np.ones(4)
  ),
  "relations.of_pair has an array of shape (5,); want [5, 7, ...] or [2, ": FunctionBias(
    lambda *_: 1.0, of_pair=np.ones(5)
  ),
}
SQUARE = dict.fromkeys(("query", "key", "value"), np.ones((3, 3, 2, 4), np.float32))
BOTH = {
  "of_query": (np.ones((3, 3, 5)), "[1, 3, ...]"),
  "of_key": (np.ones((3, 3)), "[1, 3, ...]"),
  "of_pair": (np.ones((3, 3, 3)), "[1, 3, 3, ...]"),
}


def of_shared_or_own(field):
  """Calls the operator, for three sequences, on data that may be shared or not."""
  relation = FunctionBias(lambda *_: 1.0, **{field: dict(x=BOTH[field][0])})
  return dot_product_attention(**SQUARE, relations=relation)


WRONG_CALLS = {
  **{
    f"relations.{field} has an array of shape {x.shape}, which may be shared or not; "
    f"want {want} if it is": functools.partial(of_shared_or_own, field)
    for field, (x, want) in BOTH.items()
  },
  "buckets has 3 rows and max_distance is 128; want": lambda: DistanceBias.t5(
    np.ones((3, 8))
  ),
  "buckets has 10 rows and max_distance is 512; want": lambda: KeyBias.deberta(
    np.ones((10, 4))
  ),
  "x has shape (2, 5, 4, 7); want heads of an even": lambda: rotate(
    QUERY[..., 1:], np.arange(5)
  ),
  "positions has shape (4,); want (2, 5) or (5,)": lambda: rotate(QUERY, np.arange(4)),
  "frequencies has shape (5,); want at most (4,)": lambda: rotate(
    QUERY, np.arange(5), frequencies=np.ones(5)
  ),
  "senders go from 0 to 4; want 0 to 3, or -1": lambda: on_edges(senders=[0, 4]),
  "receivers has shape (3,); want (2,)": lambda: on_edges(receivers=[0, 0, 0]),
  "labels.labels go from 0 to 2; want 0 to 1, or -1": lambda: on_edges(labels=[0, 2]),
  "labels.labels has shape (3,); want (2,)": lambda: on_edges(labels=[0, 1, 1]),
  "features.features has shape (2, 3); want (2, 2)": lambda: on_edges(
    features=np.ones((2, 3))
  ),
}
WRONG = {
  "query is int32 of shape (2, 5, 4, 8); want floating": dict(query=QUERY.astype(int)),
  "key has 3 heads; want a divisor of the query's 4 heads": dict(
    key=np.ones((2, 7, 3, 8), "f4")
  ),
  "value has shape (2, 6, 2, 8); want [2, 7, 2, V] for key of shape (2, 7, 2, 8)": dict(
    value=KEY[:, 1:]
  ),
  "key and value have dtypes float16 and float32; want": dict(
    key=KEY.astype(np.float16)
  ),
  "bias has shape (5, 6); want one that broadcasts to (2, 4, 5, 7)": dict(
    bias=np.ones((5, 6))
  ),
  "bias is of type RelativePositions; want an array: give relations=": dict(
    bias=RELATIONS
  ),
  "bias has dtype bool; give it as mask=": dict(bias=np.ones((5, 7), bool)),
  "bias has dtype int32; want floating numbers": dict(bias=np.ones((5, 7), np.int32)),
  "bias has dtype complex64; want floating numbers": dict(bias=1j * np.ones((5, 7))),
  "mask has dtype int32; want bool": dict(mask=np.ones((2, 1, 1, 7), np.int32)),
  "mask has dtype key<fry>; want bool": dict(mask=jax.random.key(0)),
  "key_positions has shape (6,); want (2, 7) or (7,)": dict(key_positions=np.arange(6)),
  "query_offset is given with positions; want it or": dict(
    query_offset=1, key_positions=np.arange(7)
  ),
  "query_offset goes from 1073741825 to 1073741825; want -2**30 to 2**30": dict(
    query_offset=2**30 + 1
  ),
  "query_offset goes from 4294967296 to 4294967296; want -2**30": dict(
    query_offset=2**32
  ),
  "query_offset goes from -1073741825 to 3; want -2**30 to 2**30": dict(
    query_offset=jnp.array([-(2**30) - 1, 3])
  ),
  "local_window_size is -1; want None, or one or two": dict(local_window_size=-1),
  "want both query_segment_ids and key_segment": dict(
    query_segment_ids=np.ones((2, 5), int)
  ),
  **{
    message: dict(relations=relations) for message, relations in WRONG_RELATIONS.items()
  },
  "logits_soft_cap is 0.0; want a positive number or None": dict(logits_soft_cap=0.0),
  "dropout_rate is 0.1 and dropout_key is None": dict(dropout_rate=0.1),
  "implementation is 'flash'; want None, which chooses, or one of reference": dict(
    implementation="flash"
  ),
}


WRONG_CALLS |= {
  name: functools.partial(call, **options) for name, options in WRONG.items()
}
LARGE = jnp.array([3, 2**30 + 2])
WRONG_CALLS |= {
  "query_offset goes from 1073741825 to 1073741825": lambda: jax.jit(
    lambda q: call(q, query_offset=2**30 + 1)
  )(QUERY),
  "query_offset goes from 3 to 1073741826": lambda: jax.jit(
    functools.partial(call, query_offset=LARGE)
  )(QUERY),
}


@pytest.mark.parametrize("message", WRONG_CALLS)
def test_a_wrong_argument_is_named(message, monkeypatch):
  monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
  with pytest.raises(ValueError) as caught:
    WRONG_CALLS[message]()
  assert str(caught.value).startswith(message)
  assert "\n" not in str(caught.value)


ONE_QUERY = dict(query=QUERY[:, :1], is_causal=True)
SEVERAL = {
  "an offset": dict(query_offset=0),
  "a position": dict(query_positions=np.array([6])),
  "positions of keys": dict(key_positions=np.arange(7)),
  "no relations": dict(relations=None),
  "one key": dict(key=KEY[:, :1], value=KEY[:, :1]),
  "all keys": dict(is_causal=False),
}


@pytest.mark.parametrize("attend", [call, lambda value=None, **x: weights(**x)])
def test_one_causal_query_without_a_position_is_warned_of(attend):
  with pytest.warns(UserWarning, match="the one query is at position 0.*query_offset="):
    attend(**ONE_QUERY)
  for change in SEVERAL.values():
    attend(**ONE_QUERY | change)


def weights(query=QUERY, key=KEY, relations=RELATIONS, **options):
  return attention_weights(query, key, relations=relations, **options)


def test_a_warning_names_the_line_that_calls():
  program = """
import jax.numpy as jnp
from relpos_jax import LinearBias, dot_product_attention
q, k = jnp.ones((1, 2, 4)), jnp.ones((3, 2, 4))
dot_product_attention(q, k, k, relations=LinearBias.alibi(2), is_causal=True)
"""
  command = [sys.executable, "-W", "error::UserWarning:__main__", "-c", program]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert "query_offset=" in done.stderr and done.returncode == 1, done.stderr


LABELLED = RELATIONS, EdgeLabels(LABELS % 5, TABLE, None)
REFUSED_BY_SKEW = {
  "positions are given; if they are consecutive, give query_offset instead": dict(
    query_positions=np.arange(5)
  ),
  "it takes no EdgeLabels": dict(relations=LABELLED),
}
REFUSED_BY_KERNELS = {
  "a bias is given": dict(bias=np.ones((1, 1, 5, 7))),
  "mask has shape (1, 1, 5, 1)": dict(mask=np.ones((1, 1, 5, 1), bool)),
  "positions or query_offset are given": dict(query_positions=np.arange(5)),
  "positions or query_offset are given; it": dict(query_offset=np.array([1, 2])),
  "positions or query_offset are given; it needs": dict(query_offset=3),
  "it takes no EdgeLabels": dict(relations=LABELLED),
  "it takes no KeyBias": dict(relations=KeyBias(TABLE)),
  "it takes no ContentBias": dict(relations=ContentBias(CONTENT, TABLE[:, :3])),
  "it takes no LinearBias": dict(relations=(RELATIONS, LinearBias.alibi(4))),
  "a local window is given": dict(local_window_size=3),
  "a soft cap is given": dict(logits_soft_cap=1.0),
  "sinks are given": dict(sinks=np.ones(4, np.float32)),
  "sinks are given, or a residual": dict(return_residual=True),
  "values have width 4; it needs the keys' width, 8": dict(
    value=KEY[..., :4], relations=RelativePositions(TABLE, None)
  ),
  "scale is traced": dict(scale=np.float32(0.1)),
}
WIDE = np.ones((1, 6, 1, 300), np.float32)
WIDE_CALL = dict(query=WIDE, key=WIDE, value=WIDE, relations=None)
REFUSED = [("pallas_gpu", "heads have width 300", WIDE_CALL)]
REFUSED += [("skew", *refused) for refused in REFUSED_BY_SKEW.items()]
REFUSED += [("pallas_gpu", *refused) for refused in REFUSED_BY_KERNELS.items()]


@pytest.mark.parametrize("name, reason, change", REFUSED)
def test_what_an_implementation_cannot_do_it_refuses_with_the_reason_that_explain_gives(
  name, reason, change
):
  arguments = dict(query=QUERY, key=KEY, value=KEY, relations=RELATIONS) | change
  arrays = [arguments.pop(name) for name in ("query", "key", "value")]
  static = "local_window_size", "logits_soft_cap", "return_residual", "implementation"
  with pytest.raises(
    NotImplementedError, match=f"'{name}' cannot .*{re.escape(reason)}"
  ):
    jax.jit(call, static_argnames=static)(*arrays, **arguments, implementation=name)
  assert explain(*arrays, **arguments).reasons[name].startswith(reason)


@pytest.mark.parametrize("implementation", [None, "chunked"])
@pytest.mark.parametrize("batch, queries, keys", [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_without_queries_or_keys_there_is_nothing_or_zero(
  batch, queries, keys, implementation
):
  query, key = jnp.ones((batch, queries, 2, 8)), jnp.ones((batch, keys, 2, 8))
  for relations in (None, RELATIONS):
    explain(query, key, key, relations=relations, implementation=implementation)
    run = lambda query, key, relations: dot_product_attention(
      query,
      key,
      key,
      relations=relations,
      is_causal=True,
      implementation=implementation,
    )
    output, pull_back = jax.vjp(run, query, key, relations)
    for x in (output, *jax.tree.leaves(pull_back(output))):
      np.testing.assert_array_equal(x, jnp.zeros_like(x))
    assert output.shape == query.shape
  assert attention_weights(query, key, relations=RELATIONS).shape == (
    batch,
    2,
    queries,
    keys,
  )


@pytest.mark.parametrize("relations", [None, RELATIONS])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_result_in_the_values_dtype_and_weights_in_float32(relations, dtype):
  query, key = jnp.asarray(QUERY, dtype), jnp.asarray(KEY, dtype)
  assert call(query, key, key, relations).dtype == dtype
  weights = attention_weights(query, key, relations=relations)
  assert weights.dtype == jnp.float32
  assert weights.shape == (2, 4, 5, 7)
  np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)


CHOSEN = [
  ("cpu", (32, 32, 4, 32), (33, 32), "per_position"),
  ("cpu", (32, 32, 4, 32), (33, 4, 32), "per_position"),
  ("cpu", (32, 32, 8, 64), (33, 64), "per_position"),
  ("cpu", (32, 32, 8, 64), (33, 8, 64), "projected"),
  ("cpu", (16, 96, 8, 64), (33, 64), "chunked"),
  ("cpu", (1, 2048, 8, 64), (33, 64), "chunked"),
  ("cpu", (1, 64, 8, 64), None, "jax.nn"),
  ("cpu", (1, 2048, 8, 64), None, "chunked"),  # rotary positions, which are no relation
]
for platform in ("tpu", "gpu", "cuda"):
  lengths = dict.fromkeys((32, 1024), "projected") | {2048: "chunked"}
  CHOSEN += [
    (platform, (64, n, 8, 64), (33, 64), wanted) for n, wanted in lengths.items()
  ]


@pytest.mark.parametrize("platform, shape, table, wanted", CHOSEN)
def test_the_choice_follows_the_measurements_on_the_platform_of_the_mesh(
  platform, shape, table, wanted
):
  chip = AbstractDevice(device_kind="chip", num_cores=1, platform=platform)
  mesh = AbstractMesh((8,), ("data",), (AxisType.Auto,), abstract_device=chip)
  array = jax.ShapeDtypeStruct(shape, jnp.float32)
  tables = table and [jax.ShapeDtypeStruct(table, jnp.float32)] * 2
  with use_abstract_mesh(mesh):
    found = explain(
      array, array, array, relations=tables and RelativePositions(*tables)
    )
  assert found.implementation == wanted
  may_be_named = "if implementation= names it" in found.reasons["pallas_gpu"]
  assert may_be_named == (platform in ("gpu", "cuda"))


@pytest.mark.parametrize(
  "change, wanted",
  [
    ({}, "pallas_gpu"),
    (dict(rows=0), "pallas_gpu"),
    (dict(kind="NVIDIA A100"), "projected"),
    (dict(devices=8), "projected"),
    (dict(dtype=jnp.float32), "projected"),
    (dict(length=512), "projected"),
    (dict(rows=129), "projected"),  # a band that is wide for this length
    (dict(width=128), "projected"),
    (dict(batch=4096, length=2048, rows=201), "chunked"),  # more than 1 GiB
    (dict(is_causal=False), "projected"),
    (dict(logits_soft_cap=9.0), "projected"),
  ],
)
def test_a_kernel_is_chosen_where_it_was_timed(change, wanted):
  call = dict(kind="NVIDIA H200", devices=1, length=1024, dtype=jnp.bfloat16, rows=33)
  call |= dict(batch=8, width=64, is_causal=True) | change
  kind, devices, length, dtype, rows, batch, width = (call.pop(x) for x in [*call][:7])
  chip = AbstractDevice(device_kind=kind, num_cores=None, platform="cuda")
  mesh = AbstractMesh((devices,), ("data",), (AxisType.Auto,), abstract_device=chip)
  x = jax.ShapeDtypeStruct((batch, length, 8, width), dtype)
  table = jax.ShapeDtypeStruct((rows, width), dtype)
  with use_abstract_mesh(mesh):
    found = explain(
      x, x, x, relations=RelativePositions(table, table) if rows else None, **call
    )
  assert found.implementation == wanted


def test_the_default_device_is_the_target(monkeypatch):
  cpu, gpu = (
    jax.devices()[0],
    AbstractDevice(device_kind="A", num_cores=None, platform="cuda"),
  )
  monkeypatch.setattr(jax, "devices", lambda *_: [gpu])
  assert partitioned.target_platform() == "gpu"
  with jax.default_device(cpu):
    assert partitioned.target_platform() == "cpu"


ARRAYS = functools.partial(kernel_calls.arrays_of, queries=5, keys=7, heads=4, width=8)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
  "implementation", [x for x in IMPLEMENTATIONS if x not in OWN_VJP]
)
def test_it_differentiates_forward(implementation):
  arrays = ARRAYS()
  steps = jax.tree.map(jnp.sin, arrays)
  run = functools.partial(kernel_calls.call, implementation=implementation)
  _, change = quickly(lambda *pair: jax.jvp(run, *pair))((arrays,), (steps,))
  run = functools.partial(kernel_calls.call, implementation="reference")
  slopes = quickly(jax.jacrev(run))(arrays)
  changes = jax.tree.map(
    lambda slope, step: jnp.tensordot(slope, step, step.ndim), slopes, steps
  )
  np.testing.assert_allclose(change, sum(jax.tree.leaves(changes)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_keep_the_precision_of_the_call(implementation):
  @jax.jit
  def precisely(arrays):
    with jax.default_matmul_precision("highest"):
      return kernel_calls.call(arrays, implementation=implementation)

  arrays = ARRAYS(dtype=np.float32)
  program = str(jax.make_jaxpr(functools.partial(with_gradients, precisely))(arrays))
  assert (
    program.count("precision=(Precision.HIGHEST, ") == program.count("dot_general[") > 5
  )


def test_devices_keep_the_precision_of_the_call():
  """Compiles on two devices: partitioning traces the products again, after the call."""
  mesh = jax.make_mesh((2,), ("rows",), (AxisType.Auto,))
  sharding = jax.NamedSharding(mesh, jax.P("rows"))
  arrays = ARRAYS(dtype=np.float32)
  arrays |= jax.device_put(
    {name: arrays[name] for name in ("query", "key", "value")}, sharding
  )

  def loss(arrays):
    with jax.default_matmul_precision("highest"):
      return kernel_calls.call(arrays, implementation="chunked").sum()

  program = quickly(jax.grad(loss)).lower(arrays).compile().as_text()
  assert (
    program.count("operand_precision={highest,highest}") == program.count(" dot(") > 5
  )


def exported_options(name, labels, ids):
  table = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
  relations = {
    "positions": RelativePositions(table, table),
    "positions beyond zero": RelativePositions(table, None, beyond="zero"),
    "positions given": RelativePositions(None, table),
    "labels": EdgeLabels(labels, table, table),
    "features": EdgeFeatures(jax.nn.one_hot(labels, 5), table, table),
    "a sum": (DistanceBias(table[:, 0]), KeyBias(table, "zero"), LinearBias.alibi(4)),
  }
  more = {
    "positions beyond zero": dict(local_window_size=(2, 1)),
    "positions given": dict(query_positions=ids, key_positions=ids),
    "a soft cap": dict(
      logits_soft_cap=1.0, query_segment_ids=ids // 5, key_segment_ids=ids // 5
    ),
    "dropout": dict(dropout_rate=0.3, dropout_key=jax.random.key(0)),
    "a sum": dict(bias=0.1 * labels[:, None]),
  }
  return dict(
    relations=relations.get(name), mask=labels[:, None] != 3, **more.get(name, {})
  )


EXPORTED = [
  "none",
  "positions",
  "positions beyond zero",
  "positions given",
  "labels",
  "features",
]
EXPORTED = [(name, "b, t") for name in (*EXPORTED, "a sum", "a soft cap", "dropout")]
EXPORTED += [("none", "2, t"), ("positions", "b, 4")]


@pytest.fixture
def symbolic_sizes(monkeypatch):
  """Switches off the checks of annotations, to which a symbolic dimension is not an int."""
  monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.usefixtures("symbolic_sizes")
@pytest.mark.parametrize("name, shape", EXPORTED)
def test_programs_with_symbolic_shapes_equal_the_operator(name, shape):
  def attend(floats, ids, labels, implementation=None):
    options = exported_options(name, labels, ids)
    query, key, value = floats
    named = dict(is_causal=True, implementation=implementation)
    return dot_product_attention(query, key, value, **options, **named)

  @functools.partial(quickly, static_argnums=0)
  def output_and_gradients(attend, floats, ids, labels):
    return with_gradients(lambda floats: attend(floats, ids, labels), floats)

  dimensions = export.symbolic_shape(shape)
  batch, length = dimensions
  shapes = (batch, length, 4, 8), (batch, length, 2, 8), (batch, length, 2, 8)
  floats = [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes]
  ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
  labels = jax.ShapeDtypeStruct((batch, length, length), jnp.int32)
  exported = export.export(quickly(attend))(floats, ids, labels)
  for sizes in ((2, 3), (3, 9)):
    batch, length = (
      n if isinstance(n, int) else m for n, m in zip(dimensions, sizes, strict=True)
    )
    random = np.random.default_rng(0)
    floats = [jnp.float32(random.normal(size=(batch, length, *x[2:]))) for x in shapes]
    ids = jnp.arange(length) + jnp.zeros((batch, 1), jnp.int32)
    labels = jnp.asarray(random.integers(-1, 5, (batch, length, length)))
    by_reference = functools.partial(attend, implementation="reference")
    actual, wanted = (
      output_and_gradients(way, floats, ids, labels)
      for way in (exported.call, by_reference)
    )
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5), actual, wanted
    )


def test_a_subclass_of_a_relation_has_its_bands():
  kind = type("Mine", (RelativePositions,), {})
  mine = jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(kind))(
    TABLE, TABLE
  )
  wanted = call(implementation="reference")
  np.testing.assert_allclose(
    call(relations=mine, implementation="chunked"), wanted, atol=1e-6
  )


@pytest.mark.usefixtures("symbolic_sizes")
def test_explain_names_what_cannot_have_symbolic_shapes():
  query = jax.ShapeDtypeStruct(export.symbolic_shape("b, t, 4, 8"), jnp.float32)
  explanation = explain(query, query, query, relations=RELATIONS)
  assert explanation.implementation == "projected"
  for name in ("skew", "chunked", "pallas_gpu"):
    assert explanation.reasons[name] == "a dimension is symbolic; it needs numbers"


def test_heads_before_tokens_are_a_warning():
  query = np.ones((2, 4, 80, 8), np.float32)  # [B, N, T, H]
  with pytest.warns(
    UserWarning, match=r"80 heads and 4 tokens: the layout is \[B, T, N, H\]"
  ):
    call(query, query, query)


def test_names_of_jax_nn_are_told_apart():
  with pytest.raises(
    ValueError,
    match=r"None, which chooses, .* name of jax.nn: leave implementation out",
  ):
    call(implementation="xla")


def test_the_choice_is_logged(caplog):
  with caplog.at_level("DEBUG", logger="relpos_jax.attention.choice"):
    jax.eval_shape(functools.partial(call, implementation="skew"))
  assert "attention by skew, because implementation= names it" in caplog.text
