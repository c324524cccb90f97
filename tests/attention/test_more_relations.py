"""The laws of every relation, alone and in sums, in float64, on random tables."""

import cmath
import dataclasses
import functools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from compiling import as_users_do, quickly
from formula import formula
from kernel_calls import LOW

from relpos_jax import (
  ContentBias,
  DistanceBias,
  EdgeFeatures,
  EdgeLabels,
  KeyBias,
  LinearBias,
  RelativePositions,
  attention_weights,
  dot_product_attention,
  explain,
  rotate,
)
from relpos_jax.attention import chunked, projected

pytestmark = pytest.mark.usefixtures("float64")

TOLERANCE = dict(rtol=0, atol=1e-10)
ABLE = ["projected", "per_position"]  # besides "reference"
KINDS = ["positions", "labels", "features", "distance", "linear", "content", "key"]
SUMS = [
  ("distance", "linear"),
  ("positions", "labels", "distance"),
  ("labels", "labels"),
  ("key", "features", "content", "linear"),
  ("positions", "key"),
  ("positions", "positions", "distance", "distance"),
]


BY_DISTANCE = ["positions", "distance", "linear", "content", "key"]
BANDS = [
  *(("distance",), ("linear",), ("content",), ("key",)),
  *(("distance", "linear"), ("positions", "key"), ("positions", "positions", "distance")),
  (*BY_DISTANCE, *BY_DISTANCE),
]


def random_call(kinds, seed, length=6):
  """Returns arrays, relations of these kinds, and the other options of a call."""
  rng = np.random.default_rng([seed, *map(KINDS.index, kinds)])
  flip = lambda: bool(rng.integers(2))
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape))
  batch, queries, keys, key_heads, group, width = rng.integers(
    [1, 1, 1, 1, 1, 1], [3, length + 1, length + 1, 3, 3, 4]
  )
  heads = key_heads * group
  arrays = dict(
    query=normal(batch, queries, heads, width),
    key=normal(batch, keys, key_heads, width),
    value=normal(batch, keys, key_heads, width),
  )
  if flip():
    arrays["bias"] = normal(batch, 1, queries, keys)

  def relation(kind):
    rows = int(rng.integers(1, 12))
    left = int(rng.integers(rows)) if flip() or rows % 2 == 0 else None
    sides = dict(beyond="zero" if flip() else "clip", left=left)
    table = lambda *row: normal(rows, *([heads] if flip() else []), *row)
    both = lambda: [[table(width), None], [None, table(width)], [table(width)] * 2][rng.integers(3)]
    match kind:
      case "positions":
        return RelativePositions(*both(), **sides)
      case "labels":
        return EdgeLabels(jnp.asarray(rng.integers(-1, rows, (batch, queries, keys))), *both())
      case "features":
        return EdgeFeatures(normal(batch, queries, keys, rows), *both())
      case "distance":
        return DistanceBias(table(), **sides)
      case "linear":
        return LinearBias(normal(heads))
      case "content":
        return ContentBias(normal(batch, queries, heads, 5), table(5), **sides)
      case "key":
        return KeyBias(table(width), **sides)

  options = dict(is_causal=flip())
  match rng.integers(4):
    case 0:
      options["query_positions"] = jnp.asarray(rng.integers(-9, 9, (batch, queries)))
      options["key_positions"] = jnp.asarray(rng.integers(-9, 9, (batch, keys)))
    case 1:
      options["query_offset"] = int(rng.integers(-20, 20))
    case 2:
      options["query_offset"] = jnp.asarray(rng.integers(-20, 20, batch))
  if flip():
    options["mask"] = jnp.asarray(rng.random((batch, 1, queries, keys)) < 0.7)
  if flip():
    options["query_segment_ids"] = jnp.asarray(rng.integers(0, 2, (batch, queries)))
    options["key_segment_ids"] = jnp.asarray(rng.integers(0, 2, (batch, keys)))
  if flip():
    options["logits_soft_cap"] = 0.8
  if flip():
    options["scale"] = -0.7
  return arrays, tuple(map(relation, kinds)), options


def results(arrays, relations, options, implementation="reference"):
  """Returns the output and the gradients of all floating numbers."""
  leaves, structure = jax.tree.flatten((arrays, relations))
  floats = {i: x for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)}

  def call(floats):
    full = [floats.get(i, x) for i, x in enumerate(leaves)]
    arrays, relations = jax.tree.unflatten(structure, full)
    named = dict(relations=relations, implementation=implementation)
    return dot_product_attention(**arrays, **options, **named)

  def both(floats):
    output, pull_back = jax.vjp(call, floats)
    cotangent = np.random.default_rng(7).normal(size=output.shape)
    return output, pull_back(jnp.asarray(cotangent, output.dtype))[0]

  output, gradients = quickly(both)(floats)
  zeros = [jnp.zeros(()) for _ in leaves]
  gradients = jax.tree.unflatten(structure, [gradients.get(i, x) for i, x in enumerate(zeros)])
  return output, *gradients


def assert_close(actual, wanted, whose=""):
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, **TOLERANCE, err_msg=whose), actual, wanted
  )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kinds", [*((x,) for x in KINDS), *SUMS], ids="+".join)
def test_every_relation_and_every_sum_is_its_formula(kinds, seed):
  call = random_call(kinds, seed)
  by_reference = results(*call)
  np.testing.assert_allclose(by_reference[0], formula(*call), **TOLERANCE)
  for name in ABLE:
    assert_close(results(*call, name), by_reference, str(name))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kinds", BANDS, ids="+".join)
def test_relations_by_distance_share_a_band(kinds, seed, monkeypatch):
  arrays, relations, options = random_call(kinds, seed, length=24)
  options = {name: x for name, x in options.items() if "positions" not in name}
  if seed:
    options |= dict(dropout_rate=0.3, dropout_key=jax.random.key(0))
    clip = lambda x: dataclasses.replace(x, beyond="clip") if hasattr(x, "beyond") else x
    relations = tuple(map(clip, relations))
  monkeypatch.setattr(chunked, "_default_block", lambda inputs: 4)
  monkeypatch.setattr(chunked, "_PAIRS", 2 * 4 * arrays["key"].shape[1])  # two heads at a time
  wanted = results(arrays, relations, options)
  for name in ("skew", "chunked"):
    assert_close(results(arrays, relations, options, name), wanted, name)


LOOKED_UP = ["positions", "labels", "distance", "key", "content"]


@pytest.mark.parametrize("kinds", [(x,) for x in LOOKED_UP], ids="+".join)
def test_lookups_by_products_are_lookups(kinds):
  call = random_call(kinds, 0)
  by_products = lambda x, labels: projected.multiply(labels, x)  # as on accelerators
  with mock.patch.object(projected, "look_up", by_products):
    found = results(*call, "projected")
  assert_close(found, results(*call))


# Law 15.
@pytest.mark.parametrize("hidden", [[0], [2, 4], [8], [0, 1, 8]], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_that_hide_distances_cost_no_digits(hidden, is_causal, monkeypatch):
  """Compares float32 with float64; a table has other rows, slopes and a value table beside it."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  monkeypatch.setattr(chunked, "_default_block", lambda inputs: 16)
  low = dict(is_causal=is_causal, mask=jnp.arange(40)[None, None, None] % 7 != 3)
  # Each head has a number of its own. A soft cap bounds a number that does not hide.
  capped = low | dict(query_offset=jnp.array([2]), logits_soft_cap=3.0)
  for options, numbers in ((low, LOW), (capped, [x for x in LOW if x < -1e38])):
    heads = len(numbers)
    arrays = {name: normal(1, 40, heads, 4) for name in ("query", "key", "value")}
    relations = (
      DistanceBias(normal(9, heads).at[jnp.array(hidden)].set(jnp.array(numbers))),
      RelativePositions(normal(5, 4), normal(5, heads, 4)),
      LinearBias(jnp.linspace(0.1, 0.5, heads)),
    )
    wide = jax.tree.map(lambda x: x.astype(float), (arrays, relations))
    wanted = results(*wide, options)
    for name in ("reference", "skew", "projected", "per_position", "chunked"):
      found = results(arrays, relations, options, name)
      jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-5, err_msg=name),
        *(found, wanted),
      )


# Law 12.
@pytest.mark.parametrize("implementation", ["reference", "projected"])
@pytest.mark.parametrize("kinds", SUMS, ids="+".join)
def test_the_order_of_a_sum_does_not_matter(kinds, implementation):
  arrays, relations, options = random_call(kinds, 9)
  forward = results(arrays, relations, options, implementation)
  backward = results(arrays, relations[::-1], options, implementation)
  assert_close((*backward[:2], backward[2][::-1]), forward)


def test_a_tuple_of_one_is_its_relation_and_an_empty_one_is_none():
  arrays, (relation,), options = random_call(("positions",), 3)
  one, alone = (results(arrays, x, options, None) for x in ((relation,), relation))
  jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(one), jax.tree.leaves(alone))
  none, empty = (results(arrays, x, options, None) for x in (None, ()))
  jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(none), jax.tree.leaves(empty))
  query = arrays["query"][:, :, :1]
  chosen = lambda relations: explain(query, query, query, relations=relations)
  table = RelativePositions(jnp.ones((3, query.shape[-1])), None)
  assert chosen(()) == chosen(None) and chosen((table,)) == chosen(table)


def t5_bucket(distance, num_buckets, bidirectional, max_distance):
  """Returns the bucket of one distance, in the float32 arithmetic of Mesh TensorFlow and T5X."""
  offset, n = 0, -distance
  if bidirectional:
    num_buckets //= 2
    offset, n = num_buckets * (n < 0), abs(n)
  n = max(n, 0)
  max_exact = num_buckets // 2
  if n < max_exact:
    return offset + n
  ratio = np.log(np.float32(n) / np.float32(max_exact) + np.finfo(np.float32).eps)
  ratio /= np.float32(np.log(max_distance / max_exact))
  large = max_exact + int(ratio * np.float32(num_buckets - max_exact))
  return offset + min(large, num_buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (32, 20), (9, 6), (64, 500)])
def test_t5_rows_are_t5_buckets(num_buckets, max_distance, bidirectional):
  buckets = jnp.asarray(np.random.default_rng(0).normal(size=(num_buckets, 3)))
  distances = np.arange(-700, 700)
  options = dict(bidirectional=bidirectional, max_distance=max_distance)
  found = [t5_bucket(int(x), num_buckets, bidirectional, max_distance) for x in distances]
  relation = DistanceBias.t5(buckets, **options)
  rows = relation.labels(jnp.zeros(1, int), jnp.asarray(distances))[0]
  np.testing.assert_array_equal(relation.table[rows], buckets[jnp.asarray(found)])
  assert len(set(found)) > num_buckets // 2

  query = jnp.asarray(np.random.default_rng(1).normal(size=(9, 3, 4)))
  pairs = [
    t5_bucket(j - i, num_buckets, bidirectional, max_distance) for i in range(9) for j in range(9)
  ]
  pairs = jnp.asarray(pairs).reshape(9, 9)

  def loss(buckets, is_dense):
    given = dict(relations=DistanceBias.t5(buckets, **options))
    given = dict(bias=buckets[pairs].transpose(2, 0, 1)) if is_dense else given
    return (dot_product_attention(query, query, query, scale=1.0, **given) ** 2).sum()

  both = [quickly(jax.value_and_grad(loss), static_argnums=1)(buckets, x) for x in (True, False)]
  np.testing.assert_allclose(both[1][0], both[0][0], rtol=1e-6)  # jax.nn's softmax is float32
  np.testing.assert_allclose(both[1][1], both[0][1], rtol=0, atol=1e-5)


def test_alibi_has_the_slopes_of_the_paper_and_its_code():
  def slopes(n):
    if math.log2(n).is_integer():
      start = 2 ** (-(2 ** -(math.log2(n) - 3)))
      return [start * start**i for i in range(n)]
    closest = 2 ** math.floor(math.log2(n))
    return slopes(closest) + slopes(2 * closest)[0::2][: n - closest]

  for n in range(1, 40):
    np.testing.assert_allclose(LinearBias.alibi(n).slopes, slopes(n), rtol=1e-12)
  np.testing.assert_allclose(LinearBias.alibi(8).slopes, [2.0**-x for x in range(1, 9)])


def test_deberta():
  """Computes the three terms of He et al. 2021, equations 2 to 4, one pair at a time."""
  rng = np.random.default_rng(0)
  length, heads, width, k = 9, 2, 4, 3
  query, key, value = rng.normal(size=(3, length, heads, width))
  key_rows, query_rows = rng.normal(size=(2, 2 * k, heads, width))
  delta = lambda i, j: 0 if i - j <= -k else 2 * k - 1 if i - j >= k else i - j + k
  output = np.zeros(query.shape)
  for i, n in np.ndindex(length, heads):
    logits = [
      query[i, n] @ key[j, n]
      + query[i, n] @ key_rows[delta(i, j), n]
      + key[j, n] @ query_rows[delta(j, i), n]
      for j in range(length)
    ]
    weights = np.exp(np.array(logits) / (3 * width) ** 0.5)
    output[i, n] = weights @ value[:, n] / weights.sum()
  to_position = RelativePositions(key_rows[::-1], None, left=k - 1)  # its rows are by i - j
  relations = to_position, KeyBias(query_rows, left=k)
  scale = (3 * width) ** -0.5
  found = dot_product_attention(query, key, value, relations=relations, scale=scale)
  np.testing.assert_allclose(found, output, **TOLERANCE)


def test_rotate_multiplies_complex_numbers():
  x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3, 6)))
  positions = jnp.asarray([[0, 1, 2, 3, 4], [7, -2, 900, 4, 4]])
  found = rotate(x, positions, base=100.0)
  for b, t, n, d in np.ndindex(2, 5, 3, 3):
    pair = complex(x[b, t, n, d], x[b, t, n, d + 3])
    turned = pair * cmath.exp(1j * float(positions[b, t]) * 100.0 ** (-2 * d / 6))
    np.testing.assert_allclose(
      complex(found[b, t, n, d], found[b, t, n, d + 3]), turned, **TOLERANCE
    )
  np.testing.assert_array_equal(rotate(x[1], positions[1], base=100.0), found[1])
  same = jnp.broadcast_to(positions[1], (2, 5))
  np.testing.assert_array_equal(rotate(x, positions[1]), rotate(x, same))
  small = x.astype(jnp.bfloat16)
  assert rotate(small, positions).dtype == jnp.bfloat16
  rounded = rotate(small.astype(jnp.float32), positions).astype(jnp.bfloat16)
  np.testing.assert_array_equal(rotate(small, positions), rounded)


def test_rotated_logits_depend_on_distances_alone():
  rng = np.random.default_rng(0)
  query, key = jnp.asarray(rng.normal(size=(2, 2, 5, 3, 6)))
  positions = jnp.asarray([3, 0, 8, 1, 1])

  def weights(shift, of_keys=0):
    turned = rotate(query, positions + shift), rotate(key, positions + shift + of_keys)
    return attention_weights(*turned)

  np.testing.assert_allclose(weights(1000), weights(0), **TOLERANCE)
  assert not np.allclose(weights(0, of_keys=1), weights(0))


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("offset", [300, -300, 30_000])
def test_a_linear_bias_far_away(offset, cap):
  arrays, _, _ = random_call(("linear",), 1)
  arrays = {name: arrays[name] for name in ("query", "key", "value")}
  relations = LinearBias(jnp.full(arrays["query"].shape[2], 1e-5))
  given = dict(query_positions=offset + jnp.arange(arrays["query"].shape[1]))
  options = dict(logits_soft_cap=cap)
  wanted = results(arrays, relations, options | given)
  for way in (offset, jnp.asarray(offset)):
    assert_close(results(arrays, relations, options | dict(query_offset=way)), wanted)


@pytest.mark.parametrize("offset", [15, -15])
def test_an_offset_counts_within_the_widest_table(offset):
  rng = np.random.default_rng(0)
  arrays = {name: jnp.asarray(rng.normal(size=(1, 3, 2, 4))) for name in ("query", "key", "value")}
  wide, narrow = (DistanceBias(jnp.asarray(rng.normal(size=rows))) for rows in (41, 3))
  wanted = results(arrays, (wide, narrow), dict(query_positions=offset + jnp.arange(3)))
  for way in (offset, jnp.asarray(offset)):
    found = results(arrays, (narrow, wide), dict(query_offset=way))
    assert_close((*found[:2], found[2][::-1]), wanted)


def test_distances_are_exact_in_low_precision():
  query, key = jnp.zeros((1, 1, 8), jnp.bfloat16), jnp.zeros((2, 1, 8), jnp.bfloat16)
  positions = dict(query_positions=jnp.array([1001]), key_positions=jnp.array([0, 1]))
  relations = LinearBias(jnp.ones(1, jnp.bfloat16))
  weights = attention_weights(query, key, relations=relations, **positions)
  np.testing.assert_allclose(weights[0, 0], jax.nn.softmax(jnp.array([-1.0, 0.0])), rtol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "projected", "chunked"])
@pytest.mark.parametrize("mapped", [0, 1, 2])
def test_vmap_equals_a_call_for_each(mapped, implementation):
  """Maps the arrays of the call, the tables, or both."""
  arrays, relations, options = random_call(("positions", "key", "content", "distance", "linear"), 2)
  axes = [(0, None), (None, 0), (0, 0)][mapped]
  three = lambda x: jnp.stack([x, 2 * x, x[..., ::-1]])
  several = [
    x if axis is None else jax.tree.map(three, x)
    for x, axis in zip((arrays, relations), axes, strict=True)
  ]

  def both(arrays, relations, implementation=implementation):
    call = lambda arrays, relations: dot_product_attention(
      **arrays, **options, relations=relations, implementation=implementation
    )
    output, pull_back = jax.vjp(call, arrays, relations)
    return output, pull_back(jnp.cos(output))

  found = quickly(jax.vmap(both, axes))(*several)
  one = quickly(functools.partial(both, implementation="reference"))
  of = lambda i: [
    x if axis is None else jax.tree.map(lambda x: x[i], x)
    for x, axis in zip(several, axes, strict=True)
  ]
  wanted = jax.tree.map(lambda *x: jnp.stack(x), *[one(*of(i)) for i in range(3)])
  assert_close(found, wanted)


def test_without_a_batch_and_its_weights():
  arrays, relations, options = random_call(KINDS, 5)
  first = lambda x: x[0]
  single = jax.tree.map(first, arrays)
  edges = dict(labels=first, features=first, query=first)
  pick = lambda x: type(x)(**{name: edges.get(name, lambda y: y)(y) for name, y in vars(x).items()})
  alone = tuple(map(pick, relations))
  per_row = {n: x[0] if isinstance(x, jax.Array) and x.ndim else x for n, x in options.items()}
  output = dot_product_attention(**single, **per_row, relations=alone)
  whole = dot_product_attention(**arrays, **options, relations=relations)
  np.testing.assert_allclose(output, whole[0], **TOLERANCE)
  without_values = tuple(x for x in relations if not hasattr(x, "value"))
  value = arrays.pop("value")
  weights = attention_weights(**arrays, **options, relations=without_values)
  value = value.repeat(weights.shape[1] // value.shape[2], 2)
  output = jnp.einsum("BNTS,BSNH->BTNH", weights, value)
  wanted = dot_product_attention(**arrays, value=value, **options, relations=without_values)
  np.testing.assert_allclose(output, wanted, **TOLERANCE)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
  "names, kinds", [(("reference", "projected"), KINDS), (("skew", "chunked"), BY_DISTANCE)]
)
def test_the_result_has_the_values_dtype(names, kinds, dtype):
  arrays, relations, options = random_call(kinds, 6)
  cast = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
  small = jax.tree.map(cast, (arrays, relations))
  wide = jax.tree.map(lambda x: x.astype(float) if x.dtype == dtype else x, small)
  run = lambda call, name: quickly(
    lambda: dot_product_attention(**call[0], **options, relations=call[1], implementation=name)
  )()
  exact = run(wide, None)
  for name in names:
    found = run(small, name)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(float), exact, rtol=0, atol=50 * jnp.finfo(dtype).eps)


NEVER_GATHERED = dict(
  content=lambda x, table, labels, features: ContentBias(x, table),
  key=lambda x, table, labels, features: KeyBias(table),
  labels=lambda x, table, labels, features: EdgeLabels(labels, table, table),
  features=lambda x, table, labels, features: EdgeFeatures(features, table, table),
)


@pytest.mark.parametrize("kind", NEVER_GATHERED)
def test_projected_never_forms_a_vector_for_every_pair(kind):
  sizes = dict(x=(2, 24, 4, 40), table=(5, 40), labels=(2, 24, 24), features=(2, 24, 24, 5))
  dtypes = dict(labels=jnp.int32)
  shapes = [jax.ShapeDtypeStruct(x, dtypes.get(n, jnp.float32)) for n, x in sizes.items()]
  loss = lambda x, *arrays: dot_product_attention(
    x, x, x, relations=NEVER_GATHERED[kind](x, *arrays), implementation="projected"
  ).sum()
  text = as_users_do(jax.grad(loss, (0, 1))).lower(*shapes).compile().as_text()
  assert "24,24,40]" not in text and "24,24,4,40]" not in text and "24,4,24,40]" not in text


@pytest.mark.parametrize("name", ["skew", "chunked", "pallas_tpu", "pallas_gpu"])
def test_the_others_refuse_what_has_no_band(name):
  x, table = jnp.ones((1, 300, 1, 8)), jnp.ones((3, 8))
  relations = RelativePositions(table, None), EdgeLabels(jnp.ones((300, 300), int), table, None)
  with pytest.raises(NotImplementedError, match=f"'{name}' cannot .* it takes no EdgeLabels"):
    dot_product_attention(x, x, x, relations=relations, implementation=name)
  explanation = explain(x, x, x, relations=relations)
  assert explanation.implementation == "projected"
  assert explanation.reasons[name] == "it takes no EdgeLabels"


Q = np.ones((2, 5, 4, 8), np.float32)
T = np.ones((5, 8), np.float32)
P = np.ones((2, 5, 4, 3), np.float32)
GOOD = RelativePositions(T, T)
WRONG = {
  "relations is of type list; want RelativePositions, EdgeLabels, Ed": lambda: [GOOD],
  "relations[1] is of type tuple; want RelativePositions": lambda: (GOOD, (GOOD,)),
  "relations[0] is float32 of shape (5, 8); want RelativePositions": lambda: (T,),
  "relations[1].table is float32 of shape (5, 3); want floating numbers of shape [R], shared by "
  "the heads, or [R, 4]": lambda: (GOOD, DistanceBias(T[:, :3])),
  "relations.table is float32 of shape (5, 6); want floating numbers of shape [R, 8], shared by "
  "the heads, or [R, 4, 8]": lambda: KeyBias(T[:, :6]),
  "relations[2].table is float32 of shape (5, 8); want floating numbers of shape [R, 3], shared": (
    lambda: (GOOD, GOOD, ContentBias(P, T))
  ),
  "relations.table is int32 of shape (5,); want floating": lambda: DistanceBias(np.ones(5, "i4")),
  "relations.table is None; want an array": lambda: KeyBias(None),
  "relations.query is None; want an array": lambda: ContentBias(None, T),
  "relations.labels is None; want an array": lambda: EdgeLabels(None, T, None),
  "relations.query has shape (5, 4, 3); want (2, 5, 4, 3)": lambda: ContentBias(P[0], T[:, :3]),
  "relations.query has dtype float16; want the query's, float32": lambda: ContentBias(
    P.astype(np.float16), T[:, :3]
  ),
  "relations[1].slopes has shape (3,); want (4,)": lambda: (GOOD, LinearBias(np.ones(3))),
  "relations.slopes has dtype int32; want floating": lambda: LinearBias(np.ones(4, np.int32)),
  "relations[1] has 4 rows; want an odd number, 2k + 1": lambda: (GOOD, KeyBias(T[:4])),
  "relations.left is 5; want 0 to 4, a table row": lambda: DistanceBias(T[:, 0], left=5),
  "relations.beyond is 'wrap'; want": lambda: ContentBias(P, T[:, :3], "wrap"),
  "relations[0] has neither a key nor a value table": lambda: (RelativePositions(None, None), GOOD),
  "buckets has 3 rows and max_distance is 128; want at least 4 rows": lambda: DistanceBias.t5(
    T[:3]
  ),
  "buckets has 32 rows and max_distance is 8; want at least 4 rows, and a max_distance above 8": (
    lambda: DistanceBias.t5(np.ones((32, 4)), max_distance=8)
  ),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_relation_is_named(message, monkeypatch):
  monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
  with pytest.raises(ValueError) as caught:
    dot_product_attention(Q, Q, Q, relations=WRONG[message]())
  assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "x, positions, message",
  [
    (Q[..., :7], np.arange(5), "x has shape (2, 5, 4, 7); want heads of an even width"),
    (Q, np.arange(4), "positions has shape (4,); want (2, 5) or (5,)"),
  ],
)
def test_rotate_names_a_wrong_argument(x, positions, message):
  with pytest.raises(ValueError) as caught:
    rotate(jnp.asarray(x), positions)
  assert str(caught.value) == message
